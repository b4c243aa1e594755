"""The bound of masked models: equal to its definition, unbiased where it is drawn, the same in every batch."""

import itertools
import math
import random
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval import api
from refusion_eval.decoders import DECODERS, llada
from refusion_eval.engine import scoring
from refusion_eval.engine.engine import Engine
from refusion_eval.engine.scoring import MaskedReading, estimate_many, noised_copies
from refusion_eval.errors import ConfigError
from tests.engine.random_model import VOCAB_SIZE, dense_logits, random_transformer
from tests.models import tiny

MASK_ID = VOCAB_SIZE - 1
PREFIX = (3, 1, 4, 1, 5)
SHIFTS = pytest.mark.parametrize("shift", [0, 1])


@pytest.fixture(scope="module")
def model():
    return random_transformer(seed=4)


def reading(shift=0, num_samples=128, seed=0):
    return MaskedReading(mask_id=MASK_ID, shift=shift, num_samples=num_samples, seed=seed)


def masked_log_probs(model, prefix, continuation, masked, shift, mask_id=MASK_ID):
    """log p(token | what is not masked) at each masked index of the continuation; [masked, V], by one dense forward."""
    tokens = [*prefix, *(mask_id if index in masked else token for index, token in enumerate(continuation))]
    sees_all = torch.ones(len(tokens), len(tokens), dtype=torch.bool)
    log_probs = dense_logits(model, tokens, range(len(tokens)), sees_all).double().log_softmax(dim=-1)
    return log_probs[[len(prefix) + index - shift for index in masked]]


def expectation(model, prefix, continuation, shift):
    """The bound by its definition: the mean over the number of masks of the mean over all subsets of that size."""
    length = len(continuation)
    means = []
    for size in range(1, length + 1):
        values = []
        for masked in itertools.combinations(range(length), size):
            rows = masked_log_probs(model, prefix, continuation, masked, shift)
            total = sum(row[continuation[index]].item() for row, index in zip(rows, masked, strict=True))
            values.append(total * length / size)
        means.append(statistics.fmean(values))
    return statistics.fmean(means)


def decoded_greedily(model, prefix, length, shift):
    """One block, one token a step: the most probable token of the most certain position, never the mask."""
    found = [MASK_ID] * length
    masked = list(range(length))
    while masked:
        probs = masked_log_probs(model, prefix, found, masked, shift).exp()
        probs[:, MASK_ID] = 0
        best = max(range(len(masked)), key=lambda row: probs[row].max().item())
        found[masked.pop(best)] = probs[best].argmax().item()
    return found


@SHIFTS
def test_a_single_token_has_its_log_probability_at_the_mask(model, shift):
    for token in range(VOCAB_SIZE):
        (score,) = estimate_many(model, [(PREFIX, [token])], 1, reading(shift))
        expected = masked_log_probs(model, PREFIX, [token], [0], shift)[0, token].item()
        assert score.log_prob == pytest.approx(expected, abs=1e-4)


@SHIFTS
@pytest.mark.parametrize("length", [2, 3, 5])
def test_a_short_continuation_has_the_expectation_itself(model, length, shift):
    continuation = [7, 2, 19, 7, 11][:length]
    (score,) = estimate_many(model, [(PREFIX, continuation)], 1, reading(shift, num_samples=2**length - 1))
    assert score.log_prob == pytest.approx(expectation(model, PREFIX, continuation, shift), abs=1e-3)


@pytest.mark.parametrize(("num_samples", "shift"), [(1, 0), (5, 1), (16, 0)])
def test_the_mean_over_seeds_is_the_expectation(model, num_samples, shift):
    continuation = [7, 2, 19, 7, 11, 0]
    estimates = [
        estimate_many(model, [(PREFIX, continuation)], 1, reading(shift, num_samples, seed))[0].log_prob
        for seed in range(100)
    ]
    error = statistics.stdev(estimates) / math.sqrt(len(estimates))
    assert 0 < error < 1
    assert statistics.fmean(estimates) == pytest.approx(expectation(model, PREFIX, continuation, shift), abs=4 * error)


@given(length=st.integers(1, 40), num_samples=st.integers(1, 200), key=st.integers(0, 2**64 - 1))
def test_copies_are_different_and_weigh_one_for_each_token(length, num_samples, key):
    masked_SL, weights_S = noised_copies(length, num_samples, key)
    assert 1 <= len(masked_SL) <= num_samples
    assert len(np.unique(masked_SL, axis=0)) == len(masked_SL)
    assert masked_SL.any(axis=1).all()
    assert weights_S @ masked_SL.sum(axis=1) == pytest.approx(length)


@pytest.mark.parametrize(("length", "num_samples"), [(32, 128), (128, 128), (200, 128), (48, 20)])
def test_numbers_of_masks_are_spread_evenly_and_no_token_is_favoured(length, num_samples):
    sizes, per_token, num_draws = np.zeros(length), [], 600
    for key in range(num_draws):
        masked_SL, weights_S = noised_copies(length, num_samples, key)
        drawn = masked_SL.sum(axis=1)
        counts = np.bincount(drawn, weights_S * drawn / length * num_samples, length + 1)[1:]
        assert set(counts.round(6)) <= {math.floor(num_samples / length), math.ceil(num_samples / length)}
        sizes += counts
        per_token.append(weights_S @ masked_SL)
    # Beside its fixed part, how often a number comes is a sum of `num_draws` binary choices.
    assert np.abs(sizes - num_draws * num_samples / length).max() <= 4 * math.sqrt(num_draws) / 2
    error = np.std(per_token, axis=0) / math.sqrt(num_draws)
    assert (np.abs(np.mean(per_token, axis=0) - 1) < 5 * error).all()


@pytest.fixture(scope="module")
def pairs():
    chooser = random.Random(3)

    def tokens(longest):
        return [chooser.randrange(VOCAB_SIZE - 1) for _ in range(chooser.randint(1, longest))]

    return [(tokens(12), tokens(14)) for _ in range(9)]


@pytest.fixture(scope="module")
def expected_scores(model, pairs):
    return {shift: estimate_many(model, pairs, 3, reading(shift, num_samples=20)) for shift in (0, 1)}


@SHIFTS
@pytest.mark.parametrize(("batch_size", "max_rows"), [(1, 4096), (4, 4096), (100, 4096), (4, 50), (4, 1)])
def test_batch_order_and_packing_change_nothing(
    model, pairs, expected_scores, shift, batch_size, max_rows, monkeypatch
):
    monkeypatch.setattr(scoring, "MAX_ROWS", max_rows)
    found = estimate_many(model, pairs[::-1], batch_size, reading(shift, num_samples=20))
    for score, wanted in zip(reversed(found), expected_scores[shift], strict=True):
        assert score.log_prob == pytest.approx(wanted.log_prob, abs=1e-3)
        assert score.is_greedy == wanted.is_greedy


def test_a_forward_takes_as_many_copies_as_its_rows_allow(model, monkeypatch):
    rows = []
    hidden = model.hidden
    monkeypatch.setattr(
        model, "hidden", lambda tokens_T, *rest: (rows.append(len(tokens_T)), hidden(tokens_T, *rest))[1]
    )
    monkeypatch.setattr(scoring, "MAX_ROWS", 50)
    estimate_many(model, [(PREFIX, [7, 2, 19, 7, 11])], 1, reading())
    # 31 copies of 10 tokens, then the steps of greedy decoding.
    assert rows[:7] == [50] * 6 + [10]
    assert set(rows[7:]) == {10}


def test_the_noise_follows_from_seed_and_tokens(model):
    pair = (PREFIX, list(range(12)))
    first, again = (estimate_many(model, [pair], 1, reading(num_samples=6, seed=5)) for _ in range(2))
    other = estimate_many(model, [pair], 1, reading(num_samples=6, seed=6))
    assert first == again
    assert first[0].log_prob != pytest.approx(other[0].log_prob, abs=1e-2)


def test_logits_are_read_in_chunks(model, pairs, monkeypatch):
    whole = estimate_many(model, pairs, 4, reading())
    read = []
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda x_NC: (read.append(len(x_NC)), logits(x_NC))[1])
    monkeypatch.setattr(scoring, "MAX_LOGITS", 3 * VOCAB_SIZE)
    monkeypatch.setattr("refusion_eval.engine.readout.MAX_LOGITS", 3 * VOCAB_SIZE)
    chunked = estimate_many(model, pairs, 4, reading())
    assert max(read) == 3
    for score, expected in zip(chunked, whole, strict=True):
        assert score.log_prob == pytest.approx(expected.log_prob, abs=1e-3)
        assert score.is_greedy == expected.is_greedy


@SHIFTS
@pytest.mark.parametrize("length", [1, 2, 6])
def test_a_continuation_is_greedy_if_and_only_if_one_token_a_step_decodes_it(model, length, shift):
    greedy = decoded_greedily(model, PREFIX, length, shift)
    others = [[*greedy[:index], (greedy[index] + 1) % MASK_ID, *greedy[index + 1 :]] for index in range(length)]
    scores = estimate_many(model, [(PREFIX, greedy), *((PREFIX, other) for other in others)], 3, reading(shift))
    assert [score.is_greedy for score in scores] == [True] + [False] * length


def test_the_mask_token_is_no_greedy_choice(model):
    for mask_id, first in itertools.product(range(VOCAB_SIZE), range(VOCAB_SIZE)):
        log_probs = masked_log_probs(model, [first, *PREFIX], [0], [0], 0, mask_id)[0]
        best, second = log_probs.topk(2).indices.tolist()
        if best == mask_id:
            break
    assert best == mask_id
    settings = MaskedReading(mask_id=mask_id, shift=0, num_samples=1, seed=0)
    scores = estimate_many(model, [([first, *PREFIX], [token]) for token in (best, second)], 2, settings)
    assert [score.is_greedy for score in scores] == [False, True]
    # What it takes from the others' probability stays taken.
    assert scores[1].log_prob == pytest.approx(log_probs[second].item(), abs=1e-4)


def test_greedy_is_what_the_decoder_gives(model):
    settings = llada.LladaSettings(gen_length=8, block_length=8, mask_id=MASK_ID)
    for first in range(6):
        prompt = [first, *PREFIX]
        tokens = Engine(model, "sdpa").run(llada.decode, prompt, settings).tokens
        assert estimate_many(model, [(prompt, tokens)], 1, reading())[0].is_greedy


@pytest.fixture(scope="module", params=["llada", "Dream"])
def checkpoint(request, tmp_path_factory):
    """A loaded random checkpoint of a masked family, its shift, and the transformers model that computes it."""
    directory = tmp_path_factory.mktemp(request.param)
    reference = tiny.save_checkpoint(directory, family=request.param, initializer_range=0.4)
    return api.load_model(str(directory), device="cpu"), {"llada": 0, "Dream": 1}[request.param], reference


def test_the_interface_reads_masked_families_both_ways_and_in_their_own_rows(checkpoint):
    model, shift, reference = checkpoint
    tokens = torch.tensor([8, 3, 44, 17, tiny.MASK_ID])
    sees_all = torch.ones(5, 5, dtype=torch.bool)
    log_probs = tiny.oracle(reference, tokens.tolist(), range(5), sees_all).double().log_softmax(dim=-1)[4 - shift]
    for token in (0, 29, 58):
        score = api.score_tokens(model, tokens[:4].tolist(), [token])
        assert score.log_prob == pytest.approx(log_probs[token].item(), abs=1e-3)
        assert score.is_greedy == (log_probs.argmax().item() == token)


def test_samples_and_seed_reach_the_estimate(checkpoint):
    model, _, _ = checkpoint
    pair = ([1, 2, 3], list(range(10, 22)))
    few, other = (api.score_tokens(model, *pair, mc_samples=4, seed=seed).log_prob for seed in (0, 1))
    in_batch = api.score_tokens_many(model, [([5], [6]), pair], mc_samples=4)[1].log_prob
    assert few == pytest.approx(in_batch, rel=1e-6)  # sums of a batch have another order on some processors
    assert few != pytest.approx(other, abs=1e-3)


def test_a_masked_model_has_a_position_for_every_token(checkpoint):
    model, _, _ = checkpoint
    assert api.longest_scored(model) == model.config.max_positions == 512
    assert api.score_tokens(model, [1] * 511, [2]).log_prob < 0
    with pytest.raises(ConfigError, match=r"a text of 513 tokens cannot be scored; .* takes at most 512"):
        api.score_tokens(model, [1] * 512, [2])


@pytest.mark.parametrize("wrong", [{"mc_samples": 0}, {"seed": -1}])
def test_numbers_out_of_range_are_refused(checkpoint, wrong):
    with pytest.raises(ConfigError, match="it must be at least"):
        api.score_tokens(checkpoint[0], [1], [2], **wrong)


@pytest.mark.parametrize(("name", "shift"), [("llada_1", 0), ("dream_1", 1)])
def test_a_single_token_on_the_golden_checkpoints(shared, name, shift):
    model = api.load_model(str(shared / "parity" / "baselines" / "checkpoints" / name), dtype="float32", device="cpu")
    assert DECODERS[model.decoders[0]].reads.mask_shift == shift
    prefix, mask_id = [5, 77, 120, 6, 33, 18], model.card.mask_id
    log_probs = masked_log_probs(model.transformer, prefix, [0], [0], shift, mask_id)[0]
    scores = api.score_tokens_many(model, [(prefix, [token]) for token in range(190)], batch_size=32)
    assert [score.log_prob for score in scores] == pytest.approx(log_probs[:190].tolist(), abs=1e-3)
    log_probs[mask_id] = -math.inf
    assert [score.is_greedy for score in scores] == [token == log_probs.argmax().item() for token in range(190)]
