"""One figure of one system on one task, published or measured: what every table, figure and claim is made of.

Published cells come from results/published/published.csv, measured ones from run directories or from the CSV that
`refusion-eval table --csv` writes. Nothing is averaged or filled in here: a cell says what it rests on, and what may
not stand side by side (`problems`) is refused or marked by whoever puts it there.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.errors import StoreError
from refusion_eval.results.published import read_published, settings_of
from refusion_eval.results.table_rows import MEAN_TASK, TableRow, read_csv
from refusion_eval.results.tables import MINI_NOTE, SPEED_METRICS, tidy_rows
from refusion_eval.results.task_metrics import ACCURACY, HALF_WRITTEN, PASS_AT_1
from refusion_eval.runs.model_args import EMBEDDED_NAMES, SYSTEM_NAMES
from refusion_eval.runs.published import published_systems

Origin = Literal["published", "measured"]

# The seven benchmarks in the order of the paper's tables.
TASKS = tuple(BENCHMARKS)
AVERAGE = "average"
SCORES = (ACCURACY, PASS_AT_1)

# Metrics that count forwards, and so change where forwards are fused; speed changes too, tokens and scores do not.
FORWARD_METRICS = (*SPEED_METRICS, "tpf", "forwards_mean")

# Decoder settings that make another system of one: what is added to its key.
VARIANTS = ("recompute_kv", "left_to_right")
GENERATE = "generate"  # likewise: the stock loop of transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One figure.

    Attributes:
        origin: published, or measured by this project.
        system: its key in tasks/settings/systems.yaml; `+...` names a variant (`refusion+recompute_kv`).
        label: its name in tables.
        backbone: model that it was made from; empty where it is not published.
        task: benchmark, `AVERAGE` for the mean over all that there are, or a task that is no benchmark.
        metric: as in the results CSV: accuracy, pass@1, tps, tpf, ...
        value: the figure.
        ci_low, ci_high: its 95% interval; NaN for none, which no published figure has.
        n: benchmark items; 0 where it is not published.
        unit: of the figure.
        artefact: what it was published in (table1, ...); empty for a measured one.
        hardware: machine, as far as known.
        batch_size: requests at the same time; empty where not published.
        run_id: run it comes from.
        mini: whether the task is a synthetic look-alike, which is never the benchmark.
        task_version: of the task; empty for published figures and files of earlier versions.
        complete: whether every sample that was asked for is in it.
        settings: decoder settings in force, or what is published beside the figure.
        notes: what a reader must know.
    """

    origin: Origin
    system: str
    label: str
    backbone: str
    task: str
    metric: str
    value: float
    ci_low: float = math.nan
    ci_high: float = math.nan
    n: int = 0
    unit: str = ""
    artefact: str = ""
    hardware: str = ""
    batch_size: str = ""
    run_id: str = ""
    mini: bool = False
    task_version: str = ""
    complete: bool = True
    settings: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def has_interval(self) -> bool:
        """Whether it has a 95% interval."""
        return math.isfinite(self.ci_low) and math.isfinite(self.ci_high)

    @property
    def fused(self) -> bool:
        """Whether it rests on fused forwards, which the paper's algorithm does not have: `fuse`, else its default."""
        fuse = self.settings.get("fuse", "false")
        asked = fuse in ("true", "varies") or (fuse == "null" and self.settings.get("release_compatible") != "true")
        return asked and self.metric in FORWARD_METRICS


Place = tuple[str, str, str]


def published_cells(artefacts: Sequence[str] = ()) -> list[Cell]:
    """The published figures, in the order of their tables.

    Args:
        artefacts: only those of table1, figure1, ...; all if empty.

    Raises:
        DataError: the files are missing.
    """
    rows = read_published("published.csv")
    return [_published(row) for row in rows if row["value"] and (not artefacts or row["artefact"] in artefacts)]


def _published(row: Mapping[str, str]) -> Cell:
    settings = settings_of(row["settings"])
    return Cell(
        origin="published",
        system=row["system"],
        label=row["label"],
        backbone=row["backbone"],
        task=row["task"],
        metric=row["metric"],
        unit=row["unit"],
        artefact=row["artefact"],
        value=float(row["value"]),
        hardware=settings.get("gpu", ""),
        batch_size=settings.get("batch_size", ""),
        settings=settings,
        notes=tuple(filter(None, (row["note"], row["defect"]))),
    )


def measured_cells(sources: Iterable[str | os.PathLike[str]], *, baseline: str | None = None) -> list[Cell]:
    """The figures of some runs.

    Args:
        sources: run directories, and results CSV files. Speed-ups of directories are among the directories given.
        baseline: as `tidy_rows` has it.

    Returns:
        One cell for each figure that is a number; those of half-written runs are not `complete`.

    Raises:
        StoreError: a source cannot be read.
    """
    paths = [Path(source) for source in sources]
    rows = [row for path in paths if path.is_file() for row in read_csv(path)]
    directories = [path for path in paths if not path.is_file()]
    if directories:
        rows += tidy_rows(directories, baseline=baseline)
    return [_measured(row) for row in rows if not math.isnan(row.value)]


def _measured(row: TableRow) -> Cell:
    notes = tuple(note for note in row.note.split("; ") if note and note != MINI_NOTE)
    return Cell(
        origin="measured",
        system=system_key(row.system, row.backbone, row.settings),
        label=row.system,
        task=AVERAGE if row.task == MEAN_TASK else row.benchmark or row.task,
        complete=not row.errors and not any(note.startswith(HALF_WRITTEN) or "not scored" in note for note in notes),
        notes=notes,
        **{name: getattr(row, name) for name in ("backbone", "metric", "value", "ci_low", "ci_high", "n", "unit")},
        **{name: getattr(row, name) for name in ("hardware", "batch_size", "run_id", "mini", "task_version")},
        settings=row.settings,
    )


def system_key(label: str, backbone: str, settings: Mapping[str, str]) -> str:
    """The key of a measured system, from the name its run gave it.

    A name of the paper is its system. A decoder's own name (AR, LLaDA) is the published system of that decoder and
    backbone, else the decoder. In brackets behind it stand a settings table, which makes no other system, or the stock
    loop, which does, as do the settings in `VARIANTS`.
    """
    plain, _, bracket = label.removesuffix(")").rpartition(" (") if label.endswith(")") else (label, "", "")
    key = _labels().get(label) or _labels().get(plain) or _of_decoder(plain, backbone)
    variants = [name for name in VARIANTS if settings.get(name) == "true" and f"+{name}" not in key]
    variants += [GENERATE] if bracket == GENERATE else []
    return "+".join((key, *variants))


@cache
def _labels() -> Mapping[str, str]:
    """Printed name -> key; of a name that stands for two the one that is a system of its own."""
    printed = {row["label"]: row["system"] for row in read_published("published.csv")}
    return printed | {system.label: name for name, system in published_systems().items()}


@cache
def published_backbone(system: str) -> str:
    """The model that a published system was made from; empty if it is none, or that is not published."""
    return next((row["backbone"] for row in read_published("published.csv") if row["system"] == system), "")


def told_apart(cell: Cell) -> Cell:
    """A cell as it may stand beside published ones: of the system that it is named after, or of one of its own.

    A figure on a real benchmark is that of a published system only if the checkpoint was made from the same model.
    """
    published = published_backbone(cell.system) or published_backbone(cell.system.split("+")[0])
    if cell.origin == "published" or cell.mini or published in ("", cell.backbone):
        return cell
    other = f" on {cell.backbone or 'an unnamed model'}"
    return replace(cell, system=cell.system + other, label=cell.label + other)


def _of_decoder(label: str, backbone: str) -> str:
    decoders = {name: decoder for decoder, name in (SYSTEM_NAMES | EMBEDDED_NAMES).items()}
    decoder = decoders.get(label, label)
    fitting = [name for name, system in published_systems().items() if system.decoder == decoder]
    return next((name for name in fitting if published_backbone(name) == backbone), decoder)


def grid(cells: Iterable[Cell]) -> dict[Place, Cell]:
    """Cells by (system, task, metric).

    Raises:
        StoreError: two cells have the same place, so that one would hide the other.
    """
    found: dict[Place, Cell] = {}
    for cell in cells:
        place = (cell.system, cell.task, cell.metric)
        if place in found:
            whence = " and ".join(sorted(other.run_id or other.artefact for other in (found[place], cell)))
            raise StoreError(f"{' '.join(place)} is there twice ({whence}); leave one of them out")
        found[place] = cell
    return found


def problems(cells: Sequence[Cell]) -> list[str]:
    """Why some cells may not stand in one table: one sentence each, none if they may.

    Measured cells of one task must be of one version of it and real or mini alike; speed must be of one machine.
    Published speed is of the paper's machine, and never compared with ours here.
    """
    measured = [cell for cell in cells if cell.origin == "measured"]
    found = []
    for task in sorted({cell.task for cell in measured}):
        of_task = [cell for cell in measured if cell.task == task]
        versions = {cell.task_version: cell.run_id for cell in of_task if cell.task_version and task != AVERAGE}
        if len(versions) > 1:
            found.append(f"{task} is there in several versions ({_listed(versions)}); run all systems on one")
        if len({cell.mini for cell in of_task}) > 1:
            found.append(f"{task} is there as benchmark and as mini look-alike; show them in two tables")
    machines = {cell.hardware: cell.run_id for cell in measured if cell.metric in SPEED_METRICS}
    if len(machines) > 1:
        found.append(f"speed of several machines ({_listed(machines)}) is no comparison; measure all on one")
    return found


def require_comparable(cells: Sequence[Cell]) -> None:
    """Raises StoreError where `problems` finds any."""
    if found := problems(cells):
        raise StoreError("; ".join(found))


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(f"{value} in {run_id}" for value, run_id in sorted(values.items()))
