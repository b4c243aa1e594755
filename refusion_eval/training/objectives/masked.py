"""Clean answers become the examples of two masked diffusion models: LLaDA's, and BD3-LM's, which goes block by block.

As in `corrupt`, `draw` decides and `llada_example` and `bd3lm_example` are pure functions of what was decided. Both
predict every masked token in its own row; the prompt is never masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refusion_eval.training.objectives.corrupt import mask_probability
from refusion_eval.training.objectives.example import IGNORED, Example, Visibility


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The random choices for one answer of A tokens.

    Attributes:
        probabilities: [A], with which each token was masked; equal within a block.
        masked: [A], whether it was.
    """

    probabilities: np.ndarray
    masked: np.ndarray


def draw(rng: np.random.Generator, answer_length: int, block_size: int) -> Noise:
    """Draws a probability of masks for each block of the answer, then masks each token by itself.

    Args:
        rng: gives t, uniform in [0, 1), for each block, then one number for each token.
        answer_length: A, at least 1.
        block_size: tokens of a block; A makes it a single one, as LLaDA has it.
    """
    num_blocks = -(-answer_length // block_size)
    probabilities = np.repeat(mask_probability(rng.random(num_blocks)), block_size)[:answer_length]
    return Noise(probabilities=probabilities, masked=rng.random(answer_length) < probabilities)


def llada_example(prompt: Sequence[int], answer: Sequence[int], noise: Noise, *, mask: int) -> Example:
    """LLaDA's supervised fine-tuning (arXiv 2502.09992, Sec. 2.3): all tokens see each other.

    With an answer r of A tokens, its noisy copy r', and p the probability of a mask:

        L = 1/A  sum_i  [r'_i = MASK]  -log P(r_i | prompt, r') / p

    EOS filling belongs to the answer: it is masked, predicted, and counted in A.
    """
    length = len(prompt) + len(answer)
    return _example(
        prompt,
        answer,
        noise,
        mask=mask,
        positions=np.arange(length),
        visibility=Visibility(blocks=np.zeros(length, dtype=np.int32), noisy=np.zeros(length, dtype=np.bool_)),
    )


def bd3lm_example(prompt: Sequence[int], answer: Sequence[int], noise: Noise, *, block_size: int, mask: int) -> Example:
    """Block diffusion (BD3-LM, arXiv 2503.09573, Sec. 3), all blocks in one forward.

    With an answer r of A tokens in blocks r^1, r^2, ..., the noisy copy r'^b of block b, and p_b its probability:

        L = 1/A  sum_b sum_(i in b)  [r'_i = MASK]  -log P(r_i | prompt, r^1 .. r^(b-1), r'^b) / p_b

    The rows are the clean text, then the noisy answer at the same positions. The clean text is as the decoder's cache
    holds it: in blocks of which one begins where the answer does, each full in itself and seeing those before it. It
    ends before the answer's last block, which nobody would see.
    """
    num_clean_answer = (len(answer) - 1) // block_size * block_size
    num_prompt, num_clean = len(prompt), len(prompt) + num_clean_answer
    positions = np.concatenate([np.arange(num_clean), num_prompt + np.arange(len(answer))])
    num_prompt_blocks = -(-num_prompt // block_size)
    blocks = (positions - num_prompt) // block_size + num_prompt_blocks
    return _example(
        [*prompt, *answer[:num_clean_answer]],
        answer,
        noise,
        mask=mask,
        positions=positions,
        visibility=Visibility(blocks=blocks.astype(np.int32), noisy=np.arange(len(positions)) >= num_clean),
    )


def _example(
    clean: Sequence[int],
    answer: Sequence[int],
    noise: Noise,
    *,
    mask: int,
    positions: np.ndarray,
    visibility: Visibility[np.ndarray],
) -> Example:
    """Clean rows without labels, then the noisy answer; a masked token's divisor is its probability times A."""
    answer_A = np.asarray(answer, dtype=np.int64)
    unread = np.full(len(clean), IGNORED)
    return Example(
        tokens=np.concatenate([np.asarray(clean, dtype=np.int64), np.where(noise.masked, mask, answer_A)]),
        positions=positions,
        ar_labels=np.full(len(positions), IGNORED),
        mdm_labels=np.concatenate([unread, np.where(noise.masked, answer_A, IGNORED)]),
        mdm_divisors=np.concatenate([np.ones(len(clean)), noise.probabilities * len(answer_A)]),
        visibility=visibility,
    )
