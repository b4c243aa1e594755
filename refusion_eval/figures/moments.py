"""A recorded decoding as moments of its text: the whole order at once (Figure 5), or step by step (Figure 9)."""

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
from refusion_eval.report.replay import Cell, Replay, apply
from refusion_eval.store.records import Sample
from refusion_eval.store.run_reader import RunReader
from refusion_eval.trace import Fix, Trace

NUM_PANELS = 6
_LOOKED_AT = 50
_SHOWN_SETTINGS = ("slot_size", "block_size", "tau_slot", "tau_token", "block_length", "steps", "threshold")
_ACTIONS = {"plan": "planned", "draft": "drafted", "fix": "accepted", "forward": "read", "stop": "done"}


def telling_sample(run_dir: Path, task: str | None) -> tuple[str | None, str | None]:
    """Task and item, among the first items of every task, whose decoding took most steps; None if none has a trace.

    Args:
        run_dir: the run.
        task: its task, or the benchmark; None takes any that is not sealed.
    """
    most = 0
    chosen: tuple[str | None, str | None] = (task, None)
    looked_at: Counter[str] = Counter()
    with RunReader.open(run_dir) as reader:
        for sample in reader.samples():
            known = task in (None, sample.key.task, sample.benchmark)
            looked_at[sample.key.task] += known
            if not known or sample.trace is None or looked_at[sample.key.task] > _LOOKED_AT or is_withheld(sample):
                continue
            num_steps = len({event.forward for event in Trace.from_json(sample.trace).of(Fix)})
            if num_steps > most:
                most, chosen = num_steps, (sample.key.task, sample.item_id)
    return chosen


def generation_order(system: str, sample: Sample, speller: Speller) -> list[TokenCell]:
    """The final text, each position with the moment at which it became final.

    Args:
        system: name of what decoded it.
        sample: with a trace.
        speller: of its tokens.

    Raises:
        DataError: the question is sealed, or no position became final.
    """
    film = _film(sample)
    return _cells(film, len(film.steps) - 1, 1, "", system, sample, speller)


def step_by_step(system: str, sample: Sample, speller: Speller, num_panels: int = NUM_PANELS) -> list[TokenCell]:
    """The text after the first plan, the first draft, and evenly spread acceptances, the last included.

    Args:
        system: name of what decoded it.
        sample: with a trace.
        speller: of its tokens.
        num_panels: moments, at least 1; fewer where less happened.
    """
    film = _film(sample)
    chosen = sorted(_chosen_steps(film, num_panels))
    cells = []
    for panel, step in enumerate(chosen, start=1):
        one = film.steps[step]
        title = f"forward {one.forward + 1} of {len(film.forwards)}: {_ACTIONS[one.action]}"
        cells += _cells(film, step, panel, title, system, sample, speller)
    return cells


def _film(sample: Sample) -> Replay:
    where = f"{sample.key.task}, item {sample.item_id}"
    if is_withheld(sample):
        raise DataError(f"{where}: GPQA's authors ask that its questions appear nowhere; name another --task")
    film = sample_replay(sample)
    if not film.kept:
        raise DataError(f"{where}: no token became final, so there is nothing to show; name another --item")
    return film


def _chosen_steps(film: Replay, num_panels: int) -> set[int]:
    fixes = [number for number, step in enumerate(film.steps) if step.action == "fix"]
    firsts = [
        next((number for number, step in enumerate(film.steps) if step.action == action), None)
        for action in ("plan", "draft")
    ]
    chosen = {number for number in firsts if number is not None and num_panels > 2}
    left = max(num_panels - len(chosen), 1)
    if len(fixes) <= left:
        return chosen | set(fixes)
    places = [round(number * (len(fixes) - 1) / max(left - 1, 1)) for number in range(left)]
    return chosen | {fixes[place] for place in places} | {fixes[-1]}


def _cells(
    film: Replay, last: int, panel: int, title: str, system: str, sample: Sample, speller: Speller
) -> list[TokenCell]:
    states = [Cell() for _ in range(film.num_positions)]
    order: dict[int, tuple[int, int]] = {}  # position -> the how-manieth moment, its forward
    moments: dict[int, int] = {}
    tokens: dict[int, int] = {}
    for number, step in enumerate(film.steps):
        if number <= last:
            apply(states, step, number)
        for change in step.changes:
            if change.state == "fixed":
                moment = moments.setdefault(step.forward, len(moments) + 1)
                order |= dict.fromkeys(change.positions, (moment, step.forward))
                tokens |= dict(zip(change.positions, change.tokens, strict=True))
    final = dict(zip(film.kept, speller.pieces([tokens[position] for position in film.kept]), strict=True))
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
        for position in film.kept
    ]


def _text(cell: Cell, final: str, speller: Speller) -> str:
    if cell.token is None:
        return ""
    return final if cell.state == "fixed" else speller.piece(cell.token)


def _settings(sample: Sample) -> str:
    named = ((name, sample.settings.get(name)) for name in _SHOWN_SETTINGS)
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in named if value is not None)


@dataclass(frozen=True, slots=True)
class Placed:
    """A token, or the part of it that stands in one line.

    Attributes:
        cell: the token.
        line, column: where it begins, in characters.
        length: characters that it takes in the end.
        text: what stands there now, as long at most.
    """

    cell: TokenCell
    line: int
    column: int
    length: int
    text: str


def lay_out(cells: Sequence[TokenCell], width: int) -> list[Placed]:
    """Where every token stands: as the final text runs, a line break where it has one or where a line is full.

    A token stands at its final place from the beginning, so that moments can be compared. What does not fit the place
    is cut.

    Args:
        cells: of one moment, by position.
        width: characters of a line.
    """
    placed = []
    line = column = 0
    for cell in cells:
        # A line break is shown as a sign at the end of its line; every token takes one place at least.
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
    """What stands there at this moment: of the final text the chunk, of a draft as much as has room."""
    if cell.state == "fixed":
        return chunk
    if not cell.text or (breaks and cell.text == cell.final):
        return chunk if cell.text else ""
    return cell.text.replace("\n", "\u21b5").replace("\t", "    ")[start : start + length]
