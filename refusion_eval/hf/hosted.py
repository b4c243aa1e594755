"""A transformers module as a model of this project: the same weights, shared where the layouts allow."""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.loading import DTYPES, LoadedModel
from refusion_eval.models.attention import possible_backends
from refusion_eval.models.checkpoint import Location
from refusion_eval.models.config import ModelConfig, model_config
from refusion_eval.models.layers import dense_along_first
from refusion_eval.models.transformer import LayerWeights, Transformer, Weights


class _Hosted(NamedTuple):
    """A hosted model, and what the module was like when it was made."""

    state: tuple[Any, ...]
    model: LoadedModel


# The hosted models hold no reference to their modules, so they go when these go.
_HOSTED: WeakKeyDictionary[nn.Module, _Hosted] = WeakKeyDictionary()


def hosted(module: nn.Module) -> LoadedModel:
    """The module as a model of this project; it has no tokenizer.

    Made at the first call and kept until the module's config or parameters change: replaced, moved, cast, or written to
    in place. Only writes through `Tensor.data` go unnoticed (torch does not count them); `release` the module then.

    Embedding, output head, attention output and down projection are the module's own tensors. Queries, keys and values,
    and gate and up projection are copied into one matrix each: 55% of the weights of Qwen3-8B, 9 GB in bfloat16. On a
    CPU in float32 small matrices are copied too.

    Args:
        module: a `Qwen3ForCausalLM` with all weights in one dtype on one device.

    Raises:
        ConfigError: another class, adapters that are not merged, or weights in several dtypes or places.
        CheckpointError: its config describes what the forward pass does not compute.
    """
    if not isinstance(module, Qwen3ForCausalLM):
        raise ConfigError(f"{type(module).__name__} is not computed here; give a Qwen3ForCausalLM")
    state = _state(module)
    known = _HOSTED.get(module)
    if known is not None and known.state == state:
        return known.model
    if known is not None:
        del _HOSTED[module]
        for part in ("engine", "transformer"):  # the old copies go before the new ones are made
            vars(known.model).pop(part, None)
    # Buffers made in a caller's inference mode could not be written outside of it.
    with torch.inference_mode(False):
        model = _host(module)
    if known is not None and _shape(known.model) == _shape(model):
        measured = {"attention", "width_cost"} & vars(known.model).keys()
        vars(model).update({name: vars(known.model)[name] for name in measured})
    _HOSTED[module] = _Hosted(state, model)
    return model


def release(module: nn.Module) -> None:
    """Frees what decoding keeps of a module: copied weights, keys and values. The next decoding makes them anew."""
    _HOSTED.pop(module, None)


def _shape(model: LoadedModel) -> tuple[ModelConfig, torch.dtype, torch.device]:
    """What the time of a forward depends on; new values in the weights do not change it."""
    return model.config, model.dtype, model.device


def _state(module: Qwen3ForCausalLM) -> tuple[Any, ...]:
    """Changes whenever the config or a parameter does."""
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
        raise ConfigError(
            f"the weights of {name} are {_listed(dtypes)} on {_listed(devices)}; decoding takes one dtype on "
            "one device, so load the model with one dtype and without spreading it (device_map)"
        )
    (dtype,), (device,) = dtypes, devices
    if dtype not in DTYPES.values() or device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"the weights of {name} are {dtype} on {device}; decoding takes {', '.join(DTYPES)}, cpu or cuda"
        )
    with tempfile.TemporaryDirectory() as directory:
        # Through the same door as a checkpoint's, so that the same variants are refused.
        path = Path(directory, "config.json")
        module.config.to_json_file(path, use_diff=False)
        try:
            config = model_config(Path(directory))
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(path), f"the config of {name}")) from None
        backends = possible_backends("auto", dtype, device)
        model = LoadedModel(Location(name, Path(directory), None), config, dtype, device, backends)
    model.transformer = Transformer(config, _weights(name, tensors, config))
    return model


def _listed(values: set[Any]) -> str:
    return " and ".join(sorted(str(value) for value in values))


def _weights(name: str, tensors: dict[str, Tensor], config: ModelConfig) -> Weights:
    """The module's parameters by our names; every one of them has to be taken, or the outputs would not be its own."""
    left = set(tensors)

    def take(key: str) -> Tensor:
        left.discard(key)
        if key not in tensors:
            raise ConfigError(f"{name} has no parameter {key}; merge or unload adapters, and do not shard the weights")
        return tensors[key].detach()

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        attention, feed = prefix + "self_attn.", prefix + "mlp."
        q_norm, k_norm = take(attention + "q_norm.weight"), take(attention + "k_norm.weight")
        return LayerWeights(
            input_norm=take(prefix + "input_layernorm.weight"),
            qkv=_matrix(*(take(f"{attention}{part}_proj.weight") for part in "qkv")),
            qk_norm=torch.cat((q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1))),
            out=_matrix(take(attention + "o_proj.weight")),
            mlp_norm=take(prefix + "post_attention_layernorm.weight"),
            gate_up=_matrix(take(feed + "gate_proj.weight"), take(feed + "up_proj.weight")),
            down=_matrix(take(feed + "down_proj.weight")),
        )

    weights = Weights(
        embedding=take("model.embed_tokens.weight"),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=take("model.norm.weight"),
        head=take("lm_head.weight"),
    )
    if left:
        raise ConfigError(
            f"{name} has parameters beside those of its class ({', '.join(sorted(left)[:3])}); merge or unload adapters"
        )
    return weights


def _matrix(*parts: Tensor) -> Tensor:
    """Stacks matrices along their first axis, laid out as `load_weights` does; a single one may stay as it is."""
    if dense_along_first(sum(part.numel() for part in parts), parts[0].dtype, parts[0].device):
        return torch.cat([part.t() for part in parts], dim=1).t()
    return parts[0] if len(parts) == 1 else torch.cat(parts)
