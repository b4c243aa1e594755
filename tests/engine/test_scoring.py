"""Log-probabilities of continuations equal transformers', one by one and in a batch."""

import random

import pytest
import torch

from refusion_eval.engine import scoring
from refusion_eval.engine.scoring import score_many
from tests.models import tiny


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    reference = tiny.save_checkpoint(directory, initializer_range=0.4)
    return tiny.load(directory), reference


@pytest.fixture(scope="module")
def pairs():
    chooser = random.Random(3)

    def tokens(longest):
        return [chooser.randrange(tiny.VOCAB_SIZE) for _ in range(chooser.randint(1, longest))]

    return [(tokens(12), tokens(6)) for _ in range(9)]


@torch.no_grad()
def expected_score(reference, prefix, continuation):
    logits = reference(torch.tensor([[*prefix, *continuation]])).logits[0].double()
    rows = logits[len(prefix) - 1 : -1]
    targets = torch.tensor(continuation)
    log_probs = rows.log_softmax(dim=-1).gather(1, targets[:, None])
    return log_probs.sum().item(), bool((rows.argmax(dim=-1) == targets).all())


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_scores_equal_transformers(pair, pairs, batch_size):
    model, reference = pair
    scores = score_many(model, pairs, batch_size)
    for score, (prefix, continuation) in zip(scores, pairs, strict=True):
        log_prob, is_greedy = expected_score(reference, prefix, continuation)
        assert score.log_prob == pytest.approx(log_prob, abs=1e-3)
        assert score.is_greedy == is_greedy


def test_the_greedy_continuation_is_recognised(pair):
    model, reference = pair
    with torch.no_grad():
        best = reference(torch.tensor([[1, 2, 3]])).logits[0, -1].argmax().item()
    assert score_many(model, [([1, 2, 3], [best])], 1)[0].is_greedy
    assert not score_many(model, [([1, 2, 3], [(best + 1) % tiny.VOCAB_SIZE])], 1)[0].is_greedy


def test_chunks_change_nothing(pair, pairs, monkeypatch):
    model, _ = pair
    whole = score_many(model, pairs, 4)
    monkeypatch.setattr(scoring, "MAX_LOGITS", 3 * tiny.VOCAB_SIZE)
    for score, expected in zip(score_many(model, pairs, 4), whole, strict=True):
        assert score.log_prob == pytest.approx(expected.log_prob, abs=1e-4)
