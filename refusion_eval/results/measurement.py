"""`Measurement`: a number of one system on one task with its interval; tables, plots and claims are made of these."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from numpy.typing import NDArray

from refusion_eval.benchmarks import BENCHMARKS, OURS
from refusion_eval.errors import StoreError
from refusion_eval.metrics import Interval, Timing
from refusion_eval.results.cautions import MINI_NOTE, Caution, Conditions, cautions, sentences, that_hold
from refusion_eval.results.metric_list import AVG_AT, SCORES, SERVER_METRICS, SPEED_METRICS
from refusion_eval.runs.systems import decoder_of_system
from refusion_eval.store.records import RELEASE_LOOP, STOCK_GENERATE

Origin = Literal["published", "measured"]
MeasurementKey = tuple[str, str, str]  # system, benchmark, metric

# The seven benchmarks in the order of the paper's tables.
TASKS = tuple(name for name, benchmark in BENCHMARKS.items() if benchmark.in_paper)
# `Measurement.task` and `Measurement.benchmark` of a mean over tasks.
MEAN_TASK, AVERAGE = "mean", "average"

# A setting of a mean over tasks that differ in it.
VARIES = "varies"

NO_PROTOCOL = "no protocol"  # in the place of a protocol, of samples beside others that have one


class RowKey(NamedTuple):
    """What the samples behind a row of any view share; of a mean over tasks, what its tasks share.

    Attributes:
        settings: as texts, sorted by name.
        protocol: its hash, because its file may have been renamed; empty for none.
        settings_hash: of what the settings of records do not name too, such as stop strings; empty for means, and for
            numbers that were read from a file.
    """

    task: str
    version: str
    mini: bool
    prompts: str
    settings: tuple[tuple[str, str], ...] = ()
    protocol: str = ""
    settings_hash: str = ""

    @property
    def kind(self) -> tuple[bool, str, str]:
        """What tasks have to share to have a mean."""
        return self.mini, self.prompts, self.protocol

    @property
    def source(self) -> tuple[str, str, bool, str]:
        """Where the items are from: rows that share it and have other numbers of items rest on other items."""
        # Tasks with other prompts have a mean of their own, which is a mean of other tasks.
        return self.task, self.version, self.mini, self.prompts if self.task == MEAN_TASK else ""

    @property
    def names(self) -> tuple[str, str, str, str]:
        """Short texts that tell the row from others of its run, for names of files."""
        return self.task, self.version, self.settings_hash, self.protocol


def hash_of_protocol(label: str | None) -> str:
    """The hash of a protocol NAME@HASH, also where several names with one hash are joined; empty for none."""
    return (label or "").rpartition("@")[2]


def notes_of(measurements: Iterable["Measurement"], *, marked: bool = False) -> list[str]:
    """The sentences about some measurements: those of `cautions.sentences`, and what tokens a forward mean."""
    measured = [entry for entry in measurements if entry.origin == "measured"]
    of_tpf = tpf_notes(entry for entry in measured if entry.metric == "tpf" and entry.samples)
    return [*sentences((entry.conditions for entry in measured), marked=marked), *of_tpf]


def tpf_notes(entries: Iterable["Measurement"]) -> list[str]:
    """Sentences about measured tokens a forward: what a mean of them is, and the most that short responses allow."""
    entries = list(entries)
    lengths = sorted(
        round(entry.tokens / entry.samples)
        for entry in entries
        if entry.decoded_by == "refusion"
        and entry.tokens is not None
        and entry.settings.get("serial") != "true"
        and not entry.is_mean
    )
    spread = f"{lengths[0]} to {lengths[-1]}" if lengths and lengths[0] < lengths[-1] else f"{(lengths or [0])[0]}"
    statements = {
        "Mean TPF: all tokens of the tasks by all their forwards.": any(entry.is_mean for entry in entries),
        f"Responses of ReFusion have {spread} tokens in the mean of a task; none takes fewer than 2 forwards, a plan "
        "and a verification.": lengths,
    }
    return that_hold(statements)


def have_fewer(lines: Iterable[tuple[Hashable, int]]) -> list[bool]:
    """Whether a line, of a source and a number of items, has some items, but fewer than another one of its source."""
    lines = list(lines)
    most = dict(sorted(lines, key=lambda line: line[1]))
    return [0 < num_items < most[source] for source, num_items in lines]


def told_apart(rows: Sequence[tuple[Hashable, Mapping[str, str]]]) -> list[list[str]]:
    """For each row, by its group and what may differ, by name: that in which rows of its group differ, `NAME=TEXT`."""
    always: dict[Hashable, set[tuple[str, str]]] = {}
    for group, values in rows:
        always[group] = always.get(group, set(values.items())) & set(values.items())
    return [
        [f"{name}={text}" for name, text in sorted(values.items()) if (name, text) not in always[group]]
        for group, values in rows
    ]


@dataclass(frozen=True, slots=True)
class ByItem:
    """What a measurement of a run rests on item by item, so that it is compared with others on the same items."""

    items: str  # digest of tasks and items, for a time also of their rounds; equal ones were resampled alike
    replicates: NDArray[Any]  # [RESAMPLES]
    scores: Mapping[str, NDArray[Any]]  # task -> share of right samples of each item, [items]; empty if no score
    timed: Sequence[Timing] = ()  # of a speed: its samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A number with its interval and everything that it rests on; who shows it averages and fills in nothing."""

    origin: Origin
    system: str  # key in tasks/settings/systems.toml, variants after plus signs: `refusion+recompute_kv`
    label: str  # name of the system as the run or the paper prints it
    backbone: str = ""
    decoder: str = field(default="", compare=False)  # empty if published, and where a file does not say it
    benchmark: str  # `AVERAGE` for a mean over tasks; the task if it belongs to no benchmark
    task: str = ""
    task_version: str = ""
    mini: bool = False
    num_tasks: int = 1  # tasks that it is a mean over
    metric: str
    value: float  # NaN where nothing could be computed
    ci_low: float = math.nan  # lower bound of the 95% interval by item; NaN for none, as in the paper
    ci_high: float = math.nan
    unit: str = ""
    n: int = 0  # items
    samples: int = 0
    errors: int = 0  # samples that failed and are in no measurement
    num_unscored: int = 0  # 0 also where only `scored` is known
    unfinished: str = ""  # `26 of 40` samples that were asked for are there; several tasks joined by `|`
    limited: str = ""  # `40 of 100` samples of the task were asked for; several tasks joined by `|`
    missing: str = ""  # of a task without rows, and so without samples, what to do; empty for a mean
    scored: bool = True
    isolated: bool = True
    batch_size: str = ""  # requests decoded at the same time; several joined by `|`; empty if not published
    dtype: str = ""
    device: str = ""
    attention: str = ""
    hardware: str = ""
    card: str = ""  # GPU, else CPU, without threads; several joined by ` | `; empty where it is not known
    forwards: int | None = 0  # None where a server does not tell them
    tokens: int | None = 0  # None where a server does not tell them, as of forwards
    seconds: float = 0.0
    settings: Mapping[str, str] = field(default_factory=dict)  # in force, or what is published beside the number
    run_id: str = ""  # name of the run directory; empty if published
    artefact: str = ""  # table or figure of the paper that it was published in, such as table1; empty if measured
    defect: str = ""  # what is wrong with a published number
    notes: tuple[str, ...] = ()
    prompts: str = OURS  # ours, release (those of ReFusion's release), or other; several joined by `|`
    num_refused: int = 0  # those of the errors that recur at every attempt, such as a prompt beyond the context
    num_cut: int = 0
    one_answer: str = ""  # as of `TaskFacts`
    collapsed: str = ""  # as of `TaskFacts`
    counts_encoder: bool = False  # whether the forwards of an encoder are in the number, which its release leaves out
    num_rounds: int = 1
    num_seeds: int = 1
    seed_sd: float = 0.0  # standard deviation over the seeds of a mean, or over the samples of a score
    same_decode_as: str = ""  # run of a sweep, of other settings, with the same tokens and forwards for every item
    slowed_by: str = ""  # what made the speed lower than it need be, sentences joined by `|`
    server_notes: str = ""  # sentences about a server's answers joined by `|`
    # SHA-256 of the records of its task, a digest of several for a mean; empty if published, not hashed or not in the
    # file.
    records: str = field(default="", compare=False)
    settings_hash: str = field(default="", compare=False)  # empty for a mean, and if published or read from a file
    protocol: str = ""  # NAME@HASH of the protocol of the samples; several joined by `|`; empty for none
    items: str = field(default="", compare=False)  # digest of the items; empty if published or read from a file
    # Digest of all that decides its texts but the seed; empty if published or read from a file.
    all_but_seed: str = field(default="", compare=False)
    command: str = field(default="", compare=False)  # that continues the run; empty if published or read from a file
    by_item: ByItem | None = field(default=None, compare=False, repr=False)  # None where no item is at hand

    @property
    def key(self) -> MeasurementKey:
        return self.system, self.benchmark, self.metric

    @property
    def base_system(self) -> str:
        return base_of_key(self.system)

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(without_backbone(self.system).split("+")[1:])

    @property
    def decoded_by(self) -> str:
        """Name of the decoder; empty where it is not known."""
        # A user may give a run any name, also that of another system, so the name of a run is asked last.
        return self.decoder or decoder_of_system(self.base_system)

    @property
    def is_autoregressive(self) -> bool:
        """Whether every token was decoded by a forward of its own, from left to right, by this engine or another."""
        return self.decoded_by in ("autoregressive", STOCK_GENERATE)

    @property
    def generate(self) -> bool:
        return GENERATE in self.variants

    @property
    def interval(self) -> Interval:
        return Interval(self.value, self.ci_low, self.ci_high, self.n)

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.ci_low) and math.isfinite(self.ci_high)

    @property
    def is_mean(self) -> bool:
        return self.benchmark == AVERAGE

    @property
    def is_mean_of_seeds(self) -> bool:
        return self.num_seeds > 1 and not self.metric.startswith(AVG_AT)

    @property
    def row(self) -> RowKey:
        """The row of its run that it stands in."""
        of_task = (self.task, "" if self.is_mean else self.task_version, self.mini, self.prompts)
        settings, protocol = tuple(sorted(self.settings.items())), hash_of_protocol(self.protocol)
        return RowKey(*of_task, settings, protocol, self.settings_hash)

    @property
    def conditions(self) -> Conditions:
        """All that its cautions are made from."""
        return Conditions.of(
            self,
            place=(self.run_id, self.row),
            is_mean=self.is_mean or self.is_mean_of_seeds,
            is_score=self.metric in SCORES,
            is_speed=self.metric in SPEED_METRICS,
            unscored=str(self.num_unscored or "" if self.scored or self.num_unscored else "some"),
        )

    @property
    def cautions(self) -> list[Caution]:
        return cautions(self.conditions) if self.origin == "measured" else []

    @property
    def finished(self) -> bool:
        return not self.unfinished

    @property
    def complete(self) -> bool:
        """Whether every sample that was asked for is in the measurement."""
        return self.finished and self.scored and not self.errors

    @property
    def full_label(self) -> str:
        """The label with the variants that stand beside their system, as views tell systems apart."""
        holds = {name: name in self.variants for name in BESIDE} | {FUSED: self.decoded_fused}
        return ", ".join((self.label, *(name for name in BESIDE if holds[name])))

    @property
    def decoded_fused(self) -> bool:
        """Whether forwards verified and planned at once, in a mean those of any task."""
        fuse = self.settings.get("fuse", "false")
        never = ("release_compatible", "serial")
        by_default = fuse == "null" and not any(self.settings.get(name) == "true" for name in never)
        return fuse in ("true", VARIES) or by_default

    @property
    def fused(self) -> bool:
        """Whether fused forwards are in the number. In scores they never are, because fusing changes no token."""
        return self.metric in (*SPEED_METRICS, "tpf", "forwards_mean") and self.decoded_fused

    @property
    def note(self) -> str:
        """All that a reader must know, as the `note` column of the CSV has it."""
        said = [caution.note for caution in self.cautions]
        return "; ".join((*([MINI_NOTE] if self.mini else []), *said, *self.notes))


def by_key(measurements: Iterable[Measurement]) -> dict[MeasurementKey, Measurement]:
    """Measurements by (system, benchmark, metric). Raises StoreError if one would hide another."""
    result: dict[MeasurementKey, Measurement] = {}
    for measurement in measurements:
        other = result.setdefault(measurement.key, measurement)
        if other is not measurement:
            names = [entry.run_id or entry.artefact for entry in (other, measurement)]
            if other.protocol != measurement.protocol:
                protocols = [entry.protocol or NO_PROTOCOL for entry in (other, measurement)]
                names = [f"{name}{_UNDER}{protocol}" for name, protocol in zip(names, protocols, strict=True)]
            sources = " and ".join(sorted(names))
            raise StoreError(f"{' '.join(measurement.key)} is there twice ({sources}); leave one of them out")
    return result


def problems(measurements: Sequence[Measurement]) -> list[str]:
    """Why some measurements must not stand in one table, one sentence each; empty if they may."""
    # Published speed belongs to the paper's machine and is not checked against the speed of this one.
    measured = [entry for entry in measurements if entry.origin == "measured"]
    sentences = []
    for benchmark in sorted({entry.benchmark for entry in measured}):
        group = [entry for entry in measured if entry.benchmark == benchmark]
        versions = {entry.task_version: entry.run_id for entry in group if entry.task_version}
        if len(versions) > 1 and benchmark != AVERAGE:
            sentences.append(f"{benchmark} is there in several versions ({_listed(versions)}); run all systems on one")
        prompts = {entry.prompts: entry.run_id for entry in group if entry.samples}
        if len(prompts) > 1:
            sentences.append(f"{benchmark} was asked with several prompts ({_listed(prompts)}); run all systems on one")
        if len({entry.mini for entry in group}) > 1:
            sentences.append(f"{benchmark} is there as benchmark and as mini look-alike; show them in two tables")
    return [*sentences, *_several_machines(measured)]


def _several_machines(measured: Iterable[Measurement]) -> list[str]:
    on_known = [entry for entry in measured if entry.metric in SPEED_METRICS and entry.metric not in SERVER_METRICS]
    machines = {entry.hardware: entry.run_id for entry in on_known}
    return [f"{speeds_of(_listed(machines))}; measure all on one"] if len(machines) > 1 else []


def speeds_of(machines: str) -> str:
    """The beginning of a refusal of speeds that several machines measured."""
    return f"speeds from different machines ({machines}) cannot be compared"


def require_comparable(measurements: Sequence[Measurement]) -> None:
    if sentences := problems(measurements):
        raise StoreError("; ".join(sentences))


def require_one_machine(measured: Iterable[Measurement]) -> None:
    if sentences := _several_machines(measured):
        raise StoreError(sentences[0])


def _listed(run_ids: Mapping[str, str]) -> str:
    return ", ".join(f"{value} in {run_id}" for value, run_id in sorted(run_ids.items()))


# The variants that stand in tables beside their system: ReFusion with the verifier's own tokens, or with fused
# forwards, and BD3-LM that stores a finished block by the first forward of the next one.
VERIFIER, FUSED, MERGED = BESIDE = ("verifier", "fused", "merged")
# Name of a variant of a system -> the decoder setting that makes it. The paper's left-to-right decoding is serial.
VARIANTS: Mapping[str, tuple[str, str]] = {
    "recompute_kv": ("recompute_kv", "true"),
    "left_to_right": ("serial", "true"),
    "slots_in_order": ("order", "left_to_right"),
    "slots_at_random": ("order", "random"),
    VERIFIER: ("completion", "verifier"),
    FUSED: ("fuse", "true"),
    MERGED: ("separate_commit", "false"),
}
# Manifest.decoder of other loops than this engine's -> the variant of systems that they decode.
GENERATE = "generate"
OF_LOOPS = {STOCK_GENERATE: GENERATE, RELEASE_LOOP: "release-loop"}


ON_BACKBONE = " on "
_UNDER = " under "


def without_protocol(system: str) -> str:
    """The key of a system without the protocol that `apart_by_protocol` added to it."""
    return system.partition(_UNDER)[0]


def without_backbone(system: str) -> str:
    """The key of a system without the backbone that `beside_published` added to it, and without a protocol."""
    return without_protocol(system).partition(ON_BACKBONE)[0]


def base_of_key(system: str) -> str:
    return without_backbone(system).partition("+")[0]


def apart_by_protocol(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Measurements under several protocols as systems of their own, whose keys and labels end with the protocol."""
    if len({entry.protocol for entry in measurements}) < 2:
        return list(measurements)
    suffixes = [f"{_UNDER}{entry.protocol or NO_PROTOCOL}" for entry in measurements]
    return [
        replace(entry, system=entry.system + suffix, label=entry.label + suffix)
        for entry, suffix in zip(measurements, suffixes, strict=True)
    ]
