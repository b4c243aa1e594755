"""FLOPs and tokens of a training run before it starts, from its first rows, and the time that they may take."""

from dataclasses import astuple
from typing import NamedTuple

import numpy as np

from refusion_eval.training.checkpoints.backbone import load_tokenizer, without_weights
from refusion_eval.training.config import RunConfig
from refusion_eval.training.cost import PEAK_FLOPS, TrainingCost
from refusion_eval.training.data.batches import ForwardInputs
from refusion_eval.training.data.collate import collate
from refusion_eval.training.data.rows import first_rows
from refusion_eval.training.data.token_cache import encode
from refusion_eval.training.objectives.table import OBJECTIVES, SpecialIds

NUM_ROWS = 256  # of each file
CARD, MFUS = "H100", (0.4, 0.1)  # assumptions: large models in full forwards, and small ones in short forwards


class StepCost(NamedTuple):
    flops: float  # of the model, as MFU counts them
    tokens: float  # of the samples, without end tokens that fill them up and second copies
    num_samples: int  # of the first rows, from which they are known


def step_cost(config: RunConfig) -> StepCost | None:
    """The mean cost of a step by the first rows of the data; None if all of them are too long for a sample."""
    tokenizer = load_tokenizer(config.backbone)
    rows = first_rows(config.data.files, NUM_ROWS, on_bad=config.data.on_bad)
    samples = [one for one in encode(tokenizer, list(map(astuple, rows))) if one.length <= config.data.max_length]
    if not samples:
        return None
    ids = SpecialIds(eos=tokenizer.eos_token_id, mask=tokenizer.mask_token_id)
    rng, make = np.random.default_rng(config.optimisation.seed), OBJECTIVES[config.objective.objective]
    examples = [make(sample, rng, config.objective, ids) for sample in samples]
    num_tokens = sum(sample.length for sample in samples)
    inputs = ForwardInputs(
        batch=collate([examples], normalisation=config.objective.normalisation),
        num_tokens=num_tokens,
        num_pairs=sum(example.num_visible_pairs() for example in examples),
    )
    scale = config.optimisation.global_batch_size / len(samples)
    flops = TrainingCost.of(without_weights(config.backbone, tokenizer)).flops(inputs)
    return StepCost(scale * flops, scale * num_tokens, len(samples))


def estimate(config: RunConfig) -> str:
    """Says what a step costs and, if the number of steps is stated, the whole run, with an estimate of its time."""
    cost = step_cost(config)
    if cost is None:
        return f"none of the first rows fits into data.max_length={config.data.max_length}, so no cost is estimated"
    words = f"a step has about {cost.flops / 1e12:,.3g} TFLOP and {cost.tokens:,.0f} tokens"
    steps, source = config.optimisation.max_steps or 0, f"from the first {cost.num_samples} samples"
    if steps:
        words += f", {steps} steps {steps * cost.flops / 1e15:,.3g} PFLOP and {steps * cost.tokens:,.0f} tokens"
    seconds = [(steps or 1) * cost.flops / PEAK_FLOPS[CARD] / mfu for mfu in MFUS]
    low, high = (f"{one / 60:,.2g}" for one in seconds)
    what = "they take" if steps else "a step takes"
    shares = " to ".join(f"{mfu:.0%}" for mfu in MFUS)
    return f"{words} ({source}); {what} {low} to {high} minutes on one {CARD} at an assumed MFU of {shares}"
