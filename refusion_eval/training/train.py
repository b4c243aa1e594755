"""The training loop of the embedded checkpoints; an interrupted run continues with the same losses.

`trainer.py` trains real backbones on many processes. This loop needs only torch, trains the matrices of the layers with
Muon, and has batches of similar lengths, so that the shipped checkpoints can be reproduced. Objectives, packing and
loss are the same.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from refusion_eval.errors import ConfigError
from refusion_eval.training.config import TrainConfig
from refusion_eval.training.data.collate import PackedBatch, collate
from refusion_eval.training.data.packed import hidden_states
from refusion_eval.training.data.samples import TrainingSample
from refusion_eval.training.objectives.corrupt import causal_example
from refusion_eval.training.objectives.loss import hybrid_loss
from refusion_eval.training.objectives.table import OBJECTIVES, SpecialIds

# A quintic whose iteration drives singular values towards 1 quickly rather than exactly (Jordan et al., 2024).
_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315
NUM_ITERATIONS = 5


def orthogonalised(matrices_NIJ: Tensor) -> Tensor:
    """Newton-Schulz iteration, which brings the singular values of each matrix close to 1.

    Args:
        matrices_NIJ: N matrices of one shape, with I <= J, as the work grows with I.
    """
    x_NIJ = matrices_NIJ / (matrices_NIJ.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram_NII = x_NIJ @ x_NIJ.mT
        factor_NII = torch.baddbmm(gram_NII, gram_NII, gram_NII, beta=_CUBIC, alpha=_QUINTIC)
        x_NIJ = torch.baddbmm(x_NIJ, factor_NII, x_NIJ, beta=_LINEAR)
    return x_NIJ


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) for the hidden matrices of a small model, in float32.

    The momentum of each matrix is replaced by the nearest matrix with equal singular values before it is applied. With
    it the embedded backbone reached 0.9 on the mini gsm8k after 800 steps, with AdamW after 2,200. `torch.optim.Muon`
    computes in bfloat16, which a CPU without bfloat16 units emulates: there each step took twice as long.

    Args:
        matrices: parameters with two axes.
        lr: step size for a square matrix; a tall matrix has a step larger by the root of its aspect ratio.
        momentum: Nesterov momentum.
    """

    def __init__(self, matrices: Iterable[Tensor], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all matrices, grouped by shape."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for matrix in group["params"]:
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
                update = matrix.grad.lerp(state["momentum"], group["momentum"])
                by_shape.setdefault(matrix.shape, []).append((matrix, update))
            for (num_rows, num_columns), updated in by_shape.items():
                updates = torch.stack([update for _, update in updated])
                tall = num_rows > num_columns
                updates = orthogonalised(updates.mT).mT if tall else orthogonalised(updates)
                size = group["lr"] * max(1.0, num_rows / num_columns) ** 0.5
                for (matrix, _), update in zip(updated, updates, strict=True):
                    matrix.add_(update, alpha=-size)


def learning_rate_share(config: TrainConfig, step: int) -> float:
    """Learning rate of a step relative to the peak: linear warm-up, then a cosine to `final_lr_share`."""
    if step < config.num_warmup_steps:
        return (step + 1) / config.num_warmup_steps
    progress = (step - config.num_warmup_steps) / max(config.num_steps - config.num_warmup_steps, 1)
    return config.final_lr_share + (1 - config.final_lr_share) * 0.5 * (1 + math.cos(math.pi * progress))


def build_batch(
    config: TrainConfig, samples: Sequence[TrainingSample], step: int, *, eos: int, mask: int
) -> PackedBatch:
    """Corrupts and packs the samples of one step; the random choices depend on seed and step only."""
    rng = np.random.default_rng([config.seed, 1, step])
    make, ids = OBJECTIVES[config.objective], SpecialIds(eos=eos, mask=mask)
    examples = [make(sample, rng, config, ids) for sample in samples]
    return collate(examples, normalisation=config.normalisation)


def plan_batches(
    lengths: Sequence[int], *, tokens_per_batch: int, seed: int, epoch: int, pool: int = 256
) -> list[list[int]]:
    """Divides one epoch into batches of samples of similar length, in an order that depends on seed and epoch.

    Args:
        lengths: number of tokens of each sample.
        tokens_per_batch: upper limit of (samples x longest sample) of a batch; a longer sample is a batch of its own.
        seed: seed of the run.
        epoch: 0-based number of the epoch.
        pool: number of shuffled samples that are sorted by length together; smaller is more random, larger pads less.

    Returns:
        Numbers of the samples of each batch; each sample occurs once.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    batches: list[list[int]] = []
    for start in range(0, len(order), pool):
        batch: list[int] = []
        for number in sorted(order[start : start + pool].tolist(), key=lambda n: lengths[n]):
            if batch and (len(batch) + 1) * lengths[number] > tokens_per_batch:
                batches.append(batch)
                batch = []
            batch.append(number)
        batches.append(batch)
    return [batches[number] for number in rng.permutation(len(batches))]


class _Schedule:
    """Numbers of the samples of each step."""

    def __init__(self, config: TrainConfig, samples: Sequence[TrainingSample]) -> None:
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
    """AdamW, and Muon for the matrices of the layers if `muon_lr` is set."""
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
    """Writes beside the target, then renames, so that a crash leaves the previous state."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


def train(
    model: Qwen3ForCausalLM,
    samples: Sequence[TrainingSample],
    config: TrainConfig,
    run_dir: Path,
    *,
    on_log: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Trains a model in place and continues from the state in `run_dir` if there is one.

    Args:
        model: float32 model whose config has `eos_token_id` and, for masks, `mask_token_id`.
        samples: training samples, at least one.
        config: settings of this stage.
        run_dir: folder for `metrics.jsonl` (one line every `log_every` steps) and `state.pt`.
        on_log: called with every line of metrics.

    Raises:
        ConfigError: the state in `run_dir` belongs to another configuration.
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
        lines = [line for line in metrics_path.read_text().splitlines() if json.loads(line)["step"] <= first_step]
        metrics_path.write_text("".join(line + "\n" for line in lines))

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

        num_done, seconds = step + 1, seconds_before + time.perf_counter() - started
        if num_done % config.log_every == 0 or num_done == config.num_steps:
            num_steps = (num_done - 1) % config.log_every + 1
            rate = num_tokens / (seconds - seconds_before)
            line = {"step": num_done, "seconds": round(seconds, 1), "lr": config.peak_lr * share}
            line |= {"ar": sums[0] / num_steps, "mdm": sums[1] / num_steps, "tokens_per_second": round(rate)}
            with metrics_path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            sums = np.zeros(2)
            if on_log is not None:
                on_log(line)
        if num_done % config.save_every == 0 or num_done == config.num_steps:
            _save_state(
                state_path,
                {
                    "config": config.to_json(),
                    "model": model.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                    "step": num_done,
                    "seconds": seconds,
                },
            )


@torch.no_grad()
def exact_share(model: Qwen3ForCausalLM, samples: Sequence[TrainingSample], *, batch_size: int = 32) -> float:
    """Share of samples for which greedy AR decoding would produce exactly the gold response, EOS included.

    One forward for each sample suffices: greedy decoding produces the gold tokens if each is the argmax after the
    tokens before it. The share is a lower bound of accuracy, as other responses may end in the same answer.
    """
    num_exact = 0
    ordered = sorted(samples, key=lambda sample: sample.length)
    for start in range(0, len(ordered), batch_size):
        group = ordered[start : start + batch_size]
        examples = [causal_example(sample.prompt, sample.answer, learn_prompt=False) for sample in group]
        batch = collate(examples)
        predicted_R = model.lm_head(hidden_states(model, batch)[batch.ar.rows_R]).argmax(-1)
        sample_R = torch.arange(len(group)).repeat_interleave(torch.tensor(batch.lengths))[batch.ar.rows_R]
        inexact = set(sample_R[predicted_R != batch.ar.labels_R].tolist())
        num_exact += len(group) - len(inexact)
    return num_exact / len(samples)
