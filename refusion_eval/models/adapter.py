"""LoRA adapters, merged by peft into the matrices of a checkpoint while it is loaded."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models.checkpoint import ModelConfig, read_json
from refusion_eval.models.weights import matrix_shapes, no_weights, open_tensors

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."

# Entries of adapter_config.json that peft reads here.
_READ: tuple[str, ...] = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
_READ += ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
# Entries that say nothing about the function computed.
_INERT: tuple[str, ...] = ("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode")
_INERT += ("loftq_config", "lora_dropout", "megatron_config", "megatron_core", "peft_version", "qalora_group_size")
_INERT += ("revision", "runtime_config", "task_type")
# Any other entry must be empty or have one of these values, because only matrices are merged, whatever peft could do.
# Other initial weights (PiSSA, OLoRA, CorDA) also subtract the adapter's first value from the base.
_MUST_BE: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva"),
}


class LoraAdapter:
    """An adapter that fits a model; raises CheckpointError otherwise, and ConfigError without peft."""

    # `merge_and_unload` of peft needs the whole base model in memory, in addition to the weights that are made of it
    # here. So peft holds a model without numbers, whose layers have the adapter's, and each gives its product when the
    # matrix is read.

    def __init__(self, directory: Path, model: ModelConfig) -> None:
        try:
            import peft  # most of a second, and few checkpoints have an adapter
        except ImportError as error:
            raise ConfigError("an adapter needs peft, which is not installed: pip install peft") from error
        if model.experts is not None:
            raise CheckpointError(
                f"{directory}: adapters are not merged into experts; give an adapter of a dense model"
            )
        settings = _settings(directory)
        names, shapes = model.family_layout.tensors, matrix_shapes(model)
        layers = map(names.layer.format, range(model.num_layers))
        matrices = {layer + name: shape for layer in layers for name, shape in shapes.items()}
        if not model.tied_head:  # a tied head would change the embedding
            matrices[names.head] = (model.vocab_size, model.hidden_size)
        self._model = nn.Module()
        for name, shape in matrices.items():
            layer = nn.Linear(*shape[::-1], bias=False, device="meta")
            # One number for a whole matrix: peft puts the adapter on the device of the base, so that cannot be "meta".
            layer.weight = nn.Parameter(torch.zeros(1).expand(shape), requires_grad=False)
            _insert(self._model, name, layer)
        _check_targets(directory, settings, matrices)
        try:
            config = peft.LoraConfig(**settings)
            peft.inject_adapter_in_model(config, self._model)
        except (TypeError, ValueError, AttributeError, KeyError, re.error) as error:
            raise CheckpointError(f"{directory / CONFIG_FILE} cannot be read by peft: {_on_one_line(error)}") from error
        self._load(peft, directory)

    def merge(self, name: str, weight_OI: Tensor) -> Tensor:
        """A tensor of the checkpoint plus the adapter's product, in float32; unchanged if it is not adapted."""
        layer: Any = dict(self._model.named_modules()).get(name.removesuffix(".weight"))
        if not hasattr(layer, "lora_A"):  # not a target, or an embedding or a norm
            return weight_OI
        with torch.no_grad():  # rounded once, from float32: not bit-identical to an adapter that is computed separately
            return weight_OI.float() + layer.get_delta_weight("default")

    def _load(self, peft: Any, directory: Path) -> None:
        path = directory / WEIGHTS_FILE
        if not path.is_file():
            raise no_weights(directory, f"no {WEIGHTS_FILE}")
        file, tensors = open_tensors(path), {}
        for stored in file.keys():  # noqa: SIM118 - a file, not a mapping
            name = stored.removeprefix(_PREFIX).replace(".default.weight", ".weight")
            tensor = file.get_tensor(stored)
            if not tensor.is_floating_point():
                raise CheckpointError(f"{path}: {stored} is {tensor.dtype}, not floating-point numbers")
            tensors[name] = tensor.float()
        try:
            loaded = peft.set_peft_model_state_dict(self._model, tensors)
        except RuntimeError as error:
            advice = "take the base that the adapter was made for"
            raise CheckpointError(f"{path}: {_on_one_line(error)}; {advice}") from error
        if loaded.unexpected_keys:
            matrix = f"{loaded.unexpected_keys[0]} is not a LoRA matrix of a target in {CONFIG_FILE}"
            raise CheckpointError(f"{path}: {matrix}; take both files from one adapter, and that adapter's own base")
        if missing := [name for name in loaded.missing_keys if ".lora_" in name]:
            raise CheckpointError(f"{path} lacks {missing[0]}; download the file again, or take the adapter's own base")


def _settings(directory: Path) -> dict[str, Any]:
    """The arguments of peft's `LoraConfig`, if adapter_config.json describes plain LoRA matrices and nothing else."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(f"{directory} has no {CONFIG_FILE}; an adapter is a directory as peft saves it")
    raw = read_json(path)
    for key in raw.keys() | _MUST_BE.keys():
        allowed = _MUST_BE.get(key, (None, False, "", [], {}))
        if key not in (*_READ, *_INERT) and raw.get(key) not in allowed:
            raise CheckpointError(f"{path}: {key} is {raw.get(key)!r}; only plain LoRA matrices are merged")
    return {key: raw[key] for key in _READ if key in raw}


def _check_targets(directory: Path, settings: Mapping[str, Any], matrices: Mapping[str, object]) -> None:
    """Every name in target_modules must be that of a matrix; peft only refuses a list of which none is."""
    targets = settings.get("target_modules")
    for target in targets if isinstance(targets, list) else []:
        if not any(module == target or module.endswith(f".{target}") for module in matrices):
            names = sorted({module.rpartition(".")[2] for module in matrices})
            entry = f"target_modules names {target!r}, which matches no matrix of this model"
            raise CheckpointError(f"{directory / CONFIG_FILE}: {entry}; it has {', '.join(names)}")


def _insert(model: nn.Module, name: str, layer: nn.Module) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        if parent not in dict(model.named_children()):
            model.add_module(parent, nn.Module())
        model = model.get_submodule(parent)
    model.add_module(last, layer)


def _on_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
