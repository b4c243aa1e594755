"""Compares a decoder of this project with the loop of the checkpoint's own release, on the same weights and prompts."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from refusion_eval import api
from refusion_eval.benchmarks import Task
from refusion_eval.config import field_types
from refusion_eval.decoders import Reads, find_decoder
from refusion_eval.decoders.diffusion_gemma import decode_with
from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.evaluation.loop import job_of
from refusion_eval.runs.job import Job, record, record_error
from refusion_eval.runs.model_args import RELEASE, parse_model_args
from refusion_eval.runs.release import ReleaseSettings
from refusion_eval.runs.settings_tables import DEFAULT
from refusion_eval.runs.stock_loop import ReleaseBackend
from refusion_eval.runs.system import System
from refusion_eval.store.records import Sample
from refusion_eval.types import Decode, Decoding, Forward, Read, Response, Trace

# Settings that mean one token in each forward where they are None -> the setting that has their number then.
_ONE_BY_ONE = {"steps": "gen_length", "denoising_steps": "block_length"}
_NEUTRAL = {"top_k": 0, "threshold": 0.0}  # values that mean that a rule is off, which some releases do not take


@dataclass(frozen=True, kw_only=True)
class Parity:
    """One prompt by both; of each pair the first is this project's.

    Attributes:
        item: the item of the task that was asked.
        num_tokens, num_forwards: tokens kept, and forwards.
        position: index in the response of the first token that differs; None if none does.
        tokens: the two tokens there, -1 behind the end of a response.
        margin: logit of this project's token there minus that of the release's, in the forward in which this project
            decided it; None where that forward did not read both.
        error: why one of them could not decode.
    """

    item: str
    num_tokens: tuple[int, int] = (0, 0)
    num_forwards: tuple[int, int] = (0, 0)
    position: int | None = None
    tokens: tuple[int, int] | None = None
    margin: float | None = None
    error: str | None = None

    @property
    def is_equal(self) -> bool:
        return self.error is None and self.position is None and self.num_forwards[0] == self.num_forwards[1]

    def in_words(self) -> str:
        if self.error is not None:
            return f"item {self.item}: not decoded: {self.error.strip().splitlines()[-1]}"
        (ours, _), forwards = self.num_tokens, " and ".join(map(str, self.num_forwards))
        if self.is_equal:
            return f"item {self.item}: equal, {ours} tokens in {self.num_forwards[0]} forwards"
        if self.position is None or self.tokens is None:
            return f"item {self.item}: the same {ours} tokens, in {forwards} forwards"
        here, there = ("the end" if token < 0 else str(token) for token in self.tokens)
        margin = "not known" if self.margin is None else f"{self.margin:.4g}"
        told = f"{here} here and {there} in the release; margin of the logits {margin}"
        return f"item {self.item}: they part at token {self.position}, {told}; {forwards} forwards"


def opened(
    arguments: Mapping[str, Any], settings: Mapping[str, Any], of_release: Mapping[str, Any], task: Task
) -> tuple[System, System, list[str]]:
    """This project's decoder and the release's loop, with settings that mean the same; and what the loop cannot have.

    Args:
        arguments: model arguments, without a loop; `allow_code` is for the release's loop.
        settings, of_release: what the user sets of the decoder and of the loop; the latter counts before the former.
    """
    ours = System(parse_model_args({**arguments, **settings, "loop": "engine", "allow_code": False}))
    resolved = ours.resolve(task.name, {})
    values = dict(resolved.values)
    for name, number in _ONE_BY_ONE.items():
        if name in values and values[name] is None:
            values[name] = values[number]
    by_loop = {name: value for name, value in arguments.items() if name != "preset"} | {"loop": RELEASE}
    entry = ReleaseBackend.of(System(parse_model_args({**by_loop, **of_release}))).entry
    if entry.name == "block_diffusion_generate" and not values.get("temperature") and "temperature" not in of_release:
        raise ConfigError(
            f"{entry} draws every token and divides the logits by the temperature, so it has no greedy decoding to "
            "compare with; --release-set temperature=1.0 compares with what it draws"
        )
    kept = {name: value for name, value in values.items() if value is not None and _NEUTRAL.get(name) != value}
    unknown = [name for name in kept if name not in field_types(ReleaseSettings) or entry.unknown([name])]
    theirs = {name: value for name, value in kept.items() if name not in unknown} | dict(of_release)
    set_here = [name for name in unknown if resolved.sources[name] not in (DEFAULT, "checkpoint")]
    return ours, System(parse_model_args({**by_loop, **theirs})), set_here


def compare(ours: System, theirs: System, task: Task, number: int, data: Path | None) -> Iterator[Parity]:
    """Decodes the first prompts of a task by both, up to the end tokens or the full length, and compares each."""
    for item in task.items(data)[:number]:
        # The loop of a release knows no stop strings.
        here, there = (
            replace(job, resolved=system.resolve(task.name, {}), sealed=())
            for system, job in ((system, job_of(system, task, item, "", 0)) for system in (ours, theirs))
        )
        if ours.args.decoder == "diffusion_gemma":  # which always draws, so that only equal draws compare
            release: Any = theirs.backend
            other = release.alone(there)
            decode: Decode = functools.partial(decode_with, draws=release.drawn)
            settings = replace(here.resolved.settings, release_compatible=True)  # the release keeps whole canvases
            here = replace(here, resolved=replace(here.resolved, settings=settings))
            yield _compared(ours, here, other if other.error else _alone(ours, here, decode), other, decode)
        else:
            decode = api.decode_of(ours.model, ours.args.decoder, here.resolved.settings, here.prompt_ids)
            yield _compared(ours, here, ours.backend.alone(here), theirs.backend.alone(there), decode)


def _alone(system: System, job: Job, decode: Decode) -> Sample:
    """As `Backend.alone`, by another function than the decoder's own."""
    try:
        decoded = system.model.engine.run(decode, job.prompt_ids, job.settings(system.backend.detokenizer))
    except DecodeError as error:
        return record_error(job, str(error), batch_size=1)
    return record(job, decoded, system.backend.detokenizer, batch_size=1)


def _compared(ours: System, job: Job, one: Any, other: Any, decode: Decode) -> Parity:
    if error := one.error or other.error:
        return Parity(item=job.item_id, error=error)
    num_tokens, num_forwards = (one.num_tokens, other.num_tokens), (one.num_forwards, other.num_forwards)
    compared = Parity(item=job.item_id, num_tokens=num_tokens, num_forwards=num_forwards)
    longest = max(len(one.tokens), len(other.tokens))
    padded = [[*sample.tokens, *[-1] * (longest - len(sample.tokens))] for sample in (one, other)]
    position = next((at for at, (mine, its) in enumerate(zip(*padded, strict=True)) if mine != its), None)
    if position is None:
        return compared
    tokens = (padded[0][position], padded[1][position])
    forward = Trace.from_json(one.trace).fixed_at().get(position)
    margin = None if forward is None or min(tokens) < 0 else _margin(ours, job, decode, forward, position, tokens)
    return replace(compared, position=position, tokens=tokens, margin=margin)


def _margin(
    system: System, job: Job, decode: Decode, forward: int, position: int, tokens: Sequence[int]
) -> float | None:
    """Difference of the logits of two tokens in one forward, in the row that predicts a position of the response."""
    reads, place, found = find_decoder(system.args.decoder).reads, len(job.prompt_ids) + position, list[float]()

    def reading(prompt: Sequence[int], settings: Any, trace: Trace) -> Decoding:
        inner = decode(prompt, settings, trace)
        try:
            asked = next(inner)
            while True:
                rows = _rows(asked, place, reads) if trace.num_forwards == forward else []
                extra = tuple(Read((row,), logits=True) for row in rows)
                readouts = yield replace(asked, reads=(*asked.reads, *extra)) if extra else asked
                for readout in readouts[len(asked.reads) :]:
                    logits = readout.logits(0)  # type: ignore[misc]
                    found.append(float(logits[tokens[0]] - logits[tokens[1]]))
                asked = inner.send(tuple(readouts[: len(asked.reads)]))
        except StopIteration as end:
            response: Response = end.value
            return response

    settings = api.with_width_cost(job.settings(system.backend.detokenizer), lambda: system.engine.width_cost)
    system.model.engine.run(reading, job.prompt_ids, settings)
    return found[0] if found else None


def _rows(asked: Forward, place: int, reads: Reads) -> list[int]:
    """The row of a forward that predicts a position, if the forward reads it."""
    wanted = place - 1 if reads.masked == "next" or (reads.clean == "next" and reads.masked is None) else place
    read = (row for one in asked.reads for row in one.rows if asked.positions[row] == wanted)
    return list(read)[:1]
