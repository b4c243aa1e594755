"""A clean answer becomes a ReFusion example: mask slots, shuffle the clean ones and put them first (Sec. 4.3).

The random draws and their consequence are apart: `draw` decides, `arrange` is a pure function of what was decided.
Labels sit where logits are read. Clean tokens predict the next token of their slot, masks the token of their own place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from refusion_eval.training.objectives.example import IGNORED, Example

SLOT_SIZES = (4, 8, 16, 32)

Number = TypeVar("Number", float, np.ndarray)


@dataclass(frozen=True, kw_only=True)
class Draws:
    """The random choices for one sample.

    Attributes:
        slot_size: k.
        mask_probability: q, with which each slot was masked.
        masked_slots: the masked slots, ascending.
        clean_slots: the other slots in the order in which they are laid out.
    """

    slot_size: int
    mask_probability: float
    masked_slots: tuple[int, ...]
    clean_slots: tuple[int, ...]


def draw_slot_size(rng: np.random.Generator, slot_sizes: Sequence[int] = SLOT_SIZES) -> int:
    """Draws k, one for each sample."""
    return slot_sizes[int(rng.integers(len(slot_sizes)))]


def mask_probability(uniform: Number) -> Number:
    """Keeps the probability of a mask above 0.001, so that the loss, which divides by it, stays finite.

    Args:
        uniform: t, uniform in [0, 1).
    """
    return 0.999 * uniform + 0.001


def draw(rng: np.random.Generator, answer_length: int, slot_size: int) -> Draws:
    """Masks each slot with probability q, the `mask_probability` of one t, and shuffles the others.

    One draw a slot, as the release does; the paper masks exactly floor(t K) slots.
    """
    num_slots = -(-answer_length // slot_size)
    probability = mask_probability(float(rng.random()))
    masked = rng.random(num_slots) < probability
    return Draws(
        slot_size=slot_size,
        mask_probability=probability,
        masked_slots=tuple(np.flatnonzero(masked).tolist()),
        clean_slots=tuple(rng.permutation(np.flatnonzero(~masked)).tolist()),
    )


def fill_with_eos(answer: Sequence[int], *, eos: int, multiple: int) -> tuple[int, ...]:
    """Repeats EOS up to a multiple of `multiple` tokens (0: leaves the answer alone, as the release does).

    At inference a block holds masks beyond the future EOS, which the release's training never shows; with the block
    length as `multiple` the model learns that they are EOS.
    """
    missing = -len(answer) % multiple if multiple else 0
    return (*answer, *[eos] * missing)


def arrange(prompt: Sequence[int], answer: Sequence[int], draws: Draws, *, mask: int) -> Example:
    """Lays out prompt, shuffled clean slots and masked slots, with true positions and labels (Sec. 4.3, Eq. 1-2).

    With slots S^c in the order c_1, c_2, ... in which the clean ones are laid out, and r_j the answer's tokens:

        CE of a clean token  (Eq. 1):  -log P(r_(j+1) | prompt, S^c1 .. S^c(n-1), r_j and those before it in slot S^cn)
        CE of a masked token (Eq. 2):  -log P(r_i | prompt, all clean slots, masks up to i)

    The last token of a slot predicts nothing. `collate` sums and divides; the divisor here is q A, the expected number
    of masked tokens, as in the release.
    """
    answer_A = np.asarray(answer, dtype=np.int64)
    k = draws.slot_size
    slots = [np.arange(start, min(start + k, len(answer_A))) for start in range(0, len(answer_A), k)]
    clean = [slots[slot] for slot in draws.clean_slots]
    masked = [slots[slot] for slot in draws.masked_slots]
    index = np.concatenate([*clean, *masked]) if slots else np.empty(0, dtype=np.int64)
    num_clean = sum(len(slot) for slot in clean)

    tokens = answer_A[index]
    tokens[num_clean:] = mask
    ar_labels = np.full(len(index), IGNORED)
    mdm_labels = np.full(len(index), IGNORED)
    mdm_labels[num_clean:] = answer_A[index[num_clean:]]
    start = 0
    for slot in clean:
        ar_labels[start : start + len(slot) - 1] = answer_A[slot[1:]]
        start += len(slot)

    prompt_P = np.asarray(prompt, dtype=np.int64)
    unread = np.full(len(prompt_P), IGNORED)
    return Example(
        tokens=np.concatenate([prompt_P, tokens]),
        positions=np.concatenate([np.arange(len(prompt_P)), len(prompt_P) + index]),
        ar_labels=np.concatenate([unread, ar_labels]),
        mdm_labels=np.concatenate([unread, mdm_labels]),
        mdm_divisors=np.full(len(prompt_P) + len(index), draws.mask_probability * len(answer_A)),
    )


def causal_example(prompt: Sequence[int], answer: Sequence[int], *, learn_prompt: bool) -> Example:
    """The next-token example of AR training: CE_j = -log P(r_j | prompt, r_1 .. r_(j-1)), which `collate` averages.

    Args:
        prompt: its token ids.
        answer: its token ids, EOS among them.
        learn_prompt: whether the prompt's own tokens are labelled too (pre-training).
    """
    tokens = np.asarray([*prompt, *answer], dtype=np.int64)
    labels = np.append(tokens[1:], IGNORED)
    if not learn_prompt:
        labels[: max(len(prompt) - 1, 0)] = IGNORED
    return Example(
        tokens=tokens,
        positions=np.arange(len(tokens)),
        ar_labels=labels,
        mdm_labels=np.full(len(tokens), IGNORED),
        mdm_divisors=np.ones(len(tokens)),
    )
