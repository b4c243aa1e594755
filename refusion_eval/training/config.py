"""Settings of a training run: backbone, data, objective, optimisation, output.

A configuration file, named in the package or YAML elsewhere, has one section for each attribute of `RunConfig`.
`base: other.yaml` takes the settings of a file beside it or of a configuration of the package, and replaces those that
this file names. Paths in a file are relative to it; folders that the package's configurations write are relative to the
current folder.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from annotated_types import Ge, Gt, Le, Lt

from refusion_eval.config import (
    NOT_OF_ITS_TAG,
    NOT_YAML,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    added_setting,
    build,
    check_keys,
    read_yaml,
    recorded_values,
    settings_class,
)
from refusion_eval.errors import ConfigError
from refusion_eval.training.data.collate import Normalisation
from refusion_eval.training.data.rows import OnBad, is_hub_id
from refusion_eval.training.objectives.corrupt import SLOT_SIZES, Masking

Objective = Literal["pretrain", "sft", "refusion", "llada", "bd3lm", "idlm", "wedlm"]
Parallelism = Literal["ddp", "zero2", "fsdp"]
Attention = Literal["auto", "flash"]
Dtype = Literal["bfloat16", "float32"]
NewRows = Literal["spare", "mean"]
Matrix = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BelowOne = Annotated[float, Ge(0), Lt(1)]

FOLDER = Path(__file__).parent / "configs"
TWO_STREAMS: tuple[Objective, ...] = ("idlm", "wedlm")  # the text by next tokens, and a noisy copy of the answer
MASKED_OBJECTIVES: tuple[Objective, ...] = ("llada", "bd3lm", *TWO_STREAMS)  # those whose attention needs a mask


@settings_class("lora")
class LoraSettings:
    """Low-rank adapters in place of training every weight.

    Attributes:
        rank: inner dimension r of the adapters.
        alpha: the product of the adapters is multiplied by alpha / rank; often twice the rank.
        dropout: probability with which an input of an adapter is dropped.
        target_modules: names of the adapted matrices inside a layer, such as "q_proj". The embedding of new tokens is
            always trained, the output layer never.
    """

    rank: PositiveInt
    alpha: PositiveFloat
    dropout: BelowOne = 0.0
    target_modules: tuple[Matrix, ...] = get_args(Matrix)

    def __post_init__(self) -> None:
        if not self.target_modules:
            raise ConfigError("target_modules is empty; give a list of matrices such as [q_proj, v_proj]")


@settings_class("backbone")
class BackboneConfig:
    """Where the initial weights come from, and which of them are trained.

    Attributes:
        model: directory or hub id of the initial weights; None where `shape` is given.
        revision: branch, tag or commit of a hub id.
        shape: shape of random weights: model_type (qwen3, qwen2, llama) and sizes under their names in config.json
            (see `backbone.random_config`).
        tokenizer: directory or hub id; None is the tokenizer of the model. A shape has to name it.
        dtype: data type of the weights.
        gradient_checkpointing: compute activations again in the backward pass instead of keeping them.
        lora: None trains every weight.
        seed: seed of random weights.
        new_rows: embeddings that new tokens begin with: the spare rows that a checkpoint has beyond its tokenizer's
            ids, as in the release of ReFusion ("spare"; the mean where there are too few), or the mean of the rows of
            all known tokens ("mean").
        mask_token: special token of the tokenizer that no text has and that becomes the mask, for a vocabulary without
            a free row; None is the checkpoint's mask token, or a new token. Its row begins as the checkpoint's
            ("spare") or as the mean of all others ("mean").
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
    mask_token: str | None = added_setting(None)

    def __post_init__(self) -> None:
        if (self.model is None) == (self.shape is None):
            given = "neither" if self.model is None else "both"
            raise ConfigError(f"{given} of model and shape given; give the one or the other")
        if self.shape is not None and self.tokenizer is None:
            raise ConfigError("random weights have no tokenizer; name one (tokenizer)")
        if self.revision is not None and self.model is None:
            raise ConfigError(f"revision={self.revision!r} belongs to a model of the hub; leave it out")


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
    share: Annotated[float, Gt(0), Le(1)] | None = None
    sample_seed: int = 0
    cache_dir: str = "runs/token_cache"
    loader_workers: NonNegativeInt = 2

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError("files is empty; name files, such as train.jsonl, or a data set of the hub")
        if self.max_samples is not None and self.share is not None:
            raise ConfigError(f"max_samples is {self.max_samples} and share {self.share}; give one of them")


@settings_class("objective")
class ObjectiveConfig:
    """Training objective: how a sample becomes an example, and what the loss of the example is.

    Attributes:
        objective: "pretrain" (next token, prompt included), "sft" (next token of the answer), "refusion" (hybrid),
            "llada" (masked answer, full attention), "bd3lm" (masked answer, block by block), "idlm" (next token, and
            blocks of masks) or "wedlm" (next token, and masked blocks with their known tokens first).
        slot_sizes: slot sizes k, of which one is drawn for each sample (refusion).
        eos_multiple: answers are filled with EOS up to a multiple of this many tokens (all but pretrain and
            sft); 0 fills nothing, as in the release of ReFusion.
        block_size: tokens of a block (bd3lm, idlm, wedlm), for bd3lm a divisor of `eos_multiple`; 0 for the others.
        normalisation: normalisation of the losses, see `collate`; objectives with masks but refusion have their own,
            under "release".
        mdm_weight: lambda of Eq. 3, the factor of the term of masks (refusion, idlm, wedlm); 1 for the others.
        masking: how many slots are masked (refusion): each with one probability, as in the release ("bernoulli"), or
            exactly floor(t K) of K, as in the paper ("exact").
        prefix_share: share of the samples whose clean slots begin the answer in reading order, with all masks behind
            them, as when blocks are decoded one after the other (refusion); 0 is the recipe of paper and release. In
            these samples no mask sees later text, which infilling needs.
        half_filled_share: share of the masked slots that keep 1 to k - 1 of their first tokens, as when a slot is
            completed (refusion, Eq. 8); 0 is the recipe of paper and release, in which no slot is half filled.
    """

    objective: Objective
    slot_sizes: tuple[PositiveInt, ...] = SLOT_SIZES
    eos_multiple: NonNegativeInt = 0
    block_size: NonNegativeInt = 0
    normalisation: Normalisation = "release"
    mdm_weight: NonNegativeFloat = 1.0
    masking: Masking = added_setting("bernoulli")
    prefix_share: Annotated[float, Ge(0), Le(1)] = added_setting(0.0)
    half_filled_share: Annotated[float, Ge(0), Le(1)] = added_setting(0.0)

    def __post_init__(self) -> None:
        if not self.slot_sizes:
            raise ConfigError("slot_sizes is empty; name one or more sizes of at least 1")
        if self.objective == "bd3lm":
            if not self.block_size or not self.eos_multiple or self.eos_multiple % self.block_size:
                raise ConfigError(
                    f"eos_multiple is {self.eos_multiple} and block_size {self.block_size}; objective=bd3lm fills "
                    "answers up to whole blocks, so set eos_multiple to a multiple of a block_size of at least 1"
                )
        elif self.objective in TWO_STREAMS:
            if not self.block_size:
                raise ConfigError(f"block_size is 0; objective={self.objective} has blocks, so set it to at least 1")
        elif self.block_size:
            raise ConfigError(
                f"block_size is {self.block_size}; objective={self.objective} has no blocks, leave it out"
            )
        unused = f"; objective={self.objective} has"
        if self.objective in MASKED_OBJECTIVES and self.normalisation != "release":
            raise ConfigError(f"normalisation={self.normalisation}{unused} its own, so leave it out")
        if self.objective != "refusion" and self.masking != "bernoulli":
            raise ConfigError(f"masking={self.masking}{unused} no slots, so leave it out")
        for name in ("prefix_share", "half_filled_share"):
            if self.objective != "refusion" and getattr(self, name):
                raise ConfigError(f"{name}={getattr(self, name)}{unused} no slots, so leave it out")
        if self.objective not in ("refusion", *TWO_STREAMS) and self.mdm_weight != 1:
            raise ConfigError(f"mdm_weight={self.mdm_weight}{unused} one term only, so leave it out")


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
    global_batch_size: PositiveInt
    micro_batch_size: PositiveInt = 4
    num_forwards: PositiveInt | None = None
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
            raise ConfigError(f"epochs is {self.epochs} and max_steps {self.max_steps}; give one of them")
        batch, micro = self.global_batch_size, self.micro_batch_size
        if batch % micro:
            raise ConfigError(f"global_batch_size is {batch} and micro_batch_size {micro}, not a divisor of it")
        if self.forwards_of_step > batch // micro:
            raise ConfigError(
                f"num_forwards is {self.num_forwards}; a step of {batch} samples has {batch // micro} micro-batches, "
                "and every forward needs one"
            )

    @property
    def forwards_of_step(self) -> int:
        return self.num_forwards or self.global_batch_size // self.micro_batch_size


@settings_class("output")
class OutputConfig:
    """Files that a run writes.

    Attributes:
        run_dir: folder of the run, on storage that all machines see.
        log_every: steps between two lines of the log, each the mean over them.
        save_every: steps between two checkpoints, a multiple of `log_every`; the end of a run is saved in any case.
        keep: number of newest checkpoints that are kept.
        tensorboard: write the log for TensorBoard too.
        tracker: experiment tracker that the log goes to as well: wandb, trackio or mlflow, through transformers.
    """

    run_dir: str
    log_every: PositiveInt = 10
    save_every: PositiveInt = 500
    keep: PositiveInt = 1
    tensorboard: bool = False
    tracker: Literal["wandb", "trackio", "mlflow"] | None = None

    def __post_init__(self) -> None:
        if self.save_every % self.log_every:
            # A line of the log would be lost when a run continues from a checkpoint.
            raise ConfigError(f"save_every is {self.save_every} and log_every {self.log_every}, not a divisor of it")


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
            sizes = f"b={objective.eos_multiple} and slot_sizes go up to k={max(objective.slot_sizes)}"
            raise ConfigError(f"eos_multiple is {sizes}; the paper needs b >= k (App. C.4), or b=0 for no filling")
        if self.attention == "flash" and objective.objective in MASKED_OBJECTIVES:
            raise ConfigError(f"attention=flash cannot mask as objective={objective.objective} needs; use auto")
        if self.attention == "flash" and compute != "bfloat16":
            raise ConfigError("attention=flash computes in half precision; set optimisation.compute_dtype=bfloat16")
        if self.optimisation.offload_optimizer and self.parallelism != "zero2":
            raise ConfigError(f"optimisation.offload_optimizer needs parallelism=zero2, not {self.parallelism}")
        if backbone.dtype == "bfloat16" and compute == "float32":
            raise ConfigError("compute_dtype=float32 needs float32 weights; set backbone.dtype=float32 as well")
        if backbone.dtype == "bfloat16" and backbone.lora is None and self.parallelism != "zero2":
            raise ConfigError(
                f"backbone.dtype=bfloat16 with parallelism={self.parallelism} would round most of AdamW's steps to "
                "nothing; set backbone.dtype=float32, or parallelism=zero2, which keeps float32 copies"
            )

    def check_world(self, world_size: int) -> None:
        """Raises ConfigError unless the processes can share the forwards of a step evenly."""
        num_forwards = self.optimisation.forwards_of_step
        if world_size < 1 or num_forwards % world_size:
            raise ConfigError(
                f"a step of {num_forwards} forwards cannot be shared evenly by {world_size} processes; change their "
                "number, or set optimisation.num_forwards to a multiple of it"
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


Config = TypeVar("Config", bound=RunConfig)


def config_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_run_config(
    name_or_path: str,
    overrides: Sequence[str] = (),
    settings: type[Config] = RunConfig,  # type: ignore[assignment]  # the bound is the default
) -> Config:
    """Reads a named configuration or a YAML file, and replaces "section.key=value" in it; later overrides win."""
    path = Path(name_or_path).expanduser()
    if not path.is_file():
        if path.suffix in (".yaml", ".yml"):
            raise ConfigError(f"--config: there is no file {path}; the named ones are {', '.join(config_names())}")
        check_keys([name_or_path], config_names(), "--config", what="configuration")
        path = FOLDER / f"{name_or_path}.yaml"
    values = _read(path)
    for override in overrides:
        _apply(values, override)
    data = values.get("data")
    if isinstance(data, dict) and isinstance(data.get("files"), str):
        data["files"] = [data["files"]]  # the name of a file may hold a comma, which separates the items of other lists
    return build(settings, values, path.name)


def _read(path: Path, *including: Path) -> dict[str, Any]:
    """Values of a file over those of its base; `including` are the files whose bases led to this one."""
    if path in including:
        raise ConfigError(f"{path} is its own base, by way of {including[-1]}; correct base:")
    values = _absolute(read_yaml(path, str(path)), path.resolve().parent)
    base = values.pop("base", None)
    return values if base is None else _merged(_read(_base(path, str(base)), *including, path), values)


def _base(path: Path, name: str) -> Path:
    """The file that `base: name` in a file means: one beside it, or a configuration of the package by its name."""
    beside, packaged = path.parent / Path(name).expanduser(), FOLDER / f"{name.removesuffix('.yaml')}.yaml"
    found = next((file for file in (beside, packaged) if file.is_file()), None)
    if found is None:
        known = ", ".join(config_names())
        raise ConfigError(f"{path}: base: there is no file {beside}; the configurations of the package are {known}")
    return found


def _merged(lower: Any, upper: Any) -> Any:
    if not (isinstance(lower, dict) and isinstance(upper, dict)):
        return upper
    return lower | {name: _merged(lower.get(name), value) for name, value in upper.items()}


def _absolute(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Values with absolute paths in place of those that are relative to the file; hub ids stay as they are."""

    def path_of(name: str) -> Path:
        return folder / Path(name).expanduser()

    def weights(name: str) -> str:  # the bare name of a folder or file has the form of a hub id
        is_path = name.startswith(("./", "../", "~")) or (path_of(name).exists() and not Path(name).is_absolute())
        return str(path_of(name).resolve()) if is_path else name

    def rows(name: str) -> str:  # those that a configuration of the package has not beside it are the user's
        is_elsewhere = is_hub_id(name) or folder == FOLDER.resolve()
        return name if is_elsewhere and not path_of(name).exists() else str(path_of(name))

    def written(name: str) -> str:  # nothing is written into the package
        return name if folder == FOLDER.resolve() else str(path_of(name))

    readings: dict[tuple[str, str], Callable[[str], str]] = {
        ("backbone", "model"): weights,
        ("backbone", "tokenizer"): weights,
        ("data", "files"): rows,
        ("data", "cache_dir"): written,
        ("output", "run_dir"): written,
    }
    for (section, name), read in readings.items():
        entries = values.get(section)
        entry = entries.get(name) if isinstance(entries, dict) else None
        if isinstance(entry, list) and all(isinstance(one, str) for one in entry):
            values[section][name] = list(map(read, entry))
        elif isinstance(entry, str):
            values[section][name] = read(entry)
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set {override}: write section.key=value, such as optimisation.lr=1e-5")
    try:
        value = yaml.safe_load(text)
    except (*NOT_YAML, *NOT_OF_ITS_TAG) as problem:
        raise ConfigError(f"--set {override}: {text!r} is not YAML ({problem})") from problem
    *sections, name = key.strip().split(".")
    for section in sections:
        values[section] = {} if values.get(section) is None else values[section]
        values = values[section]
        if not isinstance(values, dict):
            raise ConfigError(f"--set {override}: {section} is one value, not a section")
    values[name] = value
