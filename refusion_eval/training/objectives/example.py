"""A sample of the data, and the training sequence that an objective makes of it."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

IGNORED = -100  # the label of a position whose logits are not read

Array = TypeVar("Array", np.ndarray, torch.Tensor)


@dataclass(frozen=True, slots=True)
class TrainingSample:
    prompt: tuple[int, ...]  # token ids
    answer: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True, kw_only=True)
class Visibility(Generic[Array]):
    """Attention that is not causal, as two small numbers for each row instead of a mask.

    The text is divided into blocks and may occur twice, clean and noisy. A row sees its own block of its own copy, and
    the clean copy of all earlier blocks:

        i sees j  <=>  (block_i = block_j and noisy_i = noisy_j)  or  (block_j < block_i and not noisy_j)

    One clean block is full attention. If `causal`, no row sees a later row, so that the clean copy, which comes first,
    is the sequence of autoregressive training.
    """

    blocks: Array  # [..., T], 0-based number of the block of each row
    noisy: Array  # [..., T], whether the row belongs to the noisy copy
    causal: bool = False

    def mask(self) -> Array:
        """[..., T, T], whether row i (second last axis) sees row j (last axis); every row sees itself."""
        row_blocks, seen_blocks = self.blocks[..., :, None], self.blocks[..., None, :]
        same_copy = self.noisy[..., :, None] == self.noisy[..., None, :]
        seen = ((row_blocks == seen_blocks) & same_copy) | ((seen_blocks < row_blocks) & ~self.noisy[..., None, :])
        if not self.causal:
            return seen
        tril: Any = np.tril if isinstance(seen, np.ndarray) else torch.tril
        return tril(seen)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One training sequence of T rows; all arrays are [T]."""

    tokens: np.ndarray  # input token ids
    positions: np.ndarray  # index of each token in the original text
    ar_labels: np.ndarray  # the next token where it is to be predicted, else `IGNORED`
    mdm_labels: np.ndarray  # the original token of a mask, else `IGNORED`
    mdm_divisors: np.ndarray  # of the cross-entropy of each label in `mdm_labels`; without meaning elsewhere
    visibility: Visibility[np.ndarray] | None = None

    def num_visible_pairs(self) -> int:
        """Number of pairs (i, j) where row i sees row j, including i = j."""
        if self.visibility is None:
            return len(self.tokens) * (len(self.tokens) + 1) // 2
        blocks, noisy = self.visibility.blocks, self.visibility.noisy
        clean_B = np.bincount(blocks[~noisy], minlength=int(blocks.max()) + 1)
        noisy_B = np.bincount(blocks[noisy], minlength=len(clean_B))
        earlier_B = np.cumsum(clean_B) - clean_B
        own_B = [sizes * (sizes + 1) // 2 if self.visibility.causal else sizes**2 for sizes in (clean_B, noisy_B)]
        return int((own_B[0] + own_B[1] + (clean_B + noisy_B) * earlier_B).sum())
