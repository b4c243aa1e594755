"""The loop that makes the embedded family: one objective, a fixed number of steps; resumable to the same losses.

Apart from `trainer.py`, which trains real backbones on many processes: this one needs nothing but torch, has Muon for
the layers' matrices, and its batches, of similar lengths, are what the shipped checkpoints were trained on, so that the
family can be made again as it is. Objectives, packing and loss are the same.
"""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from refusion_eval.errors import ConfigError
from refusion_eval.training.config import TrainConfig
from refusion_eval.training.data.collate import PackedBatch, collate
from refusion_eval.training.data.samples import Sample, plan_batches
from refusion_eval.training.muon import Muon
from refusion_eval.training.objectives.loss import hybrid_loss
from refusion_eval.training.objectives.table import OBJECTIVES, SpecialIds


def learning_rate_share(config: TrainConfig, step: int) -> float:
    """Learning rate of a step / peak: linear warm-up, then a cosine to the final share."""
    if step < config.num_warmup_steps:
        return (step + 1) / config.num_warmup_steps
    progress = (step - config.num_warmup_steps) / max(config.num_steps - config.num_warmup_steps, 1)
    return config.final_lr_share + (1 - config.final_lr_share) * 0.5 * (1 + math.cos(math.pi * progress))


def build_batch(config: TrainConfig, samples: Sequence[Sample], step: int, *, eos: int, mask: int) -> PackedBatch:
    """Corrupts and packs the samples of one step; the draws depend on the seed and the step alone."""
    rng = np.random.default_rng([config.seed, 1, step])
    make, ids = OBJECTIVES[config.objective], SpecialIds(eos=eos, mask=mask)
    examples = [make(sample, rng, config, ids) for sample in samples]
    return collate(examples, normalisation=config.normalisation)


class _Schedule:
    """Which samples belong to which step, epoch after epoch."""

    def __init__(self, config: TrainConfig, samples: Sequence[Sample]) -> None:
        self._config, self._lengths = config, [sample.length for sample in samples]
        self._epoch, self._first_step = -1, 0
        self._batches: list[list[int]] = []

    def at(self, step: int) -> list[int]:
        while step >= self._first_step + len(self._batches):
            self._first_step += len(self._batches)
            self._epoch += 1
            config = self._config
            self._batches = plan_batches(
                self._lengths, tokens_per_batch=config.tokens_per_batch, seed=config.seed, epoch=self._epoch
            )
        return self._batches[step - self._first_step]


def _optimizers(model: Qwen3ForCausalLM, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for the matrices of the layers if it is wanted."""
    inner = {id(parameter) for layer in model.model.layers for parameter in layer.parameters() if parameter.ndim == 2}
    with_muon = [parameter for parameter in model.parameters() if config.muon_lr and id(parameter) in inner]
    others = [parameter for parameter in model.parameters() if not config.muon_lr or id(parameter) not in inner]
    groups = [
        {"params": [parameter for parameter in others if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in others if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=config.peak_lr, betas=(0.9, 0.98))]
    if with_muon:
        optimizers.append(Muon(with_muon, lr=config.muon_lr))
    return optimizers


def _save_state(path: Path, state: dict[str, Any]) -> None:
    """Writes beside the target, then renames: a crash leaves the previous state whole."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


def train(
    model: Qwen3ForCausalLM,
    samples: Sequence[Sample],
    config: TrainConfig,
    run_dir: Path,
    *,
    on_log: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Trains in place, from the state in `run_dir` if there is one.

    Args:
        model: float32; its config holds `eos_token_id` and, for masks, `mask_token_id`.
        samples: not empty.
        config: of this stage; a state of another configuration is refused.
        run_dir: gets `metrics.jsonl` (one line every `log_every` steps) and `state.pt`.
        on_log: called with every line of metrics.

    Raises:
        ConfigError: `run_dir` belongs to another configuration.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    state_path, metrics_path = run_dir / "state.pt", run_dir / "metrics.jsonl"
    optimizers = _optimizers(model, config)
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    first_step, seconds_before = 0, 0.0
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        if not config.is_that_of(state["config"]):
            raise ConfigError(f"{run_dir} was trained with {state['config']}; choose another directory or remove it")
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first_step, seconds_before = state["step"], state["seconds"]
        kept = [line for line in metrics_path.read_text().splitlines() if json.loads(line)["step"] <= first_step]
        metrics_path.write_text("".join(line + "\n" for line in kept))

    ids = {"eos": model.config.eos_token_id, "mask": model.config.mask_token_id}
    schedule = _Schedule(config, samples)
    model.train()
    started, sums, num_tokens = time.perf_counter(), np.zeros(2), 0
    for step in range(first_step, config.num_steps):
        share = learning_rate_share(config, step)
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * share
        batch = build_batch(config, [samples[number] for number in schedule.at(step)], step, **ids)
        losses = hybrid_loss(model, batch, mdm_weight=config.mdm_weight)
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        sums += (losses.ar.item(), losses.mdm.item())
        num_tokens += len(batch.tokens_T)

        done, seconds = step + 1, seconds_before + time.perf_counter() - started
        if done % config.log_every == 0 or done == config.num_steps:
            since = (done - 1) % config.log_every + 1
            rate = num_tokens / (seconds - seconds_before)
            line = {"step": done, "seconds": round(seconds, 1), "lr": config.peak_lr * share}
            line |= {"ar": sums[0] / since, "mdm": sums[1] / since, "tokens_per_second": round(rate)}
            with metrics_path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            sums = np.zeros(2)
            if on_log is not None:
                on_log(line)
        if done % config.save_every == 0 or done == config.num_steps:
            _save_state(
                state_path,
                {
                    "config": config.to_json(),
                    "model": model.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                    "step": done,
                    "seconds": seconds,
                },
            )
