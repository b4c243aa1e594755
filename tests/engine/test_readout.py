"""What is read of logits: chosen tokens, probabilities, statistics, and samples that depend on their key alone."""

import math

import numpy as np
import pytest
import torch

from refusion_eval.engine import readout
from refusion_eval.engine.readout import PackedRead, gumbel_noise, read_out
from refusion_eval.types import Read, draw_key


def ask(logits, *reads, first_row=0):
    """Reads logits that are handed in as hidden rows, the output head being the identity."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    return read_out([PackedRead(read, first_row) for read in reads], logits, lambda rows: rows, logits.shape[1])


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
    noise = gumbel_noise(draws, 5, torch.device("cpu"))
    for row, draw in enumerate(draws):
        for token in range(5):
            state = draw
            for _ in range(token + 1):
                state = (state + 0x9E3779B97F4A7C15) % (1 << 64)
            state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % (1 << 64)
            state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % (1 << 64)
            uniform = (((state ^ (state >> 31)) >> 12) + 0.5) / (1 << 52)
            assert noise[row, token].item() == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12)
