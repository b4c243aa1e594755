"""Benchmark harness for ReFusion and the systems it competes with."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refusion_eval.api import LoadedModel, generate, generate_many, load_model
    from refusion_eval.types import Decoded

__version__ = "0.1.0"

__all__ = ["Decoded", "LoadedModel", "__version__", "generate", "generate_many", "load_model"]


def __getattr__(name: str) -> Any:
    """Imports the interface when it is first used: `import refusion_eval` itself loads no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from refusion_eval import api

    return getattr(api, name)
