"""The Trainer of transformers with the loss, the batches, the log and the checkpoints of this project."""

import copy
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from refusion_eval.training.config import RunConfig
from refusion_eval.training.data.batches import ForwardInputs, StepBatches
from refusion_eval.training.data.collate import PackedBatch
from refusion_eval.training.flops import TrainingCost, peak_flops
from refusion_eval.training.objectives.loss import hybrid_loss

CHECKPOINTS, PREFIX, PART = "checkpoints", "checkpoint-", ".part"
WEIGHTS_FILE = "trained_weights.pt"
# Timeout of collective operations; rank 0 may tokenise millions of samples while the other ranks wait.
TIMEOUT_SECONDS = 6 * 3600

# As in the release: optimiser states and gradients are sharded, weights are not. transformers replaces "auto".
ZERO2: dict[str, Any] = {
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True},
    "bf16": {"enabled": "auto"},
    # DeepSpeed's default is the dtype of the weights; sums of many gradients in bfloat16 would lose most of them.
    "data_types": {"grad_accum_dtype": "fp32"},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
}
# FSDP2 with one unit for each layer of the model.
FSDP: dict[str, Any] = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "reshard_after_forward": True,
    "state_dict_type": "SHARDED_STATE_DICT",
}


def _zero2(offload_optimizer: bool) -> dict[str, Any]:
    settings = copy.deepcopy(ZERO2)  # transformers writes into it
    if offload_optimizer:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return settings


class LossModel(torch.nn.Module):
    """A model whose forward is the loss, because DDP, FSDP and DeepSpeed act on the forward of a module."""

    def __init__(self, model: torch.nn.Module, *, mdm_weight: float) -> None:
        super().__init__()
        self.model, self._mdm_weight = model, mdm_weight
        self.config = self.language_model.config
        self._no_split_modules = self.language_model._no_split_modules  # read by accelerate: the units of FSDP

    @property
    def language_model(self) -> PreTrainedModel:
        """The model of transformers, which contains the adapters."""
        model: Any = self.model
        return model if isinstance(model, PreTrainedModel) else model.get_base_model()

    def forward(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        """The loss, and its AR and MDM terms for the log."""
        language_model = self.language_model
        on_device = batch.to(language_model.device)
        losses = hybrid_loss(language_model, on_device, mdm_weight=self._mdm_weight)
        return {"loss": losses.total, "terms": torch.stack([losses.ar, losses.mdm])}


def training_arguments(config: RunConfig, world_size: int) -> TrainingArguments:
    """Settings of the Trainer except the number of steps, which depends on the data; starts the process group."""
    optimisation, output = config.optimisation, config.output
    parallelism: dict[str, dict[str, Any]] = {
        "ddp": {"ddp_find_unused_parameters": False},
        "zero2": {"deepspeed": _zero2(optimisation.offload_optimizer)},
        "fsdp": {"fsdp": True, "fsdp_config": dict(FSDP)},  # a copy, as transformers writes into it
    }
    arguments = TrainingArguments(
        output_dir=str(Path(output.run_dir)),
        per_device_train_batch_size=1,  # the items of the loader are whole packs
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
        logging_nan_inf_filter=False,  # a loss of NaN must be visible
        save_strategy="steps",
        save_steps=output.save_every,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_timeout=TIMEOUT_SECONDS,
        **parallelism[config.parallelism],
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # without torchrun one GPU is used, not DataParallel
    return arguments


class _LogAndSaveIntervals(TrainerCallback):
    """Logs the last step too, and applies the current intervals to a run that continues."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        state.logging_steps, state.save_steps = int(args.logging_steps), int(args.save_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        control.should_log |= state.global_step >= state.max_steps


class RefusionTrainer(Trainer):
    """Trains on `StepBatches`, logs both terms of the loss, speed and MFU, and writes checkpoints atomically.

    The Trainer divides the loss of a forward by the number of forwards of this process in a step; DDP, FSDP or
    DeepSpeed average the gradients over processes. The result is the mean over all forwards that `ForwardInputs` needs.
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
        optimizer: torch.optim.Optimizer | None,
        callbacks: list[TrainerCallback],
    ) -> None:
        self._cost = TrainingCost.of(model.language_model)
        callbacks = [_LogAndSaveIntervals(), *callbacks]
        optimizers = (optimizer, None)  # the Trainer makes AdamW where there is none, and the schedule
        super().__init__(model=model, args=arguments, train_dataset=batches, callbacks=callbacks, optimizers=optimizers)
        self.remove_callback(PrinterCallback)
        if self.is_fsdp_enabled and arguments.bf16:
            # accelerate would add up the gradients of all ranks, and return the loss, in bfloat16.
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
        self._batches, self._loader_workers, self._keep = batches, loader_workers, keep
        self._epochs_per_step = epochs_per_step
        self._folder = Path(arguments.output_dir) / CHECKPOINTS
        self._peak = peak_flops(arguments.device) if arguments.bf16 else None
        self._start_line()

    def _start_line(self) -> None:
        """Begins the sums of a new line of the log."""
        self._terms = torch.zeros(2, device=self.args.device)
        self._num_forwards = self._num_tokens = self._flops = 0
        self._since = time.perf_counter()

    def get_train_dataloader(self) -> DataLoader:
        """The batches of this process, without accelerate, which would distribute them again."""
        return self._batches.loader(self._loader_workers)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Trains as Trainer does and starts the time measurement."""
        self._since = time.perf_counter()
        return super().train(resume_from_checkpoint, **kwargs)

    def compute_loss(self, model: torch.nn.Module, inputs: ForwardInputs, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss of one forward; also adds the forward to the sums of the log."""
        outputs = model(batch=inputs["batch"])
        self._terms += outputs["terms"].detach()
        self._num_forwards += 1
        self._num_tokens += inputs["num_tokens"]
        self._flops += self._cost.flops(inputs)
        return outputs["loss"]

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Adds means since the previous line over all processes to a line of the log; all processes call it."""
        if "loss" in logs:
            counts = [*self._terms.tolist(), self._num_forwards, self._num_tokens, self._flops]
            sums = torch.tensor(counts, dtype=torch.float64, device=self.args.device)
            ar, mdm, num_forwards, num_tokens, flops = self.accelerator.reduce(sums, "sum").tolist()
            seconds = time.perf_counter() - self._since
            peak = self._peak and self._peak * self.accelerator.num_processes
            logs = {
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
            self._start_line()
        # Trainer.log would replace the epoch.
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the trained weights; DeepSpeed and FSDP write them with the optimiser."""
        if self.args.should_save and not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            assert output_dir is not None
            weights = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
            torch.save(weights, Path(output_dir) / WEIGHTS_FILE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        weights = torch.load(Path(resume_from_checkpoint) / WEIGHTS_FILE, map_location="cpu", weights_only=True)
        self.model.load_state_dict(weights, strict=False)  # frozen weights are not in the checkpoint

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._folder / PART)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Writes a checkpoint to a temporary folder and renames it, so that a crash leaves the previous checkpoint."""
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
                old.replace(part / old.name)  # a partly removed checkpoint must not look complete
            remove_leftovers(self._folder)
        self.accelerator.wait_for_everyone()
        self._since = time.perf_counter()  # the time for checkpoints does not count


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    steps = {path: path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*")}
    return sorted((path for path, step in steps.items() if step.isdigit()), key=lambda path: int(steps[path]))


def remove_leftovers(folder: Path) -> None:
    """Removes incomplete checkpoints after a crash."""
    shutil.rmtree(folder / PART, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Waits until a folder and all its content are on the disk."""
    for path in [folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
