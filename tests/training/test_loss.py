"""Loss values and their normalisation (`refusion_eval.training.collate` and `loss`)."""

import math

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from refusion_eval.training.collate import Targets, collate
from refusion_eval.training.corrupt import Draws, arrange, causal_example
from refusion_eval.training.loss import hybrid_loss, weighted_cross_entropy

MASK, PAD = 15, 14


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def _two_examples() -> list:
    first = Draws(slot_size=2, mask_probability=0.5, masked_slots=(1,), clean_slots=(0,))
    second = Draws(slot_size=3, mask_probability=0.25, masked_slots=(0,), clean_slots=(1,))
    return [arrange([1, 2], [3, 4, 5, 6], first, mask=MASK), arrange([7], [8, 9, 10, 11, 12], second, mask=MASK)]


def test_release_weights_by_hand() -> None:
    batch = collate(_two_examples(), pad=PAD)
    # One AR label in each sample: mean over two. MDM: 1 / (2 * 0.5 * 4) and 1 / (2 * 0.25 * 5).
    assert batch.ar.labels_R.tolist() == [4, 12]
    assert batch.ar.weights_R.tolist() == [0.5, 0.5]
    assert batch.mdm.labels_R.tolist() == [5, 6, 8, 9, 10]
    assert batch.mdm.weights_R.tolist() == pytest.approx([0.25] * 2 + [0.4] * 3)


def test_paper_weights_are_means_within_each_sample() -> None:
    batch = collate(_two_examples(), pad=PAD, normalisation="paper")
    assert batch.ar.weights_R.tolist() == [0.5, 0.5]
    assert batch.mdm.weights_R.tolist() == pytest.approx([1 / 4] * 2 + [1 / 6] * 3)


def test_padding_is_at_the_end_and_has_no_label() -> None:
    batch = collate(_two_examples(), pad=PAD)
    assert batch.tokens_BT.tolist()[0] == [1, 2, 3, 4, MASK, MASK]
    short = collate(
        [causal_example([1], [2], learn_prompt=True), causal_example([1, 2], [3, 4], learn_prompt=True)], pad=PAD
    )
    assert short.tokens_BT.tolist()[0] == [1, 2, PAD, PAD]
    assert short.ar.rows_R.tolist() == [0, 4, 5, 6]


def test_cross_entropy_of_known_logits() -> None:
    targets = Targets(rows_R=torch.tensor([0, 1]), labels_R=torch.tensor([0, 1]), weights_R=torch.tensor([1.0, 0.5]))
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]])
    expected = math.log(4 / 3) + 0.5 * math.log(2)
    assert weighted_cross_entropy(logits, targets).item() == pytest.approx(expected)


def test_hybrid_loss_equals_a_sum_over_samples_one_by_one(model: Qwen3ForCausalLM) -> None:
    examples = _two_examples()
    losses = hybrid_loss(model, collate(examples, pad=PAD))
    ar, mdm = [], 0.0
    for example in examples:
        tokens = torch.from_numpy(example.tokens)[None]
        positions = torch.from_numpy(example.positions)[None]
        ones = torch.ones_like(tokens)
        log_probs = model(input_ids=tokens, position_ids=positions, attention_mask=ones).logits[0].log_softmax(-1)
        ar += [-log_probs[row, label].item() for row, label in enumerate(example.ar_labels) if label >= 0]
        labelled = [(row, label) for row, label in enumerate(example.mdm_labels) if label >= 0]
        mdm += sum(-log_probs[row, label].item() / example.mdm_divisors[row] for row, label in labelled) / len(examples)
    assert losses.ar.item() == pytest.approx(sum(ar) / len(ar), rel=1e-5)
    assert losses.mdm.item() == pytest.approx(mdm, rel=1e-5)
    assert losses.total.item() == pytest.approx(sum(ar) / len(ar) + mdm, rel=1e-5)


def test_reordered_positions_do_not_split_attention(model: Qwen3ForCausalLM) -> None:
    draws = Draws(slot_size=1, mask_probability=0.5, masked_slots=(2,), clean_slots=(3, 1, 0))
    changed = arrange([1, 2], [3, 4, 5, 6], draws, mask=MASK)
    other = arrange([1, 2], [3, 4, 5, 7], draws, mask=MASK)  # the first clean slot differs
    assert hybrid_loss(model, collate([changed], pad=PAD)).mdm != hybrid_loss(model, collate([other], pad=PAD)).mdm


@pytest.mark.parametrize("masked", [True, False])
def test_an_empty_term_is_zero_and_trains(model: Qwen3ForCausalLM, masked: bool) -> None:
    slots = {"masked_slots": (0,), "clean_slots": ()} if masked else {"masked_slots": (), "clean_slots": (0,)}
    example = arrange([1], [2, 3], Draws(slot_size=4, mask_probability=0.5, **slots), mask=MASK)
    losses = hybrid_loss(model, collate([example], pad=PAD))
    assert (losses.ar if masked else losses.mdm).item() == 0.0
    model.zero_grad()
    losses.total.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)


def test_no_label_at_all_gives_zero(model: Qwen3ForCausalLM) -> None:
    example = arrange([1], [2], Draws(slot_size=4, mask_probability=0.1, masked_slots=(), clean_slots=(0,)), mask=MASK)
    for normalisation in ("release", "paper"):
        assert hybrid_loss(model, collate([example], pad=PAD, normalisation=normalisation)).total.item() == 0.0
