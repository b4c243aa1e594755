"""The published figures that come with the package: where their files are, and their rows."""

import csv
from functools import cache
from pathlib import Path

from refusion_eval.errors import DataError


def published_path() -> Path:
    """The folder with published.csv, claims.csv and their companions.

    An installed wheel carries it inside the package; a source checkout has it in results/.

    Raises:
        DataError: neither place has it.
    """
    package = Path(__file__).resolve().parent.parent
    candidates = (package / "published", package.parent / "results" / "published")
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise DataError(f"no published figures at {candidates[0]} or {candidates[1]}; reinstall refusion_eval")


@cache
def read_published(name: str) -> tuple[dict[str, str], ...]:
    """The rows of one of its CSV files, every value as it is printed.

    Args:
        name: of the file, such as "published.csv".

    Raises:
        DataError: there is no such file.
    """
    path = published_path() / name
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            return tuple(csv.DictReader(stream))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); reinstall refusion_eval") from error


def settings_of(text: str) -> dict[str, str]:
    """What a `settings` column holds: "batch_size=1; gpu=A100" -> {"batch_size": "1", "gpu": "A100"}."""
    pairs = (part.partition("=") for part in text.split("; ") if part)
    return {key: value for key, _, value in pairs}
