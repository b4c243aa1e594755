"""A random transformer made without a checkpoint, and its uncached reading under an arbitrary dense mask."""

from collections.abc import Sequence

import torch

from refusion_eval.decoders import DECODERS
from refusion_eval.engine.engine import Engine
from refusion_eval.models.attention import grouped_attention
from refusion_eval.models.checkpoint import Experts, ModelConfig
from refusion_eval.models.transformer import Transformer
from refusion_eval.models.weights import ExpertWeights, LayerWeights, Weights

CPU = torch.device("cpu")
VOCAB_SIZE = 23
# DiffusionGemma's needs an encoder and a decoder.
OF_THIS_TRANSFORMER = sorted(DECODERS.keys() - {"diffusion_gemma"})
# Of a layer of the two that a random transformer has: chosen in groups, with an MLP for every row besides.
EXPERTS = Experts(
    num_experts=8,
    num_chosen=2,
    width=12,
    layers=frozenset({1}),
    score="sigmoid",
    scale=2.0,
    num_groups=4,
    num_kept_groups=2,
    shared_width=40,
)


def random_transformer(
    seed: int = 0,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    sizes: tuple[int, int, int, int] = (24, 8, 40, VOCAB_SIZE),
    experts: Experts | None = None,
) -> Transformer:
    width, head_dim, mlp, vocab_size = sizes
    config = ModelConfig(
        family="qwen3",
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=mlp,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_positions=512,
        tied_head=False,
        dtype="float32",
        experts=experts,
    )
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) + 0.5

    def mixture(index: int) -> ExpertWeights | None:
        if experts is None or index not in experts.layers:
            return None
        return ExpertWeights(
            router=matrix(experts.num_experts, width),
            bias=matrix(experts.num_experts) if experts.score == "sigmoid" else None,
            gate_up=matrix(experts.num_experts, 2 * experts.width, width),
            down=matrix(experts.num_experts, width, experts.width),
        )

    layers = tuple(
        LayerWeights(
            input_norm=scales(width),
            qkv=matrix((num_heads + 2 * num_kv_heads) * head_dim, width),
            qk_norm=scales(num_heads + num_kv_heads, head_dim),
            out=matrix(width, num_heads * head_dim),
            mlp_norm=scales(width),
            gate_up=matrix(2 * mlp, width),
            down=matrix(width, mlp),
            experts=mixture(index),
        )
        for index in range(num_layers)
    )
    weights = Weights(matrix(vocab_size, width), layers, scales(width), matrix(vocab_size, width))
    return Transformer(config, weights)


def random_engine(seed: int = 0) -> Engine:
    return Engine(random_transformer(seed), "sdpa")


def dense_logits(
    model: Transformer, tokens: Sequence[int], positions: Sequence[int], visible: torch.Tensor
) -> torch.Tensor:
    """Logits of all rows in one uncached forward; `visible` [rows, rows] says who sees whom."""
    mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))

    def attend(layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
        return grouped_attention(q_THD, k_TGD.transpose(0, 1), v_TGD.transpose(0, 1), mask, is_causal=False)

    return model.logits(model.hidden(torch.tensor(tokens), torch.tensor(positions), max(positions), attend))
