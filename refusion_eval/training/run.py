"""`python -m refusion_eval.training.run`: one process of a training run; the same command continues an interrupted run.

The folder of the run contains `run.json` (settings, data, versions), `log.csv`, `checkpoints/` and at the end `model/`.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from refusion_eval.decoders import trained_decoders
from refusion_eval.errors import ConfigError, RefusionEvalError
from refusion_eval.models.device import choose_device
from refusion_eval.store.atomic_write import write_atomically
from refusion_eval.store.lock import DirectoryLock
from refusion_eval.store.manifest import PACKAGES, git_commit, package_versions
from refusion_eval.store.records import flat
from refusion_eval.training.checkpoints.backbone import check_backbone, load_backbone, load_tokenizer
from refusion_eval.training.checkpoints.save import save_backbone
from refusion_eval.training.config import Parallelism, RunConfig, config_names, read_run_config
from refusion_eval.training.cost import check_memory
from refusion_eval.training.data.batches import ProcessRank, StepBatches, StepPlan
from refusion_eval.training.data.rows import check_rows
from refusion_eval.training.data.token_cache import TokenCache, build_cache
from refusion_eval.training.estimate import estimate
from refusion_eval.training.objectives.table import SpecialIds, filled_lengths, num_rows
from refusion_eval.training.trainer import LossModel, RefusionTrainer, training_arguments

RUN_FILE, MODEL_FOLDER = "run.json", "model"

# Changes a model before a run of so many steps, and returns its optimiser; None is AdamW.
Prepare = Callable[[LossModel, RunConfig, int], torch.optim.Optimizer | None]


def process_from_environment(parallelism: Parallelism) -> ProcessRank:
    """Rank and world size that torchrun set; rank 0 of 1 without torchrun. Raises ConfigError."""
    if parallelism != "ddp" and "RANK" not in os.environ:
        raise ConfigError(f"parallelism={parallelism} needs torchrun, for one process too; start the run with train.sh")
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {world_size}; start the run with torchrun")
    return ProcessRank(int(rank), int(world_size))


def check_run(config: RunConfig, world_size: int) -> str:
    """Checks that a run can start here, without reading whole files; returns a sentence about the memory it needs."""
    config.check_world(world_size)
    tracker = config.output.tracker
    choose_device("auto")  # refuses to train on the CPU of a machine whose GPU torch cannot use
    for package, is_needed, setting, other in (
        ("deepspeed", config.parallelism == "zero2", "parallelism=zero2", "set parallelism=fsdp"),
        ("flash-attn", config.attention == "flash", "attention=flash", "set attention=auto"),
        ("tensorboard", config.output.tensorboard, "output.tensorboard=true", "read log.csv"),
        (tracker or "", tracker is not None, f"output.tracker={tracker}", "leave it out"),
    ):
        if is_needed and importlib.util.find_spec(package.replace("-", "_")) is None:
            raise ConfigError(f"{setting} needs the package {package}, which is not installed; install it, or {other}")
    if config.attention == "flash" and not torch.cuda.is_available():
        raise ConfigError("attention=flash needs a CUDA device, and there is none; use attention=auto")
    slow = config.optimisation.compute_dtype == "bfloat16" and not torch.cuda.is_available()
    if slow and not torch.ops.mkldnn._is_mkldnn_bf16_supported() and os.environ.get("RANK", "0") == "0":
        advice = "with optimisation.compute_dtype=float32 a step takes a fraction of the time"
        print(f"warning: this processor has no instructions for bfloat16; {advice}", file=sys.stderr)
    check_rows(config.data.files, on_bad=config.data.on_bad)
    max_filling = max(config.objective.eos_multiple - 1, 0)
    shapes = check_backbone(config.backbone, max_length=config.data.max_length + max_filling)
    available = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    return check_memory(config, shapes, world_size, available)


def run(config: RunConfig, process: ProcessRank, prepare: Prepare | None) -> None:
    """Starts or continues a training run and writes the model; raises RefusionEvalError."""
    check_run(config, process.world_size)
    try:
        arguments = training_arguments(config, process.world_size)
    except ValueError as problem:  # such as bfloat16 on a device without it
        raise ConfigError(f"transformers refuses the settings: {problem}") from problem
    run_dir, is_first = Path(config.output.run_dir), process.rank == 0
    with contextlib.ExitStack() as stack:
        if is_first:
            run_dir.mkdir(parents=True, exist_ok=True)
            stack.callback(DirectoryLock(run_dir).release)
        tokenizer = load_tokenizer(config.backbone)
        samples = _samples(config, tokenizer, is_first)
        optimisation = config.optimisation
        rows = num_rows(config.objective, samples.prompt_lengths, samples.lengths - samples.prompt_lengths)
        plan = StepPlan(rows, optimisation)
        arguments.max_steps = optimisation.max_steps or plan.num_steps(optimisation.epochs or 0)
        if not arguments.max_steps:
            raise ConfigError(
                f"{len(samples)} samples in {optimisation.epochs:g} epochs are fewer than one step of "
                f"{optimisation.global_batch_size}; lower optimisation.global_batch_size, or train on more data"
            )
        finished = [False]
        if is_first:
            _open_run(run_dir, config, samples, arguments.max_steps, process)
            finished = [(run_dir / MODEL_FOLDER).exists()]
        broadcast_object_list(finished)
        if not finished[0]:
            _train(config, process, arguments, tokenizer, samples, plan, prepare)
        if is_first:
            print(f"{run_dir / MODEL_FOLDER} is the trained model", file=sys.stderr)


def _samples(config: RunConfig, tokenizer: PreTrainedTokenizerFast, is_first: bool) -> TokenCache:
    """Rank 0 builds or opens the token cache; the other ranks wait and open the same folder."""
    data, directory = config.data, [Path()]
    if is_first:
        options: Any = {"max_length": data.max_length, "on_bad": data.on_bad, "workers": data.workers}
        cache = build_cache(data.files, tokenizer, Path(data.cache_dir), **options)
        print(cache.report.summary(), file=sys.stderr)
        directory = [cache.directory.resolve()]
    broadcast_object_list(directory)
    cache = TokenCache(directory[0])
    if data.max_samples is None and data.share is None:
        return cache
    return cache.draw(max_samples=data.max_samples, share=data.share, seed=data.sample_seed)


def _open_run(run_dir: Path, config: RunConfig, samples: TokenCache, num_steps: int, process: ProcessRank) -> None:
    """Writes `run.json`; refuses the folder of a run with other settings or data."""
    identity = json.loads(json.dumps(config.identity() | {"tokens": samples.directory.stem}))
    path = run_dir / RUN_FILE
    if path.exists():
        now, before = flat(identity), flat(json.loads(path.read_text(encoding="utf-8"))["identity"])
        for key in now | before:
            if now.get(key) != before.get(key):
                raise ConfigError(
                    f"{run_dir} holds a run with other settings ({key} was {before.get(key)}, is {now.get(key)}); "
                    "choose another output.run_dir, or remove the folder"
                )
        if (run_dir / MODEL_FOLDER).exists():
            return  # the record says what trained this model
    answers = samples.lengths - samples.prompt_lengths
    filled = filled_lengths(config.objective, answers)
    facts: dict[str, Any] = {
        "identity": identity,
        "config": asdict(config),
        "data": {
            "files": samples.facts["files"],
            "rows": samples.report.summary().splitlines()[0],
            "samples": len(samples),
            "tokens": int(samples.lengths.sum()),
            "drawn": samples.statement,
            "eos_filling": 1 - int(answers.sum()) / int(filled.sum()),  # share of the answers' tokens
        },
        "steps": num_steps,
        "processes": process.world_size,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": package_versions((*PACKAGES, "accelerate", "peft", "deepspeed")),
        "git_commit": git_commit(),
    }
    write_atomically(path, json.dumps(facts, indent=1) + "\n")


def _train(
    config: RunConfig,
    process: ProcessRank,
    arguments: transformers.TrainingArguments,
    tokenizer: PreTrainedTokenizerFast,
    samples: TokenCache,
    plan: StepPlan,
    prepare: Prepare | None,
) -> None:
    run_dir, num_steps = Path(config.output.run_dir), arguments.max_steps
    ids = SpecialIds(eos=tokenizer.eos_token_id, mask=tokenizer.mask_token_id)
    batches = StepBatches(samples, config.objective, ids, plan, num_steps, process)
    model = LossModel(load_backbone(config.backbone, tokenizer), mdm_weight=config.objective.mdm_weight)
    optimizer = None if prepare is None else prepare(model, config, num_steps)
    if process.rank == 0:
        sizes = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
        print(
            f"{sum(size for size, _ in sizes)} weights, {sum(size for size, trained in sizes if trained)} trained; "
            f"{len(samples)} samples, {num_steps} steps of {config.optimisation.global_batch_size}; "
            f"{process.world_size} processes, {plan.num_forwards // process.world_size} forwards each a step",
            file=sys.stderr,
        )
    trainer = RefusionTrainer(model, arguments, batches, config, optimizer)
    trainer.start_or_continue()
    trained = _trained(trainer, config, tokenizer)
    if trained is not None:
        save_backbone(trained, tokenizer, run_dir / MODEL_FOLDER, decoders=trained_decoders(config.objective.objective))
    trainer.accelerator.wait_for_everyone()


def _trained(trainer: RefusionTrainer, config: RunConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel | None:
    """The complete model on rank 0, None on other ranks."""
    weights = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None  # a collective
    if not trainer.args.should_save:
        return None
    if weights is None:
        return trainer.accelerator.unwrap_model(trainer.model).model
    model = LossModel(load_backbone(config.backbone, tokenizer), mdm_weight=config.objective.mdm_weight)
    model.load_state_dict(weights)
    return model.model


def main(
    argv: Sequence[str] | None = None, *, settings: type[RunConfig] = RunConfig, prepare: Prepare | None = None
) -> int:
    """Command line; returns the exit status. The class `settings` may have more settings, which `prepare` reads."""
    parser = argparse.ArgumentParser(prog="python -m refusion_eval.training.run", description="Train a model.")
    add = parser.add_argument
    add("--config", required=True, help=f"a YAML file, or a named configuration: {', '.join(config_names())}")
    add("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE", help="change a setting")
    add("--check", type=int, metavar="PROCESSES", help="check settings and files for so many processes, and exit")
    arguments = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    try:
        config = read_run_config(arguments.config, arguments.overrides, settings)
        if arguments.check is not None:
            print(check_run(config, arguments.check), estimate(config), sep="\n", file=sys.stderr)
        else:
            run(config, process_from_environment(config.parallelism), prepare)
    except RefusionEvalError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once for each machine
            print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            gc.collect()  # the wrapped model, in circles of references, would keep the group until the threads are gone
            torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
