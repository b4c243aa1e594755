"""What is read of logits: chosen tokens, probabilities, statistics, and samples that depend on their key alone."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from refusion_eval.engine import readout
from refusion_eval.engine.readout import ReadPlan, gumbel_noise, read_out
from refusion_eval.types import Confidence, Guidance, Read, draw_key
from tests.examples import examples


def ask(logits, *reads, first_row=0):
    """Reads logits that are handed in as hidden rows, the output head being the identity."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    return read_out(ReadPlan([(read, first_row) for read in reads]), logits, lambda rows: rows, logits.shape[1])


@pytest.fixture
def logits():
    return torch.randn(6, 11, generator=torch.Generator().manual_seed(0)) * 3


def test_greedy_reads_the_largest_logit_and_its_probability(logits):
    (got,) = ask(logits, Read(range(6)))
    probs = logits.softmax(dim=-1)
    assert got.tokens.tolist() == logits.argmax(dim=-1).tolist()
    np.testing.assert_allclose(got.probs, probs.max(dim=-1).values, rtol=1e-6)
    assert got.tokens.dtype == np.int64
    assert got.probs.dtype == np.float32
    assert (got.given, got.entropy, got.margin) == (None, None, None)


def test_ties_go_to_the_lowest_id():
    (got,) = ask([[0.0, 2.0, 2.0, 2.0]], Read([0]))
    assert got.tokens.tolist() == [1]


def test_suppressed_ids_are_not_chosen_but_stay_in_the_normaliser(logits):
    best = int(logits[0].argmax())
    (got,) = ask(logits, Read([0], suppress=(best,)))
    second = logits[0].topk(2)
    assert got.tokens.tolist() == [int(second.indices[1])]
    np.testing.assert_allclose(got.probs[0], logits[0].softmax(-1)[got.tokens[0]], rtol=1e-6)


def test_probability_of_given_tokens(logits):
    (got,) = ask(logits, Read([4, 1], given=[7, 0]))
    probs = logits.softmax(dim=-1)
    np.testing.assert_allclose(got.given, [probs[4, 7], probs[1, 0]], rtol=1e-5)


def test_entropy_and_margin(logits):
    (got,) = ask(logits, Read(range(6), entropy=True, margin=True))
    probs = logits.double().softmax(dim=-1)
    top = probs.topk(2, dim=-1).values
    np.testing.assert_allclose(got.entropy, -(probs * probs.log()).sum(-1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(got.margin, top[:, 0] - top[:, 1], rtol=1e-4, atol=1e-6)


def test_a_probability_never_exceeds_one():
    (got,) = ask([[80.0] + [-80.0] * 9] * 50, Read(range(50), given=[0] * 50, entropy=True))
    assert (got.probs <= 1).all()
    assert (got.given <= 1).all()
    assert (got.entropy >= 0).all()


def test_reads_of_different_style_are_answered_in_their_order(logits):
    reads = (Read([2]), Read([0, 5], entropy=True), Read([1], suppress=(0,)), Read([3]))
    together, alone = ask(logits, *reads), [ask(logits, read)[0] for read in reads]
    for got, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(got.tokens, expected.tokens)
        np.testing.assert_array_equal(got.probs, expected.probs)


def test_rows_count_from_the_first_row_of_their_sequence(logits):
    (got,) = ask(logits, Read([0, 2]), first_row=3)
    assert got.tokens.tolist() == logits.argmax(dim=-1)[[3, 5]].tolist()


def test_nothing_to_read():
    assert ask([[0.0, 1.0]]) == []
    (got,) = ask([[0.0, 1.0]], Read([]))
    assert len(got.tokens) == len(got.probs) == 0


def test_chunks_change_nothing(logits, monkeypatch):
    read = Read(range(6), given=list(range(6)), temperature=1.0, draws=tuple(range(6)), entropy=True)
    (whole,) = ask(logits, read)
    monkeypatch.setattr(readout, "MAX_LOGITS", 2 * logits.shape[1])
    (parts,) = ask(logits, read)
    for field in ("tokens", "probs", "given", "entropy"):
        np.testing.assert_array_equal(getattr(whole, field), getattr(parts, field))


def test_samples_follow_the_tempered_softmax():
    row, temperature, count = [0.0, 1.0, 2.0, 3.0], 1.7, 4000
    draws = tuple(draw_key(3, index) for index in range(count))
    (got,) = ask([row] * count, Read(range(count), temperature=temperature, draws=draws))
    expected = torch.tensor(row).div(temperature).softmax(-1).numpy()
    frequencies = np.bincount(got.tokens, minlength=4) / count
    # Four standard errors of a share of `count` draws.
    assert (np.abs(frequencies - expected) < 4 * np.sqrt(expected * (1 - expected) / count)).all()


def test_a_sample_depends_on_its_key_and_logits_alone(logits):
    key = draw_key(5, 1)
    (alone,) = ask(logits[2:3], Read([0], temperature=1.0, draws=(key,)))
    draws = tuple(key if row == 2 else draw_key(9, row) for row in range(6))
    (crowd,) = ask(logits, Read(range(6), temperature=1.0, draws=draws))
    assert crowd.tokens[2] == alone.tokens[0]
    np.testing.assert_allclose(crowd.probs[2], alone.probs[0], rtol=1e-6)


def test_a_sampled_token_has_its_untempered_probability(logits):
    (got,) = ask(logits, Read(range(6), temperature=2.0, draws=tuple(range(6))))
    np.testing.assert_allclose(got.probs, logits.softmax(-1)[range(6), got.tokens], rtol=1e-5)


def test_suppressed_ids_are_not_sampled(logits):
    draws = tuple(range(200))
    (got,) = ask(logits[:1].expand(200, -1), Read(range(200), temperature=5.0, draws=draws, suppress=(0, 3)))
    assert not {0, 3} & set(got.tokens.tolist())


def test_noise_equals_a_plain_reference():
    """splitmix64 in Python integers: the tensor arithmetic wraps and shifts as unsigned 64-bit numbers do."""
    draws = [0, 1, (1 << 64) - 1, draw_key(2, 3)]
    noise = gumbel_noise(torch.tensor(draws, dtype=torch.uint64).view(torch.int64), 5)
    for row, draw in enumerate(draws):
        for token in range(5):
            state = draw
            for _ in range(token + 1):
                state = (state + 0x9E3779B97F4A7C15) % (1 << 64)
            state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % (1 << 64)
            state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % (1 << 64)
            uniform = (((state ^ (state >> 31)) >> 12) + 0.5) / (1 << 52)
            assert noise[row, token].item() == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12)


def test_excluded_ids_count_for_nothing(logits):
    best = int(logits[0].argmax())
    (got,) = ask(logits, Read([0], exclude=(best,), entropy=True))
    probs = logits[0].index_fill(0, torch.tensor([best]), -math.inf).softmax(-1)
    assert got.tokens[0] == int(probs.argmax())
    np.testing.assert_allclose(got.probs[0], probs.max(), rtol=1e-6)
    np.testing.assert_allclose(got.entropy[0], torch.special.entr(probs).sum(), rtol=1e-5)


def test_ids_without_confidence_may_be_chosen(logits):
    best = int(logits[0].argmax())
    (got,) = ask(logits, Read([0, 1], confidence=Confidence(exclude=(best,))))
    assert got.tokens[0] == best
    assert got.probs[0] == 0
    rest = logits[1].index_fill(0, torch.tensor([best]), -math.inf).softmax(-1)
    np.testing.assert_allclose(got.probs[1], rest[got.tokens[1]], rtol=1e-6)


def test_confidence_has_its_own_temperature(logits):
    (got,) = ask(logits, Read(range(6), entropy=True, margin=True, confidence=Confidence(temperature=0.3)))
    probs = (logits / 0.3).softmax(-1)
    assert got.tokens.tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(got.probs, probs.max(-1).values, rtol=1e-6)
    np.testing.assert_allclose(got.entropy, torch.special.entr(probs).sum(-1), rtol=1e-5, atol=1e-7)
    top = probs.topk(2).values
    np.testing.assert_allclose(got.margin, top[:, 0] - top[:, 1], rtol=1e-5, atol=1e-7)


@examples(60)
@given(st.integers(0, 10**6), st.floats(0.05, 1.0), st.integers(0, 12))
def test_truncation_keeps_the_head_of_the_distribution(seed, top_p, top_k):
    row = torch.randn(11, generator=torch.Generator().manual_seed(seed)) * 2
    probs = row.softmax(-1)
    order = probs.argsort(descending=True, stable=True)
    kept, total = [], 0.0
    for token in order.tolist():
        kept.append(token)
        total += float(probs[token])
        if total > top_p + 1e-6:
            break
    assume(top_p == 1 or abs(float(probs[order].cumsum(0)[len(kept) - 1]) - top_p) > 1e-5)
    kept = kept[: top_k or None]
    wanted = torch.zeros(11).index_copy(0, torch.tensor(kept), probs[kept] / probs[kept].sum())
    everyone = Read([0] * 11, given=list(range(11)), top_p=top_p, top_k=top_k)
    (got,) = ask(row[None], everyone)
    np.testing.assert_allclose(got.given, wanted, atol=1e-5)


def test_samples_stay_within_what_truncation_keeps(logits):
    draws = tuple(draw_key(5, index) for index in range(400))
    (got,) = ask(logits, Read([2] * 400, temperature=2.0, top_k=2, draws=draws))
    assert set(got.tokens.tolist()) == set(logits[2].topk(2).indices.tolist())


def test_sampling_at_a_temperature_follows_the_truncated_distribution():
    row = torch.tensor([[2.0, 1.0, 0.0, -8.0]])
    draws = tuple(draw_key(3, index) for index in range(4000))
    (got,) = ask(row, Read([0] * 4000, temperature=0.5, top_p=0.9, draws=draws))
    counts = np.bincount(got.tokens, minlength=4) / 4000
    kept = torch.tensor([4.0, 2.0]).softmax(-1)  # 0.867 + 0.117 exceeds 0.9
    np.testing.assert_allclose(counts, [*kept, 0, 0], atol=0.02)


def test_confidence_dtypes():
    logits = torch.tensor([[20.0, 3.0, 2.0, 0.0], [20.0, 1.0, 2.0, 0.0]])
    double, single = ask(logits, Read([0, 1], confidence=Confidence(dtype="float64")), Read([0, 1]))
    assert double.probs.dtype == np.float64
    assert single.probs.dtype == np.float32
    assert double.probs[0] < double.probs[1] < 1  # told apart, where float32 sees two equal ones
    hidden = [(Read([0, 1], confidence=Confidence(dtype="model")), 0)]
    (short,) = read_out(ReadPlan(hidden), logits, lambda rows: rows, 4, torch.bfloat16)
    np.testing.assert_array_equal(short.probs, logits.bfloat16().softmax(-1).max(-1).values.float())
    assert (double.rounded_to, single.rounded_to, short.rounded_to) == ("", "", "bfloat16")


def test_the_most_probable_token_at_low_precision_can_be_another_than_the_largest_logit():
    logits = torch.tensor([[8.0, 8.001, 0.0]])
    reads = [(Read([0], confidence=Confidence(dtype="model", choose=choose)), 0) for choose in (False, True)]
    by_logit, by_probability = read_out(ReadPlan(reads), logits, lambda rows: rows, 3, torch.bfloat16)
    assert (by_logit.tokens[0], by_probability.tokens[0]) == (1, 0)


def test_guidance_moves_away_from_the_unconditional_row(logits):
    (got,) = ask(logits, Read([0, 1], guidance=Guidance([4, 5], 0.7)))
    guided = logits[4:] + 1.7 * (logits[:2] - logits[4:])
    assert got.tokens.tolist() == guided.argmax(-1).tolist()
    np.testing.assert_allclose(got.probs, guided.softmax(-1).max(-1).values, rtol=1e-5)


def test_reads_of_different_styles_are_answered_in_their_order(logits):
    reads = [Read([0]), Read([1], top_k=1), Read([2], confidence=Confidence(dtype="float64")), Read([3])]
    got = ask(logits, *reads)
    assert [int(answer.tokens[0]) for answer in got] == logits[:4].argmax(-1).tolist()
    assert got[1].probs[0] == 1


def kept(probs, top_p=1.0, top_k=0):
    """What stays of a distribution: the best `top_k`, then the best up to where their sum exceeds `top_p`."""
    order = probs.argsort(descending=True)[: top_k or None]
    shares = probs[order] / probs[order].sum()
    return order[: int((shares.cumsum(0) <= top_p).sum()) + 1]


def test_top_p_counts_what_top_k_leaves_if_top_k_comes_first(logits):
    (first,), (last,) = (
        ask(logits, Read(range(6), top_p=0.7, top_k=3, top_k_first=is_first)) for is_first in (True, False)
    )
    for row, probs in enumerate(logits.softmax(dim=-1)):
        rest = probs[kept(probs, 0.7, 3)]
        np.testing.assert_allclose(first.probs[row], rest.max() / rest.sum(), rtol=1e-5)
    assert (first.probs >= last.probs).all()
    assert (first.probs > last.probs).any()


def test_confidences_can_be_those_of_all_tokens_where_the_sample_is_truncated(logits):
    draws = tuple(draw_key(5, row) for row in range(6))
    read = Read(range(6), temperature=0.8, draws=draws, top_k=2, confidence=Confidence(temperature=0.8))
    whole = replace(read, confidence=replace(read.confidence, truncate=False))
    (truncated,), (untruncated,) = ask(logits, read), ask(logits, whole)
    assert truncated.tokens.tolist() == untruncated.tokens.tolist()
    probs = (logits / 0.8).softmax(dim=-1)
    np.testing.assert_allclose(untruncated.probs, probs[range(6), truncated.tokens.tolist()], rtol=1e-5)
    assert (truncated.probs > untruncated.probs).all()


def test_logits_of_a_row_stay_what_they_were(logits, monkeypatch):
    monkeypatch.setattr(readout, "MAX_LOGITS", 2 * logits.shape[1])  # in chunks of two rows
    before = logits.numpy().copy()
    plain, first, second = ask(logits, Read([5]), Read([4, 1, 3], logits=True), Read([2, 0], logits=True))
    logits.zero_()  # as the buffer of a recorded forward changes with the next forward
    assert plain.logits is None
    for got, rows in ((first, [4, 1, 3]), (second, [2, 0])):
        np.testing.assert_array_equal([got.logits(index) for index in range(len(rows))], before[rows])
