"""Reading a run directory, also while it is still being written.

The records are in a SQLite file. Strings that are compared or stored verbatim are in ASCII JSON (`body`), so that any
Python string survives, including lone surrogates. The other text columns are for people with a SQLite prompt:
`select item_id, json_extract(body, '$.seconds') from samples`.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from refusion_eval.errors import StoreError
from refusion_eval.store.records import Hardware, Manifest, Sample, SampleKey, ScoreRow

DATABASE_NAME = "records.sqlite"
SCHEMA_VERSION = 1

# Marks the file as ours: "RFEV" in ASCII.
APPLICATION_ID = 0x52464556

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

    def round(self, process_id: str) -> int:
        """Which of the rounds, in which several systems take turns, a process belongs to; 1 without rounds."""
        return int(self.processes[process_id].get("round", 1))

    def slowed_by(self, process_id: str) -> list[str]:
        """What made the times of a process longer than they need be; see `Hardware.slowed_by`."""
        process, hardware = self.processes[process_id], self.hardware(process_id)
        before, after = (process.get(name, {}).get("load") for name in ("before", "after"))
        own = 1 if hardware.gpu else hardware.threads * hardware.num_processes
        loads = [load for load in (before, None if after is None else after - own) if load is not None]
        weights = process.get("roofline", {}).get("weight_bytes", 0)
        return hardware.slowed_by(max(loads, default=None), weights)

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


class RunDatabase:
    """The records of a run, as its writer and its readers see them."""

    def __init__(self, directory: Path, connection: sqlite3.Connection) -> None:
        self.directory = directory
        self._connection = connection

    def read_run(self) -> Run:
        """The run as the database describes it. Raises StoreError if it was stopped before it recorded anything."""
        connection = self._connection
        with refusing(self.directory):
            has_tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]
            rows = dict(connection.execute("SELECT name, value FROM meta")) if has_tables else {}
            if "manifest" not in rows:
                raise StoreError(f"{self.directory}: the run was stopped before it began; run its command again")
            bodies = dict(connection.execute("SELECT process_id, body FROM processes ORDER BY rowid"))
        processes = {name: json.loads(body) for name, body in bodies.items()}
        manifest = Manifest.from_json(json.loads(rows["manifest"]))
        tasks = dict(manifest.tasks)
        for process in processes.values():
            tasks |= process.get("tasks", {})
        measured, expected = _with_prefix(rows, MEASURED), _with_prefix(rows, EXPECTED)
        return Run(self.directory.resolve().name, replace(manifest, tasks=tasks), processes, measured, expected)

    def other_machines(self, hardware: Hardware) -> list[str]:
        """Labels of the machines of recorded samples whose speeds are not comparable with those of this machine."""
        run = self.read_run()
        with refusing(self.directory):
            query = "SELECT DISTINCT json_extract(body, '$.process_id') FROM samples WHERE NOT failed"
            machines = [run.hardware(process_id) for (process_id,) in self._connection.execute(query)]
        return sorted({one.label() for one in machines if one.fingerprint() != hardware.fingerprint()})

    def samples(self, *, traces: bool = True) -> Iterator[Sample]:
        """All samples in canonical order (task, item, sample), independent of the order in which they finished.

        Without traces, which are most of the bytes, their `trace` is None.
        """
        column = "trace" if traces else "NULL"
        return self._read(Sample, f"SELECT body, {column} FROM samples ORDER BY task, item_id, sample, key")

    def scores(self) -> Iterator[ScoreRow]:
        """All scores, in the order in which they were written."""
        return self._read(ScoreRow, "SELECT body FROM scores ORDER BY rowid")

    def _read(self, kind: type[_Record], query: str) -> Iterator[_Record]:
        with refusing(self.directory):
            for row in self._connection.execute(query):
                try:
                    record = kind.from_stored(*row)
                except StoreError as error:
                    raise StoreError(f"{self.directory}: {error}") from error
                yield record


class RunReader(RunDatabase):
    """Reads a run directory without locking it or changing a record, also while it is being written."""

    def __init__(self, directory: Path, connection: sqlite3.Connection) -> None:
        super().__init__(directory, connection)
        self.run = self.read_run()

    @classmethod
    @contextmanager
    def open(cls, run_dir: str | os.PathLike[str]) -> Iterator[Self]:
        """Opens a run for reading. Raises StoreError if there is none, or its records are damaged or too new."""
        directory = Path(run_dir)
        with _open_for_reading(directory) as connection:
            yield cls(directory, connection)

    def num_recorded(self) -> int:
        """Number of good samples, which are not generated again."""
        with refusing(self.directory):
            return self._connection.execute("SELECT count(*) FROM samples WHERE NOT failed").fetchone()[0]

    def scores_by_sample(self) -> dict[SampleKey, dict[str, ScoreRow]]:
        """The scores of each sample by metric. Of two scorers of a metric the one that wrote last counts."""
        by_sample: dict[SampleKey, dict[str, ScoreRow]] = {}
        for score in self.scores():
            by_sample.setdefault(score.key, {})[score.metric] = score
        return by_sample


def _with_prefix(rows: Mapping[str, str], prefix: str) -> dict[str, Any]:
    """The values of the keys with a prefix, by the rest of the key."""
    return {name.removeprefix(prefix): json.loads(value) for name, value in rows.items() if name.startswith(prefix)}


@contextmanager
def refusing(directory: Path) -> Iterator[None]:
    """Turns errors of SQLite and of the system inside the block into a StoreError."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StoreError(_explain(directory, error)) from error


@contextmanager
def _open_for_reading(directory: Path) -> Iterator[sqlite3.Connection]:
    """Opens the database of a run that may be running, finished or killed, also on a read-only disk."""
    path = directory / DATABASE_NAME
    if not path.is_file():
        raise StoreError(f"{directory} holds no records ({DATABASE_NAME} is missing); name the directory of a run")
    with tempfile.TemporaryDirectory(prefix="refusion_eval_") as copies:
        with refusing(directory):
            connection = _connect_for_reading(path, Path(copies))
        try:
            with refusing(directory):
                check_identity(connection, path)
            yield connection
        finally:
            connection.close()


def _connect_for_reading(path: Path, copies: Path) -> sqlite3.Connection:
    """A connection that cannot change records.

    Without the right to write, SQLite cannot create the shared-memory file that WAL needs, and fails unless a writer is
    active. A copy is read instead, together with the WAL that a killed run left.
    """
    if os.access(path.parent, os.W_OK):
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, isolation_level=None, timeout=60.0)
        connection.execute("PRAGMA query_only = ON")
        return connection
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=60.0)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.OperationalError:
        connection.close()
    else:
        return connection
    for name in (path.name, f"{path.name}-wal"):
        if (path.parent / name).is_file():
            shutil.copyfile(path.parent / name, copies / name)
    return sqlite3.connect(copies / path.name, isolation_level=None)


def check_identity(connection: sqlite3.Connection, path: Path) -> None:
    """Raises StoreError if a database is of another program or of a newer schema; an empty one is neither."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    num_tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if num_tables == 0:
        return
    if application != APPLICATION_ID:
        raise StoreError(f"{path} is a SQLite file of another program; choose another run directory")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} was written by a newer refusion_eval (schema {version}; this one knows up to {SCHEMA_VERSION}); "
            "upgrade refusion_eval"
        )


def _explain(directory: Path, error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lowered = text.lower()
    if any(words in lowered for words in ("full", "no space", "file too large", "disk i/o error")):
        advice = "the disk is full or failing; free some space and run the same command again, nothing finished is lost"
    elif any(words in lowered for words in ("readonly", "read-only", "permission", "unable to open")):
        advice = "make the directory writable or choose another one"
    elif "locked" in lowered:
        advice = "another program keeps the database open; close it"
    elif isinstance(error, sqlite3.DatabaseError):
        advice = (
            f"{DATABASE_NAME} is damaged; restore it from a copy, save what `sqlite3 {DATABASE_NAME} .recover` still "
            "reads, or start again in another directory"
        )
    else:
        advice = "choose another run directory"
    return f"{directory}: {text}: {advice}"
