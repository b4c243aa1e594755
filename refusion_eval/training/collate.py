"""Examples of different lengths as one padded batch with weighted labels.

Shapes: B samples, T longest length, R labelled places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from refusion_eval.training.example import IGNORED, PADDING_BLOCK, Example, Visibility

Normalisation = Literal["release", "paper"]


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Where logits are read, and what they should say.

    Attributes:
        rows_R: places in the flattened [B * T] batch.
        labels_R: token ids.
        weights_R: factor of each place's cross-entropy in the loss.
    """

    rows_R: torch.Tensor
    labels_R: torch.Tensor
    weights_R: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One padded batch.

    Attributes:
        tokens_BT: padded at the end.
        positions_BT: continue past the end in the padding.
        ar: next-token targets.
        mdm: targets of masked places.
        visibility: [B, T], who sees whom, padding nobody but itself; None is causal, where no token ever sees padding.
    """

    tokens_BT: torch.Tensor
    positions_BT: torch.Tensor
    ar: Targets
    mdm: Targets
    visibility: Visibility[torch.Tensor] | None = None


def _targets(labels_BT: np.ndarray, weights_BT: np.ndarray) -> Targets:
    rows = np.flatnonzero(labels_BT != IGNORED)
    return Targets(
        rows_R=torch.from_numpy(rows),
        labels_R=torch.from_numpy(labels_BT.reshape(-1)[rows]),
        weights_R=torch.from_numpy(weights_BT.reshape(-1)[rows].astype(np.float32)),
    )


def collate(examples: Sequence[Example], *, pad: int, normalisation: Normalisation = "release") -> Batch:
    """Pads a list of examples and weighs their labels.

    Args:
        examples: at least one.
        pad: id of the padding token.
        normalisation: "release": AR is a mean over all labelled tokens of the batch, MDM divides each place by its
            `Example.mdm_divisors`; "paper": both are means over the labelled tokens of each sample (Eq. 1-2). Either
            way the sample terms are averaged over B, and a term without labels is 0.
    """
    longest = max(len(example.tokens) for example in examples)
    shape = (len(examples), longest)
    tokens = np.full(shape, pad)
    positions = np.tile(np.arange(longest), (len(examples), 1))
    ar_labels, mdm_labels = np.full(shape, IGNORED), np.full(shape, IGNORED)
    mdm_divisors = np.ones(shape)
    for number, example in enumerate(examples):
        length = len(example.tokens)
        tokens[number, :length] = example.tokens
        positions[number, :length] = example.positions
        ar_labels[number, :length] = example.ar_labels
        mdm_labels[number, :length] = example.mdm_labels
        mdm_divisors[number, :length] = example.mdm_divisors

    num_ar_B1 = (ar_labels != IGNORED).sum(axis=1, keepdims=True)
    num_mdm_B1 = (mdm_labels != IGNORED).sum(axis=1, keepdims=True)
    if normalisation == "release":
        ar_divisors = np.maximum(num_ar_B1.sum(), 1)
    else:
        ar_divisors = len(examples) * np.maximum(num_ar_B1, 1)
        mdm_divisors = np.maximum(num_mdm_B1, 1)
    return Batch(
        tokens_BT=torch.from_numpy(tokens),
        positions_BT=torch.from_numpy(positions),
        ar=_targets(ar_labels, np.broadcast_to(1 / ar_divisors, shape)),
        mdm=_targets(mdm_labels, np.broadcast_to(1 / (len(examples) * mdm_divisors), shape)),
        visibility=_visibility(examples, shape),
    )


def _visibility(examples: Sequence[Example], shape: tuple[int, int]) -> Visibility[torch.Tensor] | None:
    """That of all examples, which one objective made, so that all have one or none has."""
    given = [example.visibility for example in examples if example.visibility is not None]
    if not given:
        return None
    assert len(given) == len(examples), "a batch mixes causal examples and others"
    blocks, noisy = np.full(shape, PADDING_BLOCK, dtype=np.int32), np.full(shape, True)
    for number, visibility in enumerate(given):
        length = len(visibility.blocks)
        blocks[number, :length] = visibility.blocks
        noisy[number, :length] = visibility.noisy
    return Visibility(blocks=torch.from_numpy(blocks), noisy=torch.from_numpy(noisy))
