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

    def system(decoder: str, **more: Any) -> System:
        names = field_types(DECODERS[decoder].Settings)
        own = {name: value for name, value in settings.items() if name in names}
        return System(
            parse_model_args({"pretrained": checkpoint, "decoder": decoder, **arguments, **own, **more}), cache
        )

    fitting = LoadedModel.open(checkpoint, **arguments).decoders
    systems = {}
    for decoder in dict.fromkeys((fitting[0], *(name for name in fitting if name == AUTOREGRESSIVE))):
        fuses = "fuse" in field_types(DECODERS[decoder].Settings)
        systems[decoder] = system(decoder, **({"fuse": False} if fuses else {}))
        systems |= {f"{decoder}, fused": system(decoder, fuse=True)} if fuses else {}
    return systems


def systems_named(
    names: Sequence[str], model: str, settings: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, System]:
    """Name -> system of `choose_systems`, each with its own weights in memory."""
    systems = {}
    for name, chosen in choose_systems(names, model).items():
        given = {**entry_arguments(chosen, f"--system {name}"), **arguments}
        types = field_types(settings_type(given["decoder"], given["loop"]))
        own = {key: value for key, value in settings.items() if key in types}
        systems[name] = System(parse_model_args(given | own))
    return systems
