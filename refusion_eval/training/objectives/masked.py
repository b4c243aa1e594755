"""Turns clean answers into examples of masked diffusion models.

LLaDA has full attention, BD3-LM full attention within blocks, and I-DLM and WeDLM causal attention. `draw` makes the
random choices; the examples are pure functions of them. The prompt is never masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refusion_eval.training.objectives.corrupt import causal_example, mask_probability
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


def idlm_example(prompt: Sequence[int], answer: Sequence[int], *, block_size: int, mask: int) -> Example:
    """I-DLM (arXiv 2604.11035, Eq. 2 and App. E): next tokens of the text, and of masks that continue it.

    With an answer r of A tokens in blocks of k, b(i) the first token of the block of token i, and masks at b(i) .. i:

        L = mean_j  -log P(r_j | prompt, r_1 .. r_(j-1))  +  mean_i  -log P(r_(i+1) | prompt, r_1 .. r_(b(i)-1), masks)

    Nothing is drawn, as every token of the noisy copy is a mask. The rows are the clean text, then the masks. The paper
    scales the first term to the size of the second in each step; here both have the weight that `mdm_weight` gives.
    """
    answer_A = np.asarray(answer, dtype=np.int64)
    following = np.append(answer_A[1:], IGNORED) if len(answer_A) else answer_A
    order = np.arange(len(answer_A))
    divisors = np.full(len(answer_A), max(len(answer_A) - 1, 1))
    return _continued(prompt, answer_A, order, np.full_like(answer_A, mask), following, divisors, block_size)


def wedlm_example(prompt: Sequence[int], answer: Sequence[int], noise: Noise, *, block_size: int, mask: int) -> Example:
    """WeDLM (arXiv 2512.22737, Sec. 4): next tokens of the text, and masks behind the known tokens of their block.

    With an answer r of A tokens in blocks r^1, r^2, ..., and K^b the known tokens of block b, which is masked with
    probability p_b:

        L = mean_j  -log P(r_j | prompt, r_1 .. r_(j-1))
            + 1/A  sum_b sum_(i masked in b)  -log P(r_i | prompt, r^1 .. r^(b-1), K^b, masks of b up to i) / p_b

    The rows are the clean text, then each block with its known tokens first, all at their true positions. The release
    divides the second term by the sum of all 1 / p_b of a step instead of A.
    """
    answer_A = np.asarray(answer, dtype=np.int64)
    order = np.lexsort((np.arange(len(answer_A)), noise.masked, np.arange(len(answer_A)) // block_size))
    masked, known = noise.masked[order], answer_A[order]
    return _continued(
        prompt,
        answer_A,
        order,
        np.where(masked, mask, known),
        np.where(masked, known, IGNORED),
        noise.probabilities[order] * len(answer_A),
        block_size,
    )


def _continued(
    prompt: Sequence[int],
    answer_A: np.ndarray,
    order_A: np.ndarray,
    tokens_A: np.ndarray,
    labels_A: np.ndarray,
    divisors_A: np.ndarray,
    block_size: int,
) -> Example:
    """The rows of autoregressive training, then a noisy copy of the answer in an order that keeps its blocks."""
    clean = causal_example(prompt, answer_A.tolist(), learn_prompt=False)
    num_prompt, num_clean = len(prompt), len(clean.tokens)
    positions = np.concatenate([clean.positions, num_prompt + order_A])
    # As in `bd3lm_example`, one block begins with the answer. The clean rows are causal whatever their blocks are.
    blocks = (positions - num_prompt) // block_size + -(-num_prompt // block_size)
    noisy = np.arange(len(positions)) >= num_clean
    return Example(
        tokens=np.concatenate([clean.tokens, tokens_A]),
        positions=positions,
        ar_labels=np.concatenate([clean.ar_labels, np.full(len(order_A), IGNORED)]),
        mdm_labels=np.concatenate([clean.mdm_labels, labels_A]),
        mdm_divisors=np.concatenate([clean.mdm_divisors, divisors_A]),
        visibility=Visibility(blocks=blocks.astype(np.int32), noisy=noisy, causal=True),
    )


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
