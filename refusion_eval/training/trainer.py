"""The Trainer of transformers with the loss, the batches, the log and the checkpoints of this project."""

import copy
import csv
import math
import os
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from refusion_eval.store.atomic_write import write_atomically
from refusion_eval.training.config import RunConfig
from refusion_eval.training.cost import TrainingCost, peak_flops
from refusion_eval.training.data.batches import ForwardInputs, StepBatches
from refusion_eval.training.data.collate import PackedBatch
from refusion_eval.training.data.token_cache import flush
from refusion_eval.training.objectives.loss import hybrid_loss

CHECKPOINTS, PREFIX, PART = "checkpoints", "checkpoint-", ".part"
WEIGHTS_FILE = "trained_weights.pt"
LOG_FILE = "log.csv"
# Apart from step and epoch, each column covers the steps since the previous line: mean losses, last learning rate and
# gradient norm, number of tokens, and seconds without the time for checkpoints.
COLUMNS = ("step", "epoch", "ar", "mdm", "total", "lr", "grad_norm", "tokens", "seconds", "tokens_per_second", "mfu")
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


class LossModel(torch.nn.Module):
    """A model whose forward is the loss, because DDP, FSDP and DeepSpeed act on the forward of a module."""

    def __init__(self, model: torch.nn.Module, *, mdm_weight: float) -> None:
        super().__init__()
        self.model, self._mdm_weight = model, mdm_weight
        self.config = self.language_model.config
        self._no_split_modules = self.language_model._no_split_modules  # read by accelerate: the units of FSDP

    @property
    def language_model(self) -> PreTrainedModel:
        model: Any = self.model
        return model if isinstance(model, PreTrainedModel) else model.get_base_model()

    def forward(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        model = self.language_model
        losses = hybrid_loss(model, batch.to(model.device), mdm_weight=self._mdm_weight)
        return {"loss": losses.total, "terms": torch.stack([losses.ar, losses.mdm])}


def training_arguments(config: RunConfig, world_size: int) -> TrainingArguments:
    """Settings of the Trainer except the number of steps, which depends on the data; starts the process group."""
    optimisation, output = config.optimisation, config.output
    zero2 = copy.deepcopy(ZERO2)  # copies, as transformers writes into them
    if optimisation.offload_optimizer:
        zero2["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    parallelism: dict[str, dict[str, Any]] = {
        "ddp": {"ddp_find_unused_parameters": False},
        "zero2": {"deepspeed": zero2},
        "fsdp": {"fsdp": True, "fsdp_config": dict(FSDP)},
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
        report_to=[*(["tensorboard"] if output.tensorboard else []), *([output.tracker] if output.tracker else [])],
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_timeout=TIMEOUT_SECONDS,
        **parallelism[config.parallelism],
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # without torchrun one GPU is used, not DataParallel
    return arguments


class RunLog(TrainerCallback):
    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOG_FILE
        self._started, self._first_step = 0.0, 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._started, self._first_step = time.perf_counter(), state.global_step
        state.logging_steps, state.save_steps = int(args.logging_steps), int(args.save_steps)  # a continued run too
        if state.is_world_process_zero:
            # Steps after the checkpoint that a run continues from run again, and write their lines again.
            rows = read_log(self._path) if self._path.exists() else []
            kept = [row.values() for row in rows if int(row["step"]) <= state.global_step]
            write_atomically(self._path, "".join(",".join(values) + "\n" for values in (COLUMNS, *kept)))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_log |= state.global_step >= state.max_steps  # the last step too

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if not state.is_world_process_zero or "ar" not in logs:
            return
        step = state.global_step
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow({"step": step, **logs})
        seconds_per_step = (time.perf_counter() - self._started) / max(step - self._first_step, 1)
        left = timedelta(seconds=round(seconds_per_step * (state.max_steps - step)))
        mfu = f"  MFU {logs['mfu']:.1%}" if "mfu" in logs else ""
        print(
            f"step {step}/{state.max_steps}  epoch {logs['epoch']:.2f}  ar {logs['ar']:.4f}  mdm {logs['mdm']:.4f}  "
            f"lr {logs['lr']:.2e}  {logs['tokens_per_second']:.0f} tokens/s{mfu}  {left} left",
            file=sys.stderr,
            flush=True,
        )


class RefusionTrainer(Trainer):
    """Trains on `StepBatches`, logs both terms of the loss, speed and MFU, and writes checkpoints atomically."""

    # The Trainer divides the loss of a forward by the number of forwards of this process in a step; DDP, FSDP or
    # DeepSpeed average the gradients over processes. The result is the mean over all forwards that `ForwardInputs`
    # needs.

    control: TrainerControl

    def __init__(
        self,
        model: LossModel,
        arguments: TrainingArguments,
        batches: StepBatches,
        config: RunConfig,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._cost = TrainingCost.of(model.language_model)
        run_dir = Path(arguments.output_dir)
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=batches,
            callbacks=[RunLog(run_dir)],
            optimizers=(optimizer, None),  # the Trainer makes AdamW where there is none, and the schedule
        )
        self.remove_callback(transformers.PrinterCallback)
        if self.is_fsdp_enabled and arguments.bf16:
            # accelerate would add up the gradients of all ranks, and return the loss, in bfloat16.
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
        self._batches, self._config, self._folder = batches, config, run_dir / CHECKPOINTS
        self._peak = peak_flops(arguments.device) if arguments.bf16 else None
        self._start_line()

    def _start_line(self) -> None:
        self._terms = torch.zeros(2, device=self.args.device)
        self._num_forwards = self._num_tokens = self._flops = 0
        self._since = time.perf_counter()

    def get_train_dataloader(self) -> DataLoader:
        # Without accelerate, which would distribute the batches of this process again.
        return self._batches.loader(self._config.data.loader_workers)

    def start_or_continue(self) -> None:
        """Trains from the newest checkpoint, or from the beginning where there is none."""
        if self.args.should_save:
            remove_leftovers(self._folder)
        previous = checkpoints(self._folder)
        self._since = time.perf_counter()
        self.train(str(previous[-1]) if previous else None)

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
            sums = self.accelerator.reduce(torch.tensor(counts, dtype=torch.float64, device=self.args.device), "sum")
            ar, mdm, num_forwards, num_tokens, flops = sums.tolist()
            seconds = time.perf_counter() - self._since
            peak = self._peak and self._peak * self.accelerator.num_processes
            logs = {
                "epoch": self.state.global_step * self._batches.epochs_per_step,
                "ar": ar / num_forwards,
                "mdm": mdm / num_forwards,
                "total": logs["loss"],
                "lr": logs["learning_rate"],
                "grad_norm": logs.get("grad_norm", math.nan),
                "tokens": int(num_tokens),
                "seconds": seconds,
                "tokens_per_second": num_tokens / seconds,
                **({"mfu": flops / (seconds * peak)} if peak else {}),
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
            flush(part)
            os.replace(part / name, self._folder / name)
            flush(self._folder)
            for old in checkpoints(self._folder)[: -self._config.output.keep]:
                old.replace(part / old.name)  # a partly removed checkpoint must not look complete
            remove_leftovers(self._folder)
        self.accelerator.wait_for_everyone()
        self._since = time.perf_counter()  # the time for checkpoints does not count


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    steps = {path: path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*")}
    return sorted((path for path, step in steps.items() if step.isdigit()), key=lambda path: int(steps[path]))


def remove_leftovers(folder: Path) -> None:
    shutil.rmtree(folder / PART, ignore_errors=True)


def read_log(path: Path) -> list[dict[str, str]]:
    """The lines of a `log.csv`, without a last line that a crash truncated."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]
