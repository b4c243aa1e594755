"""Choices that several decoders make: small pure functions of host arrays."""

from collections.abc import Container, Sequence

import numpy as np
import numpy.typing as npt


def above_or_best(scores: npt.NDArray[np.floating], threshold: float) -> list[int]:
    """Indices whose score exceeds the threshold (strictly), ascending; the best one if there is none.

    Args:
        scores: [candidates], at least one.
        threshold: the score to exceed.

    Returns:
        At least one index; the lowest one wins among equal best scores.
    """
    chosen = np.flatnonzero(scores > threshold)
    if not len(chosen):
        return [int(np.argmax(scores))]
    return [int(index) for index in chosen]


def at_least_or_best(scores: npt.NDArray[np.floating], threshold: float) -> list[int]:
    """Indices whose score is at least the threshold, and always the best one, ascending (Fast-dLLM).

    Args:
        scores: [candidates], at least one.
        threshold: the lowest score that is chosen.

    Returns:
        At least one index; the lowest one wins among equal best scores.
    """
    chosen = ~(scores < threshold)
    chosen[np.argmax(scores)] = True
    return [int(index) for index in np.flatnonzero(chosen)]


def most_confident(scores: npt.NDArray[np.floating], count: int) -> list[int]:
    """Indices of the `count` best scores, ascending; among equal ones the lowest indices win.

    Ties are common: where probabilities round to 1, or where a truncated distribution has one token left.
    """
    return sorted(int(index) for index in np.argsort(-scores, kind="stable")[:count])


def num_within_factor(scores: npt.NDArray[np.floating], factor: float) -> int:
    """Number of best scores to commit: the longest run whose n-th score reaches 1 - factor / (n + 1) (Fast-dLLM).

    Args:
        scores: [candidates], at least one.
        factor: a larger factor commits more.

    Returns:
        At least 1: the best score always counts.
    """
    ranks = np.arange(1, len(scores) + 1)
    passes = np.sort(scores)[::-1] >= 1 - factor / (ranks + 1)
    return 1 + accepted_prefix(passes[1:])


def rounded_quotas(num_masked: int, steps: int) -> list[int]:
    """Number of masks that each step fills on a linear schedule, rounded step by step (dllm).

    With i steps to go, a step fills one i-th of the remaining masks, rounded half to even. The schedule is computed in
    float32, as in the release, because that decides how halves are rounded.

    Returns:
        Numbers above 0 that add up to `num_masked`; at most `steps`, because steps that would fill nothing are left
        out.
    """
    unit = np.float32(1)
    quotas, num_left = [], num_masked
    for step in range(steps, 0, -1):
        masked_now, masked_next = (unit - (unit - np.float32(share / steps)) for share in (step, step - 1))
        quotas.append(round(num_left * (1 - float(masked_next / masked_now))))
        num_left -= quotas[-1]
    return [quota for quota in quotas if quota]


def even_quotas(num_masked: int, steps: int) -> list[int]:
    """Number of masks that each step fills: evenly, and one more in the first steps for the remainder (LLaDA).

    Returns:
        One number a step; they add up to `num_masked` and differ by at most 1.
    """
    quota, remainder = divmod(num_masked, steps)
    return [quota + (step < remainder) for step in range(steps)]


def accepted_prefix(accepted: npt.NDArray[np.bool_]) -> int:
    """Length of the run of accepted entries from the start, 0 to len(accepted)."""
    rejected = np.flatnonzero(~accepted)
    return int(rejected[0]) if len(rejected) else len(accepted)


def first_eos(tokens: Sequence[int] | npt.NDArray[np.int64], eos_ids: Container[int]) -> int | None:
    """Index of the first end-of-sequence token, or None."""
    return next((index for index, token in enumerate(tokens) if int(token) in eos_ids), None)
