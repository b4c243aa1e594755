"""Inflated checkpoints: a tiny trained model inside a large one gives the tiny model's tokens at the large one's cost.

The tiny heads, widths and layers fill a corner of the large matrices, and everything else contributes nothing. A
decoder accepts and rejects drafts as on the trained model, which random weights cannot show, and every forward takes
the time of the large model. Weights without influence are random, because multiplying zeros can be too fast.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from refusion_eval.bench.shapes import Shape
from refusion_eval.errors import ConfigError
from refusion_eval.models.config import ModelConfig, model_config

NOISE = 0.02  # standard deviation of weights without influence
# One surplus feature has this value in every row. It gives surplus tokens impossibly low logits and is too small to
# change a norm.
CONSTANT = 1e-3
PUSH = 1e8  # factor of this feature in the head; lowers the logits of surplus tokens by tens of thousands
_POOL_SIZE = 1 << 22
_MATRICES = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class _Noise:
    """Random weights, cut from one pool because drawing billions of new ones would take minutes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._pool = (torch.randn(_POOL_SIZE, generator=torch.Generator().manual_seed(0)) * NOISE).to(dtype)

    def matrix(self, num_rows: int, num_columns: int) -> Tensor:
        size = num_rows * num_columns
        return self._pool.repeat(-(-size // _POOL_SIZE))[:size].view(num_rows, num_columns)


def inflate(source: Path, target: Path, shape: Shape, dtype: torch.dtype) -> None:
    """Writes a checkpoint of a larger shape that computes the same tokens as a smaller one.

    The scales of the residual norms shrink by sqrt(small width / large width), and the epsilon of the norms by the
    square of this factor, because the surplus features are zero.

    Args:
        source: a Qwen3 checkpoint with one safetensors file.
        target: folder to create.
        shape: shape that is at least one feature wider than the source and smaller in no dimension.
        dtype: dtype of the weights.

    Raises:
        ConfigError: the source does not fit into the shape.
    """
    config = model_config(source)
    _check(config, shape)
    weights = load_file(source / "model.safetensors")
    target.mkdir(parents=True)
    build = _Builder(config, shape, weights, dtype)
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(-1, shape.num_hidden_layers):
        tensors = build.ends() if number < 0 else build.layer(number)
        name = f"model-{number + 2:05d}-of-{shape.num_hidden_layers + 1:05d}.safetensors"
        save_file(tensors, target / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    written = json.loads((source / "config.json").read_text()) | asdict(shape)
    written |= {
        "tie_word_embeddings": False,
        "rms_norm_eps": config.rms_norm_eps * config.hidden_size / shape.hidden_size,
        "dtype": str(dtype).removeprefix("torch."),
    }
    for key in ("layer_types", "max_window_layers"):  # these follow the number of layers of the source
        written.pop(key, None)
    (target / "config.json").write_text(json.dumps(written, indent=2))
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)


def _check(config: ModelConfig, shape: Shape) -> None:
    if config.family != "qwen3":
        raise ConfigError(f"inflate: the checkpoint's model_type is {config.family!r}; only 'qwen3' can be inflated")
    group, wide_group = config.num_heads // config.num_kv_heads, shape.num_attention_heads // shape.num_key_value_heads
    needs = {
        "hidden_size": (config.hidden_size + 1, shape.hidden_size),
        "num_hidden_layers": (config.num_layers, shape.num_hidden_layers),
        "num_key_value_heads": (config.num_kv_heads, shape.num_key_value_heads),
        "query heads of a key-value head": (group, wide_group),
        "intermediate_size": (config.intermediate_size, shape.intermediate_size),
        "vocab_size": (config.vocab_size, shape.vocab_size),
    }
    for name, (needed, given) in needs.items():
        if given < needed:
            raise ConfigError(f"inflate: {name} is {given}, the checkpoint needs at least {needed}")


class _Builder:
    """Builds the tensors of the large model.

    A row of the residual stream consists of the features of the small model, the constant, and zeros, in this order.
    """

    def __init__(self, config: ModelConfig, shape: Shape, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._config, self._shape, self._weights, self._dtype = config, shape, weights, dtype
        self._noise = _Noise(dtype)
        self._width = config.hidden_size
        self._scale = math.sqrt(config.hidden_size / shape.hidden_size)

    def ends(self) -> dict[str, Tensor]:
        """Embedding, final norm and output head."""
        config, shape, width = self._config, self._shape, self._width
        embedding = self._weights["model.embed_tokens.weight"]
        embedded = torch.zeros(shape.vocab_size, shape.hidden_size, dtype=self._dtype)
        embedded[: config.vocab_size, :width] = embedding
        embedded[:, width] = CONSTANT
        head = self._noise.matrix(shape.vocab_size, shape.hidden_size)
        head[:, : width + 1] = 0
        head[: config.vocab_size, :width] = self._weights.get("lm_head.weight", embedding)
        head[config.vocab_size :, width] = -math.sqrt(PUSH)
        norm = self._norm("model.norm.weight")
        norm[width] = math.sqrt(PUSH)
        return {"model.embed_tokens.weight": embedded, "model.norm.weight": norm, "lm_head.weight": head}

    def layer(self, number: int) -> dict[str, Tensor]:
        """One layer: a layer of the small model, or one that contributes nothing."""
        config, shape, width = self._config, self._shape, self._width
        head_dim, hidden, mlp = config.head_dim, shape.hidden_size, shape.intermediate_size
        prefix = f"model.layers.{number}."
        tensors = {
            "q_proj": self._noise.matrix(shape.num_attention_heads * head_dim, hidden),
            "k_proj": self._noise.matrix(shape.num_key_value_heads * head_dim, hidden),
            "v_proj": self._noise.matrix(shape.num_key_value_heads * head_dim, hidden),
            "o_proj": self._noise.matrix(hidden, shape.num_attention_heads * head_dim),
            "gate_proj": self._noise.matrix(mlp, hidden),
            "up_proj": self._noise.matrix(mlp, hidden),
            "down_proj": self._noise.matrix(hidden, mlp),
        }
        # With values and gates of zero, the projections after them contribute nothing, whatever their weights.
        tensors["v_proj"][:, : width + 1] = 0
        tensors["gate_proj"][:, : width + 1] = 0
        sizes = {name: head_dim if name in ("q_norm", "k_norm") else hidden for name in _NORMS}
        norms = {name: torch.ones(size, dtype=self._dtype) for name, size in sizes.items()}
        if number < config.num_layers:
            self._place_layer(tensors, prefix)
            for name in ("input_layernorm", "post_attention_layernorm"):
                norms[name] = self._norm(f"{prefix}{_NORMS[name]}.weight")
            for name in ("q_norm", "k_norm"):
                norms[name] = self._weights[f"{prefix}{_NORMS[name]}.weight"].to(self._dtype)
        paths = _MATRICES | _NORMS
        return {f"{prefix}{paths[name]}.weight": tensor for name, tensor in (tensors | norms).items()}

    def _norm(self, name: str) -> Tensor:
        norm = torch.ones(self._shape.hidden_size, dtype=torch.float32)
        norm[: self._width] = self._weights[name].float() * self._scale
        return norm.to(self._dtype)

    def _place_layer(self, tensors: dict[str, Tensor], prefix: str) -> None:
        """Writes a layer of the small model into the corner of a large layer."""
        config, shape, width = self._config, self._shape, self._width
        head_dim, mlp = config.head_dim, config.intermediate_size
        small = {name: self._weights[f"{prefix}{path}.weight"] for name, path in _MATRICES.items()}
        group = config.num_heads // config.num_kv_heads
        wide_group = shape.num_attention_heads // shape.num_key_value_heads
        for kv_head in range(config.num_kv_heads):
            rows = slice(kv_head * head_dim, (kv_head + 1) * head_dim)
            for name in ("k_proj", "v_proj"):
                _place_columns(tensors[name][rows], small[name][rows], width)
            # Surplus query heads of this group attend to real values, so their output must not be read.
            first, last = kv_head * wide_group * head_dim, (kv_head + 1) * wide_group * head_dim
            tensors["o_proj"][:, first:last] = 0
            wide = slice(first, first + group * head_dim)
            narrow = slice(kv_head * group * head_dim, (kv_head + 1) * group * head_dim)
            _place_columns(tensors["q_proj"][wide], small["q_proj"][narrow], width)
            tensors["o_proj"][:width, wide] = small["o_proj"][:, narrow]
        for name in ("gate_proj", "up_proj"):
            _place_columns(tensors[name][:mlp], small[name], width)
        tensors["down_proj"][:, :mlp] = 0
        tensors["down_proj"][:width, :mlp] = small["down_proj"]


def _place_columns(target: Tensor, weights: Tensor, width: int) -> None:
    """Writes weights for the real features and zero for the constant; weights that meet zeros stay random."""
    target[:, :width] = weights
    target[:, width] = 0
