"""Measured cells as evidence for the paper's claims: which count, and why others do not.

A claim is judged only by measured cells of the same systems (name and backbone) on the same benchmarks, of which every
item was asked and answered, and, where it is about speed, of one machine and without fused forwards, which are no part
of the paper's algorithm. Mini look-alikes are never the benchmarks: they are kept apart, and say no more than whether
they point the same way.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.claims.formula import Evaluated, MissingCell, evaluate
from refusion_eval.errors import DataError
from refusion_eval.results.figure import Figure, FigureKey, by_key, problems
from refusion_eval.results.published import GENERATE, published_backbone

# On the mini tasks the tiny backbone of the embedded family stands where the paper has Qwen3-8B, its fine-tune where
# that is retrained, and each other fine-tune where the paper has a published or a retrained system.
_RETRAINED = "retrained"
_MINI_ROLES = {
    "autoregressive": ("qwen3",),
    f"autoregressive+{GENERATE}": (f"qwen3+{GENERATE}",),
    "autoregressive_sft": (f"qwen3+{_RETRAINED}",),
}


class Evidence:
    """Measured cells, sorted by what they may be used for.

    Args:
        cells: of any runs.

    Raises:
        StoreError: two runs measured the same.
    """

    def __init__(self, cells: Iterable[Figure]) -> None:
        self.excluded: dict[FigureKey, str] = {}
        real, mini = [], []
        for cell in cells:
            if why := _exclusion(cell):
                self.excluded[cell.key] = why
            elif cell.mini:
                mini += _roles(cell)
            else:
                real.append(cell)
        self.real, self.mini = by_key(real), by_key(mini)

    def on_benchmarks(self, formula: str) -> Evaluated | str:
        """What a formula gives on the real benchmarks, or why it gives nothing."""
        return self._evaluate(formula, self.real)

    def on_mini(self, formula: str) -> Evaluated | str:
        """Likewise on the mini look-alikes."""
        return self._evaluate(formula, self.mini)

    def _evaluate(self, formula: str, cells: Mapping[FigureKey, Figure]) -> Evaluated | str:
        try:
            found = evaluate(formula, cells)
        except MissingCell as error:
            whys = [self.excluded[place] for place in error.places if place in self.excluded and cells is self.real]
            return "; ".join([str(error), *whys])
        except DataError as error:
            return str(error)
        return "; ".join(problems(found.cells)) or found


def _exclusion(cell: Figure) -> str:
    """Why a cell is no evidence; empty if it is."""
    if not cell.complete:
        return f"{cell.run_id} lacks samples: {'; '.join(cell.notes)}"
    if not cell.mini and cell.benchmark in BENCHMARKS and cell.n < BENCHMARKS[cell.benchmark].source.num_rows:
        return (
            f"{cell.run_id} has {cell.n} of the {BENCHMARKS[cell.benchmark].source.num_rows} items of {cell.benchmark}"
        )
    if not cell.mini and cell.fused:
        return f"{cell.run_id} has fused forwards, which the paper's algorithm has not; run it with fuse=false"
    published = published_backbone(cell.system)
    if not cell.mini and published and cell.backbone != published:
        return f"{cell.run_id} is a {cell.label} of {cell.backbone}, not of {published}"
    return ""


def _roles(cell: Figure) -> list[Figure]:
    """A mini cell under the names of the systems that it stands for."""
    roles = _MINI_ROLES.get(cell.system, (cell.system, f"{cell.system}+{_RETRAINED}"))
    return [replace(cell, system=role) for role in roles]
