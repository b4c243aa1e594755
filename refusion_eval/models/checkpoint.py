"""Finds a checkpoint: a local directory, or the files of a revision on the hub, downloaded to the local cache."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from refusion_eval.errors import CheckpointError

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True)
class Location:
    """A located checkpoint.

    Attributes:
        name: path or hub id as the user gave it.
        directory: directory of its small files (config, tokenizer), and of its weights after `fetch_weights`.
        revision: commit on the hub; None for a local directory.
    """

    name: str
    directory: Path
    revision: str | None


def locate(name: str, revision: str | None) -> Location:
    """Finds a checkpoint, downloading its small files if it is a hub id.

    Args:
        name: a directory, or a hub id such as "GSAI-ML/ReFusion".
        revision: branch, tag or commit on the hub; None for the default branch.

    Raises:
        CheckpointError: no such directory; hub id unknown, gated or unreachable; or a revision of a local directory.
    """
    directory = Path(name).expanduser()
    if name and directory.is_dir():
        if revision is not None:
            raise CheckpointError(f"{name} is a local directory; revision={revision!r} is for hub ids, leave it out")
        return Location(name, directory, None)
    if directory.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or not name:
        raise CheckpointError(f"no directory {name!r}; give a directory or a hub id such as GSAI-ML/ReFusion")
    directory = _download(name, revision, SMALL_FILES)
    return Location(name, directory, directory.name)


def fetch_weights(location: Location) -> None:
    """Downloads the weights of a hub checkpoint into its directory; does nothing for a local one.

    Raises:
        CheckpointError: as `locate`.
    """
    if location.revision is not None:
        _download(location.name, location.revision, WEIGHT_FILES)


def _download(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        advice = f"it is gated: accept its terms on https://huggingface.co/{name}, then log in or set HF_TOKEN"
        raise CheckpointError(f"{name}: {advice}") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{name} has no revision {revision!r}; give a branch, tag or commit of it") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        advice = "neither a directory here nor a public hub id; check the spelling, or log in if it is private"
        raise CheckpointError(f"{name} is {advice}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        advice = "neither a directory here nor in the local cache, and the hub cannot be reached"
        raise CheckpointError(
            f"{name} is {advice} ({type(error).__name__}); go online or give the directory of a downloaded copy"
        ) from error
