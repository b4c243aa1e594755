"""Samples as JSON lines, and samples and figures as CSV and Parquet."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from refusion_eval.benchmarks import is_sealed, shown_answer
from refusion_eval.benchmarks.rows import WITHHELD
from refusion_eval.exports.source import plain
from refusion_eval.results import data_frames
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.render import csv_text
from refusion_eval.results.results_file import measurement_cells
from refusion_eval.store.atomic_write import write_output

RunDirs = Iterable[str | os.PathLike[str]]


def sample_rows(run_dirs: RunDirs) -> Iterator[dict[str, Any]]:
    """The rows of `refusion_eval.results.load`, without the texts of sealed tasks; settings are an object."""
    for row in data_frames.sample_rows(run_dirs):
        row |= {"settings": json.loads(row["settings"])}
        if is_sealed(row["task"], row["benchmark"]):
            row |= {"text": WITHHELD, "extracted": shown_answer(row["extracted"]), "reason": None}
            row |= {"error": row["error"] and WITHHELD}
        yield row


def json_lines(run_dirs: RunDirs) -> Iterator[str]:
    return (json.dumps(row) + "\n" for row in sample_rows(run_dirs))


def write_csv_files(run_dirs: Sequence[Path], out: Path, baseline: str | None = None) -> list[Path]:
    """Writes figures.csv, which other commands read as they read runs, and samples.csv."""
    cells = measurement_cells(run_measurements(run_dirs, baseline=baseline, hash_records=True))
    rows = ([_flat(row[name]) for name in data_frames.SAMPLE_COLUMNS] for row in sample_rows(run_dirs))
    texts = {"figures.csv": csv_text(*cells), "samples.csv": csv_text(data_frames.SAMPLE_COLUMNS, rows)}
    for name, text in texts.items():
        write_output(out / name, text)
    return [out / name for name in texts]


def write_parquet_files(run_dirs: Sequence[Path], out: Path, baseline: str | None = None) -> list[Path]:
    """Writes figures.parquet, with the columns of `refusion_eval.results.figures`, and samples.parquet."""
    samples = [{name: _flat(value) for name, value in row.items()} for row in sample_rows(run_dirs)]
    frames = {
        "figures.parquet": data_frames.figures(run_dirs, baseline=baseline),
        "samples.parquet": data_frames.frame(samples, data_frames.SAMPLE_COLUMNS),
    }
    for name, frame in frames.items():
        write_output(out / name, frame.to_parquet(index=False))
    return [out / name for name in frames]


def _flat(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) else plain(value) if isinstance(value, str) else value
