"""Decoding systems against each other: the same prompts, interleaved rounds, ratios of medians."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from refusion_eval.types import Decoded

Run = Callable[[Sequence[int]], Decoded]


class Entrant(NamedTuple):
    """One system.

    Attributes:
        run: decodes one prompt.
        like: name of the system whose tokens it must give, if any.
    """

    run: Run
    like: str | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """What a system did in all rounds.

    Attributes:
        tokens_per_second: of each round.
        num_tokens, num_forwards: of one round.
        same_tokens: whether it gave the tokens it must give; None if it is held against no other.
    """

    tokens_per_second: tuple[float, ...]
    num_tokens: int
    num_forwards: int
    same_tokens: bool | None

    @property
    def median(self) -> float:
        """Median tokens per second."""
        return statistics.median(self.tokens_per_second)


def compete(
    entrants: Mapping[str, Entrant],
    prompts: Sequence[Sequence[int]],
    num_rounds: int,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Standing]:
    """Lets every system decode every prompt, round after round, after a warm-up on the first prompt.

    Args:
        entrants: name -> system.
        prompts: token ids.
        num_rounds: at least 1.
        progress: told what is being done.
    """
    for name, entrant in entrants.items():
        progress(f"warm-up: {name}")
        entrant.run(prompts[0])
    speeds: dict[str, list[float]] = {name: [] for name in entrants}
    results: dict[str, list[Decoded]] = {}
    for number in range(num_rounds):
        for name, entrant in entrants.items():
            progress(f"round {number + 1} of {num_rounds}: {name}")
            results[name] = [entrant.run(prompt) for prompt in prompts]
            seconds = sum(result.seconds for result in results[name])
            speeds[name].append(sum(len(result.tokens) for result in results[name]) / seconds)
    tokens = {name: [result.tokens for result in some] for name, some in results.items()}
    return {
        name: Standing(
            tokens_per_second=tuple(speeds[name]),
            num_tokens=sum(len(some) for some in tokens[name]),
            num_forwards=sum(result.num_forwards for result in results[name]),
            same_tokens=None if entrant.like is None else tokens[name] == tokens[entrant.like],
        )
        for name, entrant in entrants.items()
    }
