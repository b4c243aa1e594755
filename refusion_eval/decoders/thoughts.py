"""A budget of thought tokens for any decoder: a response in two parts, with the end of the thought between them.

The first part has as many tokens as the budget. If it ends inside a thought, the tokens that end a thought follow, and
the rest is decoded as the response to prompt, first part and these tokens. A decoder that fills a canvas of masks thus
has one canvas for the thought and one for the answer. The second part begins with an empty cache, so that its first
forward reads all that stands before it; an autoregressive decoder makes one forward a token all the same.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from refusion_eval.types import DROP_ALL, Decode, Decoding, Response, Trace, draw_key

# The prompt and the response so far -> the tokens that end a thought here; empty if none is open.
EndOfThought = Callable[[Sequence[int], Sequence[int]], Sequence[int]]


def has_budget(settings: Any) -> bool:
    """Whether the settings, which may be those of a user's own decoder, end thoughts before the response is full."""
    budget = getattr(settings, "thought_budget", None)
    return budget is not None and budget < settings.gen_length


def parts(settings: Any) -> Iterator[Any]:
    """The settings of the first part, if it has a token, and of the rest; ConfigError for a length that is refused."""
    budget, whole = settings.thought_budget, settings.gen_length
    for length in filter(None, (budget, whole - budget)):
        # Steps are shared by all tokens, so that each part gets its share of them.
        steps = {"steps": settings.steps * length // whole} if getattr(settings, "steps", None) else {}
        yield replace(settings, gen_length=length, thought_budget=None, **steps)


def within_budget(decode: Decode, end_of_thought: EndOfThought) -> Decode:
    """The decoder with the `thought_budget` of its settings, where `has_budget` holds."""

    def decode_parts(prompt: Sequence[int], settings: Any, trace: Trace) -> Decoding:
        *thought, answer = parts(settings)
        begun: list[int] = []
        for part in thought:
            response = yield from decode(prompt, part, _Part(trace, 0))
            begun += response.tokens
            # Decoders that fill a canvas may look for stop strings at its end only.
            is_stopped = settings.stop_rule is not None and settings.stop_rule(begun)
            if response.stop != "length" or is_stopped:
                trace.stop(response.stop, len(begun))
                return response
        forced = end_of_thought(prompt, begun)
        num_begun = len(begun)
        begun += forced
        # Positions count from the start of the part, and so do the draws.
        changes: dict[str, Any] = {"seed": draw_key(settings.seed, num_begun) >> 1}
        if settings.stop_rule is not None:
            changes["stop_rule"] = lambda tokens: settings.stop_rule([*begun, *tokens])
        decoding = decode([*prompt, *begun], replace(answer, **changes), _Part(trace, len(begun)))
        readouts = yield replace(next(decoding), commit=DROP_ALL)
        if forced:
            trace.fix(range(num_begun, len(begun)), forced)
        response = yield from _resumed(decoding, readouts)
        tokens = (*begun, *response.tokens)
        trace.stop(response.stop, len(tokens))
        return Response(tokens, response.stop, len(forced))

    return decode_parts


def _resumed(decoding: Decoding, readouts: Any) -> Decoding:
    """What is left of a decoding that waits for these readouts."""
    while True:
        try:
            forward = decoding.send(readouts)
        except StopIteration as end:
            response: Response = end.value
            return response
        readouts = yield forward


class _Part(Trace):
    """Writes the events of a part of a response, all but its end, to the trace of the whole."""

    def __init__(self, whole: Trace, start: int) -> None:
        super().__init__()
        self._whole, self._start = whole, start

    def _moved(self, positions: Sequence[int]) -> list[int]:
        return [self._start + position for position in positions]

    def select(self, unit: str, candidates: Sequence[int], scores: Sequence[float], chosen: Sequence[int]) -> None:
        self._whole.select(unit, self._moved(candidates), scores, self._moved(chosen))

    def draft(self, positions: Sequence[int], tokens: Sequence[int]) -> None:
        self._whole.draft(self._moved(positions), tokens)

    def fix(self, positions: Sequence[int], tokens: Sequence[int]) -> None:
        self._whole.fix(self._moved(positions), tokens)

    def stop(self, reason: str, position: int) -> None:
        pass
