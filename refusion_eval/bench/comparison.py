"""Comparing the speed of decoding systems: the same prompts, interleaved rounds, medians over rounds."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from refusion_eval.types import Decoded


class System(NamedTuple):
    """A way of decoding that takes part in a comparison.

    Attributes:
        run: decodes one prompt, given as token ids.
        same_tokens_as: name of the system whose tokens it must reproduce; None if there is none.
    """

    run: Callable[[Sequence[int]], Decoded]
    same_tokens_as: str | None = None


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of one system.

    Attributes:
        tokens_per_second: all tokens divided by all seconds of a round, one value per round.
        num_tokens, num_forwards: tokens and model calls of one round.
        same_tokens: whether the tokens equal those of `System.same_tokens_as`; None without such a system.
    """

    tokens_per_second: tuple[float, ...]
    num_tokens: int
    num_forwards: int
    same_tokens: bool | None

    @property
    def median(self) -> float:
        """Median over rounds of the tokens per second."""
        return statistics.median(self.tokens_per_second)


def compare(
    systems: Mapping[str, System],
    prompts: Sequence[Sequence[int]],
    num_rounds: int,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Speed]:
    """Measures the speed of each system after a warm-up on the first prompt.

    The systems take turns in every round, so that other load on the machine affects all of them.

    Args:
        systems: systems by name.
        prompts: token ids of each prompt.
        num_rounds: number of rounds, at least 1.
        progress: called with a line of text before each step.
    """
    for name, system in systems.items():
        progress(f"warm-up: {name}")
        system.run(prompts[0])
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    results: dict[str, list[Decoded]] = {}
    for number in range(num_rounds):
        for name, system in systems.items():
            progress(f"round {number + 1} of {num_rounds}: {name}")
            results[name] = [system.run(prompt) for prompt in prompts]
            seconds = sum(result.seconds for result in results[name])
            speeds[name].append(sum(len(result.tokens) for result in results[name]) / seconds)
    tokens = {name: [result.tokens for result in round_results] for name, round_results in results.items()}
    return {
        name: Speed(
            tokens_per_second=tuple(speeds[name]),
            num_tokens=sum(map(len, tokens[name])),
            num_forwards=sum(result.num_forwards for result in results[name]),
            same_tokens=None if system.same_tokens_as is None else tokens[name] == tokens[system.same_tokens_as],
        )
        for name, system in systems.items()
    }
