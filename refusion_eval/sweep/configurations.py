"""A sweep over number formats, batch sizes and CUDA graphs, which must not decide what a model answers."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from refusion_eval.config import check_keys
from refusion_eval.errors import ConfigError
from refusion_eval.paths import EMBEDDED, embedded_systems
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


def systems_of(names: Sequence[str], model: str) -> dict[str, dict[str, Any]]:
    """Name -> model arguments: the embedded family by default, else published systems or one on a given checkpoint."""
    if model not in ("", EMBEDDED) and len(names) != 1:
        raise ConfigError(f"--model {model} is one checkpoint, and --system names {len(names)} systems")
    if model == EMBEDDED or not (names or model):
        check_keys(names, embedded_systems(), f"--model {EMBEDDED}", what="system")
        family = {name: system for name, system in embedded_systems().items() if name in (names or (name,))}
        return {
            name: {"pretrained": f"{EMBEDDED}:{one}", "decoder": decoder} for name, (one, decoder) in family.items()
        }
    on_model = {"model": model} if model else {}
    return {name: {"system": name, **on_model} for name in names}


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
