"""What the makers of tables and of sentences share."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refusion_eval.paper.names import task_title
from refusion_eval.results.render import Table, markdown_source

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "embedded"
GPU_RESULTS = ROOT / "results" / "gpu"
# Names of systems in the results of the embedded family.
AR, AR_SFT, BD3LM, REFUSION, WITH_VERIFIER = "AR", "AR-SFT", "BD3-LM", "ReFusion", "ReFusion, verifier"


def csv_rows(name: str, folder: Path = RESULTS) -> list[dict[str, str]]:
    with (folder / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table_of(columns: Sequence[str], rows: Sequence[Sequence[Any]], num_left: int = 1) -> str:
    """A Markdown table of plain values."""
    texts = [[str(value) for value in row] for row in rows]
    return Table(columns=list(columns), rows=texts, num_left=num_left, escape=markdown_source).markdown()


def interval(value: float, low: float, high: float, digits: int = 1) -> str:
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def listed(parts: Sequence[str]) -> str:
    """One text such as "a, b and c", or "none"; semicolons stand between parts that have commas."""
    *first, last = parts or ["none"]
    if not first:
        return last
    has_commas = any(", " in part for part in parts)
    return f"{'; '.join(first)}; and {last}" if has_commas else f"{', '.join(first)} and {last}"


def systems_of(words: Sequence[str]) -> list[str]:
    """The systems that the words of a block name, with a plus sign before a variant: ReFusion+verifier."""
    return [word.replace("+", ", ") for word in words]


def title(task: str) -> str:
    """The name of the benchmark that a mini task looks like."""
    return task_title(task.removeprefix("mini_"), mini=False)
