"""The systems whose speed is compared: the decoders of one checkpoint, or systems by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from refusion_eval.api import LoadedModel
from refusion_eval.config import field_types
from refusion_eval.decoders import DECODERS
from refusion_eval.runs.model_args import entry_arguments, parse_model_args, settings_type
from refusion_eval.runs.system import ModelCache, System
from refusion_eval.runs.systems import choose_systems

AUTOREGRESSIVE = "autoregressive"
SIZES = {"gen_length": 128, "slot_size": 8, "block_size": 32}  # of the decoders of one checkpoint


def systems_on(checkpoint: str, settings: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, System]:
    """Name -> system of a checkpoint: its main decoder, also with fused forwards, and autoregressive decoding.

    The latter is left out where it does not fit. `settings` are those that a decoder takes of them; `arguments` are
    model arguments of all.
    """
    cache = ModelCache()
    fitting = LoadedModel.open(checkpoint, **arguments).decoders
    systems = {}
    for decoder in dict.fromkeys((fitting[0], *(name for name in fitting if name == AUTOREGRESSIVE))):
        given = {"pretrained": checkpoint, "decoder": decoder, **arguments}
        fuses = "fuse" in field_types(DECODERS[decoder].Settings)
        systems[decoder] = _system(given | ({"fuse": False} if fuses else {}), settings, cache)
        systems |= {f"{decoder}, fused": _system(given | {"fuse": True}, settings, cache)} if fuses else {}
    return systems


def systems_named(
    names: Sequence[str], model: str, settings: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, System]:
    """Name -> system of `choose_systems`, each with its own weights in memory."""
    chosen = choose_systems(names, model).items()
    return {
        name: _system({**entry_arguments(named, f"--system {name}"), **arguments}, settings) for name, named in chosen
    }


def _system(given: Mapping[str, Any], settings: Mapping[str, Any], cache: ModelCache | None = None) -> System:
    types = field_types(settings_type(given["decoder"], str(given.get("loop"))))
    own = {name: value for name, value in settings.items() if name in types}
    return System(parse_model_args({**own, **given}), cache)
