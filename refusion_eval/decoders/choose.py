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


def accepted_prefix(accepted: npt.NDArray[np.bool_]) -> int:
    """Length of the run of accepted entries from the start, 0 to len(accepted)."""
    rejected = np.flatnonzero(~accepted)
    return int(rejected[0]) if len(rejected) else len(accepted)


def first_eos(tokens: Sequence[int] | npt.NDArray[np.int64], eos_ids: Container[int]) -> int | None:
    """Index of the first end-of-sequence token, or None."""
    return next((index for index, token in enumerate(tokens) if int(token) in eos_ids), None)
