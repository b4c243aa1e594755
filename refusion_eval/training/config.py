"""Settings of a training run: backbone, data, objective, optimisation, output.

A configuration file (`config_files`) has one section for each attribute of `RunConfig`.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt

from refusion_eval.config import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    added_setting,
    recorded_values,
    settings_class,
)
from refusion_eval.errors import ConfigError
from refusion_eval.training.data.collate import Normalisation
from refusion_eval.training.data.rows import OnBad
from refusion_eval.training.objectives.corrupt import SLOT_SIZES, Masking

Objective = Literal["pretrain", "sft", "refusion", "llada", "bd3lm"]
Parallelism = Literal["ddp", "zero2", "fsdp"]
Attention = Literal["auto", "flash"]
Dtype = Literal["bfloat16", "float32"]
NewRows = Literal["spare", "mean"]
BelowOne = Annotated[float, Ge(0), Lt(1)]

MASKED_OBJECTIVES: tuple[Objective, ...] = ("llada", "bd3lm")  # not causal


@settings_class("lora")
class LoraSettings:
    """Low-rank adapters in place of training every weight.

    Attributes:
        rank: inner dimension r of the adapters.
        alpha: the product of the adapters is multiplied by alpha / rank; often twice the rank.
        dropout: probability with which an input of an adapter is dropped.
        target_modules: names of the adapted matrices inside a layer, such as "q_proj".
    """

    rank: PositiveInt
    alpha: PositiveFloat
    dropout: BelowOne = 0.0
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def __post_init__(self) -> None:
        if not self.target_modules:
            raise ConfigError("lora: target_modules is empty; give a list of matrices such as [q_proj, v_proj]")


@settings_class("backbone")
class BackboneConfig:
    """Where the initial weights come from, and which of them are trained.

    Attributes:
        model: directory or hub id of the initial weights; None where `shape` is given.
        revision: branch, tag or commit of a hub id.
        shape: shape of random weights: model_type (qwen3, qwen2, llama) and sizes under their names in config.json
            (see `backbone.random_config`).
        tokenizer: directory or hub id; None is the tokenizer of the model. A shape needs one.
        dtype: data type of the weights.
        gradient_checkpointing: compute activations again in the backward pass instead of keeping them.
        lora: None trains every weight.
        seed: seed of random weights.
        new_rows: embeddings that new tokens begin with: the spare rows that a checkpoint has beyond its tokenizer's
            ids, as in the release of ReFusion ("spare"; the mean where there are too few), or the mean of the rows of
            all known tokens ("mean").
    """

    model: str | None = None
    revision: str | None = None
    shape: Mapping[str, Any] | None = None
    tokenizer: str | None = None
    dtype: Dtype = "bfloat16"
    gradient_checkpointing: bool = True
    lora: LoraSettings | None = None
    seed: int = 0
    new_rows: NewRows = added_setting("spare")

    def __post_init__(self) -> None:
        if (self.model is None) == (self.shape is None):
            given = "neither" if self.model is None else "both"
            raise ConfigError(
                f"backbone: {given} of model and shape given; name a checkpoint (model), or the shape of random weights"
            )
        if self.shape is not None and self.tokenizer is None:
            raise ConfigError("backbone: random weights have no tokenizer; name one (tokenizer)")
        if self.revision is not None and self.model is None:
            raise ConfigError(f"backbone: revision={self.revision!r} belongs to a model of the hub; leave it out")


@settings_class("data")
class DataConfig:
    """Data to train on.

    Attributes:
        files: files, folders or patterns of rows, or data sets of the hub (owner/name, or owner/name@revision), see
            `rows.RowReader`.
        max_length: samples with more tokens (prompt and answer) are left out.
        on_bad: "fail" stops at a malformed row, "skip" leaves the row out and counts it.
        workers: processes that tokenise; 0 tokenises in the first process of the run.
        max_samples, share: number or share of the samples that are drawn; at most one of the two is given.
        sample_seed: seed of that draw; under one seed a smaller draw is part of a larger one.
        cache_dir: folder of the token caches, which runs share; on storage that all machines see.
        loader_workers: processes that prepare batches, for each process of the run.
    """

    files: tuple[str, ...] = ()
    max_length: Annotated[int, Ge(2)] = 4096
    on_bad: OnBad = "fail"
    workers: NonNegativeInt = 0
    max_samples: PositiveInt | None = None
    share: Annotated[float, Ge(0), Le(1)] | None = None
    sample_seed: int = 0
    cache_dir: str = "runs/token_cache"
    loader_workers: NonNegativeInt = 2

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError(
                "data.files is empty; name files of rows, such as data.files=train.jsonl, or a data set of the hub"
            )
        if self.max_samples is not None and self.share is not None:
            raise ConfigError(f"data: max_samples is {self.max_samples} and share {self.share}; give one of them")
        if self.share == 0:
            raise ConfigError("data.share is 0; it must be above 0 and at most 1")


@settings_class("objective")
class ObjectiveConfig:
    """Training objective: how a sample becomes an example, and what the loss of the example is.

    Attributes:
        objective: "pretrain" (next token, prompt included), "sft" (next token of the answer), "refusion" (hybrid),
            "llada" (masked answer, full attention) or "bd3lm" (masked answer, block by block).
        slot_sizes: slot sizes k, of which one is drawn for each sample (refusion).
        eos_multiple: answers are filled with EOS up to a multiple of this many tokens (refusion, llada, bd3lm); 0
            fills nothing, as in the release of ReFusion.
        block_size: tokens of a block, a divisor of `eos_multiple` (bd3lm); 0 for the other objectives.
        normalisation: normalisation of the losses, see `collate`; llada and bd3lm have their own, under "release".
        mdm_weight: lambda of Eq. 3, the factor of the MDM term in the hybrid loss (refusion); 1 for the others.
        masking: how many slots are masked (refusion): each with one probability, as in the release ("bernoulli"), or
            exactly floor(t K) of K, as in the paper ("exact").
    """

    objective: Objective
    slot_sizes: tuple[PositiveInt, ...] = SLOT_SIZES
    eos_multiple: NonNegativeInt = 0
    block_size: NonNegativeInt = 0
    normalisation: Normalisation = "release"
    mdm_weight: NonNegativeFloat = 1.0
    masking: Masking = added_setting("bernoulli")

    def __post_init__(self) -> None:
        if not self.slot_sizes:
            raise ConfigError("slot_sizes is empty; name one or more sizes of at least 1")
        if self.objective == "bd3lm":
            if self.block_size < 1:
                raise ConfigError(f"block_size is {self.block_size}; objective=bd3lm needs blocks of at least 1 token")
            if not self.eos_multiple or self.eos_multiple % self.block_size:
                raise ConfigError(
                    f"eos_multiple is {self.eos_multiple} and block_size {self.block_size}; objective=bd3lm fills "
                    "answers up to whole blocks, so set eos_multiple to a multiple of block_size"
                )
        elif self.block_size:
            raise ConfigError(
                f"block_size is {self.block_size}; only objective=bd3lm has blocks, so leave it out of {self.objective}"
            )
        if self.objective in MASKED_OBJECTIVES and self.normalisation != "release":
            raise ConfigError(
                f"normalisation={self.normalisation}; objective={self.objective} has its own, so leave it out"
            )
        if self.objective != "refusion" and self.masking != "bernoulli":
            raise ConfigError(f"masking={self.masking}; objective={self.objective} has no slots, so leave it out")
        if self.objective != "refusion" and self.mdm_weight != 1:
            raise ConfigError(
                f"mdm_weight is {self.mdm_weight}; objective={self.objective} has one term only, so leave it out"
            )


@settings_class("optimisation")
class OptimisationConfig:
    """Optimiser and schedule: AdamW, a linear warm-up, then a cosine to 0.

    Attributes:
        epochs: passes over the data, rounded down to whole steps; or `max_steps`.
        max_steps: optimiser steps.
        global_batch_size: samples of a step, over all processes.
        micro_batch_size: samples over which the loss of the release is normalised; divides the step.
        num_forwards: forwards of a step, over all processes, each a pack of whole micro-batches without padding; None
            is one for each micro-batch. Fewer forwards use a GPU better and take more of its memory.
        lr: highest learning rate.
        warmup_steps: steps until the highest learning rate is reached.
        beta1, beta2, epsilon, weight_decay: AdamW's constants; weight decay acts on matrices only.
        max_grad_norm: norm to which larger gradients are scaled down.
        compute_dtype: data type of matrix products.
        seed: seed of the order of samples, their corruption, and dropout.
        offload_optimizer: keep the optimiser's states in the memory of the machine (zero2); slower, for fewer GPUs.
    """

    epochs: PositiveFloat | None = None
    max_steps: PositiveInt | None = None
    global_batch_size: int
    micro_batch_size: int = 4
    num_forwards: int | None = None
    lr: PositiveFloat = 2e-5
    warmup_steps: NonNegativeInt = 0
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: NonNegativeFloat = 1.0
    compute_dtype: Dtype = "bfloat16"
    seed: NonNegativeInt = 0
    offload_optimizer: bool = False

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.max_steps is None):
            raise ConfigError(f"optimisation: epochs is {self.epochs} and max_steps {self.max_steps}; give one of them")
        batch, micro, num_forwards = self.global_batch_size, self.micro_batch_size, self.forwards_of_step
        if batch < 1 or micro < 1 or batch % micro:
            raise ConfigError(
                f"global_batch_size is {batch} and micro_batch_size {micro}; a step consists of whole micro-batches, "
                "so make the first a multiple of the second"
            )
        if not 1 <= num_forwards <= batch // micro:
            raise ConfigError(
                f"num_forwards is {num_forwards}; a step of {batch} samples has {batch // micro} micro-batches of "
                f"{micro}, and every forward needs at least one of them"
            )

    @property
    def forwards_of_step(self) -> int:
        """`num_forwards`, or the number of micro-batches where it is None."""
        if self.num_forwards is None and self.micro_batch_size > 0:
            return self.global_batch_size // self.micro_batch_size
        return self.num_forwards or 0


@settings_class("output")
class OutputConfig:
    """Files that a run writes.

    Attributes:
        run_dir: folder of the run, on storage that all machines see.
        log_every: steps between two lines of the log, each the mean over them.
        save_every: steps between two checkpoints, a multiple of `log_every`; the end of a run has one in any case.
        keep: number of newest checkpoints that are kept.
        tensorboard: write the log for TensorBoard too.
    """

    run_dir: str
    log_every: PositiveInt = 10
    save_every: PositiveInt = 500
    keep: PositiveInt = 1
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.save_every % self.log_every:
            raise ConfigError(
                f"output: save_every is {self.save_every} and log_every {self.log_every}; make the first a multiple of "
                "the second, so that no line of the log is lost when a run continues from a checkpoint"
            )


@settings_class()
class RunConfig:
    """All settings of a training run.

    Attributes:
        backbone: initial weights, tokenizer, and the weights that are trained.
        data: data to train on.
        objective: training objective.
        optimisation: optimiser and schedule.
        output: files that are written.
        parallelism: "ddp" (every process holds everything), "zero2" (DeepSpeed: optimiser states and gradients are
            sharded) or "fsdp" (weights too).
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
        objective, backbone, compute = self.objective, self.backbone, self.optimisation.compute_dtype
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
        if self.attention == "flash" and compute != "bfloat16":
            raise ConfigError("attention=flash computes in half precision; set optimisation.compute_dtype=bfloat16")
        if self.optimisation.offload_optimizer and self.parallelism != "zero2":
            raise ConfigError(
                f"optimisation.offload_optimizer needs parallelism=zero2, not {self.parallelism}; set one of the two"
            )
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
        """Checks that the forwards of a step can be shared evenly.

        Raises:
            ConfigError: the number of processes does not divide them.
        """
        num_forwards = self.optimisation.forwards_of_step
        if world_size < 1 or num_forwards % world_size:
            raise ConfigError(
                f"a step of {num_forwards} forwards cannot be shared evenly by {world_size} processes; start a number "
                "of processes that divides it, or set optimisation.num_forwards to a multiple of them"
            )

    def identity(self) -> dict[str, Any]:
        """Settings that must be equal for a run to be continued: all but what changes where and how fast it runs."""
        settings = asdict(self)
        for name in ("backbone", "objective", "optimisation"):  # runs of earlier versions lack added settings
            recorded = recorded_values(getattr(self, name))
            settings[name] = {key: value for key, value in settings[name].items() if key in recorded}
        del settings["output"], settings["optimisation"]["offload_optimizer"]
        for name in ("workers", "loader_workers", "cache_dir"):
            del settings["data"][name]
        return settings
