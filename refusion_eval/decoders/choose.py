"""Choices that decoders share: small pure functions of host arrays."""

from collections.abc import Container, Sequence

import numpy as np
import numpy.typing as npt


def above_or_best(scores: npt.NDArray[np.floating], threshold: float) -> list[int]:
    """Indices whose score exceeds the threshold (strictly), ascending; if there is none, the best one.

    Args:
        scores: [candidates], at least one.
        threshold: the score to exceed.

    Returns:
        At least one index. Among equally good best ones the lowest index wins.
    """
    chosen = np.flatnonzero(scores > threshold)
    if not len(chosen):
        return [int(np.argmax(scores))]
    return [int(index) for index in chosen]


def at_least_or_best(scores: npt.NDArray[np.floating], threshold: float) -> list[int]:
    """Indices whose score is not below the threshold, ascending, and always the best one (Fast-dLLM).

    Args:
        scores: [candidates], at least one.
        threshold: the score not to fall below.

    Returns:
        At least one index. Among equally good best ones the lowest index wins.
    """
    chosen = ~(scores < threshold)
    chosen[np.argmax(scores)] = True
    return [int(index) for index in np.flatnonzero(chosen)]


def most_confident(scores: npt.NDArray[np.floating], count: int) -> list[int]:
    """Indices of the `count` best scores, ascending; among equal ones the lowest indices win.

    Ties are common: where probabilities round to 1, or where a truncated distribution has one token left.
    """
    return sorted(int(index) for index in np.argsort(-scores, kind="stable")[:count])


def even_quotas(num_masked: int, steps: int) -> list[int]:
    """How many masks each step fills: as even as possible, what is left over in the first steps (LLaDA).

    Returns:
        One number a step; they add up to `num_masked` and differ by at most 1.
    """
    least, left_over = divmod(num_masked, steps)
    return [least + (step < left_over) for step in range(steps)]


def accepted_prefix(accepted: npt.NDArray[np.bool_]) -> int:
    """Length of the run of accepted entries from the start, 0 to len(accepted)."""
    rejected = np.flatnonzero(~accepted)
    return int(rejected[0]) if len(rejected) else len(accepted)


def first_eos(tokens: Sequence[int] | npt.NDArray[np.int64], eos_ids: Container[int]) -> int | None:
    """Index of the first end-of-sequence token, or None."""
    return next((index for index, token in enumerate(tokens) if int(token) in eos_ids), None)
