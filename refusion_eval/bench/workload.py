"""The speed of whole systems on prompts without right answers.

Systems take turns in rounds over the same prompts, one request at a time, by whatever decodes them: this project's
engine, a loop of transformers or of a release, or a server. Each answer is a line of a file as soon as it is there, so
that an interrupted measurement goes on where it ended.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from refusion_eval import metrics
from refusion_eval.bench.bench import choose_threads
from refusion_eval.bench.checkpoints import SHAPES, checkpoint_named
from refusion_eval.bench.contestants import SIZES, systems_named, systems_on
from refusion_eval.bench.prompts import CHARACTERS_A_TOKEN, Prompt, Workload
from refusion_eval.benchmarks import find_task
from refusion_eval.benchmarks.rows import Turns
from refusion_eval.decoders import NO_END
from refusion_eval.errors import ConfigError
from refusion_eval.models.device import process_memory
from refusion_eval.paths import EMBEDDED
from refusion_eval.runs.job import Job, sample_key
from refusion_eval.runs.system import System
from refusion_eval.store.atomic_write import append_line, prepare_output
from refusion_eval.store.manifest import git_commit, package_versions
from refusion_eval.store.records import SERVER, Sample
from refusion_eval.types import ForwardDone, Trace, num_of_first

_WARM_UP = -1  # stands for a round
TASK = "gsm8k"  # whose settings systems have that were tuned by task


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; figures that nothing tells are None.

    Attributes:
        system, group, prompt, turn, round: what was asked; turns and rounds count from 0.
        prompt_tokens: number of tokens of the whole prompt, earlier turns included; 0 where no tokenizer is here.
        cached_tokens: those of them that a server says it took from a cache.
        tokens, seconds: of the answer.
        first_seconds: from the request to the end of the first forward; of a server, to the first byte of the answer.
        later_tokens: tokens that did not stand after the first forward; None for a server, whose first bytes may be
            those of many.
        forwards, rows, cached_rows: forwards, and the sums of their new and of their cached rows.
        joules: energy of the device.
        peak_bytes: the most memory that the device had in use meanwhile; on a CPU, this process.
        error: why there is no answer.
    """

    system: str
    group: str
    prompt: str
    turn: int
    round: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int | None = None
    seconds: float = 0.0
    first_seconds: float | None = None
    later_tokens: int | None = None
    forwards: int | None = None
    rows: int | None = None
    cached_rows: int | None = None
    joules: float | None = None
    peak_bytes: int | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, str, int]:
        """The conversation that it belongs to, which is decoded as a whole."""
        return self.system, self.group, self.prompt, self.round


@dataclass(frozen=True)
class Answers:
    """The answers of a measurement, in a file if it has one: conditions on the first line, an answer on each other."""

    conditions: Mapping[str, Any]
    path: Path | None = None

    @cached_property
    def _entries(self) -> list[Mapping[str, Any]]:
        """The whole lines of the file; a killed process or a full disk may leave an unfinished one, or none."""
        entries: list[Mapping[str, Any]] = []
        if self.path is not None and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):
                    entries += [json.loads(line)] if line else []
        return entries

    def stored(self) -> list[Answer]:
        """Those of the file; ConfigError if it is of another measurement."""
        if not self._entries:
            return []
        (first, *answers), here = self._entries, json.loads(json.dumps(self.conditions))
        if differ := sorted(name for name in {*first, *here} if first.get(name) != here.get(name)):
            raise ConfigError(f"{self.path} was measured under other {', '.join(differ)}; name another file for --out")
        return [Answer(**entry) for entry in answers]

    def keep(self, answer: Answer) -> None:
        if self.path is not None:
            if not self._entries:
                append_line(prepare_output(self.path), json.dumps(self.conditions))
                self._entries.append(self.conditions)
            append_line(self.path, json.dumps(asdict(answer)))


def measure(
    systems: Mapping[str, System],
    workload: Workload,
    *,
    num_rounds: int,
    checkpoint: str | None = None,
    path: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Any], list[Answer]]:
    """Decodes the prompts with each system in each round; returns the conditions and all answers.

    Args:
        checkpoint: what the conditions call the checkpoint of all systems; its own name if None.
        path: file of the answers.

    A prompt that a system cannot decode, such as one that is longer than its context, is an answer with its error.

    Raises:
        ConfigError: the file is of another measurement, or prompts of a length are asked of a server without tokenizer.
    """
    conditions = {
        "systems": {name: _described(system, checkpoint) for name, system in systems.items()},
        "prompts": workload.source,
        "generated": workload.generated,
        "num_prompts": len(workload.prompts),
        "asked": hashlib.sha256(json.dumps(workload.prompts).encode()).hexdigest()[:16],
        "num_rounds": num_rounds,
        "versions": package_versions(),
        "commit": git_commit(),
    }
    answers = Answers(conditions, path)
    stored, last = answers.stored(), {(prompt.group, prompt.name): len(prompt.turns) - 1 for prompt in workload.prompts}
    ended = (answer for answer in stored if answer.error or answer.turn == last[answer.group, answer.prompt])
    done = {answer.key for answer in ended}
    # Of a conversation that was interrupted and asked again, the later answers count.
    found = list({(answer.key, answer.turn): answer for answer in stored if answer.key in done}.values())
    groups = list(dict.fromkeys(prompt.group for prompt in workload.prompts))
    with contextlib.ExitStack() as stack:
        for system in systems.values():
            stack.enter_context(system.backend.open())
        warm: set[tuple[str, str]] = set()
        for turn in range(num_rounds):
            for group in groups:
                prompts = [prompt for prompt in workload.prompts if prompt.group == group]
                for name, system in systems.items():  # in turns, so that other load on the machine affects all
                    left = [p for p in prompts if (name, group, p.name, turn) not in done]
                    if left:
                        progress(f"round {turn + 1} of {num_rounds}, {group}: {name}")
                    for prompt in left:
                        if (name, group) not in warm:  # lengths have recordings and buffers of their own
                            warm.add((name, group))
                            list(_conversation(name, system, prompt, _WARM_UP))
                        for answer in _conversation(name, system, prompt, turn):
                            found.append(answer)
                            answers.keep(answer)
    return conditions, found


def _described(system: System, checkpoint: str | None) -> dict[str, Any]:
    backend, resolved = system.backend, _resolved(system)
    return {
        "checkpoint": checkpoint or system.args.pretrained,
        "decoder": backend.decoder,
        "settings": dict(resolved.values),
        "dtype": backend.dtype,
        "device": backend.device,
        "attention": backend.attention,
        "hardware": asdict(backend.hardware()),
        **backend.identity(),
    }


def _resolved(system: System) -> Any:
    task = find_task(f"mini_{TASK}" if system.args.pretrained.startswith(EMBEDDED) else f"refusion_{TASK}")
    assert task is not None
    return replace(system.resolve(task.name, {}, announce=False), until=())


def _conversation(name: str, system: System, prompt: Prompt, turn: int) -> Iterator[Answer]:
    first, *others = prompt.turns
    if system.args.loop == SERVER:  # which might take a prompt that it has seen before from its cache
        first = f"{prompt.group}, {prompt.name}, {turn}: {first}"
    texts = [first if prompt.length is None else _cut(system, first, prompt.length), *others]
    messages: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        messages.append({"role": "user", "content": text})
        rendered = _rendered(system, messages)
        ids = system.encode(rendered, plain=not system.has_template)
        resolved = _resolved(system)
        key = sample_key(
            "workload", "", {"group": prompt.group, "prompt": prompt.name}, rendered, resolved, max(turn, 0)
        )
        job = Job(
            key=key, benchmark="", item_id=prompt.name, prompt_ids=ids, prompt=rendered, resolved=resolved, alone=True
        )
        asked = Answer(name, prompt.group, prompt.name, number, turn, len(ids))
        if refusal := system.backend.refusal(job):
            yield replace(asked, error=refusal)
            return
        with _peak_memory(system) as peak:
            sample = system.backend.alone(job)
        yield _answer(asked, sample, peak())
        if sample.error is not None:
            return
        messages.append({"role": "assistant", "content": sample.text})


def _rendered(system: System, messages: Sequence[dict[str, str]]) -> str:
    if len(messages) == 1:
        return system.render_turns(Turns(messages[0]["content"]))
    if system.backend.takes_messages:
        first = [{"role": "system", "content": system.args.system_prompt}] if system.args.system_prompt else []
        return json.dumps([*first, *messages], ensure_ascii=False)
    if system.has_template:
        return system.render(messages)
    return "\n\n".join(message["content"] for message in messages) + "\n\n"


def _cut(system: System, text: str, length: int) -> str:
    """The beginning of a text with which the prompt has about so many tokens; what is cut is made of whole tokens."""
    tokenizer = system.files.tokenizer
    around = len(system.encode(_rendered(system, [{"role": "user", "content": ""}]), plain=not system.has_template))
    if length <= around:
        raise ConfigError(f"{system.args.pretrained}: its chat template alone has {around} tokens, not {length}")
    return tokenizer.decode(tokenizer.encode(text[: CHARACTERS_A_TOKEN * length])[: length - around])


def _answer(asked: Answer, sample: Sample, peak_bytes: int | None) -> Answer:
    if sample.error is not None:
        return replace(asked, error=sample.error.strip().rpartition("\n")[2])
    server = sample.server or {}
    known = replace(
        asked,
        tokens=sample.num_tokens,
        seconds=sample.seconds,
        first_seconds=server.get("first_byte_seconds", sample.prefill_seconds),
        forwards=sample.num_forwards or None,
        joules=sample.joules,
        peak_bytes=None if server else peak_bytes,
        prompt_tokens=asked.prompt_tokens or server.get("prompt_tokens", 0),
        cached_tokens=server.get("cached_tokens", 0),
        later_tokens=None if server or sample.num_tokens is None else max(0, sample.num_tokens - 1),
    )
    if sample.trace is None or sample.num_tokens is None:
        return known
    trace = Trace.from_json(sample.trace)
    forwards = list(trace.of(ForwardDone))
    return replace(
        known,
        later_tokens=sample.num_tokens - num_of_first(trace.fixed_at(), sample.num_tokens),
        rows=sum(done.rows for done in forwards),
        cached_rows=sum(done.cached for done in forwards),
    )


@contextlib.contextmanager
def _peak_memory(system: System) -> Iterator[Callable[[], int | None]]:
    """Yields a function that tells the most memory since the beginning; None where the system does not tell it."""
    if system.backend.device.startswith("cuda"):
        device = torch.device(system.backend.device)
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is in use now
    yield partial(process_memory, peak=True)


@dataclass(frozen=True, slots=True)
class Figure:
    """What one system did in one group of prompts; figures have (value, lower, upper bound of the 95% interval)."""

    group: str
    system: str
    num_answers: int
    errors: Sequence[str]
    prompt_tokens: float | None = None
    cached_tokens: float = 0.0  # of a prompt in the mean
    first_seconds: tuple[float, float, float] | None = None
    decode_tps: tuple[float, float, float] | None = None
    tps: tuple[float, float, float] | None = None
    tpf: tuple[float, float, float] | None = None
    forwards: float | None = None  # an answer, as the rows
    rows: float | None = None
    cached_rows: float | None = None
    peak_bytes: int | None = None
    joules_a_token: float | None = None


def figures_of(answers: Sequence[Answer]) -> list[Figure]:
    """A figure for each group and system, in the order in which they were asked."""
    groups = list(dict.fromkeys(answer.group for answer in answers))
    systems = list(dict.fromkeys(answer.system for answer in answers))
    return [
        _figure([answer for answer in answers if (answer.group, answer.system) == (group, system)])
        for group in groups
        for system in systems
    ]


def _figure(answers: Sequence[Answer]) -> Figure:
    errors = tuple(dict.fromkeys(answer.error for answer in answers if answer.error is not None))
    measured = [answer for answer in answers if answer.error is None]
    figure = Figure(answers[0].group, answers[0].system, len(measured), errors)
    if not measured:
        return figure

    def of(name: str) -> list[float] | None:
        values = [getattr(answer, name) for answer in measured]
        return None if None in values else values

    def mean(name: str) -> float | None:
        values = of(name)
        return None if values is None else sum(values) / len(values)

    numbers = {name: place for place, name in enumerate(dict.fromkeys(answer.prompt for answer in measured))}
    of_prompt = [numbers[answer.prompt] for answer in measured]

    def ratio(above: Sequence[float] | None, below: Sequence[float] | None) -> tuple[float, float, float] | None:
        """Sum over sum, resampled by prompt: its turns and its repetitions in other rounds go together."""
        if not above or not below or not sum(above) or not sum(below):
            return None  # such as the speed after the first forward of answers that end with it
        sums = (np.bincount(of_prompt, weights=column) for column in (above, below))
        found = metrics.bootstrap([metrics.ratio_statistic(*sums)])[0].interval()
        return found.value, *found.bounds

    seconds, first, tokens, joules = (of(name) for name in ("seconds", "first_seconds", "tokens", "joules"))
    assert seconds is not None
    later = None if first is None else [one - other for one, other in zip(seconds, first, strict=True)]
    return replace(
        figure,
        prompt_tokens=mean("prompt_tokens") or None,
        cached_tokens=mean("cached_tokens") or 0.0,
        first_seconds=ratio(first, [1.0] * len(measured)),
        decode_tps=ratio(of("later_tokens"), later),
        tps=ratio(tokens, seconds),
        tpf=ratio(tokens, of("forwards")),
        forwards=mean("forwards"),
        rows=mean("rows"),
        cached_rows=mean("cached_rows"),
        peak_bytes=max(filter(None, (answer.peak_bytes for answer in measured)), default=None),
        joules_a_token=sum(joules) / sum(tokens) if joules and tokens and sum(tokens) else None,
    )


def table(conditions: Mapping[str, Any], figures: Sequence[Figure]) -> str:
    """The figures as text, and what they rest on."""
    heading = f"{'prompts':<22} {'system':<22} {'prompt':>7} {'first ms':>20} {'tokens/s after it':>22}"
    lines = [
        f"{heading} {'tokens/s':>8} {'TPF':>6} {'forwards':>8} {'rows':>8} {'cached':>10} {'MB':>6} {'J/token':>8}"
    ]
    for figure in figures:
        name = f"{figure.group[:22]:<22} {figure.system[:22]:<22}"
        if not figure.num_answers:
            lines.append(f"{name} not measured: {'; '.join(figure.errors)}")
            continue
        first = None if figure.first_seconds is None else tuple(1e3 * value for value in figure.first_seconds)
        cells = [
            _cell(figure.prompt_tokens, 7, 0),
            f"{_bounded(first):>20} {_bounded(figure.decode_tps):>22}",
            _cell(None if figure.tps is None else figure.tps[0], 8, 1),
            _cell(None if figure.tpf is None else figure.tpf[0], 6, 2),
            *(
                _cell(value, width, 1)
                for value, width in ((figure.forwards, 8), (figure.rows, 8), (figure.cached_rows, 10))
            ),
            _cell(None if figure.peak_bytes is None else figure.peak_bytes / 1e6, 6, 0),
            _cell(figure.joules_a_token, 8, 3),
        ]
        failed = f"  {len(figure.errors)} kinds of errors: {'; '.join(figure.errors)}" if figure.errors else ""
        lines.append(f"{name} {' '.join(cells)}{failed}")
    systems = conditions["systems"].items()
    places = [f"{name}: {one['checkpoint']}, {one['device']}, {one['dtype']}" for name, one in systems]
    lines += [
        "",
        "In brackets: 95% interval by prompt. First: to the end of the first forward, which reads the prompt;",
        "of a server, to the first byte. Forwards, new rows and cached rows: of an answer in the mean. MB: the",
        "most that the device had in use, with the weights of all systems; on a CPU, that this process had.",
        f"Prompts: {conditions['prompts']}.",
        f"{'; '.join(places)}; {conditions['num_rounds']} rounds in turns.",
    ]
    lines += [
        f"{figure.system} took {figure.cached_tokens:,.0f} of {figure.prompt_tokens:,.0f} prompt tokens from a cache."
        for figure in figures
        if figure.cached_tokens and figure.prompt_tokens
    ]
    if conditions.get("ignore_eos"):
        lines.append("End tokens ended no answer (--ignore-eos).")
    if conditions["generated"]:
        lines.append(
            "The text was generated, so the TPF is not that of real questions (synthetic prompts are known to "
            "overestimate drafts); give --data for real ones."
        )
    return "\n".join(lines)


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-' if value is None else f'{value:,.{digits}f}':>{width}}"


def _bounded(value: Sequence[float] | None) -> str:
    if value is None:
        return "-"
    middle, low, high = value
    return f"{middle:.1f} [{low:.1f}, {high:.1f}]"


def run_workload(
    workload: Workload,
    model: str | None,
    names: Sequence[str],
    *,
    settings: Mapping[str, Any],
    arguments: Mapping[str, Any],
    threads: int | None,
    num_rounds: int,
    ignore_eos: bool,
    path: Path | None,
    progress: Callable[[str], None],
) -> tuple[dict[str, Any], str]:
    """Measures the systems `names`, or those of the checkpoint `model`; returns the figures as JSON types and as text.

    Args:
        settings: of decoders, which take those that they have.
        arguments: model arguments of all systems.
        ignore_eos: end tokens end no answer, so that all have the same length.
        path: file of the answers, which an interrupted measurement reads.
    """
    choose_threads(threads)
    settings = {**settings, **(NO_END if ignore_eos else {})}
    with contextlib.ExitStack() as stack:
        if names:
            systems = systems_named(names, model or "", settings, arguments)
        else:
            model = model or EMBEDDED
            if model in SHAPES:
                raise ConfigError(f"--model {model} has random weights and no tokenizer; take {model}-inflated")
            dtype = torch.float32 if arguments.get("dtype") == "float32" else torch.bfloat16
            checkpoint = str(stack.enter_context(checkpoint_named(model, dtype, progress)))
            systems = systems_on(checkpoint, {**SIZES, **settings}, arguments)
        others = sorted({system.args.loop for system in systems.values()} - {"engine"})
        if ignore_eos and others:
            raise ConfigError(f"--ignore-eos is for this project's engine, and not for loop={others[0]}; leave it out")
        # The folder of a shape has another name each time.
        name = None if names else model
        conditions, answers = measure(
            systems, workload, num_rounds=num_rounds, checkpoint=name, path=path, progress=progress
        )
    conditions["ignore_eos"] = ignore_eos
    figures = figures_of(answers)
    return {"conditions": conditions, "figures": list(map(asdict, figures))}, table(conditions, figures)
