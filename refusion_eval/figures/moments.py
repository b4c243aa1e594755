"""The text of a recorded decoding: with the order of its positions (Figure 5), or at several moments (Figure 9)."""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from refusion_eval.benchmarks import is_mini
from refusion_eval.errors import DataError
from refusion_eval.figures.rows import TokenCell
from refusion_eval.report.find import is_withheld, sample_replay
from refusion_eval.report.pieces import Speller
from refusion_eval.report.replay import Position, Replay, apply
from refusion_eval.store.records import Sample
from refusion_eval.store.run_reader import RunReader
from refusion_eval.trace import Fix, Trace

NUM_PANELS = 6
_SEARCHED_ITEMS = 50
_SHOWN_SETTINGS = ("slot_size", "block_size", "tau_slot", "tau_token", "block_length", "steps", "threshold")
_ACTIONS = {"plan": "planned", "draft": "drafted", "fix": "accepted", "forward": "read", "stop": "done"}


def longest_sample(run_dir: Path, task: str | None) -> tuple[str | None, str | None]:
    """Task and item whose decoding took most steps, among the first items of every task.

    Args:
        run_dir: run directory.
        task: task or benchmark; None for any task that is not sealed.

    Returns:
        The given task and None if no sample has a trace.
    """
    most_steps = 0
    longest: tuple[str | None, str | None] = (task, None)
    num_items: Counter[str] = Counter()
    with RunReader.open(run_dir) as reader:
        for sample in reader.samples():
            is_wanted = task in (None, sample.key.task, sample.benchmark)
            num_items[sample.key.task] += is_wanted
            if not is_wanted or num_items[sample.key.task] > _SEARCHED_ITEMS:
                continue
            if sample.trace is None or is_withheld(sample):
                continue
            num_steps = len({event.forward for event in Trace.from_json(sample.trace).of(Fix)})
            if num_steps > most_steps:
                most_steps, longest = num_steps, (sample.key.task, sample.item_id)
    return longest


def generation_order(system: str, sample: Sample, speller: Speller) -> list[TokenCell]:
    """The final text, each position with the step at which it became final.

    Args:
        system: name of the system that decoded the sample.
        sample: sample with a trace.
        speller: turns its tokens into text.

    Raises:
        DataError: the question is sealed, or no position became final.
    """
    replay = _replay(sample)
    return _cells(replay, len(replay.steps) - 1, 1, "", system, sample, speller)


def step_by_step(system: str, sample: Sample, speller: Speller, num_panels: int = NUM_PANELS) -> list[TokenCell]:
    """The text after the first plan, after the first draft, and after evenly spread acceptances up to the last one.

    Args:
        system: name of the system that decoded the sample.
        sample: sample with a trace.
        speller: turns its tokens into text.
        num_panels: number of moments, at least 1; fewer if the decoding has fewer.

    Raises:
        DataError: the question is sealed, or no position became final.
    """
    replay = _replay(sample)
    cells = []
    for panel, number in enumerate(sorted(_shown_steps(replay, num_panels)), start=1):
        step = replay.steps[number]
        title = f"forward {step.forward + 1} of {len(replay.forwards)}: {_ACTIONS[step.action]}"
        cells += _cells(replay, number, panel, title, system, sample, speller)
    return cells


def _replay(sample: Sample) -> Replay:
    where = f"{sample.key.task}, item {sample.item_id}"
    if is_withheld(sample):
        raise DataError(f"{where}: GPQA's authors ask that its questions appear nowhere; name another --task")
    replay = sample_replay(sample)
    if not replay.kept:
        raise DataError(f"{where}: no token became final, so there is nothing to show; name another --item")
    return replay


def _shown_steps(replay: Replay, num_panels: int) -> set[int]:
    fixes = [number for number, step in enumerate(replay.steps) if step.action == "fix"]
    firsts = [
        next((number for number, step in enumerate(replay.steps) if step.action == action), None)
        for action in ("plan", "draft")
    ]
    shown = {number for number in firsts if number is not None and num_panels > 2}
    num_fixes = max(num_panels - len(shown), 1)
    if len(fixes) <= num_fixes:
        return shown | set(fixes)
    places = [round(number * (len(fixes) - 1) / max(num_fixes - 1, 1)) for number in range(num_fixes)]
    return shown | {fixes[place] for place in places} | {fixes[-1]}


def _cells(
    replay: Replay, last: int, panel: int, title: str, system: str, sample: Sample, speller: Speller
) -> list[TokenCell]:
    """The positions of the final text as they are after the step with the number `last`."""
    states = [Position() for _ in range(replay.num_positions)]
    order: dict[int, tuple[int, int]] = {}  # position -> 1-based step at which it became final, and its forward
    moments: dict[int, int] = {}  # forward -> 1-based step
    tokens: dict[int, int] = {}
    for number, step in enumerate(replay.steps):
        if number <= last:
            apply(states, step, number)
        for change in step.changes:
            if change.state == "fixed":
                moment = moments.setdefault(step.forward, len(moments) + 1)
                order |= dict.fromkeys(change.positions, (moment, step.forward))
                tokens |= dict(zip(change.positions, change.tokens, strict=True))
    final = dict(zip(replay.kept, speller.pieces([tokens[position] for position in replay.kept]), strict=True))
    slot_size = sample.settings.get("slot_size")
    return [
        TokenCell(
            panel=panel,
            title=title,
            position=position,
            text=_text(states[position], final[position], speller),
            final=final[position],
            state=states[position].state if states[position].state != "dropped" else "mask",
            order=order[position][0] if states[position].state == "fixed" else 0,
            forward=order[position][1] if states[position].state == "fixed" else -1,
            slot=position - position % slot_size if isinstance(slot_size, int) else position,
            task=sample.key.task,
            item=sample.item_id,
            system=system,
            settings=_settings(sample),
            mini=is_mini(sample.key.task),
        )
        for position in replay.kept
    ]


def _text(cell: Position, final: str, speller: Speller) -> str:
    if cell.token is None:
        return ""
    return final if cell.state == "fixed" else speller.piece(cell.token)


def _settings(sample: Sample) -> str:
    named = ((name, sample.settings.get(name)) for name in _SHOWN_SETTINGS)
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in named if value is not None)


@dataclass(frozen=True, slots=True)
class Placed:
    """A token, or the part of a token that is in one line.

    Attributes:
        cell: the token.
        line: 0-based line.
        column: 0-based column of its first character.
        length: number of characters of the final text.
        text: text at this moment, at most `length` characters.
    """

    cell: TokenCell
    line: int
    column: int
    length: int
    text: str


def lay_out(cells: Sequence[TokenCell], width: int) -> list[Placed]:
    """Places every token in lines of the final text, which break at its line breaks and where a line is full.

    A token is at its final place at every moment, so that moments can be compared. Text that does not fit is cut.

    Args:
        cells: tokens of one moment, by position.
        width: characters in a line.
    """
    placed = []
    line = column = 0
    for cell in cells:
        # A line break is shown as an arrow at the end of its line. An empty token takes one character.
        parts = [part for part in itertools.chain.from_iterable(_parts(cell.final)) if part] or ["\u00b7"]
        used = 0
        for part in parts:
            breaks = part == "\n"
            shown = "\u21b5" if breaks else part
            for chunk in [shown[at : at + width] for at in range(0, len(shown), width)]:
                if column + len(chunk) > width:
                    line, column = line + 1, 0
                text = _at(cell, chunk, used, len(chunk), breaks)
                placed.append(Placed(cell, line, column, len(chunk), text))
                used += len(chunk)
                column += len(chunk)
            if breaks:
                line, column = line + 1, 0
    return placed


def _parts(text: str) -> list[list[str]]:
    pieces = text.replace("\r", "").replace("\t", "    ").split("\n")
    return [[piece] if number == 0 else ["\n", piece] for number, piece in enumerate(pieces)]


def _at(cell: TokenCell, chunk: str, start: int, length: int, breaks: bool) -> str:
    """Text at this moment: the chunk of a final token, or as much of a draft as fits."""
    if cell.state == "fixed":
        return chunk
    if not cell.text or (breaks and cell.text == cell.final):
        return chunk if cell.text else ""
    return cell.text.replace("\n", "\u21b5").replace("\t", "    ")[start : start + length]
