"""The manifest of a run: a description of the system, the machine and the invocation."""

import csv
import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from refusion_eval.api import LoadedModel
from refusion_eval.benchmarks import find_task
from refusion_eval.engine.width import cache_bytes_per_row, copy_bandwidth, weight_bytes
from refusion_eval.models.device import cpu_threads
from refusion_eval.runs.model_args import LAUNCH_ARGUMENTS, ModelArgs
from refusion_eval.runs.system import NO_TEMPLATE, System, recorded_attention
from refusion_eval.store.records import STOCK_GENERATE, Hardware, Manifest, git_commit, package_versions
from refusion_eval.version import __version__

# A weight file up to this size is hashed whole; of a larger file, evenly spread pieces are hashed.
WHOLE_BYTES = 256 * 2**20
PIECE_BYTES = 2**16
NUM_PIECES = 256

_NVIDIA_SMI_FIELDS = "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
_NVIDIA_SMI_SECONDS = 20


def build_manifest(system: System, task_versions: Mapping[str, str]) -> Manifest:
    """Describes this invocation of a system and its tasks, with the versions that are known."""
    model = system.model
    return replace(
        identity(system),
        tasks=dict(task_versions),
        prompts={name: task.benchmark.prompts_name for name in task_versions if (task := find_task(name))},
        batch_size=system.batch_size,
        warmup=system.args.warmup,
        hardware=machine(system),
        versions=package_versions(),
        git_commit=git_commit(),
        command=sys.argv,
        arguments=run_arguments(system.args) | {"cuda_graphs": model.cuda_graphs},
        roofline={} if model.is_stock else _roofline(model),
    )


def _roofline(model: LoadedModel) -> dict[str, float]:
    """The bytes that forwards of this project's transformer read, and how fast this device copies."""
    with cpu_threads(model.num_threads):  # a forward reads no faster than its own threads can
        bandwidth = copy_bandwidth(model.device)
    return {
        "weight_bytes": weight_bytes(model.config, model.dtype),
        "cache_bytes_per_row": cache_bytes_per_row(model.config, model.dtype),
        "copy_bytes_per_second": bandwidth,
    }


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
        checkpoint_hash="" if model.revision else _checkpoint_hash(Path(args.checkpoint).expanduser()),
        tasks={},
        seed=int(args.settings.get("seed", 0)),
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        attention=recorded_attention(model) if args.loop == "engine" else "transformers",  # which chooses its own
        package_version=__version__,
    )


def machine(system: System) -> Hardware:
    """The hardware that a system runs on, with the threads of its forwards."""
    device = system.model.device
    return collect_hardware(system.model.num_threads, device if device.type == "cuda" else None, system.num_processes)


def machine_state(system: System) -> dict[str, Any]:
    """Threads, load of the last minute, mean clock of the processors, clocks of the GPU: they decide times too."""
    device = system.model.device
    clocks = [float(text) for name, text in _cpuinfo() if name == "cpu MHz"]
    state: dict[str, Any] = {"threads": system.model.num_threads}
    if hasattr(os, "getloadavg"):
        state["load"] = round(os.getloadavg()[0], 2)
    if clocks:
        state["cpu_mhz"] = round(sum(clocks) / len(clocks))
    if device.type == "cuda":
        detail = read_gpu(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        state |= {name: value for name, value in detail.items() if name.startswith("clocks")}
    return state


def run_arguments(args: ModelArgs) -> dict[str, Any]:
    """The model arguments that decide texts or times, in the form in which they can be given again."""
    left_out = ("settings", "run_dir", *LAUNCH_ARGUMENTS)
    given = {field.name: getattr(args, field.name) for field in fields(args) if field.name not in left_out}
    given["batch_size"] = args.batch_size or "auto"
    return {name: value for name, value in given.items() if value is not None} | dict(args.settings)


def _adapter_facts(system: System) -> dict[str, str]:
    """Identity of the adapter that is merged into the weights: its revision, or the hash of its two files."""
    name, revision = system.model.adapter, system.model.adapter_revision
    if name is None:
        return {}
    if revision:
        return {"adapter": f"{name}@{revision}"}
    files = [Path(name).expanduser() / file for file in ("adapter_config.json", "adapter_model.safetensors")]
    return {"adapter": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:32]}


def _prompt_facts(system: System) -> dict[str, str | bool]:
    """The changes of the user to prompts: the chat template and the BOS token."""
    args, template = system.args, system.own_chat_template
    facts: dict[str, str | bool] = {}
    if args.chat_template is not None:
        facts["chat_template"] = NO_TEMPLATE if template is None else hashlib.sha256(template.encode()).hexdigest()[:32]
    if args.add_bos_token:
        facts["add_bos_token"] = True
    return facts


def _checkpoint_hash(directory: Path) -> str:
    """Hash of a local checkpoint's configuration and weights."""
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


def collect_hardware(threads: int, gpu: torch.device | None = None, num_processes: int = 1) -> Hardware:
    """Describes this machine, and one GPU of it."""
    machine = Hardware(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        threads=threads,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        num_processes=num_processes,
    )
    if gpu is None:
        return machine
    properties = torch.cuda.get_device_properties(gpu)
    # The identity of the GPU, because CUDA and nvidia-smi count GPUs differently.
    detail = read_gpu(f"GPU-{properties.uuid}")
    libraries = {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    return replace(
        machine,
        gpu=detail.get("name", properties.name),
        gpu_driver=detail.get("driver_version", ""),
        gpu_detail={**detail, **libraries},
        num_gpus=1,
    )


def read_gpu(uuid: str) -> dict[str, str]:
    """Name, driver, memory and clocks of one GPU as nvidia-smi prints them; empty if nvidia-smi fails."""
    command = ["nvidia-smi", f"--query-gpu={_NVIDIA_SMI_FIELDS}", "--format=csv,noheader", f"--id={uuid}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = list(csv.reader(answer.stdout.splitlines(), skipinitialspace=True))
    names = _NVIDIA_SMI_FIELDS.split(",")
    return dict(zip(names, rows[0], strict=True)) if rows and len(rows[0]) == len(names) else {}


def _cpu_model() -> str:
    """Model name from /proc/cpuinfo with the family numbers, because the names that clouds give are generic."""
    fields: dict[str, str] = {}
    for name, value in _cpuinfo():
        fields.setdefault(name, value)
    name = fields.get("model name") or platform.processor() or platform.machine()
    numbers = [
        f"{short} {fields[key]}" for short, key in (("family", "cpu family"), ("model", "model")) if key in fields
    ]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def _cpuinfo() -> Iterator[tuple[str, str]]:
    """Names and values of /proc/cpuinfo, those of every processor one after the other; nothing where there is none."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else ():
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()
