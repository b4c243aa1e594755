"""Turns a clean answer into a ReFusion example: masks slots and puts the shuffled clean slots first (Sec. 4.3).

`draw` makes the random choices; `arrange` is a pure function of them. A label stands in the row whose logits predict
it: a clean token predicts the next token of its slot, a mask predicts the token at its own position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from refusion_eval.training.objectives.example import IGNORED, Example

SLOT_SIZES = (4, 8, 16, 32)
Masking = Literal["bernoulli", "exact"]

Number = TypeVar("Number", float, np.ndarray)


@dataclass(frozen=True, kw_only=True)
class Draws:
    slot_size: int  # number k of tokens of a slot
    mask_probability: float  # probability q with which each slot was masked; with exact masking their share
    masked_slots: tuple[int, ...]  # in ascending order
    clean_slots: tuple[int, ...]  # in shuffled order, or in reading order where they begin the answer
    num_given: tuple[int, ...] = ()  # of each masked slot, its first tokens that are not masked; none if empty


def draw_slot_size(rng: np.random.Generator, slot_sizes: Sequence[int] = SLOT_SIZES) -> int:
    return slot_sizes[int(rng.integers(len(slot_sizes)))]


def mask_probability(uniform: Number) -> Number:
    """Maps t, uniform in [0, 1), to a mask probability of at least 0.001, as the loss divides by it."""
    return 0.999 * uniform + 0.001


def draw(
    rng: np.random.Generator,
    answer_length: int,
    slot_size: int,
    masking: Masking = "bernoulli",
    prefix_share: float = 0.0,
    half_filled_share: float = 0.0,
) -> Draws:
    """Masks some of the K slots of an answer and shuffles the others.

    "bernoulli" masks each slot independently with one probability q, as the release does; "exact" masks floor(t K)
    slots with t uniform in [0, 1), as the paper writes (Sec. 4.3). A `prefix_share` of the samples has as many masked
    slots, but these end the answer and the clean ones begin it in reading order, as when blocks are decoded one after
    the other. A `half_filled_share` of the masked slots keep 1 to k - 1 of their first tokens, as when a slot is
    completed (Eq. 8).
    """
    num_slots = -(-answer_length // slot_size)
    uniform = float(rng.random())
    if masking == "exact":
        num_masked = int(uniform * num_slots)
        probability = num_masked / num_slots if num_masked else 1.0  # nothing is divided by it without a mask
        masked = rng.permutation(num_slots) < num_masked
    else:
        probability = mask_probability(uniform)
        masked = rng.random(num_slots) < probability
    clean_slots = rng.permutation(np.flatnonzero(~masked))
    if prefix_share and rng.random() < prefix_share:
        clean_slots = np.arange(len(clean_slots))
        masked = np.arange(num_slots) >= len(clean_slots)
    num_given: tuple[int, ...] = ()
    if half_filled_share and slot_size > 1:
        kept = rng.integers(1, slot_size, size=masked.sum()) * (rng.random(masked.sum()) < half_filled_share)
        num_given = tuple(kept.tolist())
    return Draws(
        slot_size=slot_size,
        mask_probability=probability,
        masked_slots=tuple(np.flatnonzero(masked).tolist()),
        clean_slots=tuple(clean_slots.tolist()),
        num_given=num_given,
    )


def fill_with_eos(answer: Sequence[int], *, eos: int, multiple: int) -> tuple[int, ...]:
    """Repeats EOS up to a multiple of `multiple` tokens; 0 leaves the answer as it is, as in the release."""
    # At inference a block has masks after the future EOS, which do not occur in the training of the release. With the
    # block length as `multiple` the model learns that these masks are EOS.
    missing = -len(answer) % multiple if multiple else 0
    return (*answer, *[eos] * missing)


def arrange(prompt: Sequence[int], answer: Sequence[int], draws: Draws, *, mask: int) -> Example:
    """Concatenates prompt, shuffled clean slots and masked slots, with true positions and labels (Sec. 4.3, Eq. 1-2).

    With clean slots S^c in their shuffled order c_1, c_2, ..., and the tokens r_j of the answer:

        CE of a clean token  (Eq. 1):  -log P(r_(j+1) | prompt, S^c1 .. S^c(n-1), tokens of slot S^cn up to r_j)
        CE of a masked token (Eq. 2):  -log P(r_i | prompt, all clean slots, masks up to i)

    The last token of a slot has no label, nor has a token that is given in a masked slot. `collate` sums and divides;
    the divisor is q A, the expected number of masked tokens where none is given, as in the release.
    """
    answer_A = np.asarray(answer, dtype=np.int64)
    slots = np.split(np.arange(len(answer_A)), range(draws.slot_size, len(answer_A), draws.slot_size))
    clean, masked = ([slots[slot] for slot in part] for part in (draws.clean_slots, draws.masked_slots))
    index = np.concatenate([*clean, *masked]) if len(answer_A) else np.empty(0, dtype=np.int64)
    num_clean = sum(map(len, clean))
    in_masked_slot = np.arange(len(index)) >= num_clean
    num_given = draws.num_given or (0,) * len(masked)
    given = [np.arange(len(slot)) < count for slot, count in zip(masked, num_given, strict=True)]
    is_mask = in_masked_slot & ~np.concatenate([np.zeros(num_clean, dtype=bool), *given])
    ends_slot = np.isin(np.arange(len(index)), np.cumsum([len(slot) for slot in clean]) - 1)
    following = answer_A[np.minimum(index + 1, len(answer_A) - 1)]

    prompt_P = np.asarray(prompt, dtype=np.int64)
    prompt_labels = np.full(len(prompt_P), IGNORED)
    return Example(
        tokens=np.concatenate([prompt_P, np.where(is_mask, mask, answer_A[index])]),
        positions=np.concatenate([np.arange(len(prompt_P)), len(prompt_P) + index]),
        ar_labels=np.concatenate([prompt_labels, np.where(in_masked_slot | ends_slot, IGNORED, following)]),
        mdm_labels=np.concatenate([prompt_labels, np.where(is_mask, answer_A[index], IGNORED)]),
        mdm_divisors=np.full(len(prompt_P) + len(index), draws.mask_probability * len(answer_A)),
    )


def causal_example(prompt: Sequence[int], answer: Sequence[int], *, learn_prompt: bool) -> Example:
    """The example of AR training: CE_j = -log P(r_j | prompt, r_1 .. r_(j-1)), which `collate` averages."""
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
