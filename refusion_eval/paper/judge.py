"""Judges the claims of the paper by its own tables and by measured figures.

A claim is judged only by measured figures of the same systems (name and backbone) on the same benchmarks, of which
every item was asked and answered, with the prompts of the paper's release; speed has to be of one machine with the
paper's GPU and without fused forwards, which the paper's algorithm does not have. Mini look-alikes are kept apart: they
only show whether they point in the same direction.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from refusion_eval.benchmarks import BENCHMARKS, RELEASE
from refusion_eval.errors import DataError
from refusion_eval.metrics import bootstrap_mean
from refusion_eval.paper.curves import ALL_FORMULAS, SWEET_SPOTS, in_sweet_spot
from refusion_eval.paper.formulas import (
    MARGIN,
    NOTHING,
    Computed,
    Formula,
    MissingMeasurement,
    compute,
    speedup_averages,
)
from refusion_eval.paper.names import task_title
from refusion_eval.paper.statements import Claim, read_claims
from refusion_eval.paper.studies import CHOSEN, GRADED, OF_SOME_ITEMS
from refusion_eval.results.differences import not_in_turns
from refusion_eval.results.measurement import GENERATE, TASKS, Measurement, MeasurementKey, by_key, problems
from refusion_eval.results.metric_list import SPEED_METRICS
from refusion_eval.results.published import published_backbone, published_measurements

REPRODUCED = "reproduced"
NOT_DECIDED = "not decided"
NOT_REPRODUCED = "not reproduced"
NOT_MEASURED = "not measured"
DOES_NOT_FOLLOW = "does not follow from the paper's own table"
NO_FORMULA = "no formula over cells"
OTHER_PROMPTS = "measured with other prompts"
OTHER_GPU = "measured on another GPU"
ARITHMETIC = "right, by arithmetic"

AGREES, DISAGREES, OPEN = "agrees in direction", "disagrees in direction", "direction not decided"
ONE_ROUND = "speed of one round only"

PAPER_GPU = "A100"

# On the mini tasks the tiny backbone of the embedded family stands where the paper has Qwen3-8B, its fine-tune where
# that is retrained, and each other fine-tune where the paper has a published or a retrained system.
_RETRAINED = "retrained"
_MINI_ROLES = {
    "autoregressive": ("qwen3",),
    f"autoregressive+{GENERATE}": (f"qwen3+{GENERATE}",),
    "autoregressive_sft": (f"qwen3+{_RETRAINED}",),
}

ALL_TASKS = "all seven"
_TASK_SETS = {ALL_TASKS: TASKS, "without arc_challenge": tuple(task for task in TASKS if task != "arc_challenge")}


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedClaim:
    """A claim with its verdict, the result of its formula on the paper's own numbers, and whether that is printed.

    `beside` says of a sweet spot what share of its values is also better than the other autoregressive runs.
    """

    claim: Claim
    on_published: float | None = None
    follows: bool | None = None
    measured: Computed = NOTHING
    verdict: str
    reason: str
    mini: Computed = NOTHING
    mini_verdict: str = ""
    beside: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Average:
    """A claimed speed-up, averaged by one rule; `on_published` is None where the paper does not print the numbers."""

    claim: Claim
    baseline: str
    tasks: str
    rule: str
    on_published: float | None
    gives_claim: bool
    measured: Computed
    mini: Computed


class Evidence:
    """Measured figures, sorted by what they may be used for. Raises StoreError if two runs measured the same figure."""

    def __init__(self, measurements: Iterable[Measurement], margin: float = MARGIN) -> None:
        self._margin = margin
        self._excluded: dict[MeasurementKey, str] = {}
        real, mini = [], []
        for measurement in measurements:
            if reason := _exclusion(measurement):
                self._excluded[measurement.key] = reason
            elif measurement.mini:
                mini += _roles(measurement)
            else:
                real.append(measurement)
        self._real, self._mini = by_key(real), _over_rounds(mini)

    def baselines(self, setting: str, *, mini: bool) -> dict[str, str]:
        """System -> label of the autoregressive runs that a sweep of a setting measured beside its points."""
        figures = self._mini if mini else self._real
        runs = [(one.label, key.partition("@")) for (key, _, _), one in figures.items()]
        return {system: label for label, (system, _, pair) in runs if pair == setting}

    def compute(self, formula: Formula, *, mini: bool = False) -> Computed:
        """Result of a formula on the real benchmarks, or on the mini look-alikes."""
        try:
            result = compute(formula, self._mini if mini else self._real, self._margin)
        except MissingMeasurement as error:
            excluded = [self._excluded[key] for key in error.keys if key in self._excluded and not mini]
            return Computed(reason="; ".join([str(error), *excluded]))
        except DataError as error:
            return Computed(reason=str(error))
        reasons = problems(result.measurements) + _out_of_turn(result.measurements)
        return Computed(reason="; ".join(reasons)) if reasons else result


def _out_of_turn(measurements: Sequence[Measurement]) -> list[str]:
    """Why a formula must not be computed from speeds of systems that did not take turns; empty if it may."""
    first: dict[tuple[str, str], Measurement] = {}
    reasons: dict[str, None] = {}
    for one in measurements:
        if one.origin == "measured" and one.metric in SPEED_METRICS:
            other = first.setdefault((one.benchmark, one.metric), one)
            # A speed of one round has no direction, which its verdict says.
            if other is not one and (reason := not_in_turns(one, other, of_sweep=True)):
                reasons[f"{other.run_id} and {one.run_id}: {reason}"] = None
    return list(reasons)


def judge_all(measured: Sequence[Measurement], margin: float = MARGIN) -> tuple[list[JudgedClaim], list[Average]]:
    """Judges every claim and computes every average of a claimed speed-up, with measurements or without.

    The margin, in points of score, is that of the sweet spots.
    """
    evidence = Evidence(measured, margin)
    claims = read_claims()
    return [judge(claim, evidence) for claim in claims], [
        average for claim in claims for average in averages(claim, evidence)
    ]


def judge(claim: Claim, evidence: Evidence) -> JudgedClaim:
    """Computes the formula of a claim on published and measured figures and compares the results with the claim."""
    if not claim.formula:
        reason = f"{claim.note}; see {claim.look}" if claim.look else claim.note
        return JudgedClaim(claim=claim, verdict=NO_FORMULA, reason=reason)
    formula = ALL_FORMULAS[claim.id]
    printed = _on_published(claim, formula)
    follows = None if printed is None else claim.follows(printed.interval.value)
    measured = NOTHING if printed is not None and not printed.measurements else evidence.compute(formula)
    # A figure without a neutral value, for example an accuracy itself, has no direction to agree with.
    mini = evidence.compute(formula, mini=True) if claim.neutral else NOTHING
    if printed is not None and not follows:
        verdict, reason = DOES_NOT_FOLLOW, f"it gives {printed.interval.value:.6g}: {claim.note}"
    elif printed is not None and not printed.measurements:
        verdict, reason = ARITHMETIC, claim.note
    elif not measured.is_defined:
        verdict, reason = NOT_MEASURED, measured.reason
    else:
        verdict, reason = _compared(claim, measured)
    beside = [_beside(claim, evidence, found, mini=found is mini) for found in (measured, mini) if found.is_defined]
    return JudgedClaim(
        claim=claim,
        on_published=None if printed is None else printed.interval.value,
        follows=follows,
        measured=measured,
        verdict=verdict,
        reason=reason,
        mini=mini,
        mini_verdict=_direction(claim, mini) if mini.is_defined else "",
        beside=" ".join(filter(None, beside)),
    )


def _beside(claim: Claim, evidence: Evidence, against_backbone: Computed, *, mini: bool) -> str:
    """Of a sweet spot: the share of its values against the backbone, and against each autoregressive run at once."""
    if claim.id not in SWEET_SPOTS:
        return ""
    setting, low, high = SWEET_SPOTS[claim.id]
    baselines = evidence.baselines(setting, mini=mini)
    against_all = evidence.compute(in_sweet_spot(claim.id, " ".join(baselines)), mini=mini)
    benchmark = against_backbone.measurements[0].benchmark
    swept = f"of the swept values of {setting} from {low:g} to {high:g}, the paper's range,"
    text = f"On {task_title(benchmark, mini)} {_share(against_backbone)} {swept} are shown to be in the sweet spot "
    text += f"against {baselines['qwen3']}, and "
    if against_all.is_defined and len(baselines) > 1:
        text += f"{_share(against_all)} against each of {', '.join(dict.fromkeys(baselines.values()))}."
    else:
        text += f"{against_all.reason or 'no further autoregressive run was measured beside them'}."
    return text + (f" {CHOSEN}" if mini and benchmark == GRADED else "")


def _share(of_values: Computed) -> str:
    value, high = of_values.interval.value, of_values.interval.high
    return f"{value:.3g} %" + (f" (at most {high:.3g} %)" if high > value else "")


def _on_published(claim: Claim, formula: Formula) -> Computed | None:
    """The result of a formula on the paper's figures; None if it needs figures that the paper does not print."""
    try:
        return compute(formula, by_key(published_measurements(claim.artefacts.split())) if claim.artefacts else {})
    except MissingMeasurement:
        return None


def averages(claim: Claim, evidence: Evidence) -> list[Average]:
    """Every average of a claimed speed-up: for each set of tasks and rule, over each baseline and over all of them."""
    if not claim.speedup:
        return []
    fast, slow = (side.strip() for side in claim.speedup.split("|"))
    published = by_key(published_measurements(claim.artefacts.split()))
    results = []
    for baseline in dict.fromkeys([slow, *slow.split()]):
        for tasks, names in _TASK_SETS.items():
            for rule, formula in speedup_averages(fast, baseline, " ".join(names)).items():
                try:
                    printed = compute(formula, published).interval.value
                except MissingMeasurement:
                    printed = None
                average = Average(
                    claim=claim,
                    baseline=baseline,
                    tasks=tasks,
                    rule=rule,
                    on_published=printed,
                    gives_claim=printed is not None and claim.follows(printed),
                    measured=evidence.compute(formula),
                    mini=evidence.compute(formula, mini=True),
                )
                results.append(average)
    return results


def _exclusion(measurement: Measurement) -> str:
    """Why a measurement is not evidence; empty if it is."""
    if not measurement.complete:
        return f"{measurement.run_id} lacks samples: {'; '.join(caution.note for caution in measurement.cautions)}"
    if measurement.mini:
        return ""
    needs_all = measurement.benchmark in BENCHMARKS and measurement.metric not in OF_SOME_ITEMS
    num_items = BENCHMARKS[measurement.benchmark].source.num_rows if needs_all else 0
    if measurement.n < num_items:
        return f"{measurement.run_id} has {measurement.n} of the {num_items} items of {measurement.benchmark}"
    if measurement.fused:
        return f"{measurement.run_id} has fused forwards, which the paper's algorithm has not; run it with fuse=false"
    backbone = published_backbone(measurement.system)
    if backbone and measurement.backbone != backbone:
        return f"{measurement.run_id} is a {measurement.label} of {measurement.backbone}, not of {backbone}"
    return ""


def _roles(measurement: Measurement) -> list[Measurement]:
    """A mini figure under the names of the systems that it stands for."""
    system, at, point = measurement.system.partition("@")
    roles = _MINI_ROLES.get(system, (system, f"{system}+{_RETRAINED}"))
    return [replace(measurement, system=f"{role}{at}{point}") for role in roles]


def _over_rounds(measurements: Sequence[Measurement]) -> dict[MeasurementKey, Measurement]:
    """Figures by their keys; speeds of several runs of a system become one, with an interval over the runs."""
    groups: dict[MeasurementKey, list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault(measurement.key, []).append(measurement)
    result: dict[MeasurementKey, Measurement] = {}
    for key, rounds in groups.items():
        of_one_protocol = len({entry.protocol for entry in rounds}) == 1
        if len(rounds) > 1 and rounds[0].metric in SPEED_METRICS and of_one_protocol:
            interval = bootstrap_mean([entry.value for entry in rounds]).interval()
            result[key] = replace(
                rounds[0],
                run_id="|".join(entry.run_id for entry in rounds),
                value=interval.value,
                ci_low=interval.low,
                ci_high=interval.high,
                num_rounds=len(rounds),
                by_item=None,
            )
        elif len({entry.value for entry in rounds}) == 1 and of_one_protocol:
            result[key] = rounds[0]
        else:
            result |= by_key(rounds)  # names the runs and refuses them
    return result


def _compared(claim: Claim, measured: Computed) -> tuple[str, str]:
    """Verdict and reason of a claim whose formula follows from the paper's figures and has a measured result."""
    interval = measured.interval
    used = measured.measurements
    others = sorted({f"{entry.prompts} in {entry.run_id}" for entry in used if entry.prompts != RELEASE})
    if others:
        return OTHER_PROMPTS, f"{', '.join(others)}; the paper's are those of --prompts {RELEASE}"
    runs = sorted({entry.run_id for entry in used})
    machines = sorted({entry.hardware for entry in used if entry.metric in SPEED_METRICS})
    origin = f"from {', '.join(runs)}" + (f" on {machines[0]}" if machines else "")
    if elsewhere := [machine for machine in machines if PAPER_GPU not in machine]:
        return OTHER_GPU, f"on {elsewhere[0] or 'an unnamed machine'}, and the paper's speed is that of an {PAPER_GPU}"
    if claim.leaves_open(interval):
        return NOT_DECIDED, f"[{interval.low:.4g}, {interval.high:.4g}] does not tell, {origin}"
    if claim.holds(interval):
        return REPRODUCED, origin
    return NOT_REPRODUCED, f"{'more' if interval.value > float(claim.value) else 'less'} than is claimed, {origin}"


def _direction(claim: Claim, mini: Computed) -> str:
    """Whether the mini tasks lie on the claimed side of the neutral value; a claim of that value claims more."""
    if any(entry.metric in SPEED_METRICS and entry.num_rounds < 2 for entry in mini.measurements):
        return ONE_ROUND
    neutral = float(claim.neutral)
    claims_more = claim.reading == "above" or float(claim.value) >= neutral
    low, high = mini.interval.bounds
    if low <= neutral <= high:
        return OPEN
    return AGREES if (low > neutral) == claims_more else DISAGREES
