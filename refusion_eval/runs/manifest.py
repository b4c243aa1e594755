"""The manifest of a run: a description of the system, the machine and the invocation, for the run directory."""

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

import refusion_eval
from refusion_eval.engine.bandwidth import cache_bytes_per_row, copy_bandwidth, weight_bytes
from refusion_eval.runs.model_args import LAUNCH_ARGUMENTS, ModelArgs
from refusion_eval.runs.system import NO_TEMPLATE, WITH_GRAPHS, System
from refusion_eval.store.environment import Hardware, collect_hardware, git_commit, package_versions
from refusion_eval.store.manifest import STOCK_GENERATE, Manifest

# A weight file up to this size is hashed whole; of a larger file, evenly spread pieces are hashed.
WHOLE_BYTES = 256 * 2**20
PIECE_BYTES = 2**16
NUM_PIECES = 256


def build_manifest(system: System, task_versions: Mapping[str, str]) -> Manifest:
    """Describes this invocation.

    Args:
        system: the system that runs.
        task_versions: task name -> version, as far as known.
    """
    model = system.model
    return replace(
        identity(system),
        tasks=dict(task_versions),
        batch_size=system.batch_size,
        warmup=system.args.warmup,
        hardware=machine(system),
        versions=package_versions(),
        git_commit=git_commit(),
        command=sys.argv,
        arguments=run_arguments(system.args),
        roofline={
            "weight_bytes": weight_bytes(model.config, model.dtype),
            "cache_bytes_per_row": cache_bytes_per_row(model.config, model.dtype),
            "copy_bytes_per_second": copy_bandwidth(model.device),
        },
    )


def identity(system: System) -> Manifest:
    """The part of the manifest that decides texts: everything in its fingerprint, and nothing that is measured."""
    args, model = system.args, system.model
    tables = {table.label: table.benchmarks for table in system.tables.values() if table is not None}
    return Manifest(
        system=args.system_name,
        backbone=args.backbone or model.card.backbone,
        decoder=args.decoder if args.loop == "engine" else STOCK_GENERATE,
        settings={
            "model_args": dict(args.settings),
            "enable_thinking": args.enable_thinking,
            "checkpoint": system.checkpoint_settings,
            "tables": tables,
            **_adapter_facts(system),
            **_prompt_facts(system),
        },
        checkpoint=args.pretrained,
        checkpoint_revision=model.revision or "",
        checkpoint_hash="" if model.revision else checkpoint_hash(Path(args.checkpoint).expanduser()),
        tasks={},
        seed=int(args.settings.get("seed", 0)),
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        attention=_attention(system),
        package_version=refusion_eval.__version__,
    )


def machine(system: System) -> Hardware:
    """The hardware that a system runs on."""
    threads, gpu = torch.get_num_threads(), physical_gpu(system.model.device)
    return collect_hardware(threads=threads, gpu_index=gpu, num_processes=system.num_processes)


def run_arguments(args: ModelArgs) -> dict[str, Any]:
    """Model arguments in the form in which they can be given again: those that have a value and decide texts or times.

    The run directory and the arguments of a launch are left out.
    """
    left_out = ("settings", "run_dir", *LAUNCH_ARGUMENTS)
    given = {field.name: getattr(args, field.name) for field in fields(args) if field.name not in left_out}
    given["batch_size"] = args.batch_size or "auto"
    return {name: value for name, value in given.items() if value is not None} | dict(args.settings)


def _attention(system: System) -> str:
    """The name of the attention backend; the loop of transformers chooses its own."""
    if system.args.loop != "engine":
        return "transformers"
    return system.model.attention + (WITH_GRAPHS if system.model.cuda_graphs else "")


def _adapter_facts(system: System) -> dict[str, str]:
    """Identity of the adapter that is merged into the weights; empty without one."""
    name, revision = system.model.adapter, system.model.adapter_revision
    if name is None:
        return {}
    return {"adapter": f"{name}@{revision}" if revision else adapter_hash(Path(name).expanduser())}


def _prompt_facts(system: System) -> dict[str, str | bool]:
    """What the user changed in prompts: the chat template and the BOS token; empty if nothing."""
    args, template = system.args, system.own_chat_template
    facts: dict[str, str | bool] = {}
    if args.chat_template is not None:
        facts["chat_template"] = NO_TEMPLATE if template is None else hashlib.sha256(template.encode()).hexdigest()[:32]
    if args.add_bos_token:
        facts["add_bos_token"] = True
    return facts


def adapter_hash(directory: Path) -> str:
    """Hash of a local adapter's configuration and weights; its path does not matter."""
    names = ("adapter_config.json", "adapter_model.safetensors")
    return hashlib.sha256(b"".join((directory / name).read_bytes() for name in names)).hexdigest()[:32]


def checkpoint_hash(directory: Path) -> str:
    """Hash of a local checkpoint's configuration and weights; of a large file, evenly spread pieces are hashed."""
    digest = hashlib.sha256()
    for path in [directory / "config.json", *sorted(directory.glob("*.safetensors"))]:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= WHOLE_BYTES:
                digest.update(file.read())
                continue
            for piece in range(NUM_PIECES):
                file.seek(piece * (size - PIECE_BYTES) // (NUM_PIECES - 1))
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()[:32]


def physical_gpu(device: torch.device) -> int | None:
    """Index of a GPU in the order of nvidia-smi; None for a CPU."""
    if device.type != "cuda":
        return None
    index = device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return int(visible[index]) if index < len(visible) and visible[index].isdigit() else index
