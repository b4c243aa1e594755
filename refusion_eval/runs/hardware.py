"""This machine: its processor, its GPU and its threads, as records hold them."""

import csv
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from refusion_eval.store.manifest import Hardware

_NVIDIA_SMI_FIELDS = "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
_NVIDIA_SMI_SECONDS = 20


def collect_hardware(
    threads: int,
    gpu: torch.device | None = None,
    num_processes: int = 1,
    choices: str = "",  # name of the table that decides which kernels recorded forwards run
) -> Hardware:
    facts: dict[str, Any] = {}
    if gpu is not None:
        properties = torch.cuda.get_device_properties(gpu)
        # The identity of the GPU, because CUDA and nvidia-smi count GPUs differently.
        detail = read_gpu(f"GPU-{properties.uuid}")
        libraries = {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
        facts = {"gpu": detail.get("name", properties.name), "gpu_driver": detail.get("driver_version", "")}
        facts |= {"gpu_detail": {**detail, **libraries, **({"choices": choices} if choices else {})}, "num_gpus": 1}
    return Hardware(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        threads=threads,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        num_processes=num_processes,
        **facts,
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
    facts = dict(reversed(list(cpuinfo())))  # of the first processor
    name = facts.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{key.removeprefix('cpu ')} {facts[key]}" for key in ("cpu family", "model") if key in facts]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def cpuinfo() -> Iterator[tuple[str, str]]:
    """Names and values of /proc/cpuinfo, those of every processor one after the other; nothing where there is none."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else ():
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()
