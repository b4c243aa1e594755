"""Examples with masks but ReFusion's (`refusion_eval.training.objectives.masked`, `example`) and their loss."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from refusion_eval.training.config import ObjectiveConfig
from refusion_eval.training.data.collate import Targets, collate
from refusion_eval.training.objectives.example import IGNORED, Example, TrainingSample, Visibility
from refusion_eval.training.objectives.loss import hybrid_loss
from refusion_eval.training.objectives.masked import (
    Noise,
    bd3lm_example,
    draw,
    idlm_example,
    llada_example,
    wedlm_example,
)
from refusion_eval.training.objectives.table import OBJECTIVES, SpecialIds
from tests.training.tiny import EOS, MASK, cross_entropies, random_model

PROMPT, ANSWER = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12]


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return random_model()


def _noise(probabilities: list[float], masked: list[int]) -> Noise:
    chosen = np.isin(np.arange(len(probabilities)), masked)
    return Noise(probabilities=np.array(probabilities), masked=chosen)


def _bd3lm(seed: int = 0, answer: list[int] = ANSWER, prompt: list[int] = PROMPT, block_size: int = 3) -> Example:
    noise = draw(np.random.default_rng(seed), len(answer), block_size)
    return bd3lm_example(prompt, answer, noise, block_size=block_size, mask=MASK)


# --- draws and layout


def test_every_block_has_its_own_probability_between_its_bounds() -> None:
    noise = draw(np.random.default_rng(0), 4000, 4)
    of_block = noise.probabilities.reshape(-1, 4)
    assert (of_block == of_block[:, :1]).all()
    assert len(set(of_block[:, 0].tolist())) == 1000
    assert 0.001 <= of_block.min() < 0.01
    assert 0.99 < of_block.max() <= 1


@pytest.mark.parametrize("block_size", [1, 8, 400])
def test_tokens_are_masked_as_often_as_the_probabilities_say(block_size: int) -> None:
    rng = np.random.default_rng(1)
    noises = [draw(rng, 400, block_size) for _ in range(300)]
    for low in (0.0, 0.5):
        chances = np.concatenate([noise.probabilities for noise in noises])
        inside = (chances >= low) & (chances < low + 0.5)
        masked = np.concatenate([noise.masked for noise in noises])[inside]
        assert masked.mean() == pytest.approx(chances[inside].mean(), abs=0.01)


def test_one_block_has_one_probability_and_a_last_short_block_its_own() -> None:
    assert len(set(draw(np.random.default_rng(2), 20, 20).probabilities.tolist())) == 1
    assert len(set(draw(np.random.default_rng(2), 7, 3).probabilities.tolist())) == 3


def test_llada_rows_by_hand() -> None:
    example = llada_example([1, 2], [3, 4, 5], _noise([0.5] * 3, masked=[0, 2]), mask=MASK)
    assert example.tokens.tolist() == [1, 2, MASK, 4, MASK]
    assert example.positions.tolist() == [0, 1, 2, 3, 4]
    assert example.mdm_labels.tolist() == [IGNORED, IGNORED, 3, IGNORED, 5]
    assert example.mdm_divisors[[2, 4]].tolist() == [1.5, 1.5]
    assert (example.ar_labels == IGNORED).all()


def test_bd3lm_rows_by_hand() -> None:
    noise = _noise([0.5, 0.5, 0.25, 0.25], masked=[1, 2])
    example = bd3lm_example([1, 2, 3], [4, 5, 6, 7], noise, block_size=2, mask=MASK)
    # Prompt, first block of the answer; then the noisy answer. The clean last block is seen by nobody.
    assert example.tokens.tolist() == [1, 2, 3, 4, 5, 4, MASK, MASK, 7]
    assert example.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    assert example.mdm_labels.tolist() == [IGNORED] * 6 + [5, 6, IGNORED]
    assert example.mdm_divisors[[6, 7]].tolist() == [2.0, 1.0]
    assert (example.ar_labels == IGNORED).all()
    visibility = example.visibility
    assert visibility is not None
    # A prompt of 3 tokens and blocks of 2: one token, two tokens, and there the answer begins.
    assert visibility.blocks.tolist() == [0, 1, 1, 2, 2, 2, 2, 3, 3]
    assert visibility.noisy.tolist() == [False] * 5 + [True] * 4


def test_idlm_rows_by_hand() -> None:
    example = idlm_example([1, 2], [3, 4, 5], block_size=2, mask=MASK)
    assert example.tokens.tolist() == [1, 2, 3, 4, 5, MASK, MASK, MASK]
    assert example.positions.tolist() == [0, 1, 2, 3, 4, 2, 3, 4]
    assert example.ar_labels.tolist() == [IGNORED, 3, 4, 5] + [IGNORED] * 4
    assert example.mdm_labels.tolist() == [IGNORED] * 5 + [4, 5, IGNORED]  # the next tokens
    assert example.mdm_divisors[5:7].tolist() == [2.0, 2.0]
    assert example.visibility is not None
    sees = example.visibility.mask()
    assert (sees[:5, :5] == np.tri(5, dtype=bool)).all()
    assert not sees[:5, 5:].any()
    assert [np.flatnonzero(row).tolist() for row in sees[5:]] == [[0, 1, 5], [0, 1, 5, 6], [0, 1, 2, 3, 7]]


def test_wedlm_rows_by_hand() -> None:
    noise = _noise([0.5] * 3 + [0.25], masked=[0, 1, 3])
    example = wedlm_example([1, 2], [3, 4, 5, 6], noise, block_size=3, mask=MASK)
    assert example.tokens.tolist() == [1, 2, 3, 4, 5, 6, 5, MASK, MASK, MASK]
    assert example.positions.tolist() == [0, 1, 2, 3, 4, 5, 4, 2, 3, 5]
    assert example.ar_labels.tolist() == [IGNORED, 3, 4, 5, 6] + [IGNORED] * 5
    assert example.mdm_labels.tolist() == [IGNORED] * 7 + [3, 4, 6]  # their own tokens
    assert example.mdm_divisors[7:].tolist() == [2.0, 2.0, 1.0]
    assert example.visibility is not None
    seen = [np.flatnonzero(row).tolist() for row in example.visibility.mask()[6:]]
    assert seen == [[0, 1, 6], [0, 1, 6, 7], [0, 1, 6, 7, 8], [0, 1, 2, 3, 4, 9]]


def test_a_batch_of_each_objective_fills_answers_with_eos_and_masks_no_prompt() -> None:
    samples = [TrainingSample((1, 2, 3), (4, 5, EOS)), TrainingSample((6,), (7, 8, 9, 10, 11, 12, 13, 14, EOS))]
    configs = [
        ObjectiveConfig(objective="llada", eos_multiple=8),
        ObjectiveConfig(objective="bd3lm", eos_multiple=8, block_size=4),
    ]
    for config in configs:
        labels: set[tuple[int, int]] = set()
        rng = np.random.default_rng(0)
        for _ in range(60):
            make, ids = OBJECTIVES[config.objective], SpecialIds(eos=EOS, mask=MASK)
            batch = collate([[make(sample, rng, config, ids) for sample in samples]])
            assert batch.lengths == {"llada": (3 + 8, 1 + 16), "bd3lm": (3 + 4 + 8, 1 + 12 + 16)}[config.objective]
            rows_R = batch.mdm.rows_R
            assert (batch.tokens_T[rows_R] == MASK).all()
            assert (batch.tokens_T == MASK).sum() == len(rows_R)
            assert len(batch.ar.rows_R) == 0
            numbers, positions = (rows_R >= batch.lengths[0]).int().tolist(), batch.positions_T[rows_R].tolist()
            # One probability for an answer, or for each block of it: so many weights.
            blocks = [
                (number, (position - (3, 1)[number]) // (config.block_size or 16))
                for number, position in zip(numbers, positions, strict=True)
            ]
            assert len(set(zip(blocks, batch.mdm.weights_R.tolist(), strict=True))) == len(set(blocks))
            labels |= set(zip(numbers, positions, strict=True))
        # Every token of the answers is masked now and then, the EOS filling too, and none of the prompts.
        assert labels == {(0, 3 + index) for index in range(8)} | {(1, 1 + index) for index in range(16)}


# --- who sees whom


def _sees(num_prompt: int, block_size: int, own: tuple[str, int], other: tuple[str, int]) -> bool:
    """The rule in words, for rows as (copy, position): blocks are counted from the answer's start, both ways."""
    (own_copy, own_position), (other_copy, other_position) = own, other
    own_block = math.floor((own_position - num_prompt) / block_size)
    other_block = math.floor((other_position - num_prompt) / block_size)
    if own_copy == "clean":
        return other_copy == "clean" and other_block <= own_block
    return other_block == own_block if other_copy == "noisy" else other_block < own_block


def bd3lm_rows(num_prompt: int, num_answer: int, block_size: int) -> list[tuple[str, int]]:
    num_clean = num_prompt + (num_answer - 1) // block_size * block_size
    noisy = [("noisy", num_prompt + index) for index in range(num_answer)]
    return [("clean", position) for position in range(num_clean)] + noisy


@given(st.integers(0, 9), st.integers(1, 12), st.integers(1, 6))
def test_bd3lm_visibility_is_the_rule(num_prompt: int, num_answer: int, block_size: int) -> None:
    example = _bd3lm(0, [6] * num_answer, [1] * num_prompt, block_size)
    rows = bd3lm_rows(num_prompt, num_answer, block_size)
    assert example.positions.tolist() == [position for _, position in rows]
    assert example.visibility is not None
    expected = [[_sees(num_prompt, block_size, own, other) for other in rows] for own in rows]
    assert example.visibility.mask().tolist() == expected


def test_llada_sees_everything() -> None:
    example = llada_example([1], [3, 4], _noise([0.5] * 2, masked=[0]), mask=MASK)
    assert example.visibility is not None
    assert example.visibility.mask().all()
    assert collate([[example]]).sights == ("full",)


def test_a_loss_has_gradients_at_what_its_row_sees_and_exactly_none_elsewhere(model: Qwen3ForCausalLM) -> None:
    noise = _noise([0.5] * 3 + [0.25] * 3 + [0.75], masked=[0, 1, 4, 6])
    example = bd3lm_example(PROMPT, ANSWER, noise, block_size=3, mask=MASK)
    batch = collate([[example, llada_example(PROMPT[:2], ANSWER[:4], _noise([0.5] * 4, [2]), mask=MASK)]])
    sight, full = batch.sights
    assert isinstance(sight, Visibility)
    assert full == "full"
    visible_TT = torch.block_diag(sight.mask(), torch.ones(batch.lengths[1], batch.lengths[1])).bool()
    for index, row in enumerate(batch.mdm.rows_R.tolist()):
        embedded: list[torch.Tensor] = []
        hook = model.model.embed_tokens.register_forward_hook(
            lambda module, inputs, output, kept=embedded: kept.append(output.requires_grad_()) or output
        )
        one = Targets(
            rows_R=batch.mdm.rows_R[index : index + 1],
            labels_R=batch.mdm.labels_R[index : index + 1],
            weights_R=torch.ones(1),
        )
        loss = hybrid_loss(model, replace(batch, mdm=one)).total
        hook.remove()
        (gradient_1TD,) = torch.autograd.grad(loss, embedded)
        # Whom a row sees sees nobody else, so that layers above the first add no one.
        assert torch.equal(gradient_1TD[0].abs().sum(-1) > 0, visible_TT[row])


# --- the loss


def _model_of_weights(weights: list[float]) -> Qwen3ForCausalLM:
    """At every row the probability of token v is weights[v] / sum(weights), whatever is seen."""
    config = Qwen3Config(
        vocab_size=len(weights),
        hidden_size=2,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        intermediate_size=2,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)  # the norm leaves (1, 1) as it is
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, 0] = torch.tensor(weights).log()
    return model


# Probabilities 1/16, 1/16, 1/8, 1/4, 1/4, 1/4: cross-entropies of 4, 4, 3, 2, 2, 2 times log 2.
WEIGHTS = [1.0, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_llada_loss_by_hand() -> None:
    first = llada_example([1], [0, 2, 3, 3], _noise([0.5] * 4, masked=[0, 2]), mask=5)
    second = llada_example([1, 1, 1], [2, 2], _noise([0.25] * 2, masked=[1]), mask=5)
    # First: (4 + 2) / (0.5 * 4 tokens) = 3. Second: 3 / (0.25 * 2 tokens) = 6. Mean: 4.5.
    losses = hybrid_loss(_model_of_weights(WEIGHTS), collate([[first, second]]))
    assert losses.mdm.item() == pytest.approx(4.5 * math.log(2), rel=1e-5)
    assert losses.ar.item() == 0


def test_bd3lm_loss_by_hand() -> None:
    noise = _noise([0.5, 0.5, 0.25, 0.25], masked=[0, 3])
    first = bd3lm_example([1], [0, 2, 3, 3], noise, block_size=2, mask=5)
    second = bd3lm_example([1, 1, 1], [2, 2], _noise([0.25] * 2, masked=[]), block_size=2, mask=5)
    # First: (4 / 0.5 + 2 / 0.25) / 4 tokens = 4. Second: nothing is masked. Mean: 2.
    losses = hybrid_loss(_model_of_weights(WEIGHTS), collate([[first, second]]))
    assert losses.mdm.item() == pytest.approx(2 * math.log(2), rel=1e-5)
    assert losses.ar.item() == 0


def test_neighbours_change_no_loss(model: Qwen3ForCausalLM) -> None:
    examples = [_bd3lm(3), _bd3lm(5, ANSWER[:3], PROMPT[:1]), _bd3lm(6, ANSWER[:5], [])]
    alone = [hybrid_loss(model, collate([[example]])).mdm.item() for example in examples]
    assert all(alone)
    together = hybrid_loss(model, collate([examples])).mdm.item()
    assert together == pytest.approx(sum(alone) / 3, rel=1e-5)


# --- invariants of block diffusion


def test_one_block_without_a_prompt_is_llada(model: Qwen3ForCausalLM) -> None:
    noise = draw(np.random.default_rng(4), len(ANSWER), len(ANSWER))
    one_block = bd3lm_example([], ANSWER, noise, block_size=len(ANSWER), mask=MASK)
    llada = llada_example([], ANSWER, noise, mask=MASK)
    for name in ("tokens", "positions", "ar_labels", "mdm_labels", "mdm_divisors"):
        assert np.array_equal(getattr(one_block, name), getattr(llada, name)), name
    assert one_block.visibility is not None
    assert one_block.visibility.mask().all()
    losses = [hybrid_loss(model, collate([[example]])).mdm.item() for example in (one_block, llada)]
    assert losses[0] == losses[1] > 0


def _hidden(model: Qwen3ForCausalLM, example: Example) -> torch.Tensor:
    """What the last layer's attention gives every row in the loss's own forward, [T, D]."""
    kept: list[torch.Tensor] = []
    last = model.model.layers[-1].self_attn.o_proj
    hook = last.register_forward_hook(lambda module, inputs, output: kept.append(output.detach().squeeze(0)))
    hybrid_loss(model, collate([[example]]))
    hook.remove()
    return kept[0]


def test_clean_rows_do_not_depend_on_the_noise(model: Qwen3ForCausalLM) -> None:
    first, second = _bd3lm(seed=0), _bd3lm(seed=1)
    num_clean = len(PROMPT) + 6
    assert not np.array_equal(first.tokens, second.tokens)
    before, after = _hidden(model, first), _hidden(model, second)
    assert torch.equal(before[:num_clean], after[:num_clean])
    assert not torch.equal(before[num_clean:], after[num_clean:])


def test_a_block_does_not_depend_on_later_ones_but_on_earlier_ones(model: Qwen3ForCausalLM) -> None:
    noise = _noise([0.5] * 7, masked=[0, 2, 3, 4, 6])

    def losses(answer: list[int], masks: Noise = noise) -> dict[int, float]:
        example = bd3lm_example(PROMPT, answer, masks, block_size=3, mask=MASK)
        start = len(PROMPT) + 6
        return {row - start: loss for row, loss in cross_entropies(model, collate([[example]])).items()}

    before = losses(ANSWER)
    later = losses([*ANSWER[:3], 13, 14, 15, 16], _noise([0.5] * 3 + [0.1] * 4, masked=[0, 2, 3, 5, 6]))
    assert [later[row] for row in (0, 2)] == pytest.approx([before[row] for row in (0, 2)], rel=1e-6)
    earlier = losses([13, *ANSWER[1:]])  # behind a mask, so that block 0 itself is fed as before
    assert all(abs(earlier[row] - before[row]) > 1e-4 for row in (3, 4, 6))
