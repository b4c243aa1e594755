"""A report of what this machine can do, for people to read."""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

import torch
from huggingface_hub import get_token

from refusion_eval.benchmarks import PUBLISHED
from refusion_eval.benchmarks.rows import DATA_VARIABLE, split_files
from refusion_eval.errors import ConfigError
from refusion_eval.models.device import choose_backend
from refusion_eval.paths import code_metric_path, embedded_names, embedded_path, tasks_path
from refusion_eval.sandbox import probe
from refusion_eval.store.manifest import git_commit, package_versions
from refusion_eval.types import ONE_THREAD_BYTES

HOOK = "_refusion_eval_autoload"


def report(data_dir: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yields a name and what was found, for versions, devices, files and isolation that an evaluation depends on."""
    yield "package", _copy()
    yield from package_versions().items()
    yield from _devices()
    yield "lm_eval hook", _hook()
    yield "tasks", str(tasks_path())
    yield "code metric, for evaluate.load(PATH)", str(code_metric_path())
    for name in embedded_names():
        yield f"embedded {name}", str(embedded_path(name))
    if not embedded_names():
        yield "embedded", "missing; reinstall the package"
    yield from _sandbox()
    yield from _data(data_dir or (Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None))


def _copy() -> str:
    """Which copy of this package runs, and how it came there: several may be on one machine."""
    here, commit = Path(__file__).parent, git_commit()
    facts = [f"commit {commit}"] if commit else []
    try:
        installed = distribution("refusion-eval")
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return ", ".join([str(here), "not installed", *facts])
    is_editable = origin.get("dir_info", {}).get("editable", False)
    clone = Path(unquote(urlsplit(origin.get("url", "")).path))
    place = clone / "refusion_eval" if is_editable else Path(str(installed.locate_file("refusion_eval")))
    how = "editable install" if is_editable else "copied at its installation, so that changes of a clone need another"
    if place.resolve() != here.resolve():
        how = f"not the installed copy, which is {place}"
    return ", ".join([str(here), how, *facts])


def _devices() -> Iterator[tuple[str, str]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    small = f"one for weights up to {ONE_THREAD_BYTES // 2**20} MB, unless OMP_NUM_THREADS says otherwise"
    yield "cpu", f"{cores} cores for this process, {torch.get_num_threads()} threads ({small})"
    if hasattr(os, "getloadavg"):
        yield "load", f"{os.getloadavg()[0]:.1f} processes on average in the last minute; speeds need an idle machine"
    yield "memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    yield "disk", f"{shutil.disk_usage('.').free / 2**30:.0f} GiB free in this folder"
    yield "hub token", "found" if get_token() else "none; gated data and models need one: hf auth login, or HF_TOKEN"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if not torch.cuda.is_available():
        yield "cuda", "none"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        choose_backend("flash", torch.bfloat16, device)
        yield "attention", "sdpa; flash where it is asked for"
    except ConfigError as error:
        yield "attention", f"sdpa; {error}"


def _hook() -> str:
    """Says whether the stock lm_eval finds the model of this project in this environment."""
    if HOOK in sys.modules:
        return "installed: lm_eval --model refusion works"
    if importlib.util.find_spec(HOOK) is None:
        return "missing: reinstall the package, or use `python -m refusion_eval lm-eval ...`"
    return "not read at start-up (python -S, or not in site-packages): use `python -m refusion_eval lm-eval ...`"


def _sandbox() -> Iterator[tuple[str, str]]:
    probed = probe()
    if probed.tier == "D":
        yield "sandbox", "none works here, so HumanEval and MBPP are refused (`--sandbox none` runs code unprotected)"
    else:
        yield "sandbox", f"tier {probed.tier} ({probed.profile}): {', '.join(probed.layers)}"
    for profile, reason in probed.missing.items():
        yield f"sandbox {profile}", reason
    for advice in probed.advice:
        yield "sandbox advice", advice


def _data(directory: Path | None) -> Iterator[tuple[str, str]]:
    yield "data", str(directory or f"no folder named (--data, or {DATA_VARIABLE})")
    for benchmark in PUBLISHED.values():
        source = benchmark.source
        files = split_files(directory / benchmark.folder, source.split) if directory else []
        place = ", ".join(map(str, files))
        if not place and source.package is not None and importlib.util.find_spec(source.package[0]):
            place = f"package {source.package[0]}"
        gated = ", gated: accept its licence and log in" if source.gated else ""
        published = f"{'file' if source.is_address else 'hub dataset'} {source.hub}{gated}"
        yield f"data {benchmark.name}", place or published
