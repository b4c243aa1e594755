"""The plain baseline of training: ReFusion's loss computed in the style of the release.

Samples are padded to the longest one, the corrupted rows are built by Python loops, and the model computes the logits
of every position in float32. Draws and loss equal those of `refusion_eval.training`, so the ratio between the two
measures the implementation alone.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from refusion_eval.training.objectives.corrupt import draw, draw_slot_size
from refusion_eval.training.objectives.example import TrainingSample

IGNORED = -100


def plain_loss(
    model: Qwen3ForCausalLM, samples: Sequence[TrainingSample], rng: np.random.Generator, *, mask: int, pad: int
) -> torch.Tensor:
    """Sum of the AR and MDM losses of a batch (Eq. 1-3).

    Args:
        model: the Qwen3 of transformers.
        samples: samples of the batch.
        rng: source of each sample's slot size, masks and order, drawn in this order.
        mask: token id of the mask.
        pad: token id of padding.

    Returns:
        The loss, a scalar.
    """
    longest = max(sample.length for sample in samples)
    tokens, positions, ar_labels, mdm_labels, seen, divisors = [], [], [], [], [], []
    for sample in samples:
        draws = draw(rng, len(sample.answer), draw_slot_size(rng))
        start, k = len(sample.prompt), draws.slot_size
        row, places = list(sample.prompt), list(range(start))
        ar, mdm = [IGNORED] * start, [IGNORED] * start
        for slot in draws.clean_slots:
            answer = sample.answer[slot * k : (slot + 1) * k]
            row += answer
            places += range(start + slot * k, start + slot * k + len(answer))
            ar += [*answer[1:], IGNORED]
            mdm += [IGNORED] * len(answer)
        for slot in draws.masked_slots:
            answer = sample.answer[slot * k : (slot + 1) * k]
            row += [mask] * len(answer)
            places += range(start + slot * k, start + slot * k + len(answer))
            ar += [IGNORED] * len(answer)
            mdm += answer
        missing = longest - sample.length
        tokens.append(row + [pad] * missing)
        positions.append([*places, *range(sample.length, longest)])
        ar_labels.append(ar + [IGNORED] * missing)
        mdm_labels.append(mdm + [IGNORED] * missing)
        seen.append([1] * sample.length + [0] * missing)
        divisors.append(draws.mask_probability * len(sample.answer))

    device = model.device
    logits_BTV = model(
        input_ids=torch.tensor(tokens, device=device),
        attention_mask=torch.tensor(seen, device=device),
        position_ids=torch.tensor(positions, device=device),
        use_cache=False,
    ).logits.float()
    ar_BT, mdm_BT = torch.tensor(ar_labels, device=device), torch.tensor(mdm_labels, device=device)
    masked_BT = mdm_BT != IGNORED
    # As in the release, prompts and padding go through the cross-entropy and are ignored there.
    ar_loss = functional.cross_entropy(logits_BTV[~masked_BT], ar_BT[~masked_BT], ignore_index=IGNORED, reduction="sum")
    losses_R = functional.cross_entropy(logits_BTV[masked_BT], mdm_BT[masked_BT], reduction="none")
    divisors_BT = torch.tensor(divisors, device=device)[:, None].expand_as(mdm_BT)
    mdm_loss = (losses_R / divisors_BT[masked_BT]).sum() / len(samples)
    return ar_loss / (ar_BT != IGNORED).sum().clamp(min=1) + mdm_loss
