"""`Measurement`: a number of one system on one task with its interval; tables, plots and claims are made of these.

A measurement is never averaged or filled in by whoever shows it. It says what it rests on, and `problems` says which
measurements must not stand side by side.
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

from refusion_eval.benchmarks import BENCHMARKS, OURS, RELEASE
from refusion_eval.errors import DataError, StoreError
from refusion_eval.metrics import Interval
from refusion_eval.runs.model_args import decoder_of_system, published_systems, system_of_label
from refusion_eval.store.records import STOCK_GENERATE

Origin = Literal["published", "measured"]
MeasurementKey = tuple[str, str, str]  # system, benchmark, metric

# The seven benchmarks in the order of the paper's tables.
TASKS = tuple(name for name, benchmark in BENCHMARKS.items() if benchmark.in_paper)
# `Measurement.task` and `Measurement.benchmark` of a mean over tasks.
MEAN_TASK, AVERAGE = "mean", "average"

ACCURACY, PASS_AT_1 = "accuracy", "pass@1"
SCORES = (ACCURACY, PASS_AT_1)
# Ratio to the TPS of this engine's autoregressive loop, and to that of transformers' `generate`.
SPEEDUP, SPEEDUP_STOCK = "speedup", "speedup_stock"
# Energy of a response and of a token, where the device has a counter.
JOULES, JOULES_PER_TOKEN = "joules_mean", "joules_per_token"
# Share of the texts that end inside a thinking block.
CUT_IN_THOUGHT = "cut_in_thought"
# Metrics that depend on the machine.
SPEED_METRICS = (
    *("tps", "tps_mean", "decode_tps", "prefill_seconds", "latency_mean", "latency_p50", "latency_p95"),
    *(SPEEDUP, SPEEDUP_STOCK, "forwards_per_second", "mbu", "one_token_share", JOULES, JOULES_PER_TOKEN),
)
# Metrics that change where forwards are fused; tokens and scores do not.
FORWARD_METRICS = (*SPEED_METRICS, "tpf", "forwards_mean")
# Order of the metrics of a task; others follow by name.
METRIC_ORDER = (ACCURACY, PASS_AT_1, "extracted", *SPEED_METRICS, "tpf", "tpf_release", "tokens_mean", "forwards_mean")

# A setting of a mean over tasks that differ in it.
VARIES = "varies"

# Sentences, or parts of them, that both `Measurement.notes` and tables have.
MINI_NOTE = "synthetic look-alike, not the real benchmark"
SLOWED = "lower than need be: "
REFUSED_NOTE = "prompts were refused, for example as too long for the context, and are in no figure"
UNISOLATED = "programs ran without isolation (--sandbox none), so their verdicts can be forged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A number of one system on one task with its interval and everything it rests on.

    Attributes:
        system: key of the system in tasks/settings/systems.toml. A variant has its name after a plus sign
            (`refusion+recompute_kv`); `beside_published` may add a backbone.
        label: name of the system as the run or the paper prints it.
        decoder: name of the decoder; empty for published measurements, and where a file does not say it.
        benchmark: benchmark, `AVERAGE` for a mean over tasks, or the task if it belongs to no benchmark.
        num_tasks: tasks that it is a mean over, 1 for a single task.
        value: the number; NaN where nothing could be computed.
        ci_low: lower bound of the 95% interval by item; NaN for none (the paper has none).
        errors: samples that failed and are in no measurement.
        num_refused: those of them that fail at every attempt, for example because the prompt exceeds the context.
        batch_size: requests decoded at the same time; several joined by `|`; empty where it is not published.
        settings: decoder settings in force as text, or what is published beside the number.
        run_id: name of the run directory; empty if published.
        artefact: table or figure of the paper that it was published in (table1, ...); empty if measured.
        defect: what is wrong with a published number; empty for nothing.
        prompts: what the items were asked with: ours, release (those of ReFusion's release), or other; several joined
            by `|`.
        same_decode_as: another run of a sweep, of other settings, with the same tokens and forwards for every item;
            empty for none.
        slowed_by: what made the speed lower than it need be, sentences joined by `|`; empty for nothing.
        items: digest of the items that it rests on; empty if published or read from a file.
    """

    origin: Origin
    system: str
    label: str
    backbone: str = ""
    decoder: str = field(default="", compare=False)
    benchmark: str
    task: str = ""
    task_version: str = ""
    mini: bool = False
    num_tasks: int = 1
    metric: str
    value: float
    ci_low: float = math.nan
    ci_high: float = math.nan
    unit: str = ""
    n: int = 0
    samples: int = 0
    errors: int = 0
    finished: bool = True
    scored: bool = True
    isolated: bool = True
    batch_size: str = ""
    dtype: str = ""
    device: str = ""
    attention: str = ""
    hardware: str = ""
    forwards: int = 0
    tokens: int = 0
    seconds: float = 0.0
    settings: Mapping[str, str] = field(default_factory=dict)
    run_id: str = ""
    artefact: str = ""
    defect: str = ""
    notes: tuple[str, ...] = ()
    prompts: str = OURS
    num_refused: int = 0
    num_cut: int = 0
    num_rounds: int = 1
    same_decode_as: str = ""
    slowed_by: str = ""
    items: str = field(default="", compare=False)

    @property
    def key(self) -> MeasurementKey:
        """System, benchmark and metric, of which a table has one measurement."""
        return self.system, self.benchmark, self.metric

    @property
    def base_system(self) -> str:
        """Key of the system without its variants."""
        return base_of_key(self.system)

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants in the system's key."""
        return tuple(without_backbone(self.system).split("+")[1:])

    @property
    def decoded_by(self) -> str:
        """Name of the decoder: as the run recorded it, else that of the system; empty where neither is known.

        A user may give a run any name, also that of another system, so the name of a run is asked last.
        """
        return self.decoder or decoder_of_system(self.base_system)

    @property
    def is_autoregressive(self) -> bool:
        """Whether every token was decoded by a forward of its own, from left to right, by this engine or another."""
        return self.decoded_by in ("autoregressive", STOCK_GENERATE)

    @property
    def generate(self) -> bool:
        """Whether transformers' own loop decoded."""
        return GENERATE in self.variants

    @property
    def interval(self) -> Interval:
        """Value and bounds."""
        return Interval(self.value, self.ci_low, self.ci_high, self.n)

    @property
    def has_interval(self) -> bool:
        """Whether both bounds of the interval are known."""
        return math.isfinite(self.ci_low) and math.isfinite(self.ci_high)

    @property
    def is_mean(self) -> bool:
        """Whether this is a mean over tasks."""
        return self.benchmark == AVERAGE

    @property
    def complete(self) -> bool:
        """Whether every sample that was asked for is in the measurement."""
        return self.finished and self.scored and not self.errors

    @property
    def decoded_fused(self) -> bool:
        """Whether forwards were fused, so that they verify and plan at once, which the paper's algorithm does not.

        A mean is fused if any of its tasks is.
        """
        fuse = self.settings.get("fuse", "false")
        never = ("release_compatible", "serial")
        by_default = fuse == "null" and not any(self.settings.get(name) == "true" for name in never)
        return fuse in ("true", VARIES) or by_default

    @property
    def fused(self) -> bool:
        """Whether fused forwards are in the number. In scores they never are, because fusing changes no token."""
        return self.metric in FORWARD_METRICS and self.decoded_fused

    @property
    def note(self) -> str:
        """All that a reader must know, as the `note` column of the CSV has it."""
        return "; ".join((*([MINI_NOTE] if self.mini else []), *self.notes))


def by_key(measurements: Iterable[Measurement]) -> dict[MeasurementKey, Measurement]:
    """Measurements by (system, benchmark, metric). Raises StoreError if one would hide another."""
    result: dict[MeasurementKey, Measurement] = {}
    for measurement in measurements:
        other = result.setdefault(measurement.key, measurement)
        if other is not measurement:
            sources = " and ".join(sorted(each.run_id or each.artefact for each in (other, measurement)))
            raise StoreError(f"{' '.join(measurement.key)} is there twice ({sources}); leave one of them out")
    return result


def problems(measurements: Sequence[Measurement]) -> list[str]:
    """Why some measurements must not stand in one table, one sentence each; empty if they may.

    Those of a benchmark have to be of one task version and prompt, and all real or all mini; speed has to be of one
    machine. Published speed belongs to the paper's machine and is not checked against the speed of this one.
    """
    measured = [entry for entry in measurements if entry.origin == "measured"]
    sentences = []
    for benchmark in sorted({entry.benchmark for entry in measured}):
        group = [entry for entry in measured if entry.benchmark == benchmark]
        versions = {entry.task_version: entry.run_id for entry in group if entry.task_version}
        if len(versions) > 1 and benchmark != AVERAGE:
            sentences.append(f"{benchmark} is there in several versions ({_listed(versions)}); run all systems on one")
        prompts = {entry.prompts: entry.run_id for entry in group}
        if len(prompts) > 1:
            sentences.append(f"{benchmark} was asked with several prompts ({_listed(prompts)}); run all systems on one")
        if len({entry.mini for entry in group}) > 1:
            sentences.append(f"{benchmark} is there as benchmark and as mini look-alike; show them in two tables")
    machines = {entry.hardware: entry.run_id for entry in measured if entry.metric in SPEED_METRICS}
    if len(machines) > 1:
        sentences.append(f"{speeds_of(_listed(machines))}; measure all on one")
    return sentences


def speeds_of(machines: str) -> str:
    """The beginning of a refusal of speeds that several machines measured."""
    return f"speeds from different machines ({machines}) cannot be compared"


def require_comparable(measurements: Sequence[Measurement]) -> None:
    """Raises StoreError if `problems` names any."""
    if sentences := problems(measurements):
        raise StoreError("; ".join(sentences))


def _listed(run_ids: Mapping[str, str]) -> str:
    return ", ".join(f"{value} in {run_id}" for value, run_id in sorted(run_ids.items()))


# The variant of ReFusion whose forwards the user asked to be fused.
FUSED = "fused"
# Name of a variant of a system -> the decoder setting that makes it. The paper's left-to-right decoding is serial.
VARIANTS: Mapping[str, tuple[str, str]] = {
    "recompute_kv": ("recompute_kv", "true"),
    "left_to_right": ("serial", "true"),
    "slots_in_order": ("order", "left_to_right"),
    "slots_at_random": ("order", "random"),
    FUSED: ("fuse", "true"),
}
# The variant of systems that transformers' own loop decodes.
GENERATE = "generate"


def published_path() -> Path:
    """The folder with published.csv, claims.csv and their companions. Raises DataError if it is missing."""
    # An installed wheel carries it inside the package; a source checkout has it in results/.
    package = Path(__file__).resolve().parent.parent
    candidates = (package / "published", package.parent / "results" / "published")
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise DataError(f"no published results at {candidates[0]} or {candidates[1]}; reinstall refusion_eval")


@cache
def read_published(name: str) -> tuple[dict[str, str], ...]:
    """The rows of one of the CSV files, every value as it is printed. Raises DataError if it cannot be read."""
    path = published_path() / name
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            return tuple(csv.DictReader(stream))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); reinstall refusion_eval") from error


def published_measurements(artefacts: Sequence[str] = ()) -> list[Measurement]:
    """The published numbers, in the order of their tables, of all or of some tables and figures."""
    rows = read_published("published.csv")
    return [_published(row) for row in rows if row["value"] and (not artefacts or row["artefact"] in artefacts)]


def _published(row: Mapping[str, str]) -> Measurement:
    pairs = (part.partition("=") for part in row["settings"].split("; ") if part)
    settings = {name: value for name, _, value in pairs}
    return Measurement(
        origin="published",
        system=row["system"],
        label=row["label"],
        backbone=row["backbone"],
        benchmark=row["task"],
        task=row["task"],
        metric=row["metric"],
        value=float(row["value"]),
        unit=row["unit"],
        artefact=row["artefact"],
        prompts=RELEASE,
        defect=row["defect"],
        hardware=settings.get("gpu", ""),
        batch_size=settings.get("batch_size", ""),
        settings=settings,
        notes=tuple(filter(None, (row["note"],))),
    )


_ON_BACKBONE = " on "


def system_key(label: str, backbone: str, settings: Mapping[str, str], *, generate: bool) -> str:
    """The key of a measured system.

    A label that the paper prints stands for the paper's system. A decoder's own label (AR, LLaDA) stands for the
    published system of that decoder and backbone, or else for the decoder. Brackets at the end of a label name a
    settings table, which makes no other system; `generate` does, and so do the settings in `VARIANTS`.
    """
    plain, _, _ = label.removesuffix(")").rpartition(" (") if label.endswith(")") else (label, "", "")
    key = _keys_by_label().get(label) or _keys_by_label().get(plain) or _key_of_decoder(plain, backbone)
    variants = [
        name for name, (setting, value) in VARIANTS.items() if f"+{name}" not in key and settings.get(setting) == value
    ]
    variants += [GENERATE] if generate else []
    return "+".join((key, *variants))


@cache
def published_backbone(system: str) -> str:
    """The model that a published system was made from; empty if the key is not a published one or names no model."""
    return next((row["backbone"] for row in read_published("published.csv") if row["system"] == system), "")


def without_backbone(system: str) -> str:
    """The key of a system without the backbone that `beside_published` added to it."""
    return system.partition(_ON_BACKBONE)[0]


def base_of_key(system: str) -> str:
    """The key of a system without its variants and its backbone."""
    return without_backbone(system).partition("+")[0]


def beside_published(measurement: Measurement) -> Measurement:
    """The measurement as it may stand beside published ones.

    On a real benchmark it is a published system's only if its checkpoint was made from the same model. Otherwise the
    system gets a key and a label of its own, which end with " on BACKBONE".
    """
    published = published_backbone(measurement.system) or published_backbone(measurement.base_system)
    if measurement.origin == "published" or measurement.mini or published in ("", measurement.backbone):
        return measurement
    suffix = f"{_ON_BACKBONE}{measurement.backbone or 'an unnamed model'}"
    return replace(measurement, system=measurement.system + suffix, label=measurement.label + suffix)


@cache
def _keys_by_label() -> Mapping[str, str]:
    """Printed label -> key. Of a label that stands for two systems, the one in systems.toml counts."""
    printed = {row["label"]: row["system"] for row in read_published("published.csv")}
    return printed | {system.label: name for name, system in published_systems().items()}


def _key_of_decoder(label: str, backbone: str) -> str:
    decoder = system_of_label(label)
    candidates = [name for name, system in published_systems().items() if system.decoder == decoder]
    return next((name for name in candidates if published_backbone(name) == backbone), decoder)
