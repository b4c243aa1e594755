"""What the makers of tables and of sentences share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refusion_eval.results.render import Table, markdown_source

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "embedded"
GPU_RESULTS = ROOT / "results" / "gpu"


def table_of(columns: Sequence[str], rows: Sequence[Sequence[Any]], num_left: int = 1) -> str:
    """A Markdown table of plain values."""
    texts = [[str(value) for value in row] for row in rows]
    return Table(columns=list(columns), rows=texts, num_left=num_left, escape=markdown_source).markdown()


def interval(value: float, low: float, high: float, digits: int = 1) -> str:
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
