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


def num_within_factor(scores: npt.NDArray[np.floating], factor: float) -> int:
    """How many of the best scores go together: the longest run whose n-th reaches 1 - factor / (n + 1) (Fast-dLLM).

    Args:
        scores: [candidates], at least one.
        factor: the larger, the more.

    Returns:
        At least 1: the best always counts.
    """
    ranks = np.arange(1, len(scores) + 1)
    passes = np.sort(scores)[::-1] >= 1 - factor / (ranks + 1)
    return 1 + accepted_prefix(passes[1:])


def rounded_quotas(num_masked: int, steps: int) -> list[int]:
    """How many masks each step fills on a linear schedule, each rounded by itself (dllm).

    With i steps to go a step fills the i-th part of what is left, rounded half to even. Its schedule is in float32,
    which decides where halves fall.

    Returns:
        Numbers above 0 that add up to `num_masked`; at most `steps` of them, as steps that would fill nothing are left
        out.
    """
    one = np.float32(1)
    quotas, left = [], num_masked
    for step in range(steps, 0, -1):
        masked_now, masked_next = (one - (one - np.float32(share / steps)) for share in (step, step - 1))
        quotas.append(round(left * (1 - float(masked_next / masked_now))))
        left -= quotas[-1]
    return [quota for quota in quotas if quota]


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
