"""A trace as the steps of a replay: which positions were planned, drafted, accepted and rejected, in order."""

# Every step lists its changes, so that the page, the terminal and the picture only have to apply them.

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from refusion_eval.types import Draft, Event, Fix, ForwardDone, Select, Stop, Trace

State = Literal["mask", "planned", "draft", "fixed", "rejected", "dropped"]
Action = Literal["plan", "draft", "fix", "forward", "stop"]
# Gives the text of token ids, special tokens spelled out.
Spell = Callable[[Sequence[int]], str]

SLOT = "slot"
# What a tokenizer writes for bytes that are not a whole character.
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4


class Change(NamedTuple):
    """Positions that take a state, with one token each where the state shows tokens."""

    state: State
    positions: tuple[int, ...]
    tokens: tuple[int, ...] = ()


class Step(NamedTuple):
    action: Action
    forward: int
    changes: tuple[Change, ...] = ()
    num_candidates: int = 0  # slots or positions that a choice was made among, 0 without a choice
    scores: Mapping[int, float] = MappingProxyType({})
    reason: str = ""
    num_fixed: int = 0  # positions that are final after the step

    def number_of(self, state: State) -> int:
        return sum(len(change.positions) for change in self.changes if change.state == state)


class Replay(NamedTuple):
    num_positions: int
    steps: tuple[Step, ...]
    forwards: tuple[tuple[str, int, int], ...]
    tokens: Mapping[int, int]
    kept: tuple[int, ...]


@dataclass(slots=True)
class Position:
    """How a position looks: its state, its token if it has one, and the step that set both (-1 for none)."""

    state: State = "mask"
    token: int | None = None
    step: int = -1


def replay_of(trace: Trace, *, slot_size: int = 1, num_kept: int | None = None) -> Replay:
    """The replay of a trace. `num_kept` counts the tokens of a response that a stop string may have cut."""
    # Rejection is not an event: drafts are rejected when others become final without them, or take their place.
    builder = _Builder(slot_size, num_kept, _extent(trace, slot_size))
    for event in trace.events:
        builder.take[type(event)](event)
    builder.end_forward()
    tokens = dict(sorted(trace.fixed_tokens().items()))
    return Replay(builder.num_positions, tuple(builder.steps), tuple(builder.forwards), tokens, tuple(builder.kept()))


def apply(canvas: Sequence[Position], step: Step, number: int) -> None:
    """Applies the step with this index to all positions. Those that were rejected before become masks again."""
    for position in canvas:
        if position.state == "rejected":
            position.state, position.token = "mask", None
    for change in step.changes:
        for index, place in enumerate(change.positions):
            position = canvas[place]
            position.state, position.step = change.state, number
            if change.tokens:
                position.token = change.tokens[index]


def _extent(trace: Trace, slot_size: int) -> int:
    ends = [0]
    for event in trace.events:
        if isinstance(event, Draft | Fix):
            ends += [position + 1 for position in event.positions]
        elif isinstance(event, Select):
            ends += [first + (slot_size if event.unit == SLOT else 1) for first in event.candidates]
    return max(ends)


class _Builder:
    def __init__(self, slot_size: int, num_kept: int | None, num_positions: int) -> None:
        self.slot_size, self.num_kept, self.num_positions = slot_size, num_kept, num_positions
        self.steps: list[Step] = []
        self.forwards: list[tuple[str, int, int]] = []
        self._planned: set[int] = set()
        self._drafts: dict[int, int] = {}
        self._fixed: set[int] = set()
        self._choice: dict[str, Any] = {}
        self._seen = True  # whether a step belongs to the last forward
        self.take: dict[type[Event], Callable[[Any], None]] = {
            ForwardDone: self._forward,
            Select: self._select,
            Draft: self._draft,
            Fix: self._fix,
            Stop: self._stop,
        }

    def _forward(self, event: ForwardDone) -> None:
        self.end_forward()
        self.forwards.append((event.kind, event.rows, event.cached))
        self._seen = False

    def end_forward(self) -> None:
        """Adds a step for a forward without any visible change, so that every forward has a step."""
        if not self._seen:
            self._add("forward", len(self.forwards) - 1, [], **self._choice)
        self._choice = {}

    def kept(self) -> list[int]:
        """Positions of the response. The release may leave gaps; its response is then the fixed tokens in order."""
        return sorted(self._fixed)[: self.num_kept]

    def _add(self, action: Action, forward: int, changes: Iterable[Change], **more: Any) -> None:
        visible = tuple([change for change in changes if change.positions])
        self.steps.append(Step(action, forward, visible, num_fixed=len(self._fixed), **more))
        self._seen = True

    def _select(self, event: Select) -> None:
        scores = dict(zip(event.candidates, event.scores, strict=True))
        chosen = {position: scores[position] for position in event.chosen if position in scores}
        if event.unit != SLOT:  # chosen positions become final at once, so that the choice is shown with that step
            before = self._choice.get("scores", {})
            num_before = self._choice.get("num_candidates", 0)
            self._choice = {"num_candidates": num_before + len(event.candidates), "scores": before | chosen}
            return
        positions = [first + column for first in event.chosen for column in range(self.slot_size)]
        self._planned = {position for position in positions if position < self.num_positions}
        changes = [self._rejection(), Change("planned", tuple(sorted(self._planned)))]
        self._add("plan", event.forward, changes, num_candidates=len(event.candidates), scores=chosen)

    def _draft(self, event: Draft) -> None:
        changes = [self._rejection(event.positions), Change("draft", event.positions, event.tokens)]
        self._drafts = dict(zip(event.positions, event.tokens, strict=True))
        self._planned -= set(event.positions)
        self._add("draft", event.forward, changes)

    def _fix(self, event: Fix) -> None:
        unused = Change("mask", tuple(sorted(self._planned - set(event.positions))))
        changes = [self._rejection(event.positions), unused, Change("fixed", event.positions, event.tokens)]
        self._fixed |= set(event.positions)
        self._planned = set()
        self._add("fix", event.forward, changes, **self._choice)
        self._choice = {}

    def _stop(self, event: Stop) -> None:
        self.num_kept = event.position if self.num_kept is None else min(event.position, self.num_kept)
        dropped = self._fixed - set(self.kept())
        changes = [self._rejection(), Change("dropped", tuple(sorted(dropped)))]
        self._add("stop", event.forward, changes, reason=event.reason)

    def _rejection(self, accepted: Iterable[int] = ()) -> Change:
        """Rejects the drafts that were neither accepted nor drawn again."""
        rejected, self._drafts = self._drafts, {}
        for position in accepted:
            rejected.pop(position, None)
        return Change("rejected", tuple(rejected), tuple(rejected.values()))


class Speller:
    """Spells tokens one by one, or by their numbers without a tokenizer, and remembers them."""

    def __init__(self, spell: Spell | None) -> None:
        self._spell = spell
        self.piece: Callable[[int], str] = cache(lambda token: f"[{token}]" if spell is None else spell([token]))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text that each of some consecutive tokens adds; the last of the tokens of a character adds it."""
        if self._spell is None:
            return [self.piece(token) for token in tokens]
        result: list[str] = []
        waiting: list[int] = []
        for number, token in enumerate(tokens, start=1):
            waiting.append(token)
            text = self.piece(token) if len(waiting) == 1 else self._spell(waiting)
            if _BROKEN not in text or len(waiting) == _LONGEST_CHARACTER or number == len(tokens):
                result += [*[""] * (len(waiting) - 1), text]
                waiting = []
        return result


def final_pieces(replay: Replay, speller: Speller) -> dict[int, str]:
    """Text of each final position of a replay, given its neighbours: a character may take several tokens."""
    return dict(zip(replay.tokens, speller.pieces(list(replay.tokens.values())), strict=True))
