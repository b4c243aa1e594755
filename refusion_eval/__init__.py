"""Benchmark harness for ReFusion and other decoders of diffusion language models."""

from typing import TYPE_CHECKING, Any

from refusion_eval.version import __version__

if TYPE_CHECKING:
    from refusion_eval.api import (
        LoadedModel,
        decoder_settings,
        generate,
        generate_many,
        generate_stream,
        load_model,
    )
    from refusion_eval.data_frame import evaluate
    from refusion_eval.types import Decoded


__all__ = [
    "Decoded",
    "LoadedModel",
    "__version__",
    "decoder_settings",
    "evaluate",
    "generate",
    "generate_many",
    "generate_stream",
    "load_model",
]


def __getattr__(name: str) -> Any:
    """Imports the interface when it is first used: `import refusion_eval` itself loads no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "evaluate":
        from refusion_eval import data_frame

        return data_frame.evaluate
    from refusion_eval import api

    return getattr(api, name)


def __dir__() -> list[str]:
    """The names of the interface, which `__getattr__` loads."""
    return sorted(__all__)
