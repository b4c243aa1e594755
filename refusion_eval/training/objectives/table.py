"""The training objectives: each turns a sample into an `Example`; all share the loss `loss.hybrid_loss`.

An objective decides inputs, labels, weights and attention visibility. To add one, write its function, add the function
to `OBJECTIVES`, and add its name to `config.Objective`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from refusion_eval.training.config import MASKED_OBJECTIVES, TWO_STREAMS, Objective, ObjectiveConfig
from refusion_eval.training.objectives import masked
from refusion_eval.training.objectives.corrupt import arrange, causal_example, draw, draw_slot_size, fill_with_eos
from refusion_eval.training.objectives.example import Example, TrainingSample


class SpecialIds(NamedTuple):
    eos: int
    mask: int


MakeExample = Callable[[TrainingSample, np.random.Generator, ObjectiveConfig, SpecialIds], Example]


def _refusion(sample: TrainingSample, rng: np.random.Generator, config: ObjectiveConfig, ids: SpecialIds) -> Example:
    answer = fill_with_eos(sample.answer, eos=ids.eos, multiple=config.eos_multiple)
    slot_size = draw_slot_size(rng, config.slot_sizes)
    draws = draw(rng, len(answer), slot_size, config.masking, config.prefix_share, config.half_filled_share)
    return arrange(sample.prompt, answer, draws, mask=ids.mask)


def _llada(sample: TrainingSample, rng: np.random.Generator, config: ObjectiveConfig, ids: SpecialIds) -> Example:
    answer = fill_with_eos(sample.answer, eos=ids.eos, multiple=config.eos_multiple)
    noise = masked.draw(rng, len(answer), block_size=len(answer))
    return masked.llada_example(sample.prompt, answer, noise, mask=ids.mask)


def _bd3lm(sample: TrainingSample, rng: np.random.Generator, config: ObjectiveConfig, ids: SpecialIds) -> Example:
    answer = fill_with_eos(sample.answer, eos=ids.eos, multiple=config.eos_multiple)
    noise = masked.draw(rng, len(answer), config.block_size)
    return masked.bd3lm_example(sample.prompt, answer, noise, block_size=config.block_size, mask=ids.mask)


def _idlm(sample: TrainingSample, rng: np.random.Generator, config: ObjectiveConfig, ids: SpecialIds) -> Example:
    answer = fill_with_eos(sample.answer, eos=ids.eos, multiple=config.eos_multiple)
    return masked.idlm_example(sample.prompt, answer, block_size=config.block_size, mask=ids.mask)


def _wedlm(sample: TrainingSample, rng: np.random.Generator, config: ObjectiveConfig, ids: SpecialIds) -> Example:
    answer = fill_with_eos(sample.answer, eos=ids.eos, multiple=config.eos_multiple)
    noise = masked.draw(rng, len(answer), config.block_size)
    return masked.wedlm_example(sample.prompt, answer, noise, block_size=config.block_size, mask=ids.mask)


OBJECTIVES: dict[Objective, MakeExample] = {
    "pretrain": lambda sample, *_: causal_example(sample.prompt, sample.answer, learn_prompt=True),
    "sft": lambda sample, *_: causal_example(sample.prompt, sample.answer, learn_prompt=False),
    "refusion": _refusion,
    "llada": _llada,
    "bd3lm": _bd3lm,
    "idlm": _idlm,
    "wedlm": _wedlm,
}


def filled_lengths(config: ObjectiveConfig, num_answer: np.ndarray) -> np.ndarray:
    """[N], number of tokens of each of N answers after it was filled with EOS."""
    if config.objective in ("refusion", *MASKED_OBJECTIVES) and config.eos_multiple:
        return num_answer + -num_answer % config.eos_multiple
    return num_answer


def num_rows(config: ObjectiveConfig, num_prompt: np.ndarray, num_answer: np.ndarray) -> np.ndarray:
    """[N], number of rows of the example of each of N samples, computed before the examples exist."""
    num_answer = filled_lengths(config, num_answer)
    if config.objective in TWO_STREAMS:
        return num_prompt + 2 * num_answer
    if config.objective == "bd3lm":
        num_answer = num_answer + (num_answer - 1) // config.block_size * config.block_size
    return num_prompt + num_answer
