"""transformers' Trainer around our loss and our batches: what it does not do itself, and no more."""

import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from refusion_eval.training.config import RunConfig
from refusion_eval.training.data.collate import PackedBatch
from refusion_eval.training.data.step_batches import ForwardInputs, StepBatches
from refusion_eval.training.flops import TrainingCost, peak_flops
from refusion_eval.training.objectives.loss import hybrid_loss
from refusion_eval.training.parallelism import trainer_settings

CHECKPOINTS, PREFIX, PART = "checkpoints", "checkpoint-", ".part"
WEIGHTS_FILE = "trained_weights.pt"
# How long processes wait for each other: the first one may tokenise millions of samples meanwhile.
PATIENCE_SECONDS = 6 * 3600


class LossModel(torch.nn.Module):
    """A model whose forward is the loss, so that what parallel training hangs on a forward happens.

    Args:
        model: of transformers, or of peft around one.
        mdm_weight: lambda of Eq. 3.
    """

    def __init__(self, model: torch.nn.Module, *, mdm_weight: float) -> None:
        super().__init__()
        self.model, self._mdm_weight = model, mdm_weight
        self.config = self.language_model.config
        self._no_split_modules = self.language_model._no_split_modules  # read by accelerate: the units of FSDP

    @property
    def language_model(self) -> PreTrainedModel:
        """That of transformers, adapters within."""
        model: Any = self.model
        return model if isinstance(model, PreTrainedModel) else model.get_base_model()

    def forward(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        """The loss, and its two terms for the log."""
        language_model = self.language_model
        on_device = batch.to(language_model.device)
        losses = hybrid_loss(language_model, on_device, mdm_weight=self._mdm_weight)
        return {"loss": losses.total, "terms": torch.stack([losses.ar, losses.mdm])}


def training_arguments(config: RunConfig, world_size: int) -> TrainingArguments:
    """The Trainer's settings, all but the number of steps, which the data decide; starts the process group."""
    optimisation, output = config.optimisation, config.output
    arguments = TrainingArguments(
        output_dir=str(Path(output.run_dir)),
        per_device_train_batch_size=1,  # of our loader's items, which are whole packs
        gradient_accumulation_steps=optimisation.forwards_of_step // world_size,
        max_steps=1,
        learning_rate=optimisation.lr,
        lr_scheduler_type="cosine",
        warmup_steps=optimisation.warmup_steps,
        adam_beta1=optimisation.beta1,
        adam_beta2=optimisation.beta2,
        adam_epsilon=optimisation.epsilon,
        weight_decay=optimisation.weight_decay,
        max_grad_norm=optimisation.max_grad_norm,
        seed=optimisation.seed,
        bf16=optimisation.compute_dtype == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        logging_strategy="steps",
        logging_steps=output.log_every,
        logging_nan_inf_filter=False,  # a loss that is not a number shall be seen
        save_strategy="steps",
        save_steps=output.save_every,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_timeout=PATIENCE_SECONDS,
        **trainer_settings(config.parallelism),
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs without torchrun: one is used, not torch's DataParallel
    return arguments


class _Flow(TrainerCallback):
    """The last step is logged whatever its number, and a run goes on with the intervals of its present settings."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        state.logging_steps, state.save_steps = int(args.logging_steps), int(args.save_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        control.should_log |= state.global_step >= state.max_steps


class RefusionTrainer(Trainer):
    """Trains on `StepBatches`, logs both terms of the loss, speed and MFU, and writes checkpoints whole or not at all.

    A forward's loss is divided by the process' forwards of a step (by Trainer), gradients are averaged over processes
    (by DDP, FSDP or DeepSpeed): together the mean over all forwards, as `ForwardInputs` wants it.

    Args:
        model: what is trained.
        arguments: of `training_arguments`, with `max_steps`.
        batches: of this process.
        epochs_per_step: for the log.
        keep: newest checkpoints that are kept.
        loader_workers: see `DataConfig`.
        callbacks: more of them.
    """

    control: TrainerControl

    def __init__(
        self,
        model: LossModel,
        arguments: TrainingArguments,
        batches: StepBatches,
        *,
        epochs_per_step: float,
        keep: int,
        loader_workers: int,
        callbacks: list[TrainerCallback],
    ) -> None:
        self._cost = TrainingCost.of(model.language_model)
        super().__init__(model=model, args=arguments, train_dataset=batches, callbacks=[_Flow(), *callbacks])
        self.pop_callback(next(c for c in self.callback_handler.callbacks if type(c).__name__ == "PrinterCallback"))
        self._batches, self._loader_workers, self._keep = batches, loader_workers, keep
        self._epochs_per_step = epochs_per_step
        self._folder = Path(arguments.output_dir) / CHECKPOINTS
        self._peak = peak_flops(arguments.device) if arguments.bf16 else None
        self._terms = torch.zeros(2, device=arguments.device)
        self._num_forwards = self._num_tokens = self._flops = 0
        self._since = time.perf_counter()

    def get_train_dataloader(self) -> DataLoader:
        """The batches of this process; accelerate is not to deal them out again."""
        return self._batches.loader(self._loader_workers)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """See Trainer; starts the clock."""
        self._since = time.perf_counter()
        return super().train(resume_from_checkpoint, **kwargs)

    def compute_loss(self, model: torch.nn.Module, inputs: ForwardInputs, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss of one forward, which is also counted for the log."""
        batch = inputs["batch"]
        outputs = model(batch=batch)
        self._terms += outputs["terms"].detach()
        self._num_forwards += 1
        self._num_tokens += inputs["num_tokens"]
        self._flops += self._cost.flops(
            num_rows=len(batch.tokens_T),
            num_labels=len(batch.ar.rows_R) + len(batch.mdm.rows_R),
            num_pairs=inputs["num_pairs"],
        )
        return outputs["loss"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Completes a line of the log: means since the last one, over all processes. All of them call this."""
        if "loss" in logs:
            counts = [*self._terms.tolist(), self._num_forwards, self._num_tokens, self._flops]
            sums = torch.tensor(counts, dtype=torch.float64, device=self.args.device)
            ar, mdm, num_forwards, num_tokens, flops = self.accelerator.reduce(sums, "sum").tolist()
            seconds = time.perf_counter() - self._since
            peak = self._peak and self._peak * self.accelerator.num_processes
            line: dict[str, Any] = {
                "epoch": self.state.global_step * self._epochs_per_step,
                "ar": ar / num_forwards,
                "mdm": mdm / num_forwards,
                "total": logs["loss"],
                "lr": logs["learning_rate"],
                "grad_norm": logs.get("grad_norm", math.nan),
                "tokens": int(num_tokens),
                "seconds": seconds,
                "tokens_per_second": num_tokens / seconds,
                "mfu": flops / (seconds * peak) if peak else None,
            }
            logs = line
            self._terms.zero_()
            self._num_forwards = self._num_tokens = self._flops = 0
            self._since = time.perf_counter()
        # Not Trainer's: it would put its own epoch in place of ours.
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The weights that are trained; DeepSpeed and FSDP write theirs with the optimizer."""
        if self.args.should_save and not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            assert output_dir is not None
            weights = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
            torch.save(weights, Path(output_dir) / WEIGHTS_FILE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        weights = torch.load(Path(resume_from_checkpoint) / WEIGHTS_FILE, map_location="cpu", weights_only=True)
        self.model.load_state_dict(weights, strict=False)  # what is not trained is as it was loaded

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._folder / PART)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Trainer's, beside the others, then moved among them by a rename: a crash leaves the last whole one."""
        name = f"{PREFIX}{self.state.global_step}"
        part = self._folder / PART
        if self.args.should_save:
            remove_leftovers(self._folder)
            (part / name).mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            _flush(part)
            os.replace(part / name, self._folder / name)
            _flush(self._folder)
            for old in checkpoints(self._folder)[: -self._keep]:
                old.replace(part / old.name)  # half of it must not look whole
            remove_leftovers(self._folder)
        self.accelerator.wait_for_everyone()
        self._since = time.perf_counter()  # speed is that of training


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    steps = {path: path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*")}
    return sorted((path for path, step in steps.items() if step.isdigit()), key=lambda path: int(steps[path]))


def remove_leftovers(folder: Path) -> None:
    """Removes what a crash left of a checkpoint that was being written or removed."""
    shutil.rmtree(folder / PART, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Waits until a folder and everything in it is on the disk."""
    for path in [folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
