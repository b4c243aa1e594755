"""Where a checkpoint is: a folder, a GGUF file, the name of a packaged model, or a name on the hub."""

import contextlib
import stat
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import errors as hub
from huggingface_hub import snapshot_download

from refusion_eval.errors import CheckpointError
from refusion_eval.models import gguf
from refusion_eval.models.packaged import MODELS, packaged_file
from refusion_eval.untrusted import kind_of

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


class Location(NamedTuple):
    name: str
    directory: Path
    revision: str | None  # the commit on the hub; None for a local directory


def locate(name: str, revision: str | None, *, with_code: bool = False) -> Location:
    """Finds a checkpoint, and downloads its small files or unpacks its GGUF file; raises CheckpointError."""
    directory = Path(name).expanduser()
    if name in MODELS and not directory.exists():
        if revision is not None:
            raise CheckpointError(f"{name} is one file, without a revision; leave revision={revision!r} out")
        return Location(name, gguf.unpacked(packaged_file(name)), None)
    if name and directory.exists():
        if revision is not None:
            kind = "directory" if directory.is_dir() else "file"
            raise CheckpointError(f"{name} is a local {kind}; revision={revision!r} is for hub ids, leave it out")
        if not directory.is_dir():
            return Location(name, gguf.unpacked(directory), None)
        _refuse_pipes(directory)
        if not (directory / "config.json").is_file() and (files := sorted(directory.glob("*.gguf"))):
            names = ", ".join(str(path) for path in files[:3])
            raise CheckpointError(f"{name} has no config.json, but GGUF files; name one of these files: {names}")
        return Location(name, directory, None)
    is_file = name.endswith(".gguf")
    if is_file or directory.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or not name:
        kind = "file" if is_file else "directory"
        raise CheckpointError(f"no {kind} {name!r}; give a directory, a GGUF file or a hub id such as GSAI-ML/ReFusion")
    directory = _download(name, revision, (*SMALL_FILES, *(["*.py"] if with_code else [])))
    return Location(name, directory, directory.name)


def _refuse_pipes(directory: Path) -> None:
    # A library that opens a pipe, a socket or a device waits for ever.
    for path in directory.iterdir():
        with contextlib.suppress(OSError):  # of a link that leads nowhere
            mode = path.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise CheckpointError(f"{path} is a {kind_of(mode)}, not a plain file; download the checkpoint again")


def fetch_weights(location: Location) -> None:
    if location.revision is not None:  # a checkpoint of the hub
        _download(location.name, location.revision, WEIGHT_FILES)


def _download(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except hub.GatedRepoError as error:
        advice = f": it is gated: accept its terms on https://huggingface.co/{name}, then log in or set HF_TOKEN"
        raise CheckpointError(name + advice) from error
    except hub.RevisionNotFoundError as error:
        raise CheckpointError(f"{name} has no revision {revision!r}; give a branch, tag or commit of it") from error
    except (hub.RepositoryNotFoundError, hub.HFValidationError) as error:
        advice = " is neither a directory here nor a public hub id; check the spelling, or log in if it is private"
        raise CheckpointError(name + advice) from error
    except (hub.LocalEntryNotFoundError, hub.HfHubHTTPError, OSError) as error:
        places = "neither a directory here nor in the local cache"
        advice = f"the hub cannot be reached ({type(error).__name__}); go online or give a downloaded copy's directory"
        raise CheckpointError(f"{name} is {places}, and {advice}") from error
