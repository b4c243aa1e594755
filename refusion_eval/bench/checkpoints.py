"""Checkpoints of a given size for timing: with random weights, or a tiny trained model inside a large one.

An inflated checkpoint gives the tiny model's tokens at the large one's cost. The tiny heads, widths and layers fill a
corner of the large matrices, and everything else contributes nothing. A decoder accepts and rejects drafts as on the
trained model, which random weights cannot show, and every forward takes the time of the large model. Weights without
influence are random, because multiplying zeros can be too fast.
"""

import contextlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from refusion_eval.errors import ConfigError
from refusion_eval.models.checkpoint import ModelConfig, model_config, parse_model_config, read_json
from refusion_eval.models.transformer import Transformer
from refusion_eval.models.weights import arrange, matrix_shapes, padded_rows
from refusion_eval.paths import embedded_path

NOISE = 0.02  # standard deviation of weights without influence
# One surplus feature has this value in every row. It gives surplus tokens impossibly low logits and is too small to
# change a norm.
CONSTANT = 1e-3
PUSH = 1e8  # factor of this feature in the head; lowers the logits of surplus tokens by tens of thousands
_POOL_SIZE = 1 << 22
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 model, named as in its config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    head_dim: int = 128


# Qwen3's sizes with ReFusion's vocabulary, in the order of the fields.
SHAPES: Mapping[str, Shape] = {
    "0.6B": Shape(1024, 28, 16, 8, 3072, 151671),
    "8B": Shape(4096, 36, 32, 8, 12288, 151671),
}


def config_of(shape: Shape) -> ModelConfig:
    path = embedded_path("refusion") / "config.json"
    return parse_model_config(read_json(path) | asdict(shape), path)


@contextlib.contextmanager
def checkpoint_named(name: str, dtype: torch.dtype, progress: Callable[[str], None]) -> Iterator[Path]:
    """The folder of what `--model` names; that of a shape, or of a tiny model in a shape, is removed at the end.

    `dtype` is that of the weights that are made.
    """
    size = name.removesuffix("-inflated")
    if size not in SHAPES:
        yield embedded_path("refusion") if name == "embedded" else Path(name)
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / name
        if name in SHAPES:
            progress(f"random weights of shape {name}")
            random_checkpoint(SHAPES[name], checkpoint, dtype)
        else:
            progress(f"the embedded checkpoint in shape {size}")
            inflate(embedded_path("refusion"), checkpoint, SHAPES[size], dtype)
        yield checkpoint


def random_checkpoint(shape: Shape, directory: Path, dtype: torch.dtype) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM  # transformers' models load slowly

    torch.manual_seed(0)
    vocabulary = shape.vocab_size
    config = Qwen3Config(
        **asdict(shape),
        max_position_embeddings=8192,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        bos_token_id=vocabulary - 2,
        eos_token_id=vocabulary - 3,
        pad_token_id=vocabulary - 4,
    )
    config.mask_token_id = vocabulary - 1
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(directory)


def inflate(source: Path, target: Path, shape: Shape, dtype: torch.dtype) -> None:
    """Writes a checkpoint of a larger shape that computes the same tokens as a smaller one."""
    build, weight_map, total = _builder(source, shape, dtype, torch.device("cpu")), dict[str, str](), 0
    target.mkdir(parents=True)
    for number in range(-1, shape.num_hidden_layers):
        tensors = build.ends() if number < 0 else build.layer(number)
        name = f"model-{number + 2:05d}-of-{shape.num_hidden_layers + 1:05d}.safetensors"
        save_file(tensors, target / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    (target / "config.json").write_text(json.dumps(_inflated_config(source, shape, dtype), indent=2))
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)


def inflated_transformer(source: Path, shape: Shape, dtype: torch.dtype, device: torch.device) -> Transformer:
    """The model of the checkpoint that `inflate` writes, made in the memory of a device without a file."""
    config = parse_model_config(_inflated_config(source, shape, dtype), source / "config.json")
    build = _builder(source, shape, dtype, device)
    tensors: dict[str, Tensor] = {}

    def stack(sizes: tuple[int, ...], num_rows_of: Mapping[str, int], *, head: bool = False, **_: bool) -> Tensor:
        with device:
            for name in num_rows_of:
                if name not in tensors:  # of the next layer: the tensors of the one before were taken
                    number = re.search(r"layers\.(\d+)\.", name)
                    tensors.update(build.ends() if number is None else build.layer(int(number[1])))
            rows = torch.zeros(padded_rows(sizes[0], device) if head else sizes[0], *sizes[1:], dtype=dtype)
            rows[: sizes[0]] = torch.cat([tensors.pop(name) for name in num_rows_of])
        return rows

    return Transformer(config, arrange(config, stack))


def _builder(source: Path, shape: Shape, dtype: torch.dtype, device: torch.device) -> "_Builder":
    """What makes the tensors of the large model; ConfigError if the small one does not fit into it."""
    config = model_config(source)
    if config.family != "qwen3":
        raise ConfigError(f"inflate: the checkpoint's model_type is {config.family!r}; only 'qwen3' can be inflated")
    group, wide_group = _groups(config, shape)
    if shape.head_dim % config.head_dim:
        raise ConfigError(f"inflate: head_dim {shape.head_dim} is no multiple of the checkpoint's {config.head_dim}")
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
    weights = load_file(source / "model.safetensors", device=str(device))
    return _Builder(config, shape, weights, dtype, device)


def _inflated_config(source: Path, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    config = model_config(source)
    written = json.loads((source / "config.json").read_text()) | asdict(shape)
    # The surplus features are zero, so that the mean square of a row shrinks by this ratio of the widths.
    written["rms_norm_eps"] = config.rms_norm_eps * config.hidden_size / shape.hidden_size
    written |= {"tie_word_embeddings": False, "dtype": str(dtype).removeprefix("torch.")}
    for key in ("layer_types", "max_window_layers"):  # these follow the number of layers of the source
        written.pop(key, None)
    return written


def _groups(config: ModelConfig, shape: Shape) -> tuple[int, int]:
    # Query heads of each key-value head, in the small model and in the large one.
    return config.num_heads // config.num_kv_heads, shape.num_attention_heads // shape.num_key_value_heads


class _Builder:
    """The tensors of the large model, whose rows are the features of the small model, the constant, and zeros."""

    def __init__(
        self, config: ModelConfig, shape: Shape, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config, self._shape, self._weights, self._dtype = config, shape, weights, dtype
        # Random weights are cut from one pool, because drawing billions of new ones would take minutes.
        self._pool = (torch.randn(_POOL_SIZE, generator=torch.Generator().manual_seed(0)) * NOISE).to(device, dtype)
        self._width = config.hidden_size
        self._scale = math.sqrt(config.hidden_size / shape.hidden_size)  # of residual norms; see rms_norm_eps
        # The features of a small head in a wide head: those that position ids rotate by the same angles.
        half, step = config.head_dim // 2, shape.head_dim // config.head_dim
        self._places = (step * torch.arange(half) + torch.tensor([[0], [shape.head_dim // 2]])).flatten()

    def ends(self) -> dict[str, Tensor]:
        config, shape, width = self._config, self._shape, self._width
        embedding = self._weights["model.embed_tokens.weight"]
        embedded = torch.zeros(shape.vocab_size, shape.hidden_size, dtype=self._dtype)
        embedded[: config.vocab_size, :width] = embedding
        embedded[:, width] = CONSTANT
        head = self._noise(shape.vocab_size, shape.hidden_size)
        head[:, : width + 1] = 0
        head[: config.vocab_size, :width] = self._weights.get("lm_head.weight", embedding)
        head[config.vocab_size :, width] = -math.sqrt(PUSH)
        norm = self._norm("model.norm.weight")
        norm[width] = math.sqrt(PUSH)
        return {"model.embed_tokens.weight": embedded, "model.norm.weight": norm, "lm_head.weight": head}

    def layer(self, number: int) -> dict[str, Tensor]:
        """One layer: a layer of the small model, or one that contributes nothing."""
        head_dim = self._shape.head_dim
        tensors = {name: self._noise(*size) for name, size in matrix_shapes(config_of(self._shape)).items()}
        # With values and gates of zero, the projections after them contribute nothing, whatever their weights.
        for name in ("self_attn.v_proj", "mlp.gate_proj"):
            tensors[name][:, : self._width + 1] = 0
        prefix, is_placed = f"model.layers.{number}.", number < self._config.num_layers
        if is_placed:
            self._place(tensors, {name: self._weights[f"{prefix}{name}.weight"].to(self._dtype) for name in tensors})
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[name] = self._norm(f"{prefix}{name}.weight")
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            norm = torch.ones(head_dim)  # float32, as those of the residual stream
            if is_placed:
                norm[self._places] = self._weights[f"{prefix}{name}.weight"].float()
            tensors[name] = norm
        # The surplus features of a head are zero, so queries and keys have a larger norm by the root of this ratio, and
        # a wider head divides their product by one of the two roots.
        tensors["self_attn.k_norm"] *= math.sqrt(self._config.head_dim / head_dim)
        return {f"{prefix}{name}.weight": tensor for name, tensor in tensors.items()}

    def _noise(self, num_rows: int, num_columns: int) -> Tensor:
        size = num_rows * num_columns
        return self._pool.repeat(-(-size // _POOL_SIZE))[:size].view(num_rows, num_columns)

    def _norm(self, name: str) -> Tensor:
        """Scales of a residual norm: those of the small model, if it has this one, multiplied by a root, and ones."""
        norm = torch.ones(self._shape.hidden_size)  # float32, whatever the dtype of the matrices
        if name in self._weights:
            norm[: self._width] = self._weights[name].float() * self._scale
        return norm

    def _place(self, tensors: Mapping[str, Tensor], small: Mapping[str, Tensor]) -> None:
        """Writes a layer of the small model into the corner of a large layer."""
        width, mlp, places = self._width, self._config.intermediate_size, self._places
        query, output, num_groups = "self_attn.q_proj", "self_attn.o_proj", self._config.num_kv_heads
        group, wide_group = _groups(self._config, self._shape)
        wide, narrow = self._shape.head_dim, self._config.head_dim
        # Queries, keys and values by group, head of the group, feature and column; a group has one key and one value.
        for name, num_wide, num_heads in (
            (query, wide_group, group),
            ("self_attn.k_proj", 1, 1),
            ("self_attn.v_proj", 1, 1),
        ):
            heads = tensors[name].unflatten(0, (-1, num_wide, wide))[:num_groups, :num_heads]
            heads[..., : width + 1] = 0
            heads[:, :, places, :width] = small[name].unflatten(0, (num_groups, num_heads, narrow))
        # Surplus query heads of these groups attend to real values, so their output must not be read.
        outputs = tensors[output].unflatten(1, (-1, wide_group, wide))  # [row, group, head, column]
        outputs[:, :num_groups] = 0
        outputs[:width, :num_groups, :group, places] = small[output].unflatten(1, (num_groups, group, narrow))
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            tensors[name][:mlp, : width + 1] = 0
            tensors[name][:mlp, :width] = small[name]
        tensors["mlp.down_proj"][:, :mlp] = 0
        tensors["mlp.down_proj"][:width, :mlp] = small["mlp.down_proj"]
