"""The SQLite file of a run: its schema, opening it for writing or reading, and one clear error for every failure.

Strings that are compared or stored verbatim are in ASCII JSON (`body`), so that any Python string survives, including
lone surrogates. The other text columns are for people with a SQLite prompt:
`select item_id, json_extract(body, '$.seconds') from samples`.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from refusion_eval.errors import StoreError

DATABASE_NAME = "records.sqlite"
SCHEMA_VERSION = 1

# Marks the file as ours: "RFEV" in ASCII.
_APPLICATION_ID = 0x52464556

_SCHEMA = (
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


@contextmanager
def refusing(directory: Path) -> Iterator[None]:
    """Turns errors of SQLite and of the system inside the block into a StoreError."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StoreError(_explain(directory, error)) from error


def open_for_writing(directory: Path) -> sqlite3.Connection:
    """Opens or creates the database. A transaction is on disk when its commit returns.

    Raises:
        StoreError: the file is not writable, damaged, of another program or of a newer schema, or the disk is full.
    """
    path = directory / DATABASE_NAME
    with refusing(directory):
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=60.0)
        try:
            _check_identity(connection, path)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
                _create(connection)
            state = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if state != "ok":
                raise sqlite3.DatabaseError(state)
        except BaseException:
            connection.close()
            raise
    return connection


@contextmanager
def open_for_reading(directory: Path) -> Iterator[sqlite3.Connection]:
    """Opens the database of a run that may be running, finished or killed, also on a read-only disk.

    Raises:
        StoreError: there are no records, or they are damaged, of another program or of a newer schema.
    """
    path = directory / DATABASE_NAME
    if not path.is_file():
        raise StoreError(f"{directory} holds no records ({DATABASE_NAME} is missing); name the directory of a run")
    with tempfile.TemporaryDirectory(prefix="refusion_eval_") as copies:
        with refusing(directory):
            connection = _connect_for_reading(path, Path(copies))
        try:
            with refusing(directory):
                _check_identity(connection, path)
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


def _create(connection: sqlite3.Connection) -> None:
    """Creates the whole schema in one transaction. A process killed here leaves an empty database for the next one."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in _SCHEMA:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _check_identity(connection: sqlite3.Connection, path: Path) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    num_tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if num_tables == 0:
        return
    if application != _APPLICATION_ID:
        raise StoreError(f"{path} is a SQLite file of another program; choose another run directory")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} was written by a newer refusion_eval (schema {version}; this one knows up to {SCHEMA_VERSION}); "
            "upgrade refusion_eval"
        )


def _explain(directory: Path, error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lowered = text.lower()
    if "full" in lowered or "no space" in lowered or "file too large" in lowered or "disk i/o error" in lowered:
        advice = "the disk is full or failing; free some space and run the same command again, nothing finished is lost"
    elif "readonly" in lowered or "read-only" in lowered or "permission" in lowered or "unable to open" in lowered:
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
