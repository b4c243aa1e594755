"""Requests for log-likelihoods: how they are cut to length and put together to parts."""

from collections.abc import Callable, Iterator, Sequence

from refusion_eval.engine.scoring import TokenScore
from refusion_eval.errors import ConfigError

Pair = tuple[Sequence[int], Sequence[int]]
Part = Sequence[Pair]
# Yields number and scores of each part as it is computed, in any order: in this process, or in all of a run.
Score = Callable[[Sequence[Part]], Iterator[tuple[int, list[TokenScore]]]]


def fit(context: Sequence[int], continuation: Sequence[int], longest: int) -> Pair:
    """Drops the beginning of a text that has more than `longest` tokens; ConfigError if its continuation alone has."""
    surplus = len(context) + len(continuation) - longest
    if surplus >= len(context):
        raise ConfigError(
            f"a continuation of {len(continuation)} tokens is too long to be scored: it may have {longest - 1}"
        )
    return context[max(0, surplus) :], continuation


def scores(score: Score, pairs: Sequence[Pair], size: int) -> Iterator[tuple[int, TokenScore]]:
    """Yields number and score of each pair, which fits, as it is computed, in any order."""
    scored = [number for number, (_, continuation) in enumerate(pairs) if continuation]
    # A continuation is empty if the tokenizer merged it into its context.
    yield from ((number, TokenScore(0.0, True)) for number in range(len(pairs)) if not pairs[number][1])
    groups = [scored[start : start + size] for start in range(0, len(scored), size)]
    for part, part_scores in score([[pairs[number] for number in group] for group in groups]):
        yield from zip(groups[part], part_scores, strict=True)
