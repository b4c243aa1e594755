"""The files of a run directory: their names and schema, what is checked of them before they are read, and errors."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from refusion_eval.errors import StoreError
from refusion_eval.untrusted import LARGEST, kind_of, open_plain

# Strings that are compared or stored verbatim are in ASCII JSON (`body`), so that any Python string survives, including
# lone surrogates. The other text columns are for people with a SQLite prompt:
# `select item_id, json_extract(body, '$.seconds') from samples`.
DATABASE_NAME = "records.sqlite"
RUN_JSON = "run.json"
LOCK_NAME = "run.lock"
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
_MOST_STEPS_OF_SCHEMA = 10_000  # of SQLite, which reads our schema in some tens of steps
_ATTEMPTS = 3
_JOURNAL = "-journal"
_WITHOUT_LOCKS = "?mode=ro&immutable=1"
_LOG_HEADER = 32
# Everything that a run writes into its directory, and the journal that it never has.
FILES = (DATABASE_NAME, *(f"{DATABASE_NAME}{suffix}" for suffix in ("-wal", "-shm", _JOURNAL)), RUN_JSON)
FILES += (LOCK_NAME, "results.csv", "table.md")
# A file whose size is more than this many times what it takes on the disk was made to look large; no file system
# compresses records as much.
_MOST_HOLES = 64
SCHEMA_VERSION = 1
APPLICATION_ID = 0x52464556  # marks the file as ours: "RFEV" in ASCII


@contextmanager
def refusing(directory: Path) -> Iterator[None]:
    """Turns errors of SQLite and of the system inside the block into a StoreError."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StoreError(_explain(directory, error)) from error


@contextmanager
def open_records(directory: Path) -> Iterator[sqlite3.Connection]:
    """Opens the records of a run, be it running, finished or killed; a StoreError if they are not what a run leaves."""
    path = directory / DATABASE_NAME
    check_files(directory)
    if not path.is_file():
        if (directory / RUN_JSON).exists():
            raise records_gone(directory)
        if (directory / LOCK_NAME).exists():
            raise no_sample_yet(directory)
        raise StoreError(f"{directory} holds no records ({DATABASE_NAME} is missing); name the directory of a run")
    with ExitStack() as opened:
        with refusing(directory):
            before = file_state(path)
            connection, needs_no_lock = open_checked(path, opened)

        def require_unchanged() -> None:
            # Without locks a writer is not kept away, so pages of two states may be mixed.
            if needs_no_lock and file_state(path) != before:
                raise StoreError(f"{path} was written while it was read; run the same command again")

        # No variable keeps the error: its frames, and what was unpacked in them, would stay in a circle with this one.
        try:
            yield connection
        except StoreError as error:
            require_unchanged()
            if str(directory) in str(error):
                raise
            raise StoreError(f"{directory}: {error}") from error  # a sample does not know its run
        require_unchanged()


def file_state(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def open_checked(path: Path, opened: ExitStack) -> tuple[sqlite3.Connection, bool]:
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
    for name in FILES:
        place = directory / name
        with refusing(directory), suppress(FileNotFoundError, NotADirectoryError):
            status = os.lstat(place)
            # Links and pipes may lead anywhere, and SQLite would follow them.
            if not stat.S_ISREG(status.st_mode) and not (name == DATABASE_NAME and stat.S_ISDIR(status.st_mode)):
                kind = kind_of(status.st_mode)
                raise StoreError(f"{place} is a {kind}, not a plain file; name the directory of a run")
            # A journal names further files, which SQLite deletes when it rolls back. Runs are created without a journal
            # and written with a write-ahead log.
            if name.endswith(_JOURNAL):
                reason = "is a journal, which no run has and which can make SQLite delete other files"
                raise StoreError(f"{place} {reason}; remove it if you know its origin, or name another directory")
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
        newer = f"a newer refusion_eval (schema {version}; this one knows up to {SCHEMA_VERSION})"
        raise StoreError(f"{path} was written by {newer}; upgrade refusion_eval")
    foreign = {str(name) for _, name, *_ in set(map(_plain, entries)) ^ _own_schema()}
    if foreign or version < 1:
        what = ", ".join(sorted(foreign))[:80] or f"schema {version}"
        raise StoreError(f"{path} has other tables than a run ({what}); name the directory of a run")
    state = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if state != "ok":
        raise sqlite3.DatabaseError(state.partition("\n")[2] or state)


def _plain(entry: tuple[Any, ...]) -> tuple[Any, ...]:
    *names, statement = entry
    return (*names, statement and " ".join(str(statement).split()))


@cache
def _own_schema() -> frozenset[tuple[Any, ...]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in SCHEMA:
            connection.execute(statement)
        return frozenset(map(_plain, connection.execute(_ENTRIES)))


def no_sample_yet(directory: Path) -> StoreError:
    return StoreError(f"{directory}: no sample yet, the run was stopped before it began; run its command again")


def records_gone(directory: Path) -> StoreError:
    return StoreError(f"{directory} has a {RUN_JSON} but its records are gone; restore them, {ADVICE}")


# What to do about an error of SQLite or of the system, by words of its message; SQLite has no finer classes for them.
_ADVICE = {
    "full|no space|file too large|disk i/o error": "the disk is full or failing; free some space and run the same "
    "command again, nothing finished is lost",
    "readonly|read-only|permission|unable to open": "make the directory writable or choose another one",
    "locked": "another program keeps the database open; close it",
    "locks available|not supported|not implemented": "put the run on a file system with POSIX locks",
}


_DAMAGED = (
    f"{DATABASE_NAME} is damaged; restore it from a copy, save what `sqlite3 {DATABASE_NAME} .recover` still reads, or "
    "start again in another directory"
)


def _explain(directory: Path, error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    otherwise = _DAMAGED if isinstance(error, sqlite3.DatabaseError) else "choose another run directory"
    advice = (advice for words, advice in _ADVICE.items() if re.search(words, text.lower()))
    return f"{directory}: {text}: {next(advice, otherwise)}"
