"""Log-likelihoods of continuations, computed in parts: in this process, or in all processes of a run."""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from refusion_eval import api
from refusion_eval.engine.scoring import TokenScore
from refusion_eval.errors import ConfigError
from refusion_eval.runs.system import System

Pair = tuple[Sequence[int], Sequence[int]]
Part = Sequence[Pair]
Scores = list[TokenScore]


@runtime_checkable
class Scorer(Protocol):
    """Computes log-likelihoods: in this process, or in many."""

    def score(self, parts: Sequence[Part]) -> Iterator[tuple[int, Scores]]:
        """Yields number and scores of each part as it is computed, in any order."""
        ...


class LocalScorer:
    """Computes log-likelihoods in this process, part by part in their order."""

    def __init__(self, system: System) -> None:
        self._system = system

    def score(self, parts: Sequence[Part]) -> Iterator[tuple[int, Scores]]:
        """See `Scorer.score`."""
        return ((number, score_part(self._system, part)) for number, part in enumerate(parts))


def score_part(system: System, part: Part) -> Scores:
    """The log-likelihood of each continuation under a system's checkpoint; see `api.score_tokens_many`."""
    args = system.args
    return api.score_tokens_many(system.model, part, len(part), args.mc_samples, int(args.settings.get("seed", 0)))


def scores_from_json(fields: Sequence[tuple[float, bool]]) -> Scores:
    """The result of `score_part` from its JSON form."""
    return [TokenScore(*score) for score in fields]


def fit(context: Sequence[int], continuation: Sequence[int], longest: int) -> Pair:
    """Drops the beginning of a text that has more than `longest` tokens, which is too long to be scored.

    Raises:
        ConfigError: the continuation alone is too long.
    """
    surplus = len(context) + len(continuation) - longest
    if surplus >= len(context):
        raise ConfigError(
            f"a continuation of {len(continuation)} tokens is too long to be scored: it may have {longest - 1}"
        )
    return context[max(0, surplus) :], continuation


def scores(scorer: Scorer, pairs: Sequence[Pair], size: int) -> Iterator[tuple[int, TokenScore]]:
    """Yields number and score of each pair as it is computed, in any order.

    Args:
        pairs: pairs that fit; a continuation is empty if the tokenizer merged it into its context.
    """
    present = []
    for number, (_, continuation) in enumerate(pairs):
        if continuation:
            present.append(number)
        else:
            yield number, TokenScore(0.0, True)
    groups = [present[start : start + size] for start in range(0, len(present), size)]
    for part, part_scores in scorer.score([[pairs[number] for number in group] for group in groups]):
        yield from zip(groups[part], part_scores, strict=True)
