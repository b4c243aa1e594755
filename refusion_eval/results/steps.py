"""Where the forwards of a decoding go, from the recorded steps: by block, by part of the response, and by draft."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from refusion_eval.errors import StoreError
from refusion_eval.results.facts import read_each
from refusion_eval.results.measurement import RowKey
from refusion_eval.results.render import Table
from refusion_eval.store.records import Sample, ScoreRow
from refusion_eval.store.run_store import Run
from refusion_eval.types import ENCODE, Draft, Fix, ForwardDone, Select, Trace

# Settings that say how many positions a decoder fills before it goes on, and how many it drafts together.
_BLOCKS = ("block_size", "block_length", "gen_block_size", "window_size", "canvas_length")
_UNITS = ("slot_size", "gen_block_size")
_WITHOUT_BLOCKS = 32  # positions, of a decoder without blocks
_PARTS = 3
_FEW = 2  # forwards
_MOST_PLACES = 16

HEADINGS = {
    "task": "Task",
    "n": "n",
    "forwards": "Forwards",
    "by_kind": "By kind",
    "block": "Block",
    "forwards_of_block": "Forwards a block",
    "dearest_fifth": "Dearest fifth, %",
    "without_gain": "No gain, %",
    "in_few": f"At most {_FEW}, %",
    "tpf_by_part": f"TPF of {_PARTS} parts",
    "tpf_by_score": "TPF by score",
    "accepted": "Drafts accepted, %",
    "accepted_by_place": "By place, %",
}
NOTES = (
    "Forwards: of an answer, in the mean; by kind: what the decoder calls them.",
    "A forward is divided among the positions that it fixes, and one that fixes none counts for those of the next. "
    "Block: its positions; 32 for a decoder without blocks. All positions count, also those behind the EOS.",
    "Dearest fifth: the share of all forwards that went to the fifth of the blocks with the most forwards. No gain: "
    f"blocks with as many forwards as positions. At most {_FEW}: blocks with {_FEW} forwards or fewer.",
    "TPF of parts: tokens a forward in each third of the response. TPF by score: in each third of the positions, from "
    "those that were least certain to those that were most certain when the decoder first chose among them.",
    "Accepted: drafts that were fixed as they were drafted; by place: in the slot, or in the draft of a decoder that "
    f"has no slots, of the first {_MOST_PLACES}.",
)


class Steps(NamedTuple):
    """The steps of all answers to a task in one run."""

    run_id: str
    system: str
    task: str
    n: int
    forwards: float  # of an answer
    by_kind: str  # the decoder's names of them, each with the number of an answer
    block: int
    forwards_of_block: float
    dearest_fifth: float  # percent of all forwards
    without_gain: float  # percent of the blocks
    in_few: float  # percent of the blocks
    tpf_by_part: tuple[float, ...]  # empty where no response has as many tokens
    tpf_by_score: tuple[float, ...]  # from the hardest to the easiest positions; empty for a decoder that has no choice
    accepted: float | None  # percent; None for a decoder without drafts
    accepted_by_place: tuple[float, ...]

    def in_words(self) -> list[str]:
        """The texts under `HEADINGS`."""
        return [_text(getattr(self, name)) for name in HEADINGS]


class Tally:
    """What is counted over the answers to a task.

    Attributes:
        forwards: of each answer that has recorded steps; empty without any.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        sizes = [settings.get(name) for name in _BLOCKS]
        self.block = next((size for size in sizes if isinstance(size, int) and size > 0), _WITHOUT_BLOCKS)
        units = [settings.get(name) for name in _UNITS]
        self._unit = next((size for size in units if isinstance(size, int) and size > 0), None)
        # Then positions are chosen at random, and their scores say nothing of how certain the model is.
        self._draws = settings.get("remasking") == "random" or settings.get("alg") == "origin"
        self.forwards: list[int] = []
        self.kinds = Counter[str]()
        self.blocks: list[tuple[float, int]] = []  # forwards and tokens of each block
        self.parts = np.zeros((2, _PARTS))  # tokens and forwards
        self.scored: list[tuple[float, float]] = []  # first score of a position, and its forwards
        self.drafted, self.accepted = Counter[int](), Counter[int]()

    def add(self, sample: Sample, trace: Trace | None) -> None:
        """Counts the steps of an answer, if it has any."""
        if trace is None or sample.error is not None:
            return
        fixed: dict[int, list[int]] = {}
        for event in trace.of(Fix):
            fixed.setdefault(event.forward, []).extend(event.positions)
        positions = {position for of_forward in fixed.values() for position in of_forward}
        if not positions:
            return
        self.forwards.append(trace.num_forwards)
        self.kinds.update(event.kind for event in trace.of(ForwardDone))
        spent: dict[int, float] = dict.fromkeys(positions, 0.0)
        served = [max(positions)]
        for forward in reversed(range(trace.num_forwards)):
            served = fixed.get(forward) or served
            for position in served:
                spent[position] += 1 / len(served)
        scores = {} if self._draws else self._first_scores(trace)
        self.scored += [(scores[position], spent[position]) for position in scores.keys() & spent.keys()]
        length, of_block = max(positions) + 1, dict[int, list[float]]()
        for position, forwards in spent.items():
            of_block.setdefault(position // self.block, []).append(forwards)
            if length >= _PARTS:
                self.parts[:, position * _PARTS // length] += 1, forwards
        self.blocks += [(round(sum(forwards), 6), len(forwards)) for forwards in of_block.values()]
        # Tokens of a sealed task are all 0. A model with an encoder replaces what it accepted, and drafts nothing.
        if sample.tokens is not None and ENCODE not in self.kinds:
            self._add_drafts(trace)

    def _first_scores(self, trace: Trace) -> dict[int, float]:
        """Position -> its score, or that of its slot, in the first choice among candidates that had it."""
        scores: dict[int, float] = {}
        for event in trace.of(Select):
            width = (self._unit or 1) if event.unit == "slot" else 1
            for first, score in zip(event.candidates, event.scores, strict=True):
                for position in range(first, first + width):
                    scores.setdefault(position, score)
        return scores

    def _add_drafts(self, trace: Trace) -> None:
        waiting: dict[int, tuple[int, int]] = {}  # position -> its place in the draft, and its token
        for event in trace.events:
            if isinstance(event, Draft):
                for index, (position, token) in enumerate(zip(event.positions, event.tokens, strict=True)):
                    place = index if self._unit is None else position % self._unit
                    self.drafted[place] += 1
                    waiting[position] = place, token
            elif isinstance(event, Fix):
                for position, token in zip(event.positions, event.tokens, strict=True):
                    place, draft = waiting.pop(position, (0, None))
                    self.accepted[place] += token == draft

    def steps(self, run: Run, task: str) -> Steps:
        forwards, tokens = np.array(self.blocks).T
        dearest = np.sort(forwards)[::-1][: max(1, round(len(forwards) / 5))]
        places = sorted(self.drafted)[:_MOST_PLACES]
        return Steps(
            run.run_id,
            run.manifest.system,
            task,
            n=len(self.forwards),
            forwards=float(np.mean(self.forwards)),
            by_kind=" ".join(f"{kind} {count / len(self.forwards):.1f}" for kind, count in self.kinds.items()),
            block=self.block,
            forwards_of_block=float(forwards.mean()),
            dearest_fifth=float(100 * dearest.sum() / forwards.sum()),
            without_gain=float(100 * (forwards >= tokens).mean()),
            in_few=float(100 * (forwards <= _FEW).mean()),
            tpf_by_part=tuple((self.parts[0] / self.parts[1]).tolist()) if self.parts.all() else (),
            tpf_by_score=_by_score(self.scored) if len(self.scored) >= _PARTS else (),
            accepted=100 * self.accepted.total() / self.drafted.total() if places else None,
            accepted_by_place=tuple(100 * self.accepted[place] / self.drafted[place] for place in places),
        )


def _by_score(scored: list[tuple[float, float]]) -> tuple[float, ...]:
    scores, forwards = np.array(scored).T
    thirds = np.array_split(forwards[np.argsort(scores, kind="stable")], _PARTS)
    return tuple(float(len(third) / third.sum()) for third in thirds)


def read_steps(run_dirs: Iterable[Path]) -> list[Steps]:
    """The steps of each task of some runs, in their order; StoreError if no answer has recorded steps."""
    places = list(run_dirs)
    tallies: dict[tuple[str, RowKey], tuple[Run, Tally]] = {}

    def visit(run: Run, row: RowKey, sample: Sample, _: Mapping[str, ScoreRow], trace: Trace | None) -> None:
        tallies.setdefault((run.run_id, row), (run, Tally(sample.settings)))[1].add(sample, trace)

    read_each(places, visit)
    found = [tally.steps(run, row.task) for (_, row), (run, tally) in tallies.items() if tally.forwards]
    if not found:
        raise StoreError(
            f"{', '.join(map(str, places))}: no answer has recorded steps; those of servers and of the code of a "
            "release have none"
        )
    return found


def steps_table(found: Iterable[Steps]) -> Table:
    """A line for each run and task."""
    rows = [(steps.system, *steps.in_words()) for steps in found]
    return Table(title="Where forwards go", columns=("System", *HEADINGS.values()), rows=rows, notes=NOTES)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(f"{part:.1f}" if part < 10 else f"{part:.0f}" for part in value)
    return f"{value:.1f}" if isinstance(value, float) else "" if value is None else str(value)


def steps_cells(found: Iterable[Steps]) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
    """Columns and rows for files; several values of one cell are joined by a vertical line."""
    rows = (
        tuple("|".join(f"{part:.4g}" for part in value) if isinstance(value, tuple) else value for value in steps)
        for steps in found
    )
    return Steps._fields, rows
