"""Data sets of the Hugging Face hub as training data: `owner/name`, or `owner/name@revision` (branch, tag or commit).

`datasets` downloads a data set once and keeps it as Arrow files, which are read like other files of rows. The rows are
those of the split "train".
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from refusion_eval.errors import DataError

SPLIT = "train"
_HUB_ID = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")


def is_hub_id(entry: str) -> bool:
    """Whether a text has the form of a hub id and not that of a file of rows."""
    return _HUB_ID.fullmatch(entry) is not None and not entry.endswith((".json", ".jsonl", ".gz"))


def download(entry: str) -> list[Path]:
    """The Arrow files of a data set, downloaded unless they are there."""
    return [Path(file["filename"]) for file in _load(entry).cache_files]


def first_row(entry: str) -> Any:
    """The first row of a data set, streamed, so that a check need not download all of it; None if it has none."""
    return next(iter(_load(entry, streaming=True)), None)


def arrow_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of an Arrow file with their 1-based numbers."""
    import datasets
    import pyarrow

    try:
        yield from enumerate(datasets.Dataset.from_file(str(path)), start=1)
    except (pyarrow.ArrowException, OSError) as problem:
        raise DataError(f"{path} is not an Arrow data set ({problem}); remove it and start again") from problem


def _load(entry: str, **options: Any) -> Any:
    import datasets

    match = _HUB_ID.fullmatch(entry)
    assert match is not None
    try:
        return datasets.load_dataset(match[1], revision=match[2], split=SPLIT, **options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as problem:  # OSError: the hub is out of reach
        raise DataError(
            f"{entry}: there is no such file or folder here, and no such data set of the hub with a split {SPLIT!r} "
            f"could be read ({problem}); correct the path, or log in if the data set is gated"
        ) from problem
