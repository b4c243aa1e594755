"""The events of one decoding: forwards, selections, drafts, final tokens and the end, and what follows from them.

The decoder reports choices and tokens, the engine reports forwards; both report only values that are on the host
anyway. Positions are response indices: 0 is the first generated position.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar


@dataclass(frozen=True, slots=True)
class ForwardDone:
    """One model call: its number, the decoder's name for it, its number of query rows, and that of the cached rows."""

    tag: ClassVar[str] = "forward"
    forward: int
    kind: str
    rows: int
    cached: int


@dataclass(frozen=True, slots=True)
class Select:
    """A choice among candidates (first positions of slots or blocks, or positions of tokens) by their scores."""

    tag: ClassVar[str] = "select"
    forward: int
    unit: str
    candidates: tuple[int, ...]
    scores: tuple[float, ...]
    chosen: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed for positions that are not final yet."""

    tag: ClassVar[str] = "draft"
    forward: int
    positions: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fix:
    """Positions that became final, and their tokens."""

    tag: ClassVar[str] = "fix"
    forward: int
    positions: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of decoding: why, and how many positions the response keeps."""

    tag: ClassVar[str] = "stop"
    forward: int
    reason: str
    position: int


Event = ForwardDone | Select | Draft | Fix | Stop
E = TypeVar("E", ForwardDone, Select, Draft, Fix, Stop)
_EVENTS: dict[str, Callable[..., Event]] = {event.tag: event for event in (ForwardDone, Select, Draft, Fix, Stop)}


@dataclass(slots=True)
class Trace:
    """Events in the order in which they happened; an event carries the number of the last forward before it."""

    events: list[Event] = field(default_factory=list)
    num_forwards: int = 0

    def forward(self, kind: str, rows: int, cached: int) -> None:
        """Counts one model call. Only the engine calls this: it is the one place where forwards are counted."""
        self.events.append(ForwardDone(self.num_forwards, kind, rows, cached))
        self.num_forwards += 1

    def select(self, unit: str, candidates: Sequence[int], scores: Sequence[float], chosen: Sequence[int]) -> None:
        """Records a choice among candidates."""
        event = Select(self._last, unit, tuple(candidates), tuple(float(score) for score in scores), tuple(chosen))
        self.events.append(event)

    def draft(self, positions: Sequence[int], tokens: Sequence[int]) -> None:
        """Records proposed tokens."""
        self.events.append(Draft(self._last, tuple(positions), tuple(int(token) for token in tokens)))

    def fix(self, positions: Sequence[int], tokens: Sequence[int]) -> None:
        """Records final tokens."""
        self.events.append(Fix(self._last, tuple(positions), tuple(int(token) for token in tokens)))

    def stop(self, reason: str, position: int) -> None:
        """Records the end of decoding and the length of the response."""
        self.events.append(Stop(self._last, reason, position))

    @property
    def _last(self) -> int:
        return self.num_forwards - 1

    def fixed_at(self) -> dict[int, int]:
        """Maps every fixed position to the number of the forward that fixed it."""
        return {position: event.forward for event in self.of(Fix) for position in event.positions}

    def fixed_tokens(self) -> dict[int, int]:
        """Maps every fixed position to its token; positions beyond the kept response are included."""
        return {
            position: token
            for event in self.of(Fix)
            for position, token in zip(event.positions, event.tokens, strict=True)
        }

    def of(self, kind: type[E]) -> Iterator[E]:
        """The events of one kind, in order."""
        return (event for event in self.events if isinstance(event, kind))

    def to_json(self) -> list[list[Any]]:
        """Events as plain lists [tag, field, ...], for records."""
        return [[event.tag, *_values(event)] for event in self.events]

    @classmethod
    def from_json(cls, rows: Sequence[Sequence[Any]]) -> Self:
        """Rebuilds a trace from `to_json`."""
        events = [_event(*row) for row in rows]
        return cls(events, sum(isinstance(event, ForwardDone) for event in events))


def _values(event: Event) -> list[Any]:
    values = (getattr(event, name) for name in event.__slots__)
    return [list(value) if isinstance(value, tuple) else value for value in values]


def _event(tag: str, *values: Any) -> Event:
    return _EVENTS[tag](*(tuple(value) if isinstance(value, list) else value for value in values))
