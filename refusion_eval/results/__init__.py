"""From records to figures, tables and data frames.

import refusion_eval.results as results

samples = results.load(["runs/refusion", "runs/ar"])  # one row a sample
samples.groupby(["system", "task"])["passed"].mean()
results.figures(["runs/refusion", "runs/ar"])  # one row a figure with its interval
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refusion_eval.results.data_frames import figures, load

__all__ = ["figures", "load"]


def __getattr__(name: str) -> Any:
    """Imports the data frames when they are first used, because pandas takes half a second."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from refusion_eval.results import data_frames

    return getattr(data_frames, name)
