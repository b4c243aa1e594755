"""Every average of a claimed speed-up side by side: which of them gives the claimed figure?"""

from collections.abc import Mapping
from dataclasses import dataclass

from refusion_eval.claims.evidence import Evidence
from refusion_eval.claims.formula import MissingCell, evaluate
from refusion_eval.claims.statements import Claim
from refusion_eval.metrics.bootstrap import Interval
from refusion_eval.results.figure import TASKS, by_key
from refusion_eval.results.published import published_figures


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
        mini_fused: whether fused forwards, which the paper's algorithm has not, are in `mini`.
    """

    claim: Claim
    baseline: str
    tasks: str
    rule: str
    on_published: float | None
    gives_claim: bool
    measured: Interval | None
    mini: Interval | None
    mini_fused: bool


ALL_TASKS = "all seven"
_TASK_SETS = {ALL_TASKS: TASKS, "without arc_challenge": tuple(task for task in TASKS if task != "arc_challenge")}


def averages(claim: Claim, evidence: Evidence) -> list[Average]:
    """Every average of a claimed speed-up, over each baseline and over all of them together; none if it states none."""
    if not claim.speedup:
        return []
    ours, theirs = (side.strip() for side in claim.speedup.split("|"))
    baselines = list(dict.fromkeys([theirs, *theirs.split()]))
    cells = by_key(published_figures(claim.artefacts.split()))
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
                    mini_fused=not isinstance(mini, str) and mini.fused,
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
