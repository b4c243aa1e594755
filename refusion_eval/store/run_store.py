"""Writes the records of one run to one directory: `run.json` (what was run) and `records.sqlite` (samples, scores).

A sample is on disk when `append` returns. A process that is killed at any instant loses at most the samples in flight,
and the same command continues after the last recorded one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from refusion_eval.errors import StoreError
from refusion_eval.store.atomic_write import open_own, write_atomically
from refusion_eval.store.records import (
    Hardware,
    Manifest,
    Sample,
    SampleKey,
    ScoreRow,
    checking,
    differences,
    dump,
    pack,
    restricted_to_tasks,
)
from refusion_eval.store.run_reader import (
    ADVICE,
    APPLICATION_ID,
    DATABASE_NAME,
    EXPECTED,
    MEASURED,
    RUN_JSON,
    SCHEMA,
    SCHEMA_VERSION,
    RunDatabase,
    RunReader,
    check_content,
    check_files,
    connect,
    open_records,
    refusing,
)
from refusion_eval.untrusted import parse_json

MOST_DIFFERENCES = 4  # named in an error message

LOCK_NAME = "run.lock"
# What this project writes into it.
_OWN_LOCK = re.compile(rb"(pid \d+ on [^\n]{0,300}\n)?")

# Directories that this process has locked. POSIX locks never exclude their own process, and they are not inherited by
# forked workers, so a worker that outlives a killed run does not keep its directory closed.
_held: set[str] = set()


class DirectoryLock:
    """Exclusive right to write into a directory until `release` or the end of the process."""

    def __init__(self, directory: Path) -> None:
        self._name = str(directory.resolve())
        if self._name in _held:
            raise StoreError(
                f"{directory} is already open for writing in this process (pid {os.getpid()}); close it first"
            )
        path = directory / LOCK_NAME
        try:
            self._descriptor = open_own(path, os.O_RDWR)
        except OSError as error:
            problem = f"{path} cannot be opened for writing ({error.strerror or error})"
            raise StoreError(f"{problem}; choose a writable run directory") from error
        # A file of the user's that happens to have this name is never overwritten.
        if not _OWN_LOCK.fullmatch(os.pread(self._descriptor, 400, 0)):
            os.close(self._descriptor)
            raise StoreError(f"{path} is not the lock of a run; remove it, or name another directory")
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, 200, 0).decode("utf-8", "replace").strip() or "pid not yet known"
            os.close(self._descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                reason = f"is being written by another process ({holder}); wait for it, stop it, or choose another"
            else:
                reason = f"cannot be locked ({error.strerror}); put the run on a file system with POSIX locks"
            raise StoreError(f"{directory} {reason}") from error
        _held.add(self._name)
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            self.release()
            raise StoreError(f"{path} cannot be written ({error.strerror}); free some space and run again") from error

    def release(self) -> None:
        """Releases the lock."""
        # The file stays: if it were removed, two writers could hold locks on two files of one name.
        if self._name in _held:
            _held.discard(self._name)
            os.close(self._descriptor)


def _open_for_writing(directory: Path) -> sqlite3.Connection:
    """Opens or creates the database."""
    path = directory / DATABASE_NAME
    check_files(directory)
    with refusing(directory):
        is_new = not path.exists() or not path.stat().st_size
        connection = connect(f"{path.resolve().as_uri()}?mode=rwc")
        try:
            if is_new:  # a process that is killed here leaves no journal, which would be refused
                connection.execute("PRAGMA journal_mode = MEMORY")
            connection.execute("PRAGMA journal_mode = WAL")  # so that readers never wait for the writer
            connection.execute("PRAGMA synchronous = FULL")  # a transaction is on disk when its commit returns
            connection.execute("PRAGMA foreign_keys = ON")
            check_content(connection, path)
            if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
                _create(connection)
        except BaseException:
            connection.close()
            raise
    return connection


def _create(connection: sqlite3.Connection) -> None:
    # In one transaction, so that a process killed here leaves an empty database for the next one.
    connection.execute("BEGIN IMMEDIATE")
    for statement in SCHEMA:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


class RunStore(RunDatabase):
    """The only writer of a run directory: a context manager, usable from several threads of its process."""

    def __init__(self, directory: Path, connection: sqlite3.Connection, lock: DirectoryLock) -> None:
        super().__init__(directory, connection)
        self.process_id = ""
        self._lock = lock
        self._mutex = threading.RLock()

    @classmethod
    def open(cls, run_dir: str | os.PathLike[str], manifest: Manifest | None = None) -> Self:
        """Creates the run, or resumes it if everything that decides its texts is unchanged; else a StoreError.

        Without a manifest it opens a recorded run for further scores, and no process is registered.
        """
        directory = Path(run_dir)
        if (directory / RUN_JSON).exists() or os.path.lexists(directory / DATABASE_NAME):
            with open_records(directory) as connection:  # what is refused is refused before anything is written
                if RunDatabase(directory, connection).meta():
                    RunReader(directory, connection).check()
        with refusing(directory):
            directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            lock = DirectoryLock(directory)
            opened.callback(lock.release)
            store = cls(directory, _open_for_writing(directory), lock)
            opened.enter_context(store)
            if manifest is not None:
                store._adopt(manifest)
            opened.pop_all()
        return store

    def _adopt(self, manifest: Manifest) -> None:
        """Refuses a run that something else decided the texts of; otherwise registers this process."""
        now = manifest.fingerprint()
        recorded = self.read_run().manifest.fingerprint() if self.meta() else None
        tasks = {(sample.key.task, sample.benchmark) for sample in self.samples(traces=False)}
        if recorded is not None and tasks:
            differing = differences(restricted_to_tasks(recorded, tasks), restricted_to_tasks(now, tasks))
            if differing:
                shown = differing[:MOST_DIFFERENCES]
                if len(differing) > len(shown):
                    shown.append(f"{len(differing) - len(shown)} more")
                what = f"{self.directory} belongs to a different run; {'; '.join(shown)}"
                raise StoreError(f"{what}. Use the recorded settings, {ADVICE}")
        elif recorded != now:
            # A run that failed before its first sample (a wrong adapter, for example) does not block the folder.
            with self._transaction() as connection:
                connection.execute("DELETE FROM meta")
                connection.execute("DELETE FROM processes")
                # The fingerprint is for people with a SQLite prompt: it is always computed anew from the manifest.
                rows = [("fingerprint", dump(now)), ("manifest", dump(manifest.to_json()))]
                connection.executemany("INSERT INTO meta VALUES (?, ?)", rows)
        self.process_id = self.register_process(manifest.hardware, manifest)

    def register_process(self, hardware: Hardware, manifest: Manifest | None = None, pid: int | None = None) -> str:
        """Records a process that generates samples, with the machine it runs on."""
        process_id = uuid.uuid4().hex[:12]
        body: dict[str, Any] = {"hardware": asdict(hardware), "pid": pid or os.getpid(), "started": _now()}
        if manifest is not None:
            names = ("command", "versions", "git_commit", "batch_size", "warmup", "tasks", "roofline")
            body |= {name: manifest.to_json()[name] for name in names}
        with self._transaction() as connection:
            connection.execute("INSERT INTO processes VALUES (?, ?)", (process_id, dump(body)))
        self._write_run_json()
        return process_id

    def note(self, process_id: str, **facts: Any) -> None:
        """Adds facts to the record of a process, such as the state of the machine when it ended."""
        with self._transaction() as connection:
            (body,) = connection.execute("SELECT body FROM processes WHERE process_id = ?", (process_id,)).fetchone()
            changed = (dump(parse_json(body) | facts), process_id)
            connection.execute("UPDATE processes SET body = ? WHERE process_id = ?", changed)
        self._write_run_json()

    def get_or_compute(self, name: str, compute: Callable[[], Any]) -> Any:
        """A measured fact that decides how this run goes. The first process computes it, later ones read it."""
        with self._mutex:  # if two threads ask at once, the second waits for the result of the first
            with refusing(self.directory):
                row = self._connection.execute("SELECT value FROM meta WHERE name = ?", (MEASURED + name,)).fetchone()
            if row is None:
                row = (dump(compute()),)
                with self._transaction() as connection:
                    connection.execute("INSERT INTO meta VALUES (?, ?)", (MEASURED + name, row[0]))
                self._write_run_json()
            with checking(f"{self.directory}: the measured fact {name}"):
                return parse_json(row[0])

    def expect(self, totals: Mapping[str, int]) -> None:
        """Records how many samples of each task are asked for, so that readers recognise an unfinished run."""
        # A run that is resumed with a smaller --limit still has all the samples that it was first asked for.
        recorded = self.read_run().expected
        larger = {task: total for task, total in totals.items() if total > recorded.get(task, 0)}
        if larger:
            rows = [(EXPECTED + task, dump(total)) for task, total in larger.items()]
            with self._transaction() as connection:
                connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)
            self._write_run_json()

    def _write_run_json(self) -> None:
        run = self.read_run()
        with refusing(self.directory):
            write_atomically(self.directory / RUN_JSON, json.dumps(run.to_json(), indent=2, sort_keys=True) + "\n")

    def get(self, key: SampleKey) -> Sample | None:
        """The sample of a request, or None. A sample with `error` set is to be generated again."""
        with self._mutex, refusing(self.directory):
            row = self._connection.execute("SELECT body, trace FROM samples WHERE key = ?", (key.digest(),)).fetchone()
        return Sample.from_stored(*row) if row else None

    def append(self, sample: Sample) -> None:
        """Writes one sample to disk. It is final unless it is an error, which a later attempt replaces.

        Raises:
            StoreError: the request already has a good sample, its process is unknown, or the disk refuses.
        """
        sample = replace(sample, process_id=sample.process_id or self.process_id, created=sample.created or _now())
        key = sample.key.digest()
        with self._transaction() as connection:
            row = connection.execute("SELECT 1 FROM processes WHERE process_id = ?", (sample.process_id,)).fetchone()
            if row is None:
                raise StoreError(
                    f"{self.directory}: process_id {sample.process_id!r} is not registered; leave it empty for this "
                    "process, or use what register_process returned"
                )
            stored = connection.execute("SELECT failed, attempts FROM samples WHERE key = ?", (key,)).fetchone()
            if stored is not None and not stored[0]:
                raise StoreError(
                    f"{self.directory}: {sample.key.task} {sample.item_id} sample {sample.key.sample} is already "
                    "recorded, and records are written once; ask get() before generating"
                )
            packed = pack(sample.trace) if sample.trace is not None else None
            names = (_readable(sample.key.task), _readable(sample.item_id), sample.key.sample)
            attempts = stored[1] + 1 if stored else 1
            connection.execute("DELETE FROM scores WHERE key = ?", (key,))
            connection.execute(
                "INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (key, *names, sample.error is not None, attempts, sample.body(), packed),
            )

    def append_scores(self, scores: Sequence[ScoreRow]) -> None:
        """Writes judgements, all or none. They replace those of the same sample, scorer and metric.

        Raises:
            StoreError: a score belongs to a sample that is not recorded or has an error.
        """
        with self._transaction() as connection:
            for score in scores:
                key = score.key.digest()
                row = connection.execute("SELECT failed FROM samples WHERE key = ?", (key,)).fetchone()
                if row is None or row[0]:
                    state = "is not recorded" if row is None else "is an error, which is not an answer"
                    raise StoreError(
                        f"{self.directory}: {score.key.task} {score.item_id} sample {score.key.sample} cannot be "
                        f"scored: it {state}; generate it first"
                    )
                connection.execute(
                    "INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?)",
                    (key, _readable(score.scorer), _readable(score.metric), score.body()),
                )

    def close(self) -> None:
        """Closes the database and releases the lock. A second call has no effect."""
        with self._mutex:
            try:
                with refusing(self.directory):
                    self._connection.close()
            finally:
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._mutex, refusing(self.directory):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


def _readable(text: str) -> str:
    """Text for the columns that people read, with escapes for what UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
