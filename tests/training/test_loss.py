"""Loss values and their normalisation (`refusion_eval.training.data.collate` and `loss`)."""

import math

import pytest
import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from refusion_eval.errors import ConfigError
from refusion_eval.training.data.collate import collate
from refusion_eval.training.objectives import loss
from refusion_eval.training.objectives.corrupt import Draws, arrange, causal_example
from refusion_eval.training.objectives.loss import hybrid_loss, weighted_cross_entropy

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
    batch = collate([_two_examples()])
    # One AR label in each sample: mean over two. MDM: 1 / (2 * 0.5 * 4) and 1 / (2 * 0.25 * 5).
    assert batch.ar.labels_R.tolist() == [4, 12]
    assert batch.ar.weights_R.tolist() == [0.5, 0.5]
    assert batch.mdm.labels_R.tolist() == [5, 6, 8, 9, 10]
    assert batch.mdm.weights_R.tolist() == pytest.approx([0.25] * 2 + [0.4] * 3)


def test_paper_weights_are_means_within_each_sample() -> None:
    batch = collate([_two_examples()], normalisation="paper")
    assert batch.ar.weights_R.tolist() == [0.5, 0.5]
    assert batch.mdm.weights_R.tolist() == pytest.approx([1 / 4] * 2 + [1 / 6] * 3)


def test_examples_lie_end_to_end_and_rows_count_through() -> None:
    batch = collate([[causal_example([1], [2], learn_prompt=True), causal_example([1, 2], [3, 4], learn_prompt=True)]])
    assert batch.tokens_T.tolist() == [1, 2, 1, 2, 3, 4]
    assert batch.positions_T.tolist() == [0, 1, 0, 1, 2, 3]
    assert batch.lengths == (2, 4)
    assert batch.ar.rows_R.tolist() == [0, 2, 3, 4]


# --- cross-entropy in chunks


def _rows(num_rows: int, tied: bool = False) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A head over 11 tokens, an embedding of some of them as hidden states, labels and weights."""
    generator = torch.Generator().manual_seed(num_rows)
    head = torch.nn.Linear(6, 11, bias=False)
    torch.nn.init.normal_(head.weight, generator=generator)
    labels_R = torch.randint(11, (num_rows,), generator=generator)
    weights_R = torch.rand(num_rows, generator=generator)
    if tied:
        hidden_RD = functional.embedding(labels_R.roll(1), head.weight)
    else:
        hidden_RD = torch.randn(num_rows, 6, generator=generator).requires_grad_()
    return head, hidden_RD, labels_R, weights_R


def _direct(
    head: torch.nn.Linear, hidden_RD: torch.Tensor, labels_R: torch.Tensor, weights_R: torch.Tensor
) -> torch.Tensor:
    each_R = functional.cross_entropy(head(hidden_RD).float(), labels_R, reduction="none")
    return (each_R * weights_R).sum()


def test_cross_entropy_of_known_logits() -> None:
    head = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.eye_(head.weight)
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]])
    losses = weighted_cross_entropy(head, logits, torch.tensor([0, 1]), torch.tensor([1.0, 0.5]))
    assert losses.row_losses_R.tolist() == pytest.approx([math.log(4 / 3), math.log(2)])
    assert losses.total.item() == pytest.approx(math.log(4 / 3) + 0.5 * math.log(2))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk_logits", [1, 11, 33, 1000])
def test_chunks_change_neither_the_loss_nor_its_gradients(monkeypatch, chunk_logits: int, tied: bool) -> None:
    monkeypatch.setattr(loss, "CHUNK_LOGITS_ON_CPU", chunk_logits)
    found = []
    for chunked in (True, False):
        head, hidden_RD, labels_R, weights_R = _rows(8, tied)
        if chunked:
            total = weighted_cross_entropy(head, hidden_RD, labels_R, weights_R).total
        else:
            total = _direct(head, hidden_RD, labels_R, weights_R)
        (3 * total).backward()
        found.append([total.detach(), head.weight.grad] + ([] if tied else [hidden_RD.grad]))
    for chunked_value, direct_value in zip(*found, strict=True):
        torch.testing.assert_close(chunked_value, direct_value, rtol=1e-5, atol=1e-6)


def test_only_a_chunk_of_logits_exists_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[torch.Size] = []
    linear = functional.linear

    def recorded(*arguments: torch.Tensor) -> torch.Tensor:
        shapes.append((output := linear(*arguments)).shape)
        return output

    monkeypatch.setattr(functional, "linear", recorded)
    monkeypatch.setattr(loss, "CHUNK_LOGITS_ON_CPU", 3 * 11 + 5)
    head, *rows = _rows(8)
    weighted_cross_entropy(head, *rows).total.backward()
    assert shapes == [(3, 11), (3, 11), (2, 11)]


def test_a_frozen_head_gets_no_gradient_and_rows_theirs() -> None:
    head, hidden_RD, labels_R, weights_R = _rows(5)
    head.requires_grad_(False)
    weighted_cross_entropy(head, hidden_RD, labels_R, weights_R).total.backward()
    (expected_RD,) = torch.autograd.grad(_direct(head, hidden_RD, labels_R, weights_R), hidden_RD)
    assert head.weight.grad is None
    torch.testing.assert_close(hidden_RD.grad, expected_RD)


@pytest.mark.parametrize("half", ["autocast", "weights"])
def test_bfloat16_is_that_of_the_direct_computation_with_losses_in_float32(monkeypatch, half: str) -> None:
    monkeypatch.setattr(loss, "CHUNK_LOGITS_ON_CPU", 1000)
    found = []
    for chunked in (True, False):
        head, hidden_RD, labels_R, weights_R = _rows(40)
        if half == "weights":
            head.bfloat16()
            hidden_RD = hidden_RD.detach().bfloat16().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=half == "autocast"):
            if chunked:
                total = weighted_cross_entropy(head, hidden_RD, labels_R, weights_R).total
            else:
                total = _direct(head, hidden_RD, labels_R, weights_R)
        total.backward()
        assert total.dtype == torch.float32
        assert head.weight.grad is not None
        assert hidden_RD.grad is not None
        assert head.weight.grad.dtype == head.weight.dtype
        found.append((total.detach(), head.weight.grad.float(), hidden_RD.grad.float()))
    for chunked_value, direct_value in zip(*found, strict=True):
        assert (chunked_value - direct_value).norm() <= 1e-2 * direct_value.norm()


def test_heads_that_are_no_plain_matrix_and_float16_are_refused() -> None:
    head, *rows = _rows(3)
    with pytest.raises(ConfigError, match="keep adapters off"):
        weighted_cross_entropy(torch.nn.Sequential(head), *rows)
    with pytest.raises(ConfigError, match="bfloat16"), torch.autocast("cpu", torch.float16):
        weighted_cross_entropy(head, *rows)


def test_without_gradients_losses_are_the_same() -> None:
    head, *rows = _rows(7)
    with torch.no_grad():
        total = weighted_cross_entropy(head, *rows).total
    assert not total.requires_grad
    assert total.item() == weighted_cross_entropy(head, *rows).total.item()


# --- the hybrid loss


def test_hybrid_loss_equals_a_sum_over_samples_one_by_one(model: Qwen3ForCausalLM) -> None:
    examples = _two_examples()
    losses = hybrid_loss(model, collate([examples]))
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
    assert hybrid_loss(model, collate([[changed]])).mdm != hybrid_loss(model, collate([[other]])).mdm


@pytest.mark.parametrize("masked", [True, False])
def test_an_empty_term_is_zero_and_trains(model: Qwen3ForCausalLM, masked: bool) -> None:
    slots = {"masked_slots": (0,), "clean_slots": ()} if masked else {"masked_slots": (), "clean_slots": (0,)}
    example = arrange([1], [2, 3], Draws(slot_size=4, mask_probability=0.5, **slots), mask=MASK)
    losses = hybrid_loss(model, collate([[example]]))
    assert (losses.ar if masked else losses.mdm).item() == 0.0
    model.zero_grad()
    losses.total.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)


def test_no_label_at_all_gives_zero(model: Qwen3ForCausalLM) -> None:
    example = arrange([1], [2], Draws(slot_size=4, mask_probability=0.1, masked_slots=(), clean_slots=(0,)), mask=MASK)
    for normalisation in ("release", "paper"):
        assert hybrid_loss(model, collate([[example]], normalisation=normalisation)).total.item() == 0.0
