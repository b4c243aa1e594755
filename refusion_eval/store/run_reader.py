"""Reading a run directory, also while it is still being written."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from refusion_eval.errors import StoreError
from refusion_eval.store.database import SCHEMA_VERSION, open_for_reading, refusing
from refusion_eval.store.environment import Hardware
from refusion_eval.store.manifest import Manifest
from refusion_eval.store.records import Sample, SampleKey, ScoreRow

# Prefixes of keys in the meta table: measured facts that decide how the run goes, and samples asked for by task.
MEASURED = "settled:"
EXPECTED = "expected:"

_Record = TypeVar("_Record", Sample, ScoreRow)


@dataclass(frozen=True, slots=True)
class Run:
    """The description of a run in its directory.

    Attributes:
        run_id: name of the directory.
        manifest: the first invocation; `tasks` holds the tasks of all invocations.
        processes: record of each process by id, including its `hardware`.
        measured: measured facts that decided how the run went, by name.
        expected: number of samples asked for by task; runs of earlier versions do not say.
    """

    run_id: str
    manifest: Manifest
    processes: Mapping[str, Mapping[str, Any]]
    measured: Mapping[str, Any]
    expected: Mapping[str, int] = field(default_factory=dict)

    def hardware(self, process_id: str) -> Hardware:
        """The machine that a process ran on."""
        return Hardware.from_json(self.processes[process_id]["hardware"])

    def to_json(self) -> dict[str, Any]:
        """Content of run.json."""
        return {
            "schema": SCHEMA_VERSION,
            "run_id": self.run_id,
            "fingerprint": self.manifest.fingerprint(),
            "manifest": self.manifest.to_json(),
            "processes": dict(self.processes),
            "settled": dict(self.measured),
            "expected": dict(self.expected),
        }


class RunReader:
    """Reads a run directory without locking it or changing a record, also while it is being written."""

    def __init__(self, directory: Path, connection: sqlite3.Connection) -> None:
        self.directory = directory
        self.run = read_run(directory, connection)
        self._connection = connection

    @classmethod
    @contextmanager
    def open(cls, run_dir: str | os.PathLike[str]) -> Iterator[Self]:
        """Opens a run for reading. Raises StoreError if there is none, or its records are damaged or too new."""
        directory = Path(run_dir)
        with open_for_reading(directory) as connection:
            yield cls(directory, connection)

    def samples(self, *, traces: bool = True) -> Iterator[Sample]:
        """All samples in canonical order (task, item, sample); without traces their `trace` is None."""
        return iterate_samples(self.directory, self._connection, traces)

    def num_recorded(self) -> int:
        """Number of good samples, which are not generated again."""
        with refusing(self.directory):
            return self._connection.execute("SELECT count(*) FROM samples WHERE NOT failed").fetchone()[0]

    def scores(self) -> Iterator[ScoreRow]:
        """All scores, in the order in which they were written."""
        return iterate_scores(self.directory, self._connection)

    def scores_by_sample(self) -> dict[SampleKey, dict[str, ScoreRow]]:
        """The scores of each sample by metric. Of two scorers of a metric the one that wrote last counts."""
        by_sample: dict[SampleKey, dict[str, ScoreRow]] = {}
        for score in self.scores():
            by_sample.setdefault(score.key, {})[score.metric] = score
        return by_sample


def read_run(directory: Path, connection: sqlite3.Connection) -> Run:
    """The run as the database describes it. Raises StoreError if it was stopped before it recorded anything."""
    with refusing(directory):
        rows = dict(connection.execute("SELECT name, value FROM meta")) if _has_tables(connection) else {}
        if "manifest" not in rows:
            raise StoreError(f"{directory}: the run was stopped before it began; run its command again")
        bodies = dict(connection.execute("SELECT process_id, body FROM processes ORDER BY rowid"))
    processes = {name: json.loads(body) for name, body in bodies.items()}
    tasks = {task: version for process in processes.values() for task, version in process.get("tasks", {}).items()}
    manifest = Manifest.from_json(json.loads(rows["manifest"]))
    tasks = {**manifest.tasks, **tasks}
    measured, expected = _with_prefix(rows, MEASURED), _with_prefix(rows, EXPECTED)
    return Run(directory.resolve().name, replace(manifest, tasks=tasks), processes, measured, expected)


def _with_prefix(rows: Mapping[str, str], prefix: str) -> dict[str, Any]:
    """The values of the keys with a prefix, by the rest of the key."""
    return {name.removeprefix(prefix): json.loads(value) for name, value in rows.items() if name.startswith(prefix)}


def _has_tables(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0] > 0


def iterate_samples(directory: Path, connection: sqlite3.Connection, traces: bool) -> Iterator[Sample]:
    """All samples in canonical order, one at a time. Traces are most of the bytes and can be left out."""
    column = "trace" if traces else "NULL"
    query = f"SELECT body, {column} FROM samples ORDER BY task, item_id, sample, key"
    for row in _rows(directory, connection, query):
        yield _read(directory, Sample.from_stored, *row)


def iterate_scores(directory: Path, connection: sqlite3.Connection) -> Iterator[ScoreRow]:
    """All scores in the order in which they were written, one at a time."""
    for row in _rows(directory, connection, "SELECT body FROM scores ORDER BY rowid"):
        yield _read(directory, ScoreRow.from_stored, *row)


def _read(directory: Path, from_stored: Callable[..., _Record], *row: Any) -> _Record:
    try:
        return from_stored(*row)
    except StoreError as error:
        raise StoreError(f"{directory}: {error}") from error


def _rows(directory: Path, connection: sqlite3.Connection, query: str) -> Iterable[tuple]:
    with refusing(directory):
        yield from connection.execute(query)
