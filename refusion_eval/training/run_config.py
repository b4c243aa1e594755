"""What a training run is: settings in a YAML file, checked before anything large is loaded.

A file holds one section for each attribute of `RunConfig`. Named files are part of the package (`configs/`). In a file,
data files and directories of checkpoints may be given relative to it, the latter beginning with "./" or "../".
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from refusion_eval.errors import ConfigError
from refusion_eval.training.checkpoints.backbone import BackboneConfig
from refusion_eval.training.config import MASKED_OBJECTIVES, ObjectiveConfig
from refusion_eval.training.data.rows import OnBad
from refusion_eval.training.data.steps import check_batch, check_world

Parallelism = Literal["ddp", "zero2", "fsdp"]
Attention = Literal["auto", "flash"]
ComputeDtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on.

    Attributes:
        files: see `rows.read_rows`.
        max_length: samples of more tokens, prompt and answer, are left out.
        on_bad: "fail" stops at a malformed row, "skip" leaves it out and counts it.
        workers: processes that tokenise; 0 is none but the first process of the run.
        max_samples, share: how many samples, or which share of them, are drawn; at most one of the two is given.
        sample_seed: of that draw; a smaller draw is part of a larger one.
        cache_dir: where tokens are kept, for this run and others; on storage that all machines see.
        loader_workers: processes that prepare batches, for each process of the run; 0 is none.
    """

    files: tuple[str, ...] = ()
    max_length: int = 4096
    on_bad: OnBad = "fail"
    workers: int = 0
    max_samples: int | None = None
    share: float | None = None
    sample_seed: int = 0
    cache_dir: str = "runs/token_cache"
    loader_workers: int = 2

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError("data.files is empty; name files of rows, such as data.files=train.jsonl")
        _require("data", self, max_length=2, workers=0, loader_workers=0)
        if self.on_bad not in get_args(OnBad):
            raise ConfigError(f"data.on_bad={self.on_bad!r} is unknown; known: {', '.join(get_args(OnBad))}")
        if self.max_samples is not None and self.share is not None:
            raise ConfigError(f"data: max_samples is {self.max_samples} and share {self.share}; give one of them")
        if self.max_samples is not None and self.max_samples < 1:
            raise ConfigError(f"data.max_samples is {self.max_samples}; it must be at least 1")
        if self.share is not None and not 0 < self.share <= 1:
            raise ConfigError(f"data.share is {self.share}; it must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class OptimisationConfig:
    """How it is trained: AdamW, a linear warm-up, then a cosine to 0.

    Attributes:
        epochs: passes over the data, rounded down to whole steps; or `max_steps`.
        max_steps: optimizer steps.
        global_batch_size: samples of a step, over all processes.
        micro_batch_size: samples over which the loss of the release is normalised; divides the step.
        num_forwards: forwards of a step, over all processes, each a pack of whole micro-batches without padding; None
            is one for each micro-batch. Fewer use a GPU better and take more of its memory.
        lr: the highest learning rate.
        warmup_steps: steps until it is reached.
        beta1, beta2, epsilon, weight_decay: of AdamW; decay is for matrices only.
        max_grad_norm: gradients are scaled down to this norm.
        compute_dtype: of matrix products.
        seed: of the order of samples, their corruption, and dropout.
    """

    epochs: float | None = None
    max_steps: int | None = None
    global_batch_size: int
    micro_batch_size: int = 4
    num_forwards: int | None = None
    lr: float = 2e-5
    warmup_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    compute_dtype: ComputeDtype = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.max_steps is None):
            raise ConfigError(f"optimisation: epochs is {self.epochs} and max_steps {self.max_steps}; give one of them")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ConfigError(f"optimisation.epochs is {self.epochs}; it must be above 0")
        if self.max_steps is not None and self.max_steps < 1:
            raise ConfigError(f"optimisation.max_steps is {self.max_steps}; it must be at least 1")
        check_batch(self.global_batch_size, self.micro_batch_size, self.forwards_of_step)
        _require("optimisation", self, warmup_steps=0, weight_decay=0, max_grad_norm=0, seed=0)
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"optimisation.lr is {self.lr}; it must be above 0")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.epsilon > 0):
            raise ConfigError(
                f"optimisation: beta1 is {self.beta1}, beta2 {self.beta2} and epsilon {self.epsilon}; AdamW needs "
                "betas from 0 to below 1 and an epsilon above 0"
            )
        if self.compute_dtype not in get_args(ComputeDtype):
            raise ConfigError(
                f"optimisation.compute_dtype={self.compute_dtype!r} is unknown; known: "
                f"{', '.join(get_args(ComputeDtype))}"
            )

    @property
    def forwards_of_step(self) -> int:
        """`num_forwards`, or what it stands for."""
        if self.num_forwards is None and self.micro_batch_size > 0:
            return self.global_batch_size // self.micro_batch_size
        return self.num_forwards or 0


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What is written.

    Attributes:
        run_dir: the run's folder, on storage that all machines see.
        log_every: steps between two lines of the log, each the mean over them.
        save_every: steps between two checkpoints, a multiple of `log_every`; there is one at the end in any case.
        keep: newest checkpoints that are kept.
        tensorboard: whether the log is written for TensorBoard too.
    """

    run_dir: str
    log_every: int = 10
    save_every: int = 500
    keep: int = 1
    tensorboard: bool = False

    def __post_init__(self) -> None:
        _require("output", self, log_every=1, save_every=1, keep=1)
        if self.save_every % self.log_every:
            raise ConfigError(
                f"output: save_every is {self.save_every} and log_every {self.log_every}; make the first a multiple of "
                "the second, so that no line of the log is lost when a run goes on from a checkpoint"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a training run.

    Attributes:
        backbone: initial weights, tokenizer, and which weights are trained.
        data: what is trained on.
        objective: what is learned.
        optimisation: how.
        output: what is written where.
        parallelism: "ddp" (every process holds everything), "zero2" (DeepSpeed: optimizer states and gradients are
            shared out) or "fsdp" (weights too).
        attention: "auto" is flash-attn where it is installed and the objective is causal, SDPA otherwise; "flash"
            refuses to start where it would not be used.
    """

    backbone: BackboneConfig
    data: DataConfig
    objective: ObjectiveConfig
    optimisation: OptimisationConfig
    output: OutputConfig
    parallelism: Parallelism = "ddp"
    attention: Attention = "auto"

    def __post_init__(self) -> None:
        if self.parallelism not in get_args(Parallelism):
            raise ConfigError(f"parallelism={self.parallelism!r} is unknown; known: {', '.join(get_args(Parallelism))}")
        if self.attention not in get_args(Attention):
            raise ConfigError(f"attention={self.attention!r} is unknown; known: {', '.join(get_args(Attention))}")
        self._check_blocks()
        self._check_dtypes()

    def _check_blocks(self) -> None:
        objective = self.objective
        if objective.objective == "refusion" and 0 < objective.eos_multiple < max(objective.slot_sizes):
            raise ConfigError(
                f"objective: eos_multiple is b={objective.eos_multiple} and slot_sizes go up to "
                f"k={max(objective.slot_sizes)}; the paper needs b >= k (App. C.4): raise eos_multiple, set it to 0 "
                "for no filling, or leave out larger slots"
            )
        if self.attention == "flash" and objective.objective in MASKED_OBJECTIVES:
            raise ConfigError(
                f"attention=flash cannot mask as objective={objective.objective} needs it; use attention=auto"
            )
        if self.attention == "flash" and self.optimisation.compute_dtype != "bfloat16":
            raise ConfigError("attention=flash computes in half precision; set optimisation.compute_dtype=bfloat16")

    def _check_dtypes(self) -> None:
        backbone, compute = self.backbone, self.optimisation.compute_dtype
        if backbone.dtype == "bfloat16" and compute == "float32":
            raise ConfigError(
                "optimisation.compute_dtype=float32 needs weights in float32; set backbone.dtype=float32 as well"
            )
        if backbone.dtype == "bfloat16" and backbone.lora is None and self.parallelism != "zero2":
            raise ConfigError(
                f"backbone.dtype=bfloat16 with parallelism={self.parallelism} would round most of AdamW's steps to "
                "nothing; set backbone.dtype=float32 (matrix products stay in optimisation.compute_dtype), or "
                "parallelism=zero2, which keeps float32 copies"
            )

    def check_world(self, world_size: int) -> None:
        """Refuses a number of processes that a step cannot be shared by.

        Raises:
            ConfigError: likewise.
        """
        check_world(self.optimisation.forwards_of_step, world_size)

    def to_json(self) -> dict[str, Any]:
        """All settings."""
        return asdict(self)

    def identity(self) -> dict[str, Any]:
        """The settings that a run must keep to be continued: all but what is written, and who prepares the data."""
        settings = self.to_json()
        del settings["output"]
        for name in ("workers", "loader_workers", "cache_dir"):
            del settings["data"][name]
        return settings


def _require(section: str, config: Any, **lowest: float) -> None:
    for name, least in lowest.items():
        if not getattr(config, name) >= least:
            raise ConfigError(f"{section}.{name} is {getattr(config, name)}; it must be at least {least}")
