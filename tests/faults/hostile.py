"""Run directories as strangers may make them: each maker changes a copy of an honest run."""

import functools
import json
import os
import socket
import sqlite3
import struct
import zlib
from contextlib import closing

DATABASE = "records.sqlite"
# Acts on a terminal, in a spreadsheet, and on a page.
SPEAKING = "=1+1 \x1b]0;title\x07\x1b[31m\x9b5m\u202e\n# heading <img src=x onerror=alert(1)> [x](javascript:a) `b` | c"
NESTED = 100_000


def change(folder, statements, *, schema=False):
    """Runs statements on the records: texts, or texts with parameters."""
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        if schema:
            connection.execute("PRAGMA writable_schema = ON")
        for statement in statements:
            connection.execute(*([statement] if isinstance(statement, str) else statement))
        connection.commit()


def sql(*statements, **options):
    return lambda folder, victim: change(folder, statements, **options)


def journal(folder, victim):
    """Names the victim as its super-journal, which SQLite deletes when it rolls back."""
    path = os.fsencode(victim)
    tail = struct.pack(">I", 1) + path + struct.pack(">II", len(path), sum(path)) + bytes.fromhex("d9d505f920a163d7")
    (folder / f"{DATABASE}-journal").write_bytes(b"X" * 512 + tail)


def link(name, *, target=None):
    """A file of the run becomes a link to the victim, or to somewhere else."""

    def make(folder, victim):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victim if target is None else target)

    return make


def moved_and_linked(name):
    """A file lies elsewhere, and a link to it in its place."""

    def make(folder, victim):
        elsewhere = victim.with_name("elsewhere")
        (folder / name).rename(elsewhere)
        (folder / name).symlink_to(elsewhere)

    return make


def pipe(name):
    def make(folder, victim):
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(exist_ok=True)
        os.mkfifo(folder / name)

    return make


def hard_link(name):
    def make(folder, victim):
        (folder / name).unlink(missing_ok=True)
        os.link(victim, folder / name)

    return make


def a_socket(name):
    def make(folder, victim):
        (folder / name).unlink(missing_ok=True)
        here = os.getcwd()
        os.chdir(folder)  # the names of sockets are short
        with closing(socket.socket(socket.AF_UNIX)) as listener:
            listener.bind(name)
        os.chdir(here)

    return make


def written(name, content):
    return lambda folder, victim: (folder / name).write_bytes(content)


def holes(name, size):
    def make(folder, victim):
        with (folder / name).open("ab") as file:
            file.truncate(size)

    return make


def without_records(folder, victim):
    (folder / DATABASE).unlink()


def lost_log(folder, victim):
    """What kill -9 leaves of a young run if its log is lost: all records were in the log."""
    (folder / DATABASE).unlink()
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")


@functools.cache
def deflated(unit, count, end=b"0]"):
    """A deflated list of so many times 65,536 units; all times are one block, so its checksum is right for one alone.

    No reader may come as far as the checksum of a larger one.
    """
    packer = zlib.compressobj(9)
    first = packer.compress(b"[") + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(unit * (1 << 16)) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"z" + first + block * count + packer.compress(end) + packer.flush()


def trace(body):
    return sql(("UPDATE samples SET trace = ?", (body,)))


def events(*rows):
    return trace(b"j" + json.dumps(rows).encode())


def damaged_pages(step):
    """Every so many bytes one is another."""

    def make(folder, victim):
        content = bytearray((folder / DATABASE).read_bytes())
        for at in range(200, len(content), step):
            content[at] ^= 0x5A
        (folder / DATABASE).write_bytes(content)

    return make


def circle(folder, victim):
    """The page of the samples' index becomes one whose only children are itself."""
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'samples'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    cells = 20
    content = 8 * cells
    page = struct.pack(">BHHHBI", 5, 0, cells, size - content, 0, root)
    offsets = [size - 8 * number for number in range(1, cells + 1)]
    page += b"".join(struct.pack(">H", offset) for offset in offsets)
    page = page.ljust(size - content, b"\0")
    page += b"".join(struct.pack(">I", root) + b"\x81\x80\x80\x01" for _ in range(cells))
    data = bytearray((folder / DATABASE).read_bytes())
    data[(root - 1) * size : root * size] = page[:size]
    (folder / DATABASE).write_bytes(data)


def log_of(content, *, index=b""):
    def make(folder, victim):
        (folder / f"{DATABASE}-wal").write_bytes(content)
        if index is not None:
            (folder / f"{DATABASE}-shm").write_bytes(index)

    return make


def foreign_decoder(folder, victim):
    """The record names a file beside it, which would empty the victim, as its decoder."""
    (folder / "evil.py").write_text(f"open({str(victim)!r}, 'w').close()\n")
    place = f"{folder}/evil.py:DECODER"
    change(
        folder,
        [
            ("UPDATE meta SET value = json_set(value, '$.decoder', ?, '$.arguments.decoder', ?)", (place, place)),
        ],
    )


def everywhere(text):
    """A text in every field of the records that holds one, keys of records excepted."""

    def swapped(value, name=""):
        if isinstance(value, dict):
            return {key: swapped(inner, key) for key, inner in value.items() if key != "key"} | (
                {"key": value["key"]} if "key" in value else {}
            )
        if isinstance(value, list):
            return [swapped(inner) for inner in value]
        return text if isinstance(value, str) and name not in ("process_id", "decoder", "stop") else value

    def make(folder, victim):
        with closing(sqlite3.connect(folder / DATABASE)) as connection:
            for table, column in (("meta", "value"), ("processes", "body"), ("samples", "body"), ("scores", "body")):
                for old in {row[0] for row in connection.execute(f"SELECT {column} FROM {table}")}:
                    new = json.dumps(swapped(json.loads(old)))
                    connection.execute(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", (new, old))
            connection.commit()

    return make


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"
DEEP = "[" * NESTED + "]" * NESTED
RENAMED = "ALTER TABLE scores RENAME TO real_scores"

# Directories that no command reads.
REFUSED = {
    "journal with a super-journal": journal,
    "journal that is empty": written(f"{DATABASE}-journal", b""),
    "journal that is a pipe": pipe(f"{DATABASE}-journal"),
    "records that are a link": moved_and_linked(DATABASE),
    "records that are a link to the victim": link(DATABASE),
    "records that are a device": link(DATABASE, target="/dev/zero"),
    "records that are a pipe": pipe(DATABASE),
    "records that are a socket": a_socket(DATABASE),
    "log that is a link": link(f"{DATABASE}-wal"),
    "log that is a pipe": pipe(f"{DATABASE}-wal"),
    "index of the log that is a link": link(f"{DATABASE}-shm"),
    "index of the log that is a pipe": pipe(f"{DATABASE}-shm"),
    "records of holes": holes(DATABASE, 1 << 40),
    "log of holes": holes(f"{DATABASE}-wal", 1 << 40),
    "index of holes": holes(f"{DATABASE}-shm", 1 << 40),
    "lock that is a link": link("run.lock"),
    "lock that is a pipe": pipe("run.lock"),
    "run.json that is a link": link("run.json"),
    "run.json that is a pipe": pipe("run.json"),
    "results that are a link": link("results.csv"),
    "results that are a pipe": pipe("results.csv"),
    "table that is a link": link("table.md"),
    "no records": without_records,
    "empty records": written(DATABASE, b""),
    "records whose log is lost": lost_log,
    "records cut to their first page": lambda folder, victim: os.truncate(folder / DATABASE, 4096),
    "damaged bytes": damaged_pages(977),
    "pages in a circle": circle,
    "endless view of scores": sql(RENAMED, f"CREATE VIEW scores AS {ENDLESS} SELECT 'a' key, 'b' body FROM n"),
    "endless view of meta": sql(
        "ALTER TABLE meta RENAME TO m", f"CREATE VIEW meta AS {ENDLESS} SELECT x name, x value FROM n"
    ),
    "further view": sql(f"CREATE VIEW other AS {ENDLESS} SELECT x FROM n"),
    "trigger": sql("CREATE TRIGGER t AFTER INSERT ON processes BEGIN DELETE FROM samples; END"),
    "virtual table": sql("CREATE VIRTUAL TABLE other USING fts5(x)"),
    "virtual table for scores": sql(RENAMED, "CREATE VIRTUAL TABLE scores USING fts5(key, scorer, metric, body)"),
    "generated column": sql("ALTER TABLE samples ADD COLUMN g AS (hex(zeroblob(1000000000)))"),
    "column more": sql("ALTER TABLE samples ADD COLUMN more"),
    "index on an expression": sql("CREATE INDEX i ON samples (hex(zeroblob(sample)))"),
    "partial index": sql("CREATE INDEX i ON scores (metric) WHERE length(body) > 3"),
    "check": sql(
        "UPDATE sqlite_master SET sql = replace(sql, 'trace BLOB', 'trace BLOB CHECK (hex(zeroblob(9)))') "
        "WHERE name = 'samples'",
        schema=True,
    ),
    "table that is another's root": sql(
        "UPDATE sqlite_master SET rootpage = (SELECT rootpage FROM sqlite_master WHERE name = 'scores') "
        "WHERE name = 'samples'",
        schema=True,
    ),
    "schema that is no SQL": sql("UPDATE sqlite_master SET sql = 'CREATE nothing' WHERE name = 'samples'", schema=True),
    "many tables": sql(*(f"CREATE TABLE t{number} (x)" for number in range(3000))),
    "schema 0": sql("PRAGMA user_version = 0"),
    "schema below 0": sql("PRAGMA user_version = -5"),
    "later schema": sql("PRAGMA user_version = 77"),
    "another program": sql("PRAGMA application_id = 5"),
    "no meta": sql("DELETE FROM meta"),
    "no processes": sql("DELETE FROM processes"),
    "deep manifest": sql(("UPDATE meta SET value = ?", (DEEP,))),
    "deep object as manifest": sql(("UPDATE meta SET value = ?", ('{"settings":' * 5000 + "1" + "}" * 5000,))),
    "deep process": sql(("UPDATE processes SET body = ?", (DEEP,))),
    "deep sample": sql(("UPDATE samples SET body = ?", (DEEP,))),
    "deep settings": sql(
        ("UPDATE samples SET body = json_set(body, '$.settings', json(?))", ("[" * 400 + "]" * 400,)),
    ),
    "large sample": sql("UPDATE samples SET body = hex(zeroblob(40000000))"),
    "sample of lists": sql(("UPDATE samples SET body = ?", ("[" + "[]," * 9_000_000 + "1]",))),
    "sample that is a blob": sql("UPDATE samples SET body = zeroblob(100)"),
    "sample not in UTF-8": sql("UPDATE samples SET body = CAST(x'ff41' AS TEXT)"),
    "unknown process": sql("UPDATE samples SET body = json_set(body, '$.process_id', 'nobody')"),
}

# Directories that only the commands refuse that read what was changed.
DAMAGED = {
    "bomb of numbers": trace(deflated(b"0,", 20_000)),
    "bomb of lists": trace(deflated(b"[],", 1_000)),
    "bomb of blanks": trace(deflated(b" ", 20_000)),
    "cut deflation": trace(deflated(b"0,", 1)[:-9]),
    "bytes behind the deflation": trace(deflated(b"0,", 1) + b"x" * 1_000_000),
    "deep trace": trace(b"j" + DEEP.encode()),
    "deflated deep trace": trace(b"z" + zlib.compress(DEEP.encode())),
    "trace of another form": trace(b"m\x93\x01"),
    "trace that is a text": sql("UPDATE samples SET trace = 'text'"),
    "trace that is a number": sql("UPDATE samples SET trace = 5"),
    "trace that is no list": trace(b"j5"),
    "event of an unknown kind": events(["nothing", 0]),
    "event that is too long": events(["stop", -1, "eos", 3, 4]),
    "event without its number": events(["forward"]),
    "wrong number of an event": events(["fix", 7, [0], [1]]),
    "far position": events(["forward", 0, "plan", 1, 0], ["fix", 0, [10**12], [1]]),
    "negative position": events(["forward", 0, "plan", 1, 0], ["fix", 0, [-1], [1]]),
    "large token": events(["forward", 0, "plan", 1, 0], ["fix", 0, [0], [10**12]]),
    "token that is a text": events(["forward", 0, "plan", 1, 0], ["fix", 0, [0], ["a"]]),
    "unequal lengths": events(["forward", 0, "plan", 1, 0], ["draft", 0, [0, 1], [1]]),
    "huge number of rows": events(["forward", 0, "plan", 10**300, 0]),
    "kind that is an object": events(["forward", 0, {"a": 1}, 1, 0]),
    "reason that is a list": events(["stop", -1, [], 0]),
}

# Directories that are read, or whose change only the writer minds: no command may be led by what was added.
HARMLESS = {
    "text that acts everywhere": everywhere(SPEAKING),
    "decoder that is a file": foreign_decoder,
    "lock that is a hard link": hard_link("run.lock"),
    "run.json that is deep": written("run.json", DEEP.encode()),
    "leftover that is a pipe": pipe(".run.json.abcdefgh"),
    "leftover that is a link": link(".run.json.abcdefgh"),
    "rescored that is a link": lambda folder, victim: (folder / "rescored").symlink_to(victim.parent / "elsewhere"),
    "partial verdicts that are a pipe": pipe("rescored/ours.csv.partial"),
    "log of random bytes": log_of(os.urandom(40_000)),
    "log that is cut after its header": log_of(
        bytes.fromhex("377f0682002de218000010000000000011111111222222229e0ca4a5cd23b3f2")
    ),
    "log of random bytes without an index": log_of(os.urandom(40_000), index=None),
    "log with a random index": log_of(b"\x37\x7f\x06\x82" + os.urandom(9000), index=os.urandom(32768)),
    "index without a log": written(f"{DATABASE}-shm", os.urandom(32768)),
}
