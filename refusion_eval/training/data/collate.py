"""Packs examples of different lengths into one batch without padding, with weighted labels.

Shapes: T rows of all examples, R labelled rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from refusion_eval.training.objectives.example import IGNORED, Example, Visibility

Normalisation = Literal["release", "paper"]
# Attention visibility within an example. The two frequent kinds have names, as attention needs no mask for them.
Sight = Literal["causal", "full"] | Visibility[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Targets:
    rows_R: torch.Tensor  # indices of the labelled rows in the batch
    labels_R: torch.Tensor  # token ids that the logits of these rows should predict
    weights_R: torch.Tensor  # factor of the cross-entropy of each row in the loss


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Several concatenated examples; no row of one example sees a row of another."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor  # they restart with each example and need not ascend within one
    lengths: tuple[int, ...]  # number of rows of each example; their sum is T
    sights: tuple[Sight, ...]  # of each example
    ar: Targets  # next tokens
    mdm: Targets  # masked positions

    def to(self, device: torch.device) -> "PackedBatch":
        return _on_device(self, device)


def _on_device(value: Any, device: torch.device) -> Any:
    """A copy of a tensor, of a tuple, or of a dataclass of these; other values stay as they are."""
    if isinstance(value, tuple):
        return tuple(_on_device(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _on_device(getattr(value, field.name), device) for field in fields(value)})
    return value.to(device) if isinstance(value, torch.Tensor) else value


def collate(
    groups: Sequence[Sequence[Example]], *, normalisation: Normalisation = "release", num_groups: float = 1
) -> PackedBatch:
    """Packs groups of examples and weighs their labels; the loss is the sum of those of the groups over `num_groups`.

    Let CE be the cross-entropy of a row, C_s and M_s the rows of sample s with an AR label and with an MDM label, d_i
    the divisor of a row (`Example.mdm_divisors`; for ReFusion q_s A_s, the expected number of masked tokens), B the
    number of samples, and lambda the `mdm_weight` of `hybrid_loss`. The loss of a group (Eq. 3) is

        L = L_AR + lambda L_MDM
        release:      L_AR = sum_s sum_(j in C_s) CE_j / sum_s |C_s|      L_MDM = 1/B sum_s sum_(i in M_s) CE_i / d_i
        paper (1-2):  L_AR = 1/B sum_s 1/|C_s| sum_(j in C_s) CE_j        L_MDM = 1/B sum_s 1/|M_s| sum_(i in M_s) CE_i

    A clean slot of k tokens has k - 1 labelled rows and a masked slot has k. If all slots are full, |C_s| and |M_s| are
    therefore the (k - 1) and k times the number of slots of the paper. A term without labels is 0.
    """
    examples = [example for group in groups for example in group]
    weights = [_weights(group, normalisation) for group in groups]
    ar_weights_T, mdm_weights_T = (np.concatenate(parts) / num_groups for parts in zip(*weights, strict=True))
    return PackedBatch(
        tokens_T=torch.from_numpy(np.concatenate([example.tokens for example in examples])),
        positions_T=torch.from_numpy(np.concatenate([example.positions for example in examples])),
        lengths=tuple(len(example.tokens) for example in examples),
        sights=tuple(_sight(example.visibility) for example in examples),
        ar=_targets(np.concatenate([example.ar_labels for example in examples]), ar_weights_T),
        mdm=_targets(np.concatenate([example.mdm_labels for example in examples]), mdm_weights_T),
    )


def _weights(examples: Sequence[Example], normalisation: Normalisation) -> tuple[np.ndarray, np.ndarray]:
    """Factors of the AR and the MDM cross-entropy of each row of a group."""
    lengths = [len(example.tokens) for example in examples]
    num_ar = [(example.ar_labels != IGNORED).sum() for example in examples]
    if normalisation == "release":
        ar_divisors_T = np.full(sum(lengths), max(sum(num_ar), 1))
        mdm_divisors_T = np.concatenate([example.mdm_divisors for example in examples])
    else:
        num_mdm = [(example.mdm_labels != IGNORED).sum() for example in examples]
        ar_divisors_T = len(examples) * np.repeat(np.maximum(num_ar, 1), lengths)
        mdm_divisors_T = np.repeat(np.maximum(num_mdm, 1), lengths)
    return 1 / ar_divisors_T, 1 / (len(examples) * mdm_divisors_T)


def _targets(labels_T: np.ndarray, weights_T: np.ndarray) -> Targets:
    rows = np.flatnonzero(labels_T != IGNORED)
    return Targets(
        rows_R=torch.from_numpy(rows),
        labels_R=torch.from_numpy(labels_T[rows]),
        weights_R=torch.from_numpy(weights_T[rows].astype(np.float32)),
    )


def _sight(visibility: Visibility[np.ndarray] | None) -> Sight:
    if visibility is None:
        return "causal"
    if (visibility.blocks == visibility.blocks[0]).all() and not visibility.noisy.any():
        return "full"
    blocks, noisy = torch.from_numpy(visibility.blocks), torch.from_numpy(visibility.noisy)
    return Visibility(blocks=blocks, noisy=noisy, causal=visibility.causal)
