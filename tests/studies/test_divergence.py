"""Divergences at masks equal a direct computation with full logits, under every reading."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import refusion_eval
from refusion_eval.errors import DecodeError
from refusion_eval.models.layers import Weights
from refusion_eval.models.transformer import Transformer
from refusion_eval.studies.locality import divergence
from refusion_eval.studies.locality.divergence import MaskedText, jensen_shannon, reveal_divergences
from tests.engine.random_model import VOCAB_SIZE, dense_logits, random_transformer
from tests.models import tiny

READINGS = ("bidirectional", "bidirectional_shifted", "refusion")
FAMILIES = {"bidirectional": "llada", "bidirectional_shifted": "Dream", "refusion": "qwen3"}
GOLDEN = {"bidirectional": "llada_1", "bidirectional_shifted": "dream_1", "refusion": "qwen3_1"}
GOLDEN_MASK_ID = 191
MASK_ID = VOCAB_SIZE - 1


def direct_divergence(log_p, log_q):
    """The definition, in float64."""
    p, q = np.exp(log_p), np.exp(log_q)
    log_m = np.log((p + q) / 2)
    return (p * (log_p - log_m) + q * (log_q - log_m)).sum(axis=-1) / 2


def who_sees_whom(length, masked, reading):
    """[query, key] in the order of positions, unlike the order in which the engine lays a text out."""
    if reading != "refusion":
        return torch.ones(length, length, dtype=torch.bool)
    is_mask = torch.zeros(length, dtype=torch.bool)
    is_mask[list(masked)] = True
    before = torch.ones(length, length, dtype=torch.bool).tril()
    return (before & (is_mask[:, None] == is_mask[None, :])) | (is_mask[:, None] & ~is_mask[None, :])


def direct(logits_of, text, reading, mask_id):
    """[K, M], from the full logits of each whole text; `logits_of(tokens, visible)` computes these."""

    def log_probs(masked):
        tokens = [mask_id if position in masked else token for position, token in enumerate(text.tokens)]
        logits = logits_of(tokens, who_sees_whom(len(tokens), masked, reading)).double()
        shift = reading == "bidirectional_shifted"
        return logits[[position - shift for position in text.masked]].log_softmax(dim=-1).numpy()

    base = log_probs(text.masked)
    found = np.array([direct_divergence(base, log_probs(set(text.masked) - {shown})) for shown in text.revealed])
    found[np.array(text.revealed)[:, None] == np.array(text.masked)] = np.nan
    return found


def random_texts(seed, num_tokens, *, count=3):
    chooser = random.Random(seed)
    texts = []
    for _ in range(count):
        tokens = [chooser.randrange(num_tokens - 1) for _ in range(chooser.randint(8, 20))]
        masked = sorted(chooser.sample(range(3, len(tokens)), chooser.randint(2, len(tokens) - 4)))
        texts.append(MaskedText(tokens, masked, chooser.sample(masked, chooser.randint(1, len(masked)))))
    return texts


def rows_of(model):
    return lambda tokens, visible: dense_logits(model, tokens, range(len(tokens)), visible)


@pytest.mark.parametrize("reading", READINGS)
def test_divergences_are_those_of_transformers_logits(reading, tmp_path):
    reference = tiny.save_checkpoint(tmp_path, family=FAMILIES[reading])
    model = tiny.load(tmp_path)
    texts = random_texts(1, tiny.VOCAB_SIZE)
    for text, found in zip(texts, reveal_divergences(model, texts, reading, tiny.MASK_ID, 4), strict=True):
        expected = direct(
            lambda tokens, visible: tiny.oracle(reference, tokens, range(len(tokens)), visible),
            text,
            reading,
            tiny.MASK_ID,
        )
        assert np.nanmax(expected) > 1e-3
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("reading", READINGS)
def test_golden_checkpoints(shared, reading):
    folder = shared / "parity" / "baselines" / "checkpoints" / GOLDEN[reading]
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    model = refusion_eval.load_model(str(folder), dtype="float32", device="cpu").engine.model
    texts = random_texts(2, GOLDEN_MASK_ID)
    for text, found in zip(texts, reveal_divergences(model, texts, reading, GOLDEN_MASK_ID, 4), strict=True):
        np.testing.assert_allclose(found, direct(rows_of(model), text, reading, GOLDEN_MASK_ID), atol=1e-5)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_neither_the_batch_nor_chunks_change_values(reading, batch_size, monkeypatch):
    model, texts = random_transformer(), random_texts(3, VOCAB_SIZE)
    whole = list(reveal_divergences(model, texts, reading, MASK_ID, 7))
    monkeypatch.setattr(divergence, "MAX_LOGITS", 3 * 8 * VOCAB_SIZE)
    for found, expected in zip(reveal_divergences(model, texts, reading, MASK_ID, batch_size), whole, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("reading", READINGS)
def test_only_the_revealed_position_itself_has_no_value(reading):
    text = MaskedText([1, 2, 3, 4, 5, 6], [2, 3, 5], [5, 2])
    (found,) = reveal_divergences(random_transformer(), [text], reading, MASK_ID, 8)
    assert np.isnan(found).tolist() == [[False, False, True], [True, False, False]]
    others = found[~np.isnan(found)]
    assert (others > 0).all()
    assert (others <= math.log(2)).all()


@pytest.mark.parametrize("reading", READINGS)
def test_without_attention_a_reveal_changes_only_the_row_that_it_enters(reading):
    whole = random_transformer()
    layers = tuple(dataclasses.replace(layer, out=torch.zeros_like(layer.out)) for layer in whole.weights.layers)
    cut = Transformer(
        whole.config, Weights(whole.weights.embedding, layers, whole.weights.final_norm, whole.weights.head)
    )
    text = MaskedText([1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 6], [3, 2])
    (found,) = reveal_divergences(cut, [text], reading, MASK_ID, 1)
    # Read shifted, the row of the revealed token is the one that predicts the next position.
    changed = {(0, 4), (1, 3)} if reading == "bidirectional_shifted" else set()
    for index, revealed in enumerate(text.revealed):
        for column, position in enumerate(text.masked):
            if position != revealed:
                assert (found[index, column] > 1e-6) == ((index, position) in changed)


@pytest.mark.parametrize("reading", ["bidirectional", "bidirectional_shifted"])
def test_a_token_that_is_the_mask_reveals_nothing(reading):
    text = MaskedText([1, 2, 3, MASK_ID, 5, 6], [2, 3, 4], [3])
    (found,) = reveal_divergences(random_transformer(), [text], reading, MASK_ID, 1)
    np.testing.assert_allclose(found, [[0, np.nan, 0]], atol=1e-9)


def test_in_the_refusion_reading_masks_do_not_see_masks_behind_them():
    model, tokens = random_transformer(), [1, 2, 3, 4, 5, 6, 7, 8]
    with_trailing = MaskedText(tokens, [2, 4, 6, 7], [2])
    without = MaskedText(tokens[:6], [2, 4], [2])
    for reading in READINGS:
        (longer,) = reveal_divergences(model, [with_trailing], reading, MASK_ID, 1)
        (shorter,) = reveal_divergences(model, [without], reading, MASK_ID, 1)
        assert (abs(longer[0, 1] - shorter[0, 1]) < 1e-6) == (reading == "refusion")


def test_in_the_refusion_reading_a_reveal_reaches_masks_on_both_sides():
    text = MaskedText([1, 2, 3, 4, 5, 6, 7, 8], [2, 4, 6], [4])
    (found,) = reveal_divergences(random_transformer(), [text], "refusion", MASK_ID, 1)
    assert found[0, 0] > 1e-4
    assert found[0, 2] > 1e-4


def test_weights_that_are_not_finite_are_an_error():
    model = random_transformer()
    model.weights.head[0, 0] = float("nan")
    with pytest.raises(DecodeError, match="not finite"):
        list(reveal_divergences(model, [MaskedText([1, 2, 3], [1, 2], [1])], "bidirectional", MASK_ID, 1))


LOGITS = st.lists(st.floats(-60, 60), min_size=5, max_size=5)


@given(LOGITS, LOGITS)
def test_divergence_is_symmetric_bounded_and_exact(left, right):
    log_p, log_q = (torch.tensor([logits]).log_softmax(dim=-1) for logits in (left, right))
    found = jensen_shannon(log_p, log_q).item()
    assert found == jensen_shannon(log_q, log_p).item()
    assert 0 <= found <= math.log(2)
    assert found == pytest.approx(direct_divergence(log_p.double().numpy(), log_q.double().numpy())[0], abs=2e-6)


def test_disjoint_distributions_are_ln_2_apart_and_equal_ones_0():
    log_p, log_q = torch.tensor([[0.0, -200.0]]), torch.tensor([[-200.0, 0.0]])
    assert jensen_shannon(log_p, log_q).item() == pytest.approx(math.log(2), rel=1e-6)
    assert jensen_shannon(log_p, log_p).item() == 0


@pytest.mark.parametrize("step", [1e-1, 1e-2, 1e-3])
def test_small_divergences_keep_their_digits(step):
    generator = torch.Generator().manual_seed(0)
    log_p = torch.randn(1, 50, generator=generator).log_softmax(dim=-1)
    log_q = (log_p + step * torch.randn(1, 50, generator=generator)).log_softmax(dim=-1)
    # The direct form cancels: in float64 it has digits left for steps of this size, in float32 it has none.
    expected = direct_divergence(log_p.double().numpy(), log_q.double().numpy())[0]
    assert jensen_shannon(log_p, log_q).item() == pytest.approx(expected, rel=3e-3)
