"""LoRA adapters in the layout of peft, merged into the matrices of a checkpoint while it is loaded.

A merged model costs nothing at run time. It is not bit-identical to a model that computes the adapter separately in a
short dtype, because the sum is computed in float32 and rounded once.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from refusion_eval.errors import CheckpointError
from refusion_eval.models.config import ModelConfig, read_json
from refusion_eval.models.weights import no_weights, open_tensors

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_TENSOR_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_FLOATS = ("F64", "F32", "F16", "BF16")

# Entries of adapter_config.json that must have one of these values; any other changes the computed function.
_MUST_BE: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # The others subtract the adapter's first value from the base weights.
    "init_lora_weights": (True, False, None, "gaussian", "eva"),
}
# Entries that are read here, or that say nothing about the function computed.
_READ = {
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
}
_INERT = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}


class _Matrix(NamedTuple):
    """A matrix of the model that can be adapted; `layer` is None for the output head."""

    shape: tuple[int, int]
    layer: int | None


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Contents of adapter_config.json; keys of patterns are regular expressions, anchored at the end.

    Attributes:
        excluded: names, or ends of names, of modules that are not adapted, or one regular expression.
    """

    path: Path
    rank: int
    alpha: float
    rank_stabilised: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: tuple[str, ...] | str
    excluded: tuple[str, ...] | str
    layers: frozenset[int] | None

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        return next((rank for key, rank in self.rank_pattern.items() if _pattern_matches(key, module)), self.rank)

    def scale_of(self, module: str) -> float:
        """Factor of the product of a module's two matrices."""
        alpha = next((a for key, a in self.alpha_pattern.items() if _pattern_matches(key, module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)

    def selects(self, module: str, layer: int | None) -> bool:
        """Whether a module is adapted."""
        if self.layers is not None and layer not in self.layers:
            return False
        return _named(module, self.targets) and not _named(module, self.excluded)


def _pattern_matches(key: str, module: str) -> bool:
    return re.fullmatch(rf"(?:.*\.)?(?:{key})", module) is not None


def _named(module: str, names: tuple[str, ...] | str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def lora_config(directory: Path) -> LoraConfig:
    """Reads adapter_config.json.

    Raises:
        CheckpointError: the file is missing or malformed, or describes something else than plain LoRA matrices.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(f"{directory} has no {CONFIG_FILE}; an adapter is a directory as peft saves it")
    raw = read_json(path)
    for key, allowed in _MUST_BE.items():
        if raw.get(key) not in allowed:
            raise CheckpointError(f"{path}: {key} is {raw.get(key)!r}; only {allowed[0]!r} is computed")
    for key, value in raw.items():
        if key not in _MUST_BE.keys() | _READ | _INERT and value not in (None, False, "", [], {}):
            raise CheckpointError(f"{path}: {key} is {value!r}; only plain LoRA matrices are merged")
    try:
        config = _parse(path, raw)
        for key in (*config.rank_pattern, *config.alpha_pattern):
            re.compile(key)
        for names in (config.targets, config.excluded):
            re.compile(names if isinstance(names, str) else "")
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise CheckpointError(
            f"{path} is malformed ({error!r}); it needs r, lora_alpha and target_modules as peft writes them"
        ) from error
    if not config.targets or min([config.rank, *config.rank_pattern.values()]) < 1:
        raise CheckpointError(f"{path}: target_modules is empty or a rank is below 1, so nothing would be adapted")
    return config


def _parse(path: Path, raw: Mapping[str, Any]) -> LoraConfig:
    def names(key: str) -> tuple[str, ...] | str:
        value = raw.get(key) or ()
        return value if isinstance(value, str) else tuple(str(name) for name in value)

    layers = raw.get("layers_to_transform")
    return LoraConfig(
        path=path,
        rank=int(raw["r"]),
        alpha=float(raw["lora_alpha"]),
        rank_stabilised=bool(raw.get("use_rslora")),
        rank_pattern={key: int(rank) for key, rank in (raw.get("rank_pattern") or {}).items()},
        alpha_pattern={key: float(alpha) for key, alpha in (raw.get("alpha_pattern") or {}).items()},
        targets=names("target_modules"),
        excluded=names("exclude_modules"),
        layers=None if layers is None else frozenset([layers] if isinstance(layers, int) else layers),
    )


class LoraAdapter:
    """An adapter that fits a model: its low-rank matrices, read one pair at a time.

    Args:
        model: shapes of the model to be adapted.

    Raises:
        CheckpointError: there are no safetensors, or config, tensors and model do not fit together.
    """

    def __init__(self, config: LoraConfig, model: ModelConfig) -> None:
        self._config = config
        self._path = config.path.with_name(WEIGHTS_FILE)
        if not self._path.is_file():
            raise no_weights(config.path.parent, f"no {WEIGHTS_FILE}")
        matrices = _matrices(model)
        self._check_targets(matrices)
        self._tensors = self._find_tensors(matrices)
        self._check_complete(matrices)

    def merge(self, name: str, weight_OI: Tensor) -> Tensor:
        """A tensor of the checkpoint plus the adapter's product, in float32; unchanged if it is not adapted.

        Args:
            weight_OI: the tensor, [out, in] if it is a matrix.
        """
        pair = self._tensors.get(name.removesuffix(".weight"))
        if pair is None or not name.endswith(".weight"):
            return weight_OI
        tensors = open_tensors(self._path)
        low_RI, high_OR = (tensors.get_tensor(pair[part]).float() for part in "AB")
        scale = self._config.scale_of(name.removesuffix(".weight"))
        return torch.addmm(weight_OI.float(), high_OR, low_RI, alpha=scale)

    def _check_targets(self, matrices: Mapping[str, _Matrix]) -> None:
        """Every name in target_modules has to be that of a matrix."""
        targets = self._config.targets
        for names in [targets] if isinstance(targets, str) else [(name,) for name in targets]:
            if not any(_named(module, names) for module in matrices):
                unknown = names if isinstance(names, str) else names[0]
                known = sorted({module.rpartition(".")[2] for module in matrices})
                raise CheckpointError(
                    f"{self._config.path}: target_modules names {unknown!r}, which matches no matrix of this model; "
                    f"it has {', '.join(known)}"
                )

    def _find_tensors(self, matrices: Mapping[str, _Matrix]) -> dict[str, dict[str, str]]:
        """Names of the two tensors of each adapted module, {module: {"A": name, "B": name}}."""
        tensors = open_tensors(self._path)
        pairs: dict[str, dict[str, str]] = {}
        for name in tensors.keys():  # noqa: SIM118 - a file, not a mapping
            match = _TENSOR_NAME.fullmatch(name)
            if match is None:
                raise CheckpointError(f"{self._path}: {name} is no LoRA matrix; nothing else is merged")
            module, part = match.groups()
            if module not in matrices:
                raise CheckpointError(
                    f"{self._path}: {name} belongs to no matrix of this model; take the base that it was made for"
                )
            (num_out, num_in), rank = matrices[module].shape, self._config.rank_of(module)
            expected = (rank, num_in) if part == "A" else (num_out, rank)
            entry = tensors.get_slice(name)
            if tuple(entry.get_shape()) != expected or entry.get_dtype() not in _FLOATS:
                raise CheckpointError(
                    f"{self._path}: {name} has shape {tuple(entry.get_shape())} ({entry.get_dtype()}), but the model "
                    f"and rank {rank} mean {expected} of floating-point numbers; take the base that it was made for"
                )
            pairs.setdefault(module, {})[part] = name
        return pairs

    def _check_complete(self, matrices: Mapping[str, _Matrix]) -> None:
        """The tensors have to be those of the targets, two for each."""
        selected = {module for module, matrix in matrices.items() if self._config.selects(module, matrix.layer)}
        strays = sorted(self._tensors.keys() - selected)
        if strays:
            raise CheckpointError(
                f"{self._path} has tensors for {strays[0]}, which {self._config.path.name} does not name as a target; "
                "take both files from the same adapter"
            )
        for module in sorted(selected):
            if len(self._tensors.get(module, ())) < 2:
                raise CheckpointError(f"{self._path} lacks lora_A or lora_B of {module}; download the file again")


def _matrices(model: ModelConfig) -> dict[str, _Matrix]:
    """Every matrix of a model that can be adapted, by its module's name in the checkpoint; a tied head is none."""
    names = model.tensors
    width, mlp = model.hidden_size, model.intermediate_size
    q_rows, kv_rows = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes = {
        names.q: (q_rows, width),
        names.k: (kv_rows, width),
        names.v: (kv_rows, width),
        names.out: (width, q_rows),
        names.gate: (mlp, width),
        names.up: (mlp, width),
        names.down: (width, mlp),
    }
    matrices = {
        names.layer.format(number) + name: _Matrix(shape, number)
        for number in range(model.num_layers)
        for name, shape in shapes.items()
    }
    if not model.tied_head:
        matrices[names.head] = _Matrix((model.vocab_size, width), None)
    return matrices
