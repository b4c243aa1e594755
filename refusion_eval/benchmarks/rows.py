"""Benchmark rows: from a directory the user names, an installed package, or the Hugging Face hub, in that order."""

import gzip
import importlib.util
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from refusion_eval.errors import DataError

LOG = logging.getLogger(__name__)

Row = Mapping[str, Any]

DATA_VARIABLE = "REFUSION_EVAL_DATA"

# Bytes. The longest row of any benchmark has some 20,000; a line without end would take all memory.
LONGEST_LINE = 16 * 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class ColumnType(NamedTuple):
    """What a column must hold: a test of one value, and its description in messages."""

    accepts: Callable[[object], bool]
    description: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one benchmark's rows are published, and what they must hold.

    Attributes:
        hub: dataset name on the hub.
        configs: the dataset's configurations, whose rows are read one after the other; (None,) if it has no choice.
        split: the split that is evaluated.
        num_rows: rows of that split.
        columns: columns that every row must have, with their types.
        check: says what else is wrong with a row whose columns are right; None if nothing is.
        package: (module, file inside it) of an installed package that carries the rows.
        gated: the hub asks for an accepted licence and a token.
    """

    hub: str
    configs: Sequence[str | None] = (None,)
    split: str
    num_rows: int
    columns: Mapping[str, ColumnType]
    check: Callable[[Row], str | None] | None = None
    package: tuple[str, str] | None = None
    gated: bool = False


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads JSON lines.

    Raises:
        DataError: not UTF-8, not JSON, not an object (with the line's number), or no row at all.
    """
    rows: list[dict[str, Any]] = []
    for number, row in json_lines(path):
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected a JSON object, found {type(row).__name__}")
        rows.append(row)
    if not rows:
        raise DataError(f"{path} holds no rows; write one JSON object a line, or name another folder")
    return rows


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields (line number from 1, value) for every line that is not blank; `.gz` files are decompressed.

    Only a line feed ends a line: U+0085 and its kin occur inside real questions.

    Raises:
        DataError: unreadable, a line of more than `LONGEST_LINE` bytes, not UTF-8, not JSON, or an object that has a
            key twice.
    """
    for number, line in enumerate(_lines(path), start=1):
        line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if not line.strip():
            continue
        try:
            yield number, json.loads(line.decode("utf-8"), object_pairs_hook=_unique_keys)
        except UnicodeDecodeError as problem:
            raise DataError(f"{path}, line {number}: not UTF-8 ({problem}); save the file as UTF-8") from problem
        except (ValueError, RecursionError) as problem:
            raise DataError(
                f"{path}, line {number}: not a JSON value ({problem}); write one JSON object a line"
            ) from problem


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, read one at a time: neither a huge file nor a small one that unpacks to one fills memory."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            number = 0
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise DataError(
                        f"{path}, line {number} is longer than {LONGEST_LINE // 2**20} MiB; write one JSON object a "
                        "line, each with its line feed"
                    )
                yield line
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"cannot read {path}: {problem}; copy or download the file again") from problem


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses an object with a repeated key: which of the two values is meant cannot be known."""
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return result


def find_rows(
    benchmark: str, source: Source, data_dir: str | Path | None, split: str
) -> tuple[list[dict[str, Any]], str]:
    """Tries the directory, the package and the hub.

    Args:
        benchmark: its name, which names its folder in the directory.
        source: where it is published.
        data_dir: the directory, None if the user named none.
        split: the split to be read.

    Returns:
        The rows, and the file or dataset that they came from.

    Raises:
        DataError: there are no rows in any of the places; the message names them and says what to do.
    """
    tried: list[str] = []
    if data_dir is not None:
        path, looked = _in_directory(Path(data_dir).expanduser(), benchmark, split)
        if path is not None:
            return read_rows(path), str(path)
        tried.append(f"{looked} (no such file)")
        LOG.warning("%s: no such file; looking for the rows of %s elsewhere", looked, benchmark)
    else:
        tried.append(f"a directory (none named: --data, the model argument data_dir, or {DATA_VARIABLE})")
    if source.package is not None:
        module, inside = source.package
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None and split == source.split:
            path = Path(spec.origin).parent / inside
            if path.is_file():
                return read_rows(path), str(path)
        tried.append(f"the package {module} (not installed, or without {inside})")
    try:
        return _from_hub(source, split), source.hub
    except (OSError, ValueError) as problem:
        tried.append(f"the hub dataset {source.hub} ({type(problem).__name__}: {str(problem).splitlines()[0][:200]})")
    advice = (
        _advice_on_licence(benchmark, source)
        if source.gated
        else f"put the rows, in hub columns, into DIR/{benchmark}/{split}.jsonl and name DIR, or allow the download"
    )
    raise DataError(f"no {split} rows of {benchmark}; tried {'; '.join(tried)}. To go on: {advice}")


def _in_directory(directory: Path, benchmark: str, split: str) -> tuple[Path | None, str]:
    """Returns the file with the rows, or None, and the description of what was looked for."""
    if not directory.is_dir():
        raise DataError(f"data directory {directory} does not exist; name one with {benchmark}/{split}.jsonl in it")
    for folder in (directory / benchmark, directory):
        for name in (f"{split}.jsonl", f"{split}.jsonl.gz"):
            if (folder / name).is_file():
                return folder / name, str(folder / name)
    return None, str(directory / benchmark / f"{split}.jsonl[.gz]")


def _advice_on_licence(benchmark: str, source: Source) -> str:
    from refusion_eval.benchmarks import BENCHMARKS  # the package imports this module

    return (
        f"accept the licence at https://huggingface.co/datasets/{source.hub}, then log in: `hf auth login` or "
        f"HF_TOKEN, or leave {benchmark} out with --tasks {','.join(name for name in BENCHMARKS if name != benchmark)}"
    )


def _from_hub(source: Source, split: str) -> list[dict[str, Any]]:
    """Downloads (or finds in the hub's cache); imports the library here because it takes a second."""
    import datasets

    tables = [datasets.load_dataset(source.hub, config, split=split) for config in source.configs]
    return [dict(row) for table in tables for row in table]
