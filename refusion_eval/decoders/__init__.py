"""The decoders by name, found from the files of this folder.

A decoder is one file that ends with `DECODER = Decoder(...)`; its name is the file's. A file that holds several ends
with `DECODERS = {name: Decoder(...), ...}`.
"""

from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules

from refusion_eval.decoders.decoder import Decoder
from refusion_eval.types import CheckpointKind

__all__ = ["DECODERS", "Decoder", "fitting_decoders", "trained_decoders"]


def _find_decoders() -> dict[str, Decoder]:
    decoders: dict[str, Decoder] = {}
    for file in iter_modules(__path__):
        module = import_module(f"{__name__}.{file.name}")
        if hasattr(module, "DECODER"):
            decoders[file.name] = module.DECODER
        decoders |= getattr(module, "DECODERS", {})
    return decoders


DECODERS: dict[str, Decoder] = _find_decoders()


def fitting_decoders(kind: CheckpointKind, named: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the decoders that fit a checkpoint, its main one first.

    Args:
        kind: what the checkpoint was trained to do.
        named: the decoders that its config.json names; these alone fit if there are any.
    """
    if named:
        return tuple(named)
    fitting = (name for name, decoder in DECODERS.items() if kind in decoder.fits)
    return tuple(sorted(fitting, key=lambda name: DECODERS[name].style.order))


def trained_decoders(objective: str) -> tuple[str, ...]:
    """Names of the decoders that a checkpoint is for after training with an objective; none if it serves several."""
    trained = (name for name, decoder in DECODERS.items() if objective in decoder.trained_by)
    return tuple(sorted(trained, key=lambda name: DECODERS[name].style.order))
