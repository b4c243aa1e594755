"""A run reduced to what measurements need: the samples of each task as numbers, joined with their scores."""

import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from refusion_eval.benchmarks import BENCHMARKS, OWN, find_task, is_mini
from refusion_eval.errors import StoreError
from refusion_eval.metrics import Timing, bytes_read, tpf_release
from refusion_eval.results.cautions import SERVERS_TEMPLATE, UNTEMPLATED, Conditions
from refusion_eval.results.collapse import IN_WORDS, SCRIPT, SIGNS, scripts_of, signs_of
from refusion_eval.results.measurement import RowKey, hash_of_protocol
from refusion_eval.runs.server_facts import as_dict, own_seconds
from refusion_eval.store.manifest import restricted_to_tasks, without_seed
from refusion_eval.store.records import NO_ISOLATION, PASSED, REFUSED, SERVER, Sample, SampleKey, ScoreRow, dump
from refusion_eval.store.run_store import Run, RunReader
from refusion_eval.types import ENCODE, ForwardDone, Trace, num_of_first

log = logging.getLogger(__name__)

_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFacts(Timing):
    """One good sample; `item` is the hash of the item, equal across runs on the same data."""

    item_id: str
    prompt_hash: str
    scores: Mapping[str, ScoreRow]
    tokens_no_eos: int | None  # None where a server counted them, maybe without the EOS
    tokens_canvas: int | None = None
    tpf_release: float | None = None
    decoder_forwards: int | None = None  # of a model whose encoder has forwards of its own
    prefill_seconds: float | None = None  # up to the end of the first forward, which reads the prompt
    later_tokens: int | None = None  # tokens kept that the forwards after the first one fixed
    later_seconds: float | None = None  # of these forwards
    thinks: bool = False
    thought_tokens: int = 0
    cut_in_thought: bool = False  # whether the text ends inside a thinking block
    is_cut: bool = False  # whether it reached the length of the settings, and so may lack its end
    signs: frozenset[str] = frozenset()  # of collapse
    forced: int | None = None  # tokens that ended a thought at its budget; None without a budget
    least_seconds: float | None = None  # that the device needs to read what all forwards read
    serial_seconds: float | None = None  # that it needs to read the weights once for each token
    joules: float | None = None
    apart: bool = False  # whether its times are of a server on a machine that is not known
    completion_tokens: int | None = None  # of a server, as it counts them; None where it tells nothing of the kind
    first_byte_seconds: float | None = None  # of a server, as the client sees it
    own_seconds: float | None = None  # the server's own, of prefill and generation
    queue_seconds: float | None = None
    drafted: int | None = None
    accepted: int | None = None

    @property
    def answer_tokens(self) -> int | None:
        """Tokens kept outside thinking blocks."""
        return None if self.tokens is None else self.tokens + (self.forced or 0) - self.thought_tokens

    @property
    def ended_by_budget(self) -> bool | None:
        return None if self.forced is None else self.forced > 0

    @property
    def verdict(self) -> ScoreRow | None:
        return self.scores.get(PASSED)


class Extent(NamedTuple):
    """How much of a task a run has, in samples; a number that is not known is 0."""

    present: int  # decoded, or refused at every attempt
    expected: int  # asked for
    whole: int  # without a limit
    missing: str = ""  # of a task without rows, and so without samples, what to do

    @property
    def unfinished(self) -> str:
        """How many of the samples that were asked for are there; empty if that is all of them."""
        if self.missing:
            return "0"  # of how many, nobody knows without rows
        return f"{self.present} of {self.expected}" if self.present < self.expected else ""

    @property
    def limited(self) -> str:
        """How many samples of the whole task were asked for; empty if that is all of them."""
        return f"{self.expected} of {self.whole}" if self.expected < self.whole else ""

    def conditions(self, run: Run, task: str) -> Conditions:
        """What the extent of a task tells of its numbers."""
        return Conditions.of(self, run_id=run.run_id, command=run.command_for(task), task=task)


_FEWEST_LETTERS, _MOST_SHARE = 20, 0.7  # answers, and the share of one letter that no set of right answers has
UNKNOWN = Extent(0, 0, 0)  # of a task under several settings, whose shares the run does not say


def setting_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def row_of(sample: Sample) -> RowKey:
    key = sample.key
    prompts = sample.prompts if sample.benchmark in BENCHMARKS else OWN
    settings = tuple(sorted((name, setting_text(value)) for name, value in sample.settings.items()))
    of_task = (key.task, key.task_version, is_mini(key.task), prompts)
    return RowKey(*of_task, settings, hash_of_protocol(sample.protocol), key.settings_hash)


@dataclass(slots=True)
class TaskFacts:
    """All samples of one row, in canonical order."""

    row: RowKey
    benchmark: str
    settings: Mapping[str, Any]
    samples: list[SampleFacts] = field(default_factory=list)
    num_errors: int = 0
    num_refused: int = 0  # errors that recur at every attempt
    hardware: set[str] = field(default_factory=set)
    cards: set[str] = field(default_factory=set)  # empty names, of servers, left out
    extent: Extent = UNKNOWN
    slowed_by: set[str] = field(default_factory=set)
    server_notes: set[str] = field(default_factory=set)  # what a reader must know of a server's answers
    records: str = ""  # SHA-256 of the records of the task, in whatever rows; empty if they were not hashed
    items: str = ""  # digest of the items of the good samples, equal across runs on the same items
    all_but_seed: str = ""  # digest of all that decides the texts of the good samples, but the seed
    protocols: set[str] = field(default_factory=set)  # as NAME@HASH, of one hash; several if its file was renamed
    asked: set[str] = field(default_factory=set)  # hashes of the items of all samples, failed ones included

    @property
    def task(self) -> str:
        return self.row.task

    @property
    def task_version(self) -> str:
        return self.row.version

    @property
    def mini(self) -> bool:
        return self.row.mini

    @property
    def kind(self) -> str:
        """How answers to the benchmark are compared; empty for a task on none of the benchmarks."""
        return BENCHMARKS[self.benchmark].kind if self.benchmark in BENCHMARKS else ""

    @property
    def protocol(self) -> str:
        return "|".join(sorted(self.protocols))

    @property
    def is_code(self) -> bool:
        return self.kind == "code"

    @property
    def is_control(self) -> bool:
        """Whether it is asked for comparison with another task alone."""
        return (named := find_task(self.task)) is not None and named.benchmark.is_control

    @property
    def score_name(self) -> str:
        return "pass@1" if self.is_code else "accuracy"

    @property
    def num_unscored(self) -> int:
        return sum(sample.verdict is None for sample in self.samples)

    def conditions(self, run: Run, *, is_speed: bool = False) -> Conditions:
        """What its cautions are made from, as of a score, or of a score and a speed."""
        names = ("mini", "num_refused", "isolated", "num_cut", "one_answer", "collapsed", "protocol")
        return self.extent.conditions(run, self.task)._replace(
            **{name: getattr(self, name) for name in names},
            place=(run.run_id, self.row),
            is_score=True,
            is_speed=is_speed,
            errors=self.num_errors,
            unscored=str(self.num_unscored or ""),
            prompts=self.row.prompts,
            hardware=" | ".join(sorted(self.hardware)),
            card=" | ".join(sorted(self.cards)),
            num_rounds=len({sample.round for sample in self.samples}),
            slowed_by="|".join(sorted(self.slowed_by)),
            attention=run.manifest.attention,
            server_notes="|".join(sorted(self.server_notes)),
        )

    @property
    def unjudged(self) -> list[str]:
        """Items whose text no sandbox could judge, which counts as wrong."""
        return sorted({s.item_id for s in self.samples if s.verdict is not None and s.verdict.verdict == "error"})

    @property
    def num_cut(self) -> int:
        return sum(sample.is_cut for sample in self.samples)

    @property
    def collapsed(self) -> str:
        """`12 of 100: 10 repeating, 3 empty` where answers show signs of collapse; one may show several."""
        counts = {sign: sum(sign in sample.signs for sample in self.samples) for sign in SIGNS}
        if not any(counts.values()):
            return ""
        kinds = ", ".join(f"{count} {IN_WORDS[sign]}" for sign, count in counts.items() if count)
        return f"{sum(map(bool, (sample.signs for sample in self.samples)))} of {len(self.samples)}: {kinds}"

    @property
    def one_answer(self) -> str:
        """`96 of 100 are C` where most answers to choices are one letter, as of a model that guesses."""
        letters = [one.verdict.extracted for one in self.samples if one.verdict and one.verdict.extracted]
        if self.kind != "choice" or len(letters) < _FEWEST_LETTERS:
            return ""
        letter, count = Counter(letters).most_common(1)[0]
        return f"{count} of {len(letters)} are {letter}" if count >= _MOST_SHARE * len(letters) else ""

    @property
    def isolated(self) -> bool:
        """Whether no program ran without isolation, so that no verdict can be forged."""
        return not any(sample.verdict is not None and sample.verdict.tier == NO_ISOLATION for sample in self.samples)


class RunFacts(NamedTuple):
    """One run: what it is, and its tasks ordered by name."""

    run: Run
    tasks: list[TaskFacts]


# Called with every sample, failed ones included, while a run is read, so that who needs whole samples reads them only
# once: the run, the row and the sample, its scores by metric, and its trace if it has one.
Visit = Callable[[Run, RowKey, Sample, Mapping[str, ScoreRow], Trace | None], None]


def read_facts(run_dir: str | os.PathLike[str], visit: Visit | None = None, *, hash_records: bool = False) -> RunFacts:
    """Reads a run; StoreError if the directory holds no readable run, or an item was asked with several prompts."""
    with RunReader.open(run_dir) as reader:
        run = reader.run
        scripts: dict[RowKey, list[frozenset[str]]] = {}
        scores, digests = reader.scores_by_sample(), reader.digests() if hash_records else {}
        slowed_by = {process_id: run.slowed_by(process_id) for process_id in run.processes}
        machines = {process_id: run.hardware(process_id) for process_id in run.processes}
        fingerprints = {process_id: machine.fingerprint() for process_id, machine in machines.items()}
        labels = {process_id: machine.label() for process_id, machine in machines.items()}
        tasks: dict[RowKey, TaskFacts] = {}
        prompts: dict[tuple[SampleKey, str], str] = {}
        for sample in reader.samples():
            row = row_of(sample)
            task = tasks.setdefault(row, TaskFacts(row, sample.benchmark, sample.settings))
            trace = None if sample.trace is None else sample.events()
            if visit is not None:
                visit(run, row, sample, scores.get(sample.key, {}), trace)
            task.asked.add(sample.key.doc_hash)
            task.protocols.update([sample.protocol] if sample.protocol else [])
            task.hardware.add(labels[sample.process_id])
            task.cards.update(filter(None, [machines[sample.process_id].card]))
            task.slowed_by.update(slowed_by[sample.process_id])
            if sample.error is not None:
                task.num_errors += 1
                task.num_refused += sample.stop == REFUSED
                continue
            item = (sample.key.without_prompt(), sample.item_id)
            if prompts.setdefault(item, sample.key.prompt_hash) != sample.key.prompt_hash:
                where = f"{run_dir}: {sample.key.task} item {sample.item_id} was asked with several prompts"
                reason = "the chat template, its date or the examples changed while the run went on"
                raise StoreError(f"{where} ({reason}); start the run again in another folder")
            task.server_notes.update(server_notes(sample, run.manifest.settings))
            scripts.setdefault(row, []).append(scripts_of(sample.text) if _is_decoded(sample) else frozenset())
            facts = _reduced(sample, run, fingerprints[sample.process_id], scores.get(sample.key, {}), trace)
            task.samples.append(replace(facts, apart=bool(machines[sample.process_id].server)))
    extents = _extents(run, {row: len(task.samples) + task.num_refused for row, task in tasks.items()})
    for row in extents.keys() - tasks.keys():
        entry = find_task(row.task)
        benchmark = "" if entry is None else entry.benchmark.name
        tasks[row] = TaskFacts(row, benchmark, {}, protocols=set(filter(None, [run.protocol])))
    for row, task in tasks.items():
        task.records = digests.get(task.task, "")
        task.items = digest(str(sample.item) for sample in task.samples)
        task.all_but_seed = _all_but_seed(run, task)
        task.extent = extents[row]
        task.samples = _with_scripts(task.samples, scripts.get(row, ()))
    return RunFacts(run, [tasks[row] for row in sorted(tasks, key=lambda row: row.names)])


def _with_scripts(samples: Sequence[SampleFacts], scripts: Sequence[frozenset[str]]) -> list[SampleFacts]:
    """The samples of a task, of which those in another script than most show that as a sign."""
    counts = Counter(script for of_sample in scripts for script in of_sample)
    asked = {script for script, count in counts.items() if count > len(samples) / 2}
    pairs = zip(samples, scripts, strict=True)
    return [replace(one, signs=one.signs | {SCRIPT}) if found - asked else one for one, found in pairs]


def read_each(
    run_dirs: Iterable[str | os.PathLike[str]], visit: Visit | None = None, *, hash_records: bool = False
) -> list[RunFacts]:
    """Reads several runs as `read_facts` does, and logs how far it is."""
    places, runs = list(run_dirs), []
    for number, run_dir in enumerate(places, start=1):
        if len(places) > 1:
            log.info("reading run %d of %d: %s", number, len(places), run_dir)
        runs.append(read_facts(run_dir, visit, hash_records=hash_records))
    named = with_models_named([facts.run for facts in runs])
    return [facts._replace(run=run) for facts, run in zip(runs, named, strict=True)]


def with_models_named(runs: Sequence[Run]) -> list[Run]:
    """The runs; those of one server by other models, or at other paths of it, have these in the names of systems."""
    # A run alone keeps the name that it was recorded with.
    known: dict[tuple[str, str], set[str]] = {}
    told = []
    for run in runs:
        server = as_dict(run.manifest.settings.get("server"))
        path = str(server.get("address", "")).partition("/")[2]
        told.append({"path": f"/{path}" if path else "", "model": f" {server['model']}" if "model" in server else ""})
        for part, text in told[-1].items():
            known.setdefault((run.manifest.system, part), set()).add(text)
    named = []
    for run, own in zip(runs, told, strict=True):
        system = run.manifest.system
        differing = "".join(text for part, text in own.items() if len(known[system, part]) > 1)
        head, bracket, table = system.partition(" (")  # in which a name ends with its settings table
        named.append(replace(run, manifest=replace(run.manifest, system=f"{head}{differing}{bracket}{table}")))
    return named


def on_common_items(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """The runs with those items of each task only that every run with the task has judged."""
    common: dict[str, set[Hashable]] = {}
    for task in (task for facts in runs for task in facts.tasks):
        judged = {sample.item for sample in task.samples if sample.verdict is not None}
        common[task.task] = common.get(task.task, judged) & judged
    return [
        facts._replace(tasks=[_restricted(facts.run, task, common[task.task]) for task in facts.tasks])
        for facts in runs
    ]


def _restricted(run: Run, task: TaskFacts, items: Container[Hashable]) -> TaskFacts:
    samples = [sample for sample in task.samples if sample.item in items]
    restricted = replace(task, samples=samples, items=digest(str(sample.item) for sample in samples))
    restricted.all_but_seed = _all_but_seed(run, restricted)
    return restricted


def _all_but_seed(run: Run, task: TaskFacts) -> str:
    """Digest of the system as a run that goes on has to have it again, without its seed, and of items and prompts."""
    decided = without_seed(restricted_to_tasks(run.manifest.fingerprint(), [(task.task, task.benchmark)]))
    return digest([dump(decided), *(f"{sample.item} {sample.prompt_hash}" for sample in task.samples)])


def extents_of(reader: RunReader) -> dict[RowKey, Extent]:
    """How much of each row a run has, without the traces."""
    present = Counter[RowKey]()
    for sample in reader.samples(traces=False):
        present[row_of(sample)] += sample.error is None or sample.stop == REFUSED
    return _extents(reader.run, present)


def _extents(run: Run, present: Mapping[RowKey, int]) -> dict[RowKey, Extent]:
    """The extent of every row, by its decoded and refused samples, and of tasks of which no sample is there yet."""
    begun = {row.task for row in present}
    waiting = ((task, version) for task, version in run.manifest.tasks.items() if task not in begun)
    protocol = hash_of_protocol(run.protocol)
    missing = [RowKey(task, str(version), is_mini(task), "", protocol=protocol) for task, version in waiting]
    extents: dict[RowKey, Extent] = {}
    for row in sorted((*present, *missing)):
        of_task = [other._replace(protocol="") for other in present if other.task == row.task]
        num_present, whole = present.get(row, 0), run.whole.get(row.task, 0)
        if len(of_task) <= 1:
            # A run that was stopped before it said how many samples it would make was asked for one at least.
            expected = run.expected.get(row.task, 0 if of_task else 1)
            extents[row] = Extent(num_present, expected, whole, "" if of_task else run.missing.get(row.task, ""))
        elif len(set(of_task)) == 1:  # under several protocols: no command adds to one the samples of the others
            extents[row] = Extent(num_present, num_present, whole)
        else:  # the run does not say how many each of two settings should have
            extents[row] = UNKNOWN
    return extents


def natural_order(item_id: str) -> list[str | int]:
    """The parts of a name as they sort: text, number, text, ..."""
    return [int(part) if place % 2 else part for place, part in enumerate(_DIGITS.split(item_id))]


def digest(items: Iterable[str]) -> str:
    """Hash of a set of items, whatever their order and however often each is there."""
    return hashlib.sha256("\0".join(sorted(set(items))).encode()).hexdigest()[:16]


def costs(sample: Sample) -> dict[str, Any]:
    """The fields of `Timing` that a sample itself holds, which are all but the machine."""
    return {
        "item": sample.key.doc_hash,
        "tokens": sample.num_decoded,
        "forwards": None if sample.server is not None and not sample.num_forwards else sample.num_forwards,
        "seconds": sample.seconds,
        "batch_size": sample.batch_size,
        "warm": sample.warm,
    }


def _reduced(
    sample: Sample, run: Run, machine: str, scores: Mapping[str, ScoreRow], trace: Trace | None
) -> SampleFacts:
    num_decoded = None if (sample.server or {}).get("tokens") == "usage" else sample.num_decoded
    return SampleFacts(
        **costs(sample),
        hardware=machine,
        round=run.round(sample.process_id),
        created=sample.created,
        turn_of=run.turn_of(sample.process_id),
        item_id=sample.item_id,
        prompt_hash=sample.key.prompt_hash,
        scores=scores,
        tokens_no_eos=None if num_decoded is None else num_decoded - (sample.stop == "eos"),
        joules=sample.joules,
        thinks=sample.num_thought_tokens is not None,
        thought_tokens=sample.num_thought_tokens or 0,
        cut_in_thought=bool(sample.cut_in_thought),
        is_cut=sample.stop == "length",
        signs=signs_of(sample.text, sample.tokens, sample.settings) if _is_decoded(sample) else frozenset(),
        forced=sample.num_forced_tokens,
        **_from_server(sample.server or {}, sample.seconds),
        **_from_trace(sample, trace, run.processes[sample.process_id].get("roofline")),
    )


def _is_decoded(sample: Sample) -> bool:
    """Whether the text is an answer, and not one that was scored by its log-likelihood."""
    return sample.num_forwards != 0 or sample.server is not None


def _from_server(told: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The facts that a server told of an answer."""
    facts = {name: told.get(name) for name in ("completion_tokens", "first_byte_seconds", "queue_seconds")}
    facts |= {"drafted": told.get("drafted_tokens"), "accepted": told.get("accepted_tokens")}
    return facts | {"own_seconds": own_seconds(told, seconds)}


def server_notes(sample: Sample, settings: Mapping[str, Any]) -> list[str]:
    """Sentences about what a server did not tell of an answer, or did otherwise than it was asked.

    Args:
        settings: those of the run, which name the server.
    """
    told = sample.server
    if told is None:
        return []
    read, dropped = told.get("prompt_tokens"), ", ".join(map(str, told.get("dropped", ())))
    ignored = ", ".join(map(str, told.get("ignored", ())))
    sentences = {
        f"it takes the fields {ignored} and does not follow them": ignored,
        f"TPF is empty where {as_dict(settings.get('server')).get('name')} tells no forwards": not sample.num_forwards,
        "it does not tell the tokens of some answers, so no figure counts them": sample.num_tokens is None,
        f"it answered as the model {told.get('model')}, which was not asked": told.get("model"),
        "prompts were sent as text": told.get("prompt") == "text",
        UNTEMPLATED: told.get("template") == "none",
        SERVERS_TEMPLATE: told.get("template") == SERVER,
        "some answers came from a proxy's cache": told.get("from_cache"),
        "it declined some requests in words": told.get("refusal"),
        "tokens are those of the text, split again here": told.get("tokens") == "tokenizer",
        "it read other numbers of prompt tokens than the prompts have here": read is not None
        and sample.prompt_num_tokens not in (0, read),
        "it took parts of prompts from its cache": told.get("cached_tokens"),
        f"it could not read the fields {dropped}": dropped,
        "its content filter ended some answers": sample.stop == "content_filter",
    }
    return [sentence for sentence, holds in sentences.items() if holds]


def _from_trace(sample: Sample, trace: Trace | None, roofline: Mapping[str, float] | None) -> dict[str, Any]:
    """The facts that need the trace of a sample, and the roofline of its device; none without a trace."""
    if trace is None or sample.num_tokens is None or sample.num_decoded is None:
        return {}
    fixed_at, forced = trace.fixed_at(), sample.num_forced_tokens or 0
    facts: dict[str, Any] = {"tokens_canvas": len(fixed_at) - forced}
    if sample.prefill_seconds is not None:
        first = num_of_first(fixed_at, sample.num_tokens)
        facts["prefill_seconds"] = sample.prefill_seconds
        # A budget of 0 has its tokens before those of the first forward.
        facts["later_tokens"] = sample.num_decoded - first + (0 if sample.settings.get("thought_budget") else forced)
        facts["later_seconds"] = sample.seconds - sample.prefill_seconds
    kinds = [event.kind for event in trace.of(ForwardDone)]
    if ENCODE in kinds:
        facts["decoder_forwards"] = len(kinds) - kinds.count(ENCODE)
    if sample.slot_size is not None:
        facts["tpf_release"] = tpf_release(trace, sample.slot_size)
    if roofline and (bandwidth := roofline["copy_bytes_per_second"]):
        names = ("weight_bytes", "cache_bytes_per_row", "expert_bytes", "experts_of_a_row")
        sizes = {name: roofline[name] for name in names if name in roofline}
        if num_bytes := bytes_read(trace, **sizes, num_experts_read=sample.num_experts_read):
            facts["least_seconds"] = num_bytes / bandwidth
            facts["serial_seconds"] = sample.num_decoded * roofline["weight_bytes"] / bandwidth
    return facts
