"""Reading a run directory, also while it is still being written.

The records are in a SQLite file. Strings that are compared or stored verbatim are in ASCII JSON (`body`), so that any
Python string survives, including lone surrogates. The other text columns are for people with a SQLite prompt:
`select item_id, json_extract(body, '$.seconds') from samples`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

from refusion_eval.errors import StoreError
from refusion_eval.store.records import (
    MOST,
    Hardware,
    Manifest,
    Sample,
    SampleKey,
    ScoreRow,
    checking,
    from_fields,
)
from refusion_eval.untrusted import LARGEST, kind_of, open_plain, parse_json

DATABASE_NAME = "records.sqlite"
RUN_JSON = "run.json"

# The same advice for all three front ends, because the store does not know which of them opened it.
ADVICE = (
    "remove the folder, or give another one: --results DIR of eval.sh, --run-dir DIR of refusion-eval run, "
    "the model argument run_dir=DIR of lm_eval"
)

SCHEMA = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE processes (process_id TEXT PRIMARY KEY, body TEXT NOT NULL)",
    """CREATE TABLE samples (
        key BLOB PRIMARY KEY, task TEXT NOT NULL, item_id TEXT NOT NULL, sample INTEGER NOT NULL,
        failed INTEGER NOT NULL, attempts INTEGER NOT NULL, body TEXT NOT NULL, trace BLOB)""",
    "CREATE INDEX samples_in_order ON samples (task, item_id, sample, key)",
    """CREATE TABLE scores (
        key BLOB NOT NULL REFERENCES samples (key), scorer TEXT NOT NULL, metric TEXT NOT NULL, body TEXT NOT NULL,
        PRIMARY KEY (key, scorer, metric))""",
)
_ENTRIES = "SELECT type, name, tbl_name, sql FROM sqlite_master"
# Steps of SQLite that reading our schema takes some tens of.
_MOST_STEPS_OF_SCHEMA = 10_000
_ATTEMPTS = 3
_JOURNAL = "-journal"
_WITHOUT_LOCKS = "?mode=ro&immutable=1"
_LOG_HEADER = 32
# Everything that a run writes into its directory, and the journal that it never has.
_FILES = (DATABASE_NAME, *(f"{DATABASE_NAME}{suffix}" for suffix in ("-wal", "-shm", _JOURNAL)), RUN_JSON)
_FILES += ("run.lock", "results.csv", "table.md")
# A file whose size is more than this many times what it takes on the disk was made to look large; no file system
# compresses records as much.
_MOST_HOLES = 64
SCHEMA_VERSION = 1

# Marks the file as ours: "RFEV" in ASCII.
APPLICATION_ID = 0x52464556

# Prefixes of keys in the meta table: measured facts that decide how the run goes (run.json calls them settled), and
# samples asked for by task.
MEASURED = "settled:"
EXPECTED = "expected:"

_Record = TypeVar("_Record", Sample, ScoreRow)


@dataclass(frozen=True, slots=True)
class Run:
    """The description of a run in its directory."""

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
        """The reasons why the times of a process are longer than they need be; see `Hardware.slowed_by`."""
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

    def meta(self) -> dict[str, str]:
        """The facts about the run as a whole; none if it was stopped before it recorded any."""
        with refusing(self.directory):
            has_tables = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            rows = dict(self._connection.execute("SELECT name, value FROM meta")) if has_tables else {}
        if "manifest" not in rows and (self.directory / RUN_JSON).exists():
            raise records_gone(self.directory)
        return rows

    def read_run(self) -> Run:
        """The run as the database describes it. Raises StoreError if it was stopped before it recorded anything."""
        connection, rows = self._connection, self.meta()
        if "manifest" not in rows:
            raise StoreError(f"{self.directory}: the run was stopped before it began; run its command again")
        with refusing(self.directory):
            bodies = dict(connection.execute("SELECT process_id, body FROM processes ORDER BY rowid"))
        with checking(f"{self.directory}: the description of the run"):
            processes = {name: _process(parse_json(body)) for name, body in bodies.items()}
            manifest = Manifest.from_json(parse_json(rows["manifest"]))
            tasks = dict(manifest.tasks)
            for process in processes.values():
                tasks |= process.get("tasks", {})
            measured, expected = _with_prefix(rows, MEASURED), _with_prefix(rows, EXPECTED)
            if not all(type(total) is int and 0 <= total <= MOST for total in expected.values()):
                raise ValueError("a number of expected samples is none")
        return Run(self.directory.resolve().name, replace(manifest, tasks=tasks), processes, measured, expected)

    def other_machines(self, hardware: Hardware) -> list[str]:
        """Labels of the machines of recorded samples whose speeds are not comparable with those of this machine."""
        run = self.read_run()
        with refusing(self.directory):
            query = "SELECT DISTINCT json_extract(body, '$.process_id') FROM samples WHERE NOT failed"
            machines = [run.hardware(process_id) for (process_id,) in self._connection.execute(query)]
        return sorted({one.label() for one in machines if one.fingerprint() != hardware.fingerprint()})

    def samples(self, *, traces: bool = True) -> Iterator[Sample]:
        """All samples in canonical order (task, item, sample); without traces, their `trace` is None."""
        # Traces are most of the bytes. The order does not depend on that in which the samples finished.
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
        with open_records(directory) as connection:
            yield cls(directory, connection)

    def samples(self, *, traces: bool = True) -> Iterator[Sample]:
        """As `RunDatabase.samples`; a sample of a process that the run does not know is a StoreError."""
        for sample in super().samples(traces=traces):
            if sample.process_id not in self.run.processes:
                where = f"{self.directory}: {sample.key.task} {sample.item_id}"
                raise StoreError(f"{where} is of an unknown process {sample.process_id!r}; restore records.sqlite")
            yield sample

    def check(self) -> None:
        """Reads everything once. Raises StoreError if a record is damaged."""
        for sample in self.samples():
            if sample.trace is not None:
                sample.events()
        for _ in self.scores():
            pass

    def num_recorded(self) -> int:
        """Number of good samples, which are not generated again."""
        with refusing(self.directory):
            return self._connection.execute("SELECT count(*) FROM samples WHERE NOT failed").fetchone()[0]

    def scores_by_sample(self) -> dict[SampleKey, dict[str, ScoreRow]]:
        """The scores of each sample by metric."""
        by_sample: dict[SampleKey, dict[str, ScoreRow]] = {}
        # Of two scorers of a metric the one that wrote last counts: it is the later version of the rules.
        for score in self.scores():
            by_sample.setdefault(score.key, {})[score.metric] = score
        return by_sample


def _with_prefix(rows: Mapping[str, str], prefix: str) -> dict[str, Any]:
    """The values of the keys with a prefix, by the rest of the key."""
    return {name.removeprefix(prefix): parse_json(value) for name, value in rows.items() if name.startswith(prefix)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """The fields of the record of a process that readers compute with."""

    hardware: Mapping[str, Any]
    round: int = 1
    tasks: Mapping[str, str] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)
    roofline: Mapping[str, float] = field(default_factory=dict)


def _process(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    # Other fields of later versions are only shown, so what is checked is not what is returned.
    checked = from_fields(_Process, fields)
    Hardware.from_json(checked.hardware)
    loads = (state["load"] for state in (checked.before, checked.after) if state.get("load") is not None)
    if not all(type(number) in (int, float) and 0 <= number <= MOST for number in (*loads, *checked.roofline.values())):
        raise ValueError("a measured number is none")
    return fields


@contextmanager
def refusing(directory: Path) -> Iterator[None]:
    """Turns errors of SQLite and of the system inside the block into a StoreError."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StoreError(_explain(directory, error)) from error


@contextmanager
def open_records(directory: Path) -> Iterator[sqlite3.Connection]:
    """Opens the records of a run that may be running, finished or killed; nothing is written beside them.

    Raises:
        StoreError: there are no records, or they are not what a run leaves: links, pipes, other tables, damaged pages.
    """
    path = directory / DATABASE_NAME
    check_files(directory)
    if not path.is_file():
        if (directory / RUN_JSON).exists():
            raise records_gone(directory)
        raise StoreError(f"{directory} holds no records ({DATABASE_NAME} is missing); name the directory of a run")
    with ExitStack() as opened:
        with refusing(directory):
            before = _state(path)
            connection, needs_no_lock = _open_checked(path, opened)

        def refuse_change(error: StoreError | None = None) -> None:
            if needs_no_lock and _state(path) != before:
                raise StoreError(f"{path} was written while it was read; run the same command again") from error

        try:
            yield connection
        except StoreError as error:
            refuse_change(error)
            if str(directory) in str(error):
                raise
            raise StoreError(f"{directory}: {error}") from error  # a sample does not know its run
        refuse_change()


def _state(path: Path) -> tuple[int, ...]:
    """Differs after a change of the file."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _open_checked(path: Path, opened: ExitStack) -> tuple[sqlite3.Connection, bool]:
    """A connection to checked records, and whether it reads them without locks."""
    for _ in range(_ATTEMPTS):
        uri = _uri_for_reading(path, opened)
        connection = opened.enter_context(closing(connect(uri)))
        try:
            check_content(connection, path)
        except sqlite3.OperationalError:  # the writer may have ended in this moment and taken the log away
            if _has_log(path):
                raise
        else:
            return connection, uri.endswith(_WITHOUT_LOCKS)
    raise StoreError(f"{path} cannot be opened; run the same command again")


def check_files(directory: Path) -> None:
    """Refuses (StoreError) a run of which a file is not a plain file, or that has a rollback journal."""
    for name in _FILES:
        place = directory / name
        with refusing(directory), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = os.lstat(place)
            # Links and pipes may lead anywhere, and SQLite would follow them.
            if not stat.S_ISREG(status.st_mode) and not (name == DATABASE_NAME and stat.S_ISDIR(status.st_mode)):
                kind = kind_of(status.st_mode)
                raise StoreError(f"{place} is a {kind}, not a plain file; name the directory of a run")
            # A journal names further files, which SQLite deletes when it rolls back. Runs are created without a journal
            # and written with a write-ahead log.
            if name.endswith(_JOURNAL):
                raise StoreError(
                    f"{place} is a journal, which no run has and which can make SQLite delete other files; remove it "
                    "if you know where it comes from, or name another directory"
                )
            if status.st_size > _MOST_HOLES * (512 * status.st_blocks + status.st_blksize):
                raise StoreError(f"{place} is a file of holes ({status.st_size} bytes); name the directory of a run")


def _uri_for_reading(path: Path, opened: ExitStack) -> str:
    """The name under which SQLite changes no file of a run."""
    if not _has_log(path):  # no process writes the records
        return path.resolve().as_uri() + _WITHOUT_LOCKS
    if path.with_name(f"{path.name}-shm").exists():  # a process writes them, or was killed
        return path.resolve().as_uri() + "?mode=ro&readonly_shm=1"
    # SQLite would have to write the missing index of the log, so it gets a copy.
    copies = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="refusion_eval_")))
    for file in (path, path.with_name(f"{path.name}-wal")):
        shutil.copyfile(file, copies / file.name)
    return (copies / path.name).as_uri() + "?mode=rw"


def _has_log(path: Path) -> bool:
    """Whether there is a write-ahead log that may hold pages: its header holds, and something follows it."""
    # SQLite takes a log with another header for empty, but only after it has waited ten seconds for its writer. The
    # header (sqlite.org/fileformat2.html#walformat): magic number, version, page size, counter, two salts, two
    # checksums, all big-endian; the checksums are of numbers in the order that the last bit of the magic number says.
    try:
        with open_plain(path.with_name(f"{path.name}-wal")) as log:
            header, more = log.read(_LOG_HEADER), log.read(1)
    except FileNotFoundError:
        return False
    if len(header) < _LOG_HEADER or not more:
        return False
    first = second = 0
    order = ">" if header[3] & 1 else "<"
    for one, other in struct.iter_unpack(f"{order}II", header[:24]):
        first = (first + one + second) % 2**32
        second = (second + other + first) % 2**32
    return header[:3] == b"\x37\x7f\x06" and struct.unpack(">II", header[24:]) == (first, second)


def connect(uri: str) -> sqlite3.Connection:
    """A connection that takes nothing of a database on trust, and reads no value that is longer than a run writes."""
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=60.0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


def check_content(connection: sqlite3.Connection, path: Path) -> None:
    """Checks that a database is empty, or that of a run, and whole; else a StoreError or a sqlite3.DatabaseError."""
    # Views, triggers, virtual tables and generated columns would run statements of the file's author, and pages that
    # refer to each other in circles never end, so nothing but the own tables of a run is ever read.
    connection.set_progress_handler(lambda: 1, _MOST_STEPS_OF_SCHEMA)
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    entries = connection.execute(_ENTRIES).fetchall()
    connection.set_progress_handler(None, 0)
    if not entries:
        return
    if application != APPLICATION_ID:
        raise StoreError(f"{path} is a SQLite file of another program; choose another run directory")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} was written by a newer refusion_eval (schema {version}; this one knows up to {SCHEMA_VERSION}); "
            "upgrade refusion_eval"
        )
    foreign = {str(name) for _, name, *_ in set(map(_plain, entries)) ^ _own_schema()}
    if foreign or version < 1:
        what = ", ".join(sorted(foreign))[:80] or f"schema {version}"
        raise StoreError(f"{path} has other tables than a run ({what}); name the directory of a run")
    state = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if state != "ok":
        raise sqlite3.DatabaseError(state.partition("\n")[2] or state)


def _plain(entry: tuple[Any, ...]) -> tuple[Any, ...]:
    """An entry of a schema, whatever the white space of its statement."""
    *names, statement = entry
    return (*names, statement and " ".join(str(statement).split()))


@cache
def _own_schema() -> frozenset[tuple[Any, ...]]:
    """The entries of the schema of a run."""
    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in SCHEMA:
            connection.execute(statement)
        return frozenset(map(_plain, connection.execute(_ENTRIES)))


def records_gone(directory: Path) -> StoreError:
    """The error of a run that had begun, and whose records are empty or missing."""
    return StoreError(f"{directory} has a {RUN_JSON} but its records are gone; restore them, {ADVICE}")


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
