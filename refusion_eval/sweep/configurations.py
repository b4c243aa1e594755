"""A sweep over number formats, batch sizes and CUDA graphs, which must not decide what a model answers."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from refusion_eval.runs.model_args import entry_arguments
from refusion_eval.store.records import SERVER
from refusion_eval.sweep.spec import SweepSpec, SweptSystem


def configurations(batch_size: int, *, with_graphs: bool, of_server: bool = False) -> dict[str, dict[str, Any]]:
    """Name -> model arguments; the first is the reference. Nothing but requests at once changes what a server does."""
    if of_server:
        return {f"b{size}": {"batch_size": size} for size in (1, batch_size)}
    graphs = (False, True) if with_graphs else (False,)
    made = itertools.product(("float32", "bfloat16"), (1, batch_size), graphs)
    common = {"attention": "sdpa"}  # one backend for all, so that nothing else differs
    return {
        f"{dtype}-b{size}{'-graphs' * recorded}": common | {"dtype": dtype, "batch_size": size, "cuda_graphs": recorded}
        for dtype, size, recorded in made
    }


def spec_of(
    systems: Mapping[str, Mapping[str, Any]],
    named: Mapping[str, Mapping[str, Mapping[str, Any]]],
    *,
    tasks: tuple[str, ...] = (),
    limit: int | None = None,
) -> SweepSpec:
    """The sweep of some systems under the configurations of each, called `folder_of(SYSTEM, CONFIGURATION)`."""
    swept = []
    for name, arguments in systems.items():
        given = entry_arguments(arguments, f"system {name}")
        for configuration, changes in named[name].items():
            system = SweptSystem(name=folder_of(name, configuration), arguments={**given, **changes})
            swept.append(replace(system, points=(system.point({}, "table"),)))
    return SweepSpec(name="flips", tasks=tasks, limit=limit, systems=tuple(swept))


def is_server(arguments: Mapping[str, Any]) -> bool:
    return entry_arguments(arguments, "system")["loop"] == SERVER


def folder_of(system: str, configuration: str) -> str:
    """The name of a configuration of a system; the address of a server is written as a folder may be called."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', system)}-{configuration}"
