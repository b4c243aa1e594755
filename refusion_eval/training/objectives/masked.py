"""Turns clean answers into examples of two masked diffusion models: LLaDA (full attention) and BD3-LM (blocks).

`draw` makes the random choices; `llada_example` and `bd3lm_example` are pure functions of them. Both models predict
every masked token in its own row. The prompt is never masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refusion_eval.training.objectives.corrupt import mask_probability
from refusion_eval.training.objectives.example import IGNORED, Example, Visibility


@dataclass(frozen=True, kw_only=True)
class Noise:
    probabilities: np.ndarray  # [A], probability with which each token was masked; equal within a block
    masked: np.ndarray  # [A], whether each token was masked


def draw(rng: np.random.Generator, answer_length: int, block_size: int) -> Noise:
    """Draws a mask probability for each block of the answer, then masks each token independently."""
    num_blocks = -(-answer_length // block_size)
    probabilities = np.repeat(mask_probability(rng.random(num_blocks)), block_size)[:answer_length]
    return Noise(probabilities=probabilities, masked=rng.random(answer_length) < probabilities)


def llada_example(prompt: Sequence[int], answer: Sequence[int], noise: Noise, *, mask: int) -> Example:
    """LLaDA's supervised fine-tuning (arXiv 2502.09992, Sec. 2.3): all tokens see each other.

    With an answer r of A tokens, its noisy copy r', and the mask probability p:

        L = 1/A  sum_i  [r'_i = MASK]  -log P(r_i | prompt, r') / p

    EOS filling belongs to the answer: it is masked, predicted, and counted in A.
    """
    positions = np.arange(len(prompt) + len(answer))
    visibility = Visibility(blocks=np.zeros_like(positions, np.int32), noisy=np.zeros_like(positions, np.bool_))
    return _example(prompt, answer, noise, mask, positions, visibility)


def bd3lm_example(prompt: Sequence[int], answer: Sequence[int], noise: Noise, *, block_size: int, mask: int) -> Example:
    """Block diffusion (BD3-LM, arXiv 2503.09573, Sec. 3), with all blocks in one forward.

    With an answer r of A tokens in blocks r^1, r^2, ..., and the noisy copy r'^b of block b with mask probability p_b:

        L = 1/A  sum_b sum_(i in b)  [r'_i = MASK]  -log P(r_i | prompt, r^1 .. r^(b-1), r'^b) / p_b

    The rows are the clean text, then the noisy answer at the same positions.
    """
    # The clean text has the blocks of the decoder's cache: one block begins with the answer, and each block sees itself
    # and the earlier blocks. It ends before the last block of the answer, which no row would see.
    num_clean_answer = (len(answer) - 1) // block_size * block_size
    num_prompt, num_clean = len(prompt), len(prompt) + num_clean_answer
    positions = np.concatenate([np.arange(num_clean), num_prompt + np.arange(len(answer))])
    blocks = (positions - num_prompt) // block_size + -(-num_prompt // block_size)
    visibility = Visibility(blocks=blocks.astype(np.int32), noisy=np.arange(len(positions)) >= num_clean)
    return _example([*prompt, *answer[:num_clean_answer]], answer, noise, mask, positions, visibility)


def _example(
    clean: Sequence[int], answer: Sequence[int], noise: Noise, mask: int, positions: np.ndarray, visibility: Visibility
) -> Example:
    """Clean rows without labels, then the noisy answer; the divisor of a mask is its probability times A."""
    answer_A = np.asarray(answer, dtype=np.int64)
    clean_labels = np.full(len(clean), IGNORED)
    return Example(
        tokens=np.concatenate([np.asarray(clean, dtype=np.int64), np.where(noise.masked, mask, answer_A)]),
        positions=positions,
        ar_labels=np.full(len(positions), IGNORED),
        mdm_labels=np.concatenate([clean_labels, np.where(noise.masked, answer_A, IGNORED)]),
        mdm_divisors=np.concatenate([np.ones(len(clean)), noise.probabilities * len(answer_A)]),
        visibility=visibility,
    )
