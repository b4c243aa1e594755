"""The paper's claims as data, and what published and measured cells say about each.

A claim is judged only by measured cells of the same systems (name and backbone) on the same benchmarks, from runs that
are complete, and, where it is about speed, of one machine. Mini look-alikes are never the benchmarks: they get a column
of their own, which says no more than whether they point the same way.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from refusion_eval.artefacts.cells import (
    GENERATE,
    SPEED_METRICS,
    TASKS,
    Cell,
    Place,
    grid,
    problems,
    published_backbone,
    published_cells,
)
from refusion_eval.artefacts.formula import Evaluated, MissingCell, evaluate
from refusion_eval.artefacts.published import read_published
from refusion_eval.errors import ConfigError, DataError
from refusion_eval.metrics.bootstrap import Interval

REPRODUCED = "reproduced"
NOT_REPRODUCED = "not reproduced"
NOT_MEASURED = "not measured"
DOES_NOT_FOLLOW = "does not follow from the paper's own table"

AGREES, DISAGREES, OPEN = "agrees in direction", "disagrees in direction", "direction open"

Reading = Literal["equal", "over", "above", ""]

# On the mini tasks the tiny backbone of the embedded family stands where the paper has Qwen3-8B, its fine-tune where
# that is retrained, and each other fine-tune where the paper has a published or a retrained system.
_RETRAINED = "retrained"
_MINI_ROLES = {
    "autoregressive": ("qwen3",),
    f"autoregressive+{GENERATE}": (f"qwen3+{GENERATE}",),
    "autoregressive_sft": (f"qwen3+{_RETRAINED}",),
}

_EPSILON = 1e-9  # 3.675 is 3.68 to two digits, however it is represented


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One reading of one statement; a row of claims.csv.

    Attributes:
        id: of the reading.
        claim: of the statement.
        statement: what is claimed.
        published: as printed.
        value: the number in it that the formula is to give, with the printed digits; empty for none.
        unit: of it.
        reading: `equal` at the printed digits, `over` (rounded down, or more), `above`.
        formula: over cells; empty where no cells say it.
        speedup: two sides of a speed-up, `systems | systems`, whose averages are all of interest; else empty.
        artefacts: whose cells the formula is about.
        neutral: the result that says neither yes nor no, as 1 of a ratio; empty for none.
        location: where in the paper.
        note: what a recomputation found.
    """

    id: str
    claim: str
    statement: str
    published: str
    value: str
    unit: str
    reading: Reading
    formula: str
    speedup: str
    artefacts: str
    neutral: str
    location: str
    note: str

    def __post_init__(self) -> None:
        if self.formula and (self.reading not in ("equal", "over", "above") or not self.value):
            raise ConfigError(f"claims.csv: {self.id} has a formula and reading={self.reading!r}, value={self.value!r}")

    @property
    def resolution(self) -> float:
        """One unit of the last printed digit."""
        return float(10.0 ** -len(self.value.partition(".")[2]))

    def follows(self, value: float) -> bool:
        """Whether a number is what is printed."""
        stated, unit = float(self.value), self.resolution
        if self.reading == "equal":
            return abs(value - stated) <= unit / 2 + _EPSILON
        return stated <= value + _EPSILON < stated + unit if self.reading == "over" else value > stated

    def holds(self, measured: Interval) -> bool:
        """Whether a measurement bears the claim out: its interval, or its value alone if it has none.

        `equal`: it meets what rounds to the printed number. `over` and `above`: all of it lies there.
        """
        low = measured.value if math.isnan(measured.low) else measured.low
        high = measured.value if math.isnan(measured.high) else measured.high
        stated = float(self.value)
        if self.reading == "equal":
            half = self.resolution / 2 + _EPSILON
            return low <= stated + half and high >= stated - half
        return low >= stated if self.reading == "over" else low > stated


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What cells say about a claim.

    Attributes:
        claim: the claim.
        on_published: what the formula gives on the paper's own cells; None without a formula.
        follows: whether that is what is printed.
        measured: what it gives on measured cells; None where one is missing.
        verdict: one of the four above.
        reason: why.
        mini: what it gives on the mini look-alikes, where these can point the same way at all.
        mini_verdict: whether these point the same way; empty if nothing can be said.
    """

    claim: Claim
    on_published: float | None
    follows: bool | None
    measured: Interval | None
    verdict: str
    reason: str
    mini: Interval | None = None
    mini_verdict: str = ""


class Evidence:
    """Measured cells, sorted by what they may be used for.

    Args:
        cells: of any runs.

    Raises:
        StoreError: two runs measured the same.
    """

    def __init__(self, cells: Iterable[Cell]) -> None:
        self.excluded: dict[Place, str] = {}
        real, mini = [], []
        for cell in cells:
            if why := _exclusion(cell):
                self.excluded[cell.system, cell.task, cell.metric] = why
            elif cell.mini:
                mini += _roles(cell)
            else:
                real.append(cell)
        self.real, self.mini = grid(real), grid(mini)

    def on_benchmarks(self, formula: str) -> Evaluated | str:
        """What a formula gives on the real benchmarks, or why it gives nothing."""
        return self._evaluate(formula, self.real)

    def on_mini(self, formula: str) -> Evaluated | str:
        """Likewise on the mini look-alikes."""
        return self._evaluate(formula, self.mini)

    def _evaluate(self, formula: str, cells: Mapping[Place, Cell]) -> Evaluated | str:
        try:
            found = evaluate(formula, cells)
        except MissingCell as error:
            whys = [self.excluded[place] for place in error.places if place in self.excluded and cells is self.real]
            return "; ".join([str(error), *whys])
        except DataError as error:
            return str(error)
        return "; ".join(problems(found.cells)) or found


def _exclusion(cell: Cell) -> str:
    """Why a cell is no evidence; empty if it is."""
    if not cell.complete:
        return f"{cell.run_id} lacks samples: {'; '.join(cell.notes)}"
    published = published_backbone(cell.system)
    if not cell.mini and published and cell.backbone != published:
        return f"{cell.run_id} is a {cell.label} of {cell.backbone}, not of {published}"
    return ""


def _roles(cell: Cell) -> list[Cell]:
    """A mini cell under the names of the systems that it stands for."""
    roles = _MINI_ROLES.get(cell.system, (cell.system, f"{cell.system}+{_RETRAINED}"))
    return [replace(cell, system=role) for role in roles]


def read_claims() -> list[Claim]:
    """The claims in the order of the paper.

    Raises:
        ConfigError: a row contradicts itself.
    """
    names = [one.name for one in fields(Claim)]
    return [Claim(**{name: row[name] for name in names}) for row in read_published("claims.csv")]  # type: ignore[arg-type]


def judge(claim: Claim, evidence: Evidence) -> Judged:
    """Computes a claim's formula on published and measured cells, and compares."""
    if not claim.formula:
        return Judged(
            claim=claim, on_published=None, follows=None, measured=None, verdict=NOT_MEASURED, reason=claim.note
        )
    printed = evaluate(claim.formula, grid(published_cells(claim.artefacts.split()))).interval.value
    follows = claim.follows(printed)
    measured = evidence.on_benchmarks(claim.formula)
    # A figure without a neutral value, as an accuracy itself, has no direction to agree with.
    mini = evidence.on_mini(claim.formula) if claim.neutral else ""
    interval = None if isinstance(measured, str) else measured.interval
    if not follows:
        verdict, reason = DOES_NOT_FOLLOW, f"it gives {printed:.6g}: {claim.note}"
    elif isinstance(measured, str):
        verdict, reason = NOT_MEASURED, measured
    else:
        verdict, reason = _compared(claim, measured)
    return Judged(
        claim=claim,
        on_published=printed,
        follows=follows,
        measured=interval,
        verdict=verdict,
        reason=reason,
        mini=None if isinstance(mini, str) else mini.interval,
        mini_verdict="" if isinstance(mini, str) else _direction(claim, mini.interval),
    )


def _compared(claim: Claim, measured: Evaluated) -> tuple[str, str]:
    interval = measured.interval
    runs = sorted({cell.run_id for cell in measured.cells})
    machines = sorted({cell.hardware for cell in measured.cells if cell.metric in SPEED_METRICS})
    whence = f"from {', '.join(runs)}" + (f" on {machines[0]}" if machines else "")
    if claim.holds(interval):
        return REPRODUCED, whence
    return NOT_REPRODUCED, f"{'more' if interval.value > float(claim.value) else 'less'} than is claimed, {whence}"


def _direction(claim: Claim, mini: Interval) -> str:
    """Whether the mini tasks lie on the claimed side of the neutral value."""
    neutral = float(claim.neutral)
    claims_more = claim.reading == "above" or float(claim.value) > neutral
    low = mini.value if math.isnan(mini.low) else mini.low
    high = mini.value if math.isnan(mini.high) else mini.high
    if low <= neutral <= high:
        return OPEN
    return AGREES if (low > neutral) == claims_more else DISAGREES


@dataclass(frozen=True, kw_only=True, slots=True)
class Average:
    """A speed-up by one rule of averaging.

    Attributes:
        claim: the claim that states a speed-up.
        baseline: what it is over.
        tasks: over which tasks.
        rule: how it is averaged.
        on_published: by the paper's cells; None where the paper prints none.
        gives_claim: whether that is what is claimed.
        measured, mini: by measured cells, and by those of the mini look-alikes.
    """

    claim: Claim
    baseline: str
    tasks: str
    rule: str
    on_published: float | None
    gives_claim: bool
    measured: Interval | None
    mini: Interval | None


ALL_TASKS = "all seven"
_TASK_SETS = {ALL_TASKS: TASKS, "without arc_challenge": tuple(task for task in TASKS if task != "arc_challenge")}


def averages(claim: Claim, evidence: Evidence) -> list[Average]:
    """Every average of a claimed speed-up, over each baseline and over all of them together; none if it states none."""
    if not claim.speedup:
        return []
    ours, theirs = (side.strip() for side in claim.speedup.split("|"))
    baselines = list(dict.fromkeys([theirs, *theirs.split()]))
    cells = grid(published_cells(claim.artefacts.split()))
    found = []
    for baseline in baselines:
        for tasks, names in _TASK_SETS.items():
            for rule, formula in _rules(ours, baseline, " ".join(names)).items():
                try:
                    printed = evaluate(formula, cells).interval.value
                except MissingCell:
                    printed = None
                measured, mini = evidence.on_benchmarks(formula), evidence.on_mini(formula)
                average = Average(
                    claim=claim,
                    baseline=baseline,
                    tasks=tasks,
                    rule=rule,
                    on_published=printed,
                    gives_claim=printed is not None and claim.follows(printed),
                    measured=None if isinstance(measured, str) else measured.interval,
                    mini=None if isinstance(mini, str) else mini.interval,
                )
                found.append(average)
    return found


def _rules(ours: str, theirs: str, tasks: str) -> Mapping[str, str]:
    """Name -> formula. Total time: of one request a task, or of each baseline's in turn."""
    fast, slow = f"tps('{ours}', '{tasks}')", f"tps('{theirs}', '{tasks}')"
    times = [f"sum(latency_mean('{name}', '{tasks}'))" for name in (theirs, ours)]
    return {
        "mean of ratios": f"mean({fast} / {slow})",
        "ratio of means": f"mean({fast}) / mean({slow})",
        "geometric mean": f"gmean({fast} / {slow})",
        "median of ratios": f"median({fast} / {slow})",
        "total time": f"{times[0]} / {len(theirs.split())} / {times[1]}",
    }


def judge_all(measured: Sequence[Cell]) -> tuple[list[Judged], list[Average]]:
    """Every claim and every average of a claimed speed-up.

    Args:
        measured: cells of any runs; none is fine.

    Raises:
        StoreError: two runs measured the same.
    """
    evidence = Evidence(measured)
    known = read_claims()
    return [judge(claim, evidence) for claim in known], [one for claim in known for one in averages(claim, evidence)]
