"""Examples of different lengths as one padded batch with weighted labels.

Shapes: B samples, T longest length, R labelled places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from refusion_eval.training.corrupt import IGNORED, Example

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
        tokens_BT: padded at the end; plain causal attention never lets a token see padding, so no mask is needed.
        positions_BT: continue past the end in the padding.
        ar: next-token targets.
        mdm: targets of masked places.
    """

    tokens_BT: torch.Tensor
    positions_BT: torch.Tensor
    ar: Targets
    mdm: Targets


def _targets(labels_BT: np.ndarray, weight_of_sample_B: np.ndarray) -> Targets:
    sample_R, _ = np.nonzero(labels_BT != IGNORED)
    rows = np.flatnonzero(labels_BT != IGNORED)
    return Targets(
        rows_R=torch.from_numpy(rows),
        labels_R=torch.from_numpy(labels_BT.reshape(-1)[rows]),
        weights_R=torch.from_numpy(weight_of_sample_B[sample_R].astype(np.float32)),
    )


def collate(examples: Sequence[Example], *, pad: int, normalisation: Normalisation = "release") -> Batch:
    """Pads a list of examples and weighs their labels.

    Args:
        examples: at least one.
        pad: id of the padding token.
        normalisation: "release": AR is a mean over all labelled tokens of the batch, MDM divides by q * A for each
            sample; "paper": both are means over the labelled tokens of each sample (Eq. 1-2). Either way the sample
            terms are averaged over B, and a term without labels is 0.
    """
    longest = max(len(example.tokens) for example in examples)
    shape = (len(examples), longest)
    tokens = np.full(shape, pad)
    positions = np.tile(np.arange(longest), (len(examples), 1))
    ar_labels, mdm_labels = np.full(shape, IGNORED), np.full(shape, IGNORED)
    for number, example in enumerate(examples):
        length = len(example.tokens)
        tokens[number, :length] = example.tokens
        positions[number, :length] = example.positions
        ar_labels[number, :length] = example.ar_labels
        mdm_labels[number, :length] = example.mdm_labels

    num_ar_B = (ar_labels != IGNORED).sum(axis=1)
    num_mdm_B = (mdm_labels != IGNORED).sum(axis=1)
    if normalisation == "release":
        ar_weights_B = np.full(len(examples), 1 / max(num_ar_B.sum(), 1))
        mdm_sizes_B = np.array([example.mask_probability * example.answer_length for example in examples])
        mdm_weights_B = 1 / (len(examples) * mdm_sizes_B)
    else:
        ar_weights_B = 1 / (len(examples) * np.maximum(num_ar_B, 1))
        mdm_weights_B = 1 / (len(examples) * np.maximum(num_mdm_B, 1))
    return Batch(
        tokens_BT=torch.from_numpy(tokens),
        positions_BT=torch.from_numpy(positions),
        ar=_targets(ar_labels, ar_weights_B),
        mdm=_targets(mdm_labels, mdm_weights_B),
    )
