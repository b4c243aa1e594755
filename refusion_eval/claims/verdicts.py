"""What published and measured cells say about each claim of the paper."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from refusion_eval.claims.averages import Average, averages
from refusion_eval.claims.evidence import Evidence
from refusion_eval.claims.formula import Evaluated, evaluate
from refusion_eval.claims.statements import Claim, read_claims
from refusion_eval.metrics.bootstrap import Interval
from refusion_eval.results.figure import SPEED_METRICS, Figure, by_key
from refusion_eval.results.published import published_figures

REPRODUCED = "reproduced"
CONSISTENT = "consistent, too imprecise"
NOT_REPRODUCED = "not reproduced"
NOT_MEASURED = "not measured"
DOES_NOT_FOLLOW = "does not follow from the paper's own table"
NO_FORMULA = "no formula over cells"

AGREES, DISAGREES, OPEN = "agrees in direction", "disagrees in direction", "direction open"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What cells say about a claim.

    Attributes:
        claim: the claim.
        on_published: what the formula gives on the paper's own cells; None without a formula.
        follows: whether that is what is printed.
        measured: what it gives on measured cells; None where one is missing.
        verdict: one of the six above.
        reason: why.
        mini: what it gives on the mini look-alikes, where these can point the same way at all.
        mini_verdict: whether these point the same way; empty if nothing can be said.
        items: benchmark items of the smallest cell that `measured` rests on; 0 for none.
        mini_items: likewise of `mini`.
        mini_fused: whether fused forwards, which the paper's algorithm has not, are in `mini`.
    """

    claim: Claim
    on_published: float | None
    follows: bool | None
    measured: Interval | None
    verdict: str
    reason: str
    mini: Interval | None = None
    mini_verdict: str = ""
    items: int = 0
    mini_items: int = 0
    mini_fused: bool = False


def judge(claim: Claim, evidence: Evidence) -> Judged:
    """Computes a claim's formula on published and measured cells, and compares."""
    if not claim.formula:
        reason = f"{claim.note}; see {claim.look}" if claim.look else claim.note
        return Judged(claim=claim, on_published=None, follows=None, measured=None, verdict=NO_FORMULA, reason=reason)
    printed = evaluate(claim.formula, by_key(published_figures(claim.artefacts.split()))).interval.value
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
        items=0 if isinstance(measured, str) else measured.fewest_items,
        mini_items=0 if isinstance(mini, str) else mini.fewest_items,
        mini_fused=not isinstance(mini, str) and mini.fused,
    )


def _compared(claim: Claim, measured: Evaluated) -> tuple[str, str]:
    interval = measured.interval
    runs = sorted({cell.run_id for cell in measured.cells})
    machines = sorted({cell.hardware for cell in measured.cells if cell.metric in SPEED_METRICS})
    whence = f"from {', '.join(runs)}" + (f" on {machines[0]}" if machines else "")
    if claim.leaves_open(interval):
        return CONSISTENT, f"[{interval.low:.4g}, {interval.high:.4g}] does not tell, {whence}"
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


def judge_all(measured: Sequence[Figure]) -> tuple[list[Judged], list[Average]]:
    """Every claim and every average of a claimed speed-up.

    Args:
        measured: cells of any runs; none is fine.

    Raises:
        StoreError: two runs measured the same.
    """
    evidence = Evidence(measured)
    known = read_claims()
    return [judge(claim, evidence) for claim in known], [one for claim in known for one in averages(claim, evidence)]
