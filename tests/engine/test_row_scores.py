"""Scores of rows against sums written out, and what a commit of the best rows leaves in each layer."""

import pytest
import torch

from refusion_eval.engine.engine import Request
from refusion_eval.engine.features import row_scores
from refusion_eval.errors import DecodeError
from refusion_eval.models.attention import attend_over
from refusion_eval.models.cache import KVCache, ScoredRows
from refusion_eval.types import Commit, Forward, Read, Response, RowScores, bidirectional
from tests.decoders.baselines import forwards_of
from tests.engine.random_model import CPU, random_engine, random_transformer

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
QUERIES, KEYS = [3, 4, 5], [0, 1, 2, 6, 7, 8, 9]


def written_out(q_QHD: torch.Tensor, k_KGD: torch.Tensor, pooling: int) -> list[float]:
    num_queries, num_heads, _ = q_QHD.shape
    num_shared = num_heads // k_KGD.shape[1]
    own = [
        sum(
            float(q_QHD[query, head] @ k_KGD[key, head // num_shared])
            for query in range(num_queries)
            for head in range(num_heads)
        )
        / (num_queries * num_heads)
        for key in range(len(k_KGD))
    ]
    reach = pooling // 2
    return [max(own[max(key - reach, 0) : key + reach + 1]) for key in range(len(own))]


@pytest.mark.parametrize("pooling", [1, 3, 5, 21])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_a_score_is_the_mean_over_queries_and_heads_then_the_largest_of_the_neighbours(pooling, num_kv_heads):
    generator = torch.Generator().manual_seed(5)
    q_QHD = torch.randn(3, 4, 8, generator=generator)
    k_KGD = torch.randn(9, num_kv_heads, 8, generator=generator)
    assert row_scores(q_QHD, k_KGD, pooling).tolist() == pytest.approx(written_out(q_QHD, k_KGD, pooling), abs=1e-5)
    assert row_scores(q_QHD, k_KGD[:0], pooling).tolist() == []


class Recording:
    """Attention that remembers what it is given."""

    def __init__(self, attend):
        self.attend, self.layers = attend, []

    def __call__(self, layer, q_THD, k_TGD, v_TGD):
        self.layers.append((q_THD, k_TGD, v_TGD))
        return self.attend(layer, q_THD, k_TGD, v_TGD)


def keeps_best(prompt, best, trace):
    """Scores some rows of the prompt and keeps the best."""
    whole = bidirectional(len(prompt))
    yield Forward(prompt, range(len(prompt)), whole, (), approximation=RowScores(QUERIES, KEYS, best, 3))
    (readout,) = yield Forward([7, 8], [3, 4], bidirectional(2), (Read([0, 1]),), Commit(KEYS))
    return Response(tuple(readout.tokens.tolist()), "length")


@pytest.mark.parametrize("best", [0, 1, 3, 7])
def test_each_layer_keeps_its_own_best_rows(best):
    engine = random_engine(3)
    decoded = engine.run(keeps_best, TOKENS, best)
    assert [(done["q"], done["ctx"]) for done in forwards_of(decoded)] == [(10, 0), (2, best)]

    cache = KVCache(engine.model.config, 1, 10, torch.float32, CPU)
    recording = Recording(attend_over(cache, [bidirectional(10)], "sdpa"))
    engine.model.hidden(torch.tensor(TOKENS), torch.arange(10), 9, recording)
    chosen_by_layer = []
    for layer, (q_THD, k_TGD, v_TGD) in enumerate(recording.layers):
        scores = written_out(q_THD[QUERIES], k_TGD[KEYS], 3)
        chosen = sorted(sorted(range(len(KEYS)), key=lambda key: (-round(scores[key], 5), key))[:best])
        rows = [KEYS[key] for key in chosen]
        chosen_by_layer.append(rows)
        for buffer, wanted in ((engine._cache.keys, k_TGD), (engine._cache.values, v_TGD)):
            torch.testing.assert_close(buffer[layer, 0, :, :best].transpose(0, 1), wanted[rows])
    if best == 3:
        assert chosen_by_layer[0] != chosen_by_layer[1]


def test_among_equals_the_first_rows_stay():
    model = random_transformer()
    cache = KVCache(model.config, 1, 16, torch.float32, CPU)
    cache.keys[:, 0, :, :8] = torch.arange(8.0)[:, None]
    cache.stage(0, 8)
    cache.states[0] = ScoredRows([1, 3, 5, 7], 2, torch.tensor([[0.0, 1, 1, 1], [2, 2, 2, 2]]))
    cache.commit(0, [1, 3, 5, 7])
    assert cache.keys[:, 0, 0, :2, 0].tolist() == [[3, 5], [1, 3]]
    assert (cache.lengths, cache.staged) == ([2], [0])


def test_the_best_rows_stand_behind_what_is_kept():
    model = random_transformer()
    cache = KVCache(model.config, 1, 16, torch.float32, CPU)
    cache.keys[:, 0, :, :9] = torch.arange(9.0)[:, None]
    cache.lengths[0] = 3
    cache.stage(0, 6)
    cache.states[0] = ScoredRows([0, 2, 5], 2, torch.tensor([[1.0, 3, 2], [3, 1, 2]]))
    cache.commit(0, [0, 2, 5], keep=1)
    assert cache.keys[:, 0, 0, :3, 0].tolist() == [[0, 5, 8], [0, 3, 8]]


@pytest.mark.parametrize("commit", [Commit(KEYS[1:]), Commit([*KEYS, 5]), Commit([0])])
def test_a_commit_of_rows_that_were_not_scored_is_refused(commit):
    def careless(prompt, settings, trace):
        yield Forward(prompt, range(10), bidirectional(10), (), approximation=RowScores(QUERIES, KEYS, 2))
        yield Forward([1], [3], bidirectional(1), (), commit)

    engine = random_engine()
    with pytest.raises(DecodeError, match="they must be those that the forward before scored"):
        engine.run(careless, TOKENS, None)


@pytest.mark.parametrize(
    "scores",
    [
        RowScores([], KEYS, 2),
        RowScores([10], KEYS, 2),
        RowScores(QUERIES, KEYS, 2, 2),
        RowScores(QUERIES, KEYS, 8),
        RowScores(QUERIES, KEYS, -1),
    ],
)
def test_scores_that_cannot_be_are_refused(scores):
    def careless(prompt, settings, trace):
        yield Forward(prompt, range(10), bidirectional(10), (), approximation=scores)

    with pytest.raises(DecodeError, match="it takes at least one query"):
        random_engine().run(careless, TOKENS, None)


def test_scores_do_not_outlive_the_next_forward():
    """After a forward without scores a commit keeps all of its rows."""

    def forgetful(prompt, settings, trace):
        yield Forward(prompt, range(10), bidirectional(10), (), approximation=RowScores(QUERIES, KEYS, 2))
        yield Forward(prompt, range(10), bidirectional(10), ())
        yield Forward([1], [3], bidirectional(1), (), Commit(KEYS))
        return Response((), "length")

    engine = random_engine()
    ((_, outcome),) = engine.run_many([Request(forgetful, TOKENS, None)], 1)
    assert [done["ctx"] for done in forwards_of(outcome)] == [0, 0, 7]
