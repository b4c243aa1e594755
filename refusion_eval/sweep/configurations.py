"""A sweep over number formats, batch sizes and CUDA graphs, which must not decide what a model answers."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from refusion_eval.runs.model_args import entry_arguments
from refusion_eval.sweep.spec import SweepSpec, SweptSystem


def configurations(batch_size: int, *, with_graphs: bool) -> dict[str, dict[str, Any]]:
    """Name -> model arguments; the first is the reference."""
    graphs = (False, True) if with_graphs else (False,)
    made = itertools.product(("float32", "bfloat16"), (1, batch_size), graphs)
    common = {"attention": "sdpa"}  # one backend for all, so that nothing else differs
    return {
        f"{dtype}-b{size}{'-graphs' * recorded}": common | {"dtype": dtype, "batch_size": size, "cuda_graphs": recorded}
        for dtype, size, recorded in made
    }


def spec_of(
    systems: Mapping[str, Mapping[str, Any]],
    named: Mapping[str, Mapping[str, Any]],
    *,
    tasks: tuple[str, ...] = (),
    limit: int | None = None,
) -> SweepSpec:
    """The sweep of some systems under every configuration, each called `SYSTEM-CONFIGURATION`."""
    swept = []
    for name, arguments in systems.items():
        given = entry_arguments(arguments, f"system {name}")
        for configuration, changes in named.items():
            system = SweptSystem(name=f"{name}-{configuration}", arguments={**given, **changes})
            swept.append(replace(system, points=(system.point({}, "table"),)))
    return SweepSpec(name="flips", tasks=tasks, limit=limit, systems=tuple(swept))
