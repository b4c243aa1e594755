"""One training sequence of any objective: what is fed, what is predicted where, how it weighs, and who sees whom."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

IGNORED = -100  # the label of a position whose logits are not read

Array = TypeVar("Array", np.ndarray, torch.Tensor)


@dataclass(frozen=True, kw_only=True)
class Visibility(Generic[Array]):
    """Who sees whom where attention is not causal: two small numbers a row in place of a mask.

    The text is cut into blocks, and may be there twice, clean and noisy. A row sees its own block of its own copy, and
    the clean copy of all blocks before it:

        i sees j  <=>  (block_i = block_j and noisy_i = noisy_j)  or  (block_j < block_i and not noisy_j)

    One clean block is full attention.

    Attributes:
        blocks: [..., T], number of each row's block, from 0.
        noisy: [..., T], whether the row belongs to the noisy copy.
    """

    blocks: Array
    noisy: Array

    def mask(self) -> Array:
        """[..., T, T], whether the row of the last but one axis sees that of the last; every row sees itself."""
        own, other = self.blocks[..., :, None], self.blocks[..., None, :]
        same_copy = self.noisy[..., :, None] == self.noisy[..., None, :]
        return ((own == other) & same_copy) | ((other < own) & ~self.noisy[..., None, :])


@dataclass(frozen=True, kw_only=True)
class Example:
    """One training sequence of T rows.

    Attributes:
        tokens: [T], as they are fed.
        positions: [T], each token's index in the true text.
        ar_labels: [T], the next token, where it is to be predicted, or `IGNORED`.
        mdm_labels: [T], the token behind a mask, or `IGNORED`.
        mdm_divisors: [T], what the cross-entropy at each place of `mdm_labels` is divided by; of the other places
            nobody asks.
        visibility: who sees whom; None is causal, in the order of the rows.
    """

    tokens: np.ndarray
    positions: np.ndarray
    ar_labels: np.ndarray
    mdm_labels: np.ndarray
    mdm_divisors: np.ndarray
    visibility: Visibility[np.ndarray] | None = None
