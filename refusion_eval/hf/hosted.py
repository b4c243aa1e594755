"""Decodes with the weights of a transformers module, which are shared where the layouts allow."""

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.loading import DTYPES, LoadedModel
from refusion_eval.models.config import ModelConfig, model_config
from refusion_eval.models.transformer import Transformer, Weights, dense_along_first
from refusion_eval.models.weights import arrange_weights, head_name, with_saved_head

# Module -> its state (see `_state`) when its model was made, and the model, which holds no reference to the module, so
# that an entry disappears with its module.
_HOSTED: WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], LoadedModel]] = WeakKeyDictionary()


def hosted(module: nn.Module) -> LoadedModel:
    """The model of this project with the weights of a module; it has no tokenizer.

    The model is made at the first call and kept until the module's config or parameters change: replaced, moved, cast,
    or written to in place. torch does not count writes through `Tensor.data`; call `release` after these.

    Embedding, output head, attention output and down projection are the module's own tensors. Queries, keys and values
    are copied into one matrix, and so are gate and up projection: 55% of the weights of Qwen3-8B, 9 GB in bfloat16. On
    a CPU in float32 small matrices are copied too.

    Raises:
        ConfigError: another class, adapters that are not merged, or weights in several dtypes or places.
        CheckpointError: its config describes what the forward pass does not compute.
    """
    if not isinstance(module, Qwen3ForCausalLM):
        raise ConfigError(f"{type(module).__name__} is not computed here; give a Qwen3ForCausalLM")
    state = _state(module)
    known_state, known = _HOSTED.get(module, (None, None))
    if known is not None and known_state == state:
        return known
    if known is not None:
        del _HOSTED[module]
        for part in ("engine", "transformer"):  # frees the old copies before the new ones are made
            vars(known).pop(part, None)
    # Tensors made in the caller's inference mode could not be written to outside of it.
    with torch.inference_mode(False):
        model = _host(module)
    _HOSTED[module] = state, model
    return model


def release(module: nn.Module) -> None:
    """Frees the copied weights, keys and values of a module; the next decoding makes them again."""
    _HOSTED.pop(module, None)


def _state(module: Qwen3ForCausalLM) -> tuple[Any, ...]:
    """A value that changes whenever the config or a parameter does."""
    parameters = tuple(
        (parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version, parameter.dtype, parameter.device)
        for parameter in module.parameters()
    )
    return module.config.to_dict(), parameters


def _host(module: Qwen3ForCausalLM) -> LoadedModel:
    name = module.name_or_path or type(module).__name__
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    dtypes, devices = ({getattr(tensor, what) for tensor in tensors.values()} for what in ("dtype", "device"))
    if len(dtypes) > 1 or len(devices) > 1:
        found = " on ".join(" and ".join(sorted(map(str, values))) for values in (dtypes, devices))
        raise ConfigError(
            f"the weights of {name} are {found}; decoding takes one dtype on one device, so load the model with one "
            "dtype and without spreading it (device_map)"
        )
    (dtype,), (device,) = dtypes, devices
    if dtype not in DTYPES.values() or device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"the weights of {name} are {dtype} on {device}; decoding takes {', '.join(DTYPES)}, cpu or cuda"
        )
    with tempfile.TemporaryDirectory() as directory:
        # Read like the config of a checkpoint, so that the same variants are refused.
        path = Path(directory, "config.json")
        module.config.to_json_file(path, use_diff=False)
        try:
            config = model_config(Path(directory))
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(path), f"the config of {name}")) from None
        model = LoadedModel.open(
            directory, dtype=str(dtype).removeprefix("torch."), device=str(device), cuda_graphs=False
        )
        model.name = name
    model.transformer = Transformer(config, _weights(name, tensors, config))
    return model


def _weights(name: str, tensors: dict[str, Tensor], config: ModelConfig) -> Weights:
    """The parameters of a module as the weights of a `Transformer`."""
    config = with_saved_head(config, tensors.get, name)
    unused = set(tensors) - ({head_name(config)} if config.tied_head else set())

    def stack(shape: tuple[int, ...], parts: Mapping[str, int], *, matrix: bool = False) -> Tensor:
        for key in parts:
            if key not in tensors:
                raise ConfigError(
                    f"{name} has no parameter {key}; merge or unload adapters, and do not shard the weights"
                )
        unused.difference_update(parts)
        parameters = [tensors[key].detach() for key in parts]
        if matrix and dense_along_first(math.prod(shape), parameters[0].dtype, parameters[0].device):
            return torch.cat([part.t() for part in parameters], dim=1).t()
        return parameters[0] if len(parameters) == 1 else torch.cat(parameters)

    weights = arrange_weights(config, stack)
    if unused:
        raise ConfigError(
            f"{name} has parameters besides those of its class ({', '.join(sorted(unused)[:3])}); merge or unload "
            "adapters"
        )
    return weights
