"""Packed attention (`refusion_eval.training.data.packed`) against padded batches on transformers' own attention."""

import copy
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3

from refusion_eval.errors import ConfigError
from refusion_eval.training.config import Objective, ObjectiveConfig
from refusion_eval.training.data import packed
from refusion_eval.training.data.collate import PackedBatch, collate
from refusion_eval.training.data.packed import ATTENTION, hidden_states
from refusion_eval.training.objectives.example import IGNORED, Example, TrainingSample
from refusion_eval.training.objectives.loss import hybrid_loss
from refusion_eval.training.objectives.table import OBJECTIVES, SpecialIds

MASK, EOS, PAD = 23, 21, 22
FAMILIES = {"qwen3": (Qwen3Config, Qwen3), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
FAMILIES |= {"llama": (LlamaConfig, LlamaForCausalLM)}
SAMPLES = [
    TrainingSample((1, 2, 3), (4, 5, 6, 7, 8, 9, EOS)),
    TrainingSample((5,), (EOS,)),
    TrainingSample((9, 8, 7, 6, 5, 4, 3), (*range(1, 19), EOS)),
    TrainingSample((2, 2), (3, 4, 5, 6)),
]


def _model(family: str = "qwen3", **settings: object) -> PreTrainedModel:
    torch.manual_seed(0)
    make_config, make_model = FAMILIES[family]
    sizes = {
        "vocab_size": 24,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "tie_word_embeddings": family != "llama",
    }
    return make_model(make_config(**sizes, **settings))


def _examples(objective: Objective) -> list[Example]:
    config = ObjectiveConfig(
        objective=objective, slot_sizes=(2, 4), eos_multiple=4, block_size=4 * (objective in ("bd3lm", "idlm", "wedlm"))
    )
    rng = np.random.default_rng(3)
    return [OBJECTIVES[objective](sample, rng, config, SpecialIds(EOS, MASK)) for sample in SAMPLES]


def _padded_loss(model: PreTrainedModel, examples: Sequence[Example]) -> torch.Tensor:
    """The release's losses from sequences padded to the longest, dense masks and all logits."""
    longest = max(len(example.tokens) for example in examples)
    tokens, positions = torch.full((len(examples), longest), PAD), torch.arange(longest).repeat(len(examples), 1)
    visible = torch.eye(longest, dtype=torch.bool).repeat(len(examples), 1, 1)
    for number, example in enumerate(examples):
        length = len(example.tokens)
        tokens[number, :length] = torch.from_numpy(example.tokens)
        positions[number, :length] = torch.from_numpy(example.positions)
        seen = np.tri(length, dtype=bool) if example.visibility is None else example.visibility.mask()
        visible[number, :length, :length] = torch.from_numpy(seen)
    mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))[:, None]
    logits = model(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False).logits
    ar: list[torch.Tensor] = []
    mdm: list[torch.Tensor] = []
    for number, example in enumerate(examples):
        for labels, found in ((example.ar_labels, ar), (example.mdm_labels, mdm)):
            rows = np.flatnonzero(labels != IGNORED)
            losses = functional.cross_entropy(logits[number, rows], torch.from_numpy(labels[rows]), reduction="none")
            found += list(losses / torch.from_numpy(example.mdm_divisors[rows]) if found is mdm else losses)
    zero = logits.sum() * 0
    return sum(ar, zero) / max(len(ar), 1) + sum(mdm, zero) / len(examples)


def _gradients(model: PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], share: float) -> None:
    assert found.keys() == expected.keys()
    assert any(gradient.norm() > 0 for gradient in expected.values())
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= share * gradient.norm() + 1e-9, name


# --- the same losses and gradients


@pytest.mark.parametrize("objective", get_args(Objective))
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_a_padded_batch(family: str, objective: Objective) -> None:
    examples = _examples(objective)
    stock = _model(family, attn_implementation="eager")
    expected = _padded_loss(stock, examples)
    model = _model(family)
    losses = hybrid_loss(model, collate([examples]))
    assert losses.total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert (losses.ar + losses.mdm).item() == pytest.approx(losses.total.item(), rel=1e-6)
    _assert_close(_gradients(model, losses.total), _gradients(stock, expected), 1e-5)


@pytest.mark.parametrize("objective", ["refusion", "bd3lm"])
def test_activation_checkpointing_gives_the_same_gradients(objective: Objective) -> None:
    batch, model = collate([_examples(objective)]), _model().train()
    expected = _gradients(model, hybrid_loss(model, batch).total)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _assert_close(_gradients(model, hybrid_loss(model, batch).total), expected, 1e-6)


@pytest.mark.parametrize("objective", ["refusion", "llada", "bd3lm", "idlm", "wedlm"])
def test_autocast_in_bfloat16_stays_close(objective: Objective) -> None:
    batch, model = collate([_examples(objective)]), _model()
    expected = hybrid_loss(model, batch).total
    with torch.autocast("cpu", torch.bfloat16):
        found = hybrid_loss(model, batch).total
    assert found.item() == pytest.approx(expected.item(), rel=0.03)
    assert found.item() != expected.item()
    _assert_close(_gradients(model, found), _gradients(model, expected), 0.2)


def test_a_batch_moves_whole() -> None:
    for objective in ("refusion", "llada", "bd3lm"):
        batch = collate([_examples(objective)]).to(torch.device("meta"))
        for part in (batch, batch.ar, batch.mdm, *batch.sights):
            tensors = [value for value in getattr(part, "__dict__", {}).values() if isinstance(value, torch.Tensor)]
            assert isinstance(part, str) or tensors
            assert all(tensor.is_meta for tensor in tensors)


# --- what is not computed


@pytest.mark.parametrize("objective", ["refusion", "llada", "bd3lm", "wedlm"])
def test_attention_never_spans_two_examples_and_only_blocks_need_masks(
    objective: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, model = collate([_examples(objective)]), _model()
    calls: list[tuple] = []
    original = functional.scaled_dot_product_attention

    def recorded(query, key, value, attn_mask=None, is_causal=False, **settings):  # type: ignore[no-untyped-def]
        calls.append((query.shape[2], key.shape[2], None if attn_mask is None else attn_mask.shape, is_causal))
        return original(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **settings)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", recorded)
    hidden_states(model, batch)
    masks = [(1, 1, length, length) if objective in ("bd3lm", "wedlm") else None for length in batch.lengths]
    causal = objective == "refusion"
    assert calls == 2 * [(length, length, mask, causal) for length, mask in zip(batch.lengths, masks, strict=True)]


def test_neighbours_and_their_order_change_no_row() -> None:
    examples, model = _examples("refusion"), _model().double()
    together = hidden_states(model, collate([examples]))
    alone = [hidden_states(model, collate([[example]])) for example in examples]
    torch.testing.assert_close(together, torch.cat(alone))
    torch.testing.assert_close(hidden_states(model, collate([examples[::-1]])), torch.cat(alone[::-1]))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_mlp_sees_only_the_rows_that_are_read(family: str) -> None:
    batch, model = collate([_examples("bd3lm")]), _model(family)
    rows, seen = batch.mdm.rows_R.flip(0), []
    expected = hidden_states(model, batch)[rows]
    for layer in model.get_decoder().layers:
        layer.mlp.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[1]))
    torch.testing.assert_close(hidden_states(model, batch, rows), expected)
    assert seen == [len(batch.tokens_T), len(rows)]


# --- elsewhere the model is what it was


def test_without_a_packing_the_model_attends_as_with_sdpa(tmp_path: Path) -> None:
    stock, model = _model(attn_implementation="sdpa").eval(), _model().eval()
    hidden_states(model, collate([_examples("refusion")]))
    assert model.config._attn_implementation == ATTENTION
    tokens = torch.tensor([[PAD, PAD, 1, 2, 3], [1, 2, 3, 4, 5]])
    attended = (tokens != PAD).long()
    outputs = [some(input_ids=tokens, attention_mask=attended).logits for some in (stock, model)]
    assert torch.equal(*outputs)
    generated = [
        some.generate(tokens, attention_mask=attended, max_new_tokens=5, do_sample=False) for some in (stock, model)
    ]
    assert torch.equal(*generated)
    model.save_pretrained(tmp_path)
    assert ATTENTION not in (tmp_path / "config.json").read_text()
    assert hidden_states(copy.deepcopy(model), collate([_examples("llada")])).isfinite().all()


def test_a_sliding_window_shorter_than_an_example_is_refused() -> None:
    batch = collate([_examples("sft")])
    windowed = {"use_sliding_window": True, "max_window_layers": 0}
    with pytest.raises(ConfigError, match="sliding window of 8"):
        hidden_states(_model("qwen2", sliding_window=8, **windowed), batch)
    wide = hidden_states(_model("qwen2", sliding_window=max(batch.lengths), **windowed), batch)
    torch.testing.assert_close(wide, hidden_states(_model("qwen2"), batch))


# --- flash-attn


def _varlen(query_THW: torch.Tensor, key_TKW: torch.Tensor, value_TKW: torch.Tensor, **settings: Any) -> torch.Tensor:
    """What flash_attn.flash_attn_varlen_func says it computes."""
    ends, longest = settings["cu_seqlens_q"].tolist(), settings["max_seqlen_q"]
    assert settings["cu_seqlens_k"].tolist() == ends
    assert settings["cu_seqlens_k"].dtype == torch.int32
    assert settings["max_seqlen_k"] == longest == max(np.diff(ends))
    assert settings["causal"] is True
    outputs = []
    for start, end in pairwise(ends):
        query, key, value = (rows[start:end].transpose(0, 1)[None] for rows in (query_THW, key_TKW, value_TKW))
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=settings["softmax_scale"], enable_gqa=True
        )
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


def test_the_one_kernel_of_flash_attn_gives_what_examples_one_by_one_do(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = collate([_examples("refusion")])
    packing = packed.Packing.of(batch, torch.float32)
    module = _model().model.layers[0].self_attn
    num_rows = len(batch.tokens_T)
    query, key, value = (torch.randn(1, heads, num_rows, 8) for heads in (4, 2, 2))
    monkeypatch.setattr(packed, "flash_attn_varlen_func", _varlen)
    expected, _ = packed.packed_attention(module, query, key, value, None, scaling=0.3, packing=packing)
    found = packed._flash(query, key, value, 0.0, 0.3, packing)
    assert found.shape == (1, num_rows, 4, 8)
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("objective", get_args(Objective))
def test_on_cuda_in_bfloat16_losses_are_those_of_the_cpu(objective: Objective) -> None:
    batch: PackedBatch = collate([_examples(objective)])
    model = _model()
    expected = hybrid_loss(model, batch).total.item()
    half = copy.deepcopy(model).to("cuda", torch.bfloat16)
    found = hybrid_loss(half, batch.to(torch.device("cuda"))).total
    found.backward()
    assert found.item() == pytest.approx(expected, rel=0.05)
