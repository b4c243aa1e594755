"""Writes and reads the records of one run in one directory: `run.json` (what was run) and `records.sqlite`."""

# A sample is on disk when `append` returns. A process that is killed at any instant loses at most the samples in
# flight, and the same command continues after the last recorded one. Readers never wait for the writer.

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar

from refusion_eval.errors import StoreError
from refusion_eval.store import records
from refusion_eval.store.atomic_write import write_atomically
from refusion_eval.store.lock import DirectoryLock
from refusion_eval.store.manifest import Hardware, Manifest, differences, restricted_to_tasks, split_code
from refusion_eval.store.records import (
    NO_CACHE,
    STOCK_GENERATE,
    Sample,
    SampleKey,
    ScoreRow,
    checking,
    dump,
    from_fields,
)
from refusion_eval.store.run_files import (
    ADVICE,
    APPLICATION_ID,
    DATABASE_NAME,
    RUN_JSON,
    SCHEMA,
    SCHEMA_VERSION,
    check_content,
    check_files,
    connect,
    no_sample_yet,
    open_records,
    records_gone,
    refusing,
)
from refusion_eval.untrusted import parse_json

# Prefixes of keys in the meta table: measured facts that decide how the run goes (run.json calls them settled), and
# by task the samples asked for, the process that asked for them, and the samples that the whole task has.
MEASURED = "settled:"
EXPECTED = "expected:"
ASKED_BY = "asked_by:"
WHOLE = "whole:"

_Record = TypeVar("_Record", Sample, ScoreRow)


@dataclass(frozen=True, slots=True)
class Run:
    run_id: str
    manifest: Manifest
    processes: Mapping[str, Mapping[str, Any]]
    measured: Mapping[str, Any]
    expected: Mapping[str, int] = field(default_factory=dict)
    whole: Mapping[str, int] = field(default_factory=dict)
    asked_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command of the last process that worked on the run."""
        return self.command_for("")

    def command_for(self, task: str) -> str:
        """The command that continues a task: that which asked for its samples; the last one where none is recorded."""
        every = (process.get("command") for process in self.processes.values())  # workers of a run have none
        *_, last = ((), self.manifest.command, *filter(None, every))
        asked = self.processes.get(self.asked_by.get(task, ""), {}).get("command")
        program, *words = asked or last or ("",)
        name = "refusion-eval" if program.endswith("__main__.py") else Path(program).name
        return shlex.join([*(("python", program) if name.endswith(".py") else (name,)), *words]) if name else ""

    @property
    def protocol(self) -> str:
        """The protocol, as NAME@HASH, under which the last process continued the run; empty for none."""
        *_, last = ({}, *(process for process in self.processes.values() if "command" in process))  # workers have none
        return str(last.get("protocol", {}).get("label", ""))

    @property
    def missing(self) -> dict[str, str]:
        """Task without rows -> what to do, as the last process says that found none."""
        every = (process.get("missing", {}) for process in self.processes.values())
        return {task: advice for missing in every for task, advice in missing.items()}

    def hardware(self, process_id: str) -> Hardware:
        return from_fields(Hardware, self.processes[process_id]["hardware"])

    def round(self, process_id: str) -> int:
        """Which of the rounds, in which several systems take turns, a process belongs to; 1 without rounds."""
        return int(self.processes[process_id].get("round", 1))

    def turn_of(self, process_id: str) -> str:
        """The process, by its number and command, for which a process took one of its turns; empty without turns."""
        process = self.processes[process_id]
        driver = process.get("driver", process.get("pid"))  # a worker decodes for another process
        return f"{driver} {process.get('command', '')}" if "round" in process else ""

    def slowed_by(self, process_id: str) -> list[str]:
        """A sentence for each thing that makes the times of a process longer than they need be."""
        process, hardware = self.processes[process_id], self.hardware(process_id)
        before, after = (process.get(name, {}).get("load") for name in ("before", "after"))
        own = 1 if hardware.gpu else hardware.threads * hardware.num_processes
        loads = [load for load in (before, None if after is None else after - own) if load is not None]
        weights = process.get("roofline", {}).get("weight_bytes", 0)
        # The loop of transformers' `generate` has a cache of its own.
        is_slow = self.manifest.arguments.get("backend") == "transformers" and self.manifest.decoder != STOCK_GENERATE
        return [*hardware.slowed_by(max(loads, default=None), weights), *([NO_CACHE] if is_slow else [])]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA_VERSION,
            "run_id": self.run_id,
            "fingerprint": self.manifest.fingerprint(),
            "manifest": self.manifest.to_json(),
            "processes": dict(self.processes),
            "settled": dict(self.measured),
            "expected": dict(self.expected),
            "whole": dict(self.whole),
            "asked_by": dict(self.asked_by),
        }


class RunDatabase:
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
        connection, rows = self._connection, self.meta()
        if "manifest" not in rows:
            raise no_sample_yet(self.directory)
        with refusing(self.directory):
            bodies = dict(connection.execute("SELECT process_id, body FROM processes ORDER BY rowid"))
        with checking(f"{self.directory}: the description of the run"):
            processes = {name: _process(parse_json(body)) for name, body in bodies.items()}
            manifest = Manifest.from_json(parse_json(rows["manifest"]))
            tasks = dict(manifest.tasks)
            for process in processes.values():
                tasks |= process.get("tasks", {})
            prefixes = (MEASURED, EXPECTED, WHOLE, ASKED_BY)
            measured, expected, whole, asked_by = (_with_prefix(rows, prefix) for prefix in prefixes)
            totals = (*expected.values(), *whole.values())
            if not all(type(total) is int and 0 <= total <= records.MOST for total in totals):
                raise ValueError("a number of expected samples is not a whole number")
            if not all(isinstance(process_id, str) for process_id in asked_by.values()):
                raise ValueError("a process that asked for samples is not a text")
        run_id, manifest = self.directory.resolve().name, replace(manifest, tasks=tasks)
        return Run(run_id, manifest, processes, measured, expected, whole, asked_by)

    def other_machines(self, hardware: Hardware) -> list[str]:
        """Labels of the machines of recorded samples whose speeds are not comparable with those of this machine."""
        run = self.read_run()
        with refusing(self.directory):
            query = "SELECT DISTINCT json_extract(body, '$.process_id') FROM samples WHERE NOT failed"
            machines = [run.hardware(process_id) for (process_id,) in self._connection.execute(query)]
        return sorted({one.label() for one in machines if one.fingerprint() != hardware.fingerprint()})

    def protocols(self) -> set[str]:
        """The protocols of the recorded samples, as NAME@HASH; an empty text for those without one."""
        with refusing(self.directory):
            query = "SELECT DISTINCT coalesce(json_extract(body, '$.protocol'), '') FROM samples"
            return {str(name) for (name,) in self._connection.execute(query)}

    def samples(self, *, traces: bool = True) -> Iterator[Sample]:
        # Traces are most of the bytes. The order (task, item, sample) is not that in which the samples finished.
        column = "trace" if traces else "NULL"
        return self._read(Sample, f"SELECT body, {column} FROM samples ORDER BY task, item_id, sample, key")

    def scores(self) -> Iterator[ScoreRow]:
        return self._read(ScoreRow, "SELECT body FROM scores ORDER BY rowid")

    def digests(self) -> dict[str, str]:
        """Task -> SHA-256 of its records, which are all samples with their traces, and their scores."""
        hashes: dict[str, Any] = {}
        queries = (
            "SELECT task, body, CAST(trace AS BLOB) FROM samples ORDER BY task, item_id, sample, key",
            "SELECT task, scores.body, NULL FROM scores JOIN samples USING (key) ORDER BY task, key, scorer, metric",
        )
        with refusing(self.directory):
            for query in queries:
                for task, body, trace in self._connection.execute(query):
                    of_task = hashes.setdefault(task, hashlib.sha256())
                    for part in (str(body).encode(), trace or b""):
                        of_task.update(b"%d " % len(part) + part)  # so that no two sequences of parts are alike
        return {task: of_task.hexdigest() for task, of_task in hashes.items()}

    def _read(self, kind: type[_Record], query: str) -> Iterator[_Record]:
        with refusing(self.directory):
            for row in self._connection.execute(query):
                yield records.from_stored(kind, *row)


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
        for sample in super().samples(traces=traces):
            if sample.process_id not in self.run.processes:  # which has the machine that every reader asks for
                where = f"{self.directory}: {sample.key.task} {sample.item_id}"
                raise StoreError(f"{where} is of an unknown process {sample.process_id!r}; restore records.sqlite")
            yield sample

    def check(self) -> None:
        for sample in self.samples():
            if sample.trace is not None:
                sample.events()
        for _ in self.scores():
            pass

    def num_recorded(self) -> int:
        with refusing(self.directory):
            return self._connection.execute("SELECT count(*) FROM samples WHERE NOT failed").fetchone()[0]

    def scores_by_sample(self) -> dict[SampleKey, dict[str, ScoreRow]]:
        by_sample: dict[SampleKey, dict[str, ScoreRow]] = {}
        # Of two scorers of a metric the one that wrote last counts: it is the later version of the rules.
        for score in self.scores():
            by_sample.setdefault(score.key, {})[score.metric] = score
        return by_sample


def _with_prefix(rows: Mapping[str, str], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): parse_json(value) for name, value in rows.items() if name.startswith(prefix)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    hardware: Mapping[str, Any]
    round: int = 1
    command: Sequence[str] = ()
    tasks: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)
    roofline: Mapping[str, float] = field(default_factory=dict)


def _process(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    # Other fields of later versions are only shown, so what is checked is not what is returned.
    checked = from_fields(_Process, fields)
    from_fields(Hardware, checked.hardware)
    loads = (state["load"] for state in (checked.before, checked.after) if state.get("load") is not None)
    if not all(
        type(number) in (int, float) and 0 <= number <= records.MOST for number in (*loads, *checked.roofline.values())
    ):
        raise ValueError("a measured number is negative or not a number")
    return fields


MOST_DIFFERENCES = 4  # named in an error message


def _open_for_writing(directory: Path) -> sqlite3.Connection:
    path = directory / DATABASE_NAME
    check_files(directory)
    with refusing(directory), ExitStack() as opened:
        is_new = not path.exists() or not path.stat().st_size
        connection = opened.enter_context(closing(connect(f"{path.resolve().as_uri()}?mode=rwc")))
        if is_new:  # a process that is killed here leaves no journal, which would be refused
            connection.execute("PRAGMA journal_mode = MEMORY")
        connection.execute("PRAGMA journal_mode = WAL")  # so that readers never wait for the writer
        connection.execute("PRAGMA synchronous = FULL")  # a transaction is on disk when its commit returns
        connection.execute("PRAGMA foreign_keys = ON")
        check_content(connection, path)
        if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
            # In one transaction, so that a process killed here leaves an empty database for the next one.
            marks = (f"PRAGMA application_id = {APPLICATION_ID}", f"PRAGMA user_version = {SCHEMA_VERSION}")
            for statement in ("BEGIN IMMEDIATE", *SCHEMA, *marks, "COMMIT"):
                connection.execute(statement)
        opened.pop_all()
    return connection


class RunStore(RunDatabase):
    """The only writer of a run directory: a context manager, usable from several threads of its process."""

    def __init__(self, directory: Path, connection: sqlite3.Connection, lock: DirectoryLock) -> None:
        super().__init__(directory, connection)
        self.process_id = ""
        self._protocol: str | None = None
        self._lock = lock
        self._mutex = threading.RLock()

    @classmethod
    def open(cls, run_dir: str | os.PathLike[str], manifest: Manifest | None = None) -> Self:
        """Creates the run, or resumes it if everything that decides its texts is unchanged; else a StoreError."""
        # Without a manifest a recorded run is opened for further scores, and no process is registered.
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
            before, after = (restricted_to_tasks(fingerprint, tasks) for fingerprint in (recorded, now))
            (name, code), (name_now, code_now) = map(split_code, (before["decoder"], after["decoder"]))
            if name == name_now and code and code != code_now:
                changed = f"the code of {name} changed ({code} decoded it, and now it is {code_now})"
                raise StoreError(f"{self.directory}: {changed}; a run has one algorithm. Restore that code, {ADVICE}")
            if name == name_now:  # a run of version 1.0 does not say its code
                after = {**after, "decoder": before["decoder"]}
            if differing := differences(before, after):
                more = [f"{len(differing) - MOST_DIFFERENCES} more"] if len(differing) > MOST_DIFFERENCES else []
                what = f"{self.directory} belongs to a different run; {'; '.join(differing[:MOST_DIFFERENCES] + more)}"
                raise StoreError(f"{what}. Use the recorded settings, {ADVICE}")
        elif recorded != now:
            # A run that failed before its first sample (a wrong adapter, for example) does not block the folder.
            with self._transaction() as connection:
                connection.execute("DELETE FROM meta")
                connection.execute("DELETE FROM processes")
                # The fingerprint is for people with a SQLite prompt: it is always computed anew from the manifest.
                rows = [("fingerprint", dump(now)), ("manifest", dump(manifest.to_json()))]
                connection.executemany("INSERT INTO meta VALUES (?, ?)", rows)
        self._protocol = manifest.protocol.get("label")
        self.process_id = self.register_process(manifest.hardware, manifest)

    def register_process(self, hardware: Hardware, manifest: Manifest | None = None, pid: int | None = None) -> str:
        process_id = uuid.uuid4().hex[:12]
        body: dict[str, Any] = {"hardware": asdict(hardware), "pid": pid or os.getpid(), "started": _now()}
        if manifest is not None:
            names = ("command", "versions", "git_commit", "batch_size", "warmup", "tasks", "roofline")
            described = manifest.to_json()
            body |= {name: described[name] for name in (*names, *(["protocol"] if manifest.protocol else []))}
        with self._describing() as connection:
            connection.execute("INSERT INTO processes VALUES (?, ?)", (process_id, dump(body)))
        return process_id

    def note(self, process_id: str, **facts: Any) -> None:
        with self._describing() as connection:
            (body,) = connection.execute("SELECT body FROM processes WHERE process_id = ?", (process_id,)).fetchone()
            changed = (dump(parse_json(body) | facts), process_id)
            connection.execute("UPDATE processes SET body = ? WHERE process_id = ?", changed)

    def get_or_compute(self, name: str, compute: Callable[[], Any]) -> Any:
        """A measured fact that decides how this run goes. The first process computes it, later ones read it."""
        with self._mutex:  # if two threads ask at once, the second waits for the result of the first
            with refusing(self.directory):
                row = self._connection.execute("SELECT value FROM meta WHERE name = ?", (MEASURED + name,)).fetchone()
            if row is None:
                row = (dump(compute()),)
                with self._describing() as connection:
                    connection.execute("INSERT INTO meta VALUES (?, ?)", (MEASURED + name, row[0]))
            with checking(f"{self.directory}: the measured fact {name}"):
                return parse_json(row[0])

    def expect(self, totals: Mapping[str, int], whole: Mapping[str, int] | None = None) -> None:
        """Records how many samples of each task are asked for, and how many the whole task has where that is known."""
        run = self.read_run()
        # A run that is resumed with a smaller --limit still has all the samples that it was first asked for, and is
        # continued by the command that asked for them.
        most = {task: total for task, total in totals.items() if total and total >= run.expected.get(task, 0)}
        rows = [(EXPECTED + task, dump(total)) for task, total in most.items() if total != run.expected.get(task)]
        rows += [(ASKED_BY + task, dump(self.process_id)) for task in most if run.asked_by.get(task) != self.process_id]
        rows += [(WHOLE + task, dump(total)) for task, total in (whole or {}).items() if total != run.whole.get(task)]
        if rows:
            with self._describing() as connection:
                connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)

    @contextmanager
    def _describing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that changes the description of the run, which is then in run.json too."""
        with self._transaction() as connection:
            yield connection
        run = self.read_run()
        with refusing(self.directory):
            write_atomically(self.directory / RUN_JSON, json.dumps(run.to_json(), indent=2, sort_keys=True) + "\n")

    def get(self, key: SampleKey) -> Sample | None:
        with self._mutex, refusing(self.directory):
            row = self._connection.execute("SELECT body, trace FROM samples WHERE key = ?", (key.digest(),)).fetchone()
        return records.from_stored(Sample, *row) if row else None

    def append(self, sample: Sample) -> None:
        """Writes one sample to disk. It is final unless it is an error, which a later attempt replaces."""
        sample = replace(
            sample,
            process_id=sample.process_id or self.process_id,
            created=sample.created or _now(),
            protocol=sample.protocol or self._protocol,
        )
        key = sample.key.digest()
        with self._transaction() as connection:
            where = f"{self.directory}: {sample.key.task} {sample.item_id} sample {sample.key.sample}"
            process = (sample.process_id,)
            if connection.execute("SELECT 1 FROM processes WHERE process_id = ?", process).fetchone() is None:
                advice = "leave process_id empty for this process, or use what register_process returned"
                raise StoreError(f"{where} is of a process that is not registered ({sample.process_id!r}); {advice}")
            stored = connection.execute("SELECT failed, attempts FROM samples WHERE key = ?", (key,)).fetchone()
            failed, attempts = stored or (True, 0)
            if not failed:
                raise StoreError(f"{where} is already recorded, and records are written once; ask get() first")
            packed = records.pack(sample.trace) if sample.trace is not None else None
            attempts += (sample.server or {}).get("attempts", 1)
            names = (_readable(sample.key.task), _readable(sample.item_id), sample.key.sample)
            row = (key, *names, sample.error is not None, attempts, sample.body(), packed)
            connection.execute("DELETE FROM scores WHERE key = ?", (key,))
            connection.execute("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

    def append_scores(self, scores: Sequence[ScoreRow]) -> None:
        """Writes judgements, all or none. They replace those of the same sample, scorer and metric."""
        with self._transaction() as connection:
            for score in scores:
                key = score.key.digest()
                failed = connection.execute("SELECT failed FROM samples WHERE key = ?", (key,)).fetchone()
                if failed is None or failed[0]:
                    where = f"{self.directory}: {score.key.task} {score.item_id} sample {score.key.sample}"
                    state = "is not recorded" if failed is None else "is an error, which is not an answer"
                    raise StoreError(f"{where} cannot be scored: it {state}; generate it first")
                row = (key, _readable(score.scorer), _readable(score.metric), score.body())
                connection.execute("INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?)", row)

    def close(self) -> None:
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
