"""LiveCodeBench: problems of programming contests with the date of each (arXiv 2403.07974).

A program reads standard input, or is a method that is called. It is judged as by the public checker of 2025
(`lcb_runner/evaluation/testing_util.py`), with the differences that `tasks/livecodebench/README.md` lists.
"""

import base64
import functools
import json
import pickletools
import re
import zlib
from datetime import date, datetime
from typing import Any, NamedTuple

from refusion_eval.benchmarks import Benchmark, CodeTest, Extraction, Prompts
from refusion_eval.benchmarks.extract.programs import fenced, whole_program
from refusion_eval.benchmarks.rows import ID, TEXT, ColumnType, Row, Source
from refusion_eval.errors import DataError


class _File(NamedTuple):
    name: str
    before: date  # all its contests, and those of the files before it, are older
    num_rows: int


# Release n is the first n files.
_FILES = (
    _File("test", date(2024, 4, 1), 400),
    _File("test2", date(2024, 6, 1), 111),
    _File("test3", date(2024, 8, 1), 101),
    _File("test4", date(2024, 10, 1), 101),
    _File("test5", date(2025, 2, 1), 167),
    _File("test6", date(2025, 5, 1), 175),
)
_NAME = re.compile(r"livecodebench_v([1-6])_(\d{4}_\d\d(?:_\d\d)?)_(\d{4}_\d\d(?:_\d\d)?)")

# What a pickle consists of that holds one text and nothing else.
_OF_A_TEXT = {
    *("PROTO", "FRAME", "STOP", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
}
_LONGEST_ROW = 256 << 20  # bytes; the rows of release 4 have 12 million on average
_MOST_TEST_BYTES = 512 << 20  # of the tests of a row, unpacked

# Seconds of own time that a program has for one test, and for all: their number is not known here.
_SECONDS_PER_TEST, _SECONDS = 6.0, 600.0
_MEMORY_MB = 4096  # the tests count too


def _is_date(value: object) -> bool:
    try:
        datetime.fromisoformat(str(value))
    except ValueError:
        return False
    return isinstance(value, str)


_DATE = ColumnType(_is_date, "a date such as 2025-01-04T00:00:00")

# Runs in the program's process. Each test of a program that reads its input has a process of its own, in which the
# program finds what a shell gives to a process: its input on descriptor 0, its output on descriptor 1, and an end at
# which threads are waited for, handlers run and buffers are written. The sandbox has no /dev/stdin and no /proc, so the
# names of these descriptors are told apart here. The names that a program finds without importing them are those of the
# public checker.
_RUNNER = """
import atexit
import builtins
import functools
import io
import json
import os
import random
import sys
import threading
import types

ALL_OF = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
)
MODULES = [name for name in ALL_OF if name not in ("builtins", "typing")]
NAMES = "\\n".join([*map("from {} import *".format, ALL_OF), *map("import {}".format, MODULES)])
CODE = compile(PROGRAM, "program.py", "exec", dont_inherit=True)
STREAMS = {f"/{name}/{number}": number for name in ("dev/fd", "proc/self/fd") for number in (0, 1)}
STREAMS |= {"/dev/stdin": 0, "/dev/stdout": 1}
ENDED_BY_EXCEPTION = 113  # an exit status that no program uses
plain_open, plain_os_open = open, os.open
builtins.exit = builtins.quit = sys.exit


def run(name):
    module = sys.modules[name] = types.ModuleType(name)
    exec(NAMES, module.__dict__)
    sys.setrecursionlimit(50_000)
    sys.set_int_max_str_digits(50_000)
    exec(CODE, module.__dict__)
    return module


def stream_of(file):
    if isinstance(file, (str, bytes, os.PathLike)) and (number := STREAMS.get(os.fsdecode(file))) is not None:
        return os.dup(number)


def open_file(file, *arguments, **options):
    number = stream_of(file)
    return plain_open(file if number is None else number, *arguments, **options)


def os_open(path, *arguments, **options):
    number = stream_of(path)
    return plain_os_open(path, *arguments, **options) if number is None else number


def be_process():
    text = dict(encoding="utf-8", errors="surrogatepass", closefd=False)
    sys.stdin = sys.__stdin__ = open(0, **text)
    sys.stdout = sys.__stdout__ = printed = open(1, "w", **text)
    builtins.open, io.open, os.open = open_file, open_file, os_open
    random.seed(0)  # each process draws the same
    os.setpgid(0, 0)
    try:
        run("__main__")
    except SystemExit:
        pass
    threading._shutdown()
    atexit._run_exitfuncs()
    for _ in range(2):
        for stream in (sys.stdout, printed):
            try:
                stream.flush()
            except Exception:  # closed, detached, or of the program's own class
                pass
        vars(sys.modules["__main__"]).clear()  # which closes files that only the program had


def livecodebench_output(text):
    for number, content in ((0, text.encode("utf-8", "surrogatepass")), (1, b"")):
        os.ftruncate(number, 0)
        os.pwrite(number, content, 0)
        os.lseek(number, 0, os.SEEK_SET)
    parent, spare = os.getpid(), os.dup(0)
    child = os.fork()
    if not child:
        status = 0
        try:
            be_process()
        except BaseException as error:
            status = ENDED_BY_EXCEPTION
            if os.getppid() == parent:  # else it is a child of the program, whose errors are its own
                os.ftruncate(spare, 0)
                os.pwrite(spare, f"{type(error).__name__}: {error}"[:300].encode("utf-8", "replace"), 0)
        finally:
            os._exit(status)
    os.close(spare)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    if os.WEXITSTATUS(status) == ENDED_BY_EXCEPTION:
        told = os.pread(0, 300, 0).decode("utf-8", "replace")
        raise (MemoryError if told.startswith("MemoryError") else RuntimeError)(told)
    return os.pread(1, os.fstat(1).st_size, 0).decode("utf-8", "replace")


@functools.cache
def solution():
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # what is printed here is nobody's
    module = run("solution")
    return module.Solution() if "class Solution" in PROGRAM else module


def is_json(value):
    return all(map(is_json, value)) if type(value) is list else value is None or type(value) in (bool, int, float, str)


def livecodebench_value(name, text):
    arguments = [json.loads(line) for line in text.split("\\n")]
    value = getattr(solution(), name)(*arguments)
    value = list(value) if isinstance(value, tuple) else value
    # A text takes a fraction of the time of a list with as many values; what is no JSON is handed over as it is.
    return (True, json.dumps(value)) if is_json(value) else (False, value)
"""

# Runs in the process of the test, which has no more rights than a program; a malformed test is found before all tests.
_COMPARISON = """
import base64
import decimal
import io
import json
import pickle
import zlib


class LivecodebenchText(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError("the tests are more than a text")


def livecodebench_decimals(line):
    return [decimal.Decimal(word) for word in line.split()]


def livecodebench_lines(text):
    return [line.strip() for line in text.strip().split("\\n")]


def livecodebench_is_right(line, expected):
    if line == expected:
        return True
    try:
        return livecodebench_decimals(line) == livecodebench_decimals(expected)
    except ArithmeticError:
        return False


def livecodebench_arguments(text):
    for line in text.split("\\n"):
        json.loads(line)
    return text


def livecodebench_check_output(output_of):
    for text, expected in livecodebench_tests:
        output = output_of(text)
        assert type(output) is str  # each method of an object would be a call of its own, with its own time
        lines = livecodebench_lines(output)
        assert len(lines) == len(expected)
        assert all(map(livecodebench_is_right, lines, expected))


def livecodebench_check_value(value_of, name):
    for arguments, expected in livecodebench_tests:
        is_json, value = value_of(name, arguments)
        assert (json.loads(value) if is_json else value) == expected
"""
_UNPACKED = "LivecodebenchText(io.BytesIO(zlib.decompress(base64.b64decode({!r})))).load()"


def _tests(text: str) -> str:
    """Source of the tests of a column, which are JSON, or base64 of zlib of a pickle of it."""
    return f"json.loads({repr(text) if text.lstrip().startswith('[') else _UNPACKED.format(text)})"


def _test(row: Row) -> CodeTest:
    tests = " + ".join(_tests(row[column]) for column in ("public_test_cases", "private_test_cases"))
    if row["func_name"]:
        check = f"livecodebench_check_value(livecodebench_value, {row['func_name']!r})\n"
        pair = 'livecodebench_arguments(test["input"]), json.loads(test["output"])'
    else:
        check = "livecodebench_check_output(livecodebench_output)\n"
        pair = 'test["input"], livecodebench_lines(test["output"])'
    helpers = f"{_COMPARISON}\nlivecodebench_tests = [({pair}) for test in {tests}]\nassert livecodebench_tests\n"
    return CodeTest(
        test=check,
        helpers=helpers,
        timeout_s=_SECONDS,
        call_s=_SECONDS_PER_TEST,
        memory_mb=_MEMORY_MB,
        runner=_RUNNER,
    )


def _as_read(start: date, end: date, row: Row, _number: int) -> dict[str, Any] | None:
    if not start <= datetime.fromisoformat(row["contest_date"]).date() < end:
        return None
    try:
        metadata = json.loads(row["metadata"] or "{}")
    except ValueError:
        metadata = None
    func_name = (metadata.get("func_name") or "") if isinstance(metadata, dict) else None
    if not isinstance(func_name, str):
        told = "metadata is no JSON object, or its func_name no text; correct the row"
        raise DataError(f"livecodebench: {row['question_id']}: {told}")
    names = ("question_id", "question_content", "contest_date", "starter_code", "public_test_cases")
    return {name: row[name] for name in (*names, "private_test_cases")} | {"func_name": func_name}


def _gold(row: Row) -> str:
    """Nothing, because there are no right programs; DataError where tests are packed in a way that is not read."""
    for column in ("public_test_cases", "private_test_cases"):
        text = row[column]
        if not text.lstrip().startswith("["):
            try:
                _check_pickle(base64.b64decode(text, validate=True))
            except (ValueError, zlib.error) as problem:
                raise DataError(f"livecodebench: {column} of {row['question_id']}: {problem}") from problem
    return ""


def _check_pickle(packed: bytes) -> None:
    """ValueError unless the bytes are a pickle that holds a text, and nothing that runs when it is unpickled."""
    unpacker = zlib.decompressobj()
    content = unpacker.decompress(packed, _MOST_TEST_BYTES)
    if not unpacker.eof:
        raise ValueError(f"its end is missing, or it has more than {_MOST_TEST_BYTES >> 20} MiB")
    if more := {opcode.name for opcode, _, _ in pickletools.genops(content)} - _OF_A_TEXT:
        raise ValueError(f"its pickle holds more than a text ({', '.join(sorted(more))}), and is not read")


def _no_program(_row: Row) -> str:
    raise DataError("livecodebench has no right programs, only tests; score texts of a model with --outputs FILE")


def _user(row: Row) -> str:
    question, starter = row["question_content"].strip(), row["starter_code"]
    if starter.strip():
        return f"{question}\n\nComplete this class. Reply with the whole class in a python block.\n\n{fenced(starter)}"
    return (
        f"{question}\n\nWrite a program that reads standard input and writes the answer to standard output. Reply with "
        "the whole program in a python block."
    )


def _program(text: str, row: Row) -> Extraction:
    name = row["func_name"]
    return whole_program(text, ("class Solution", f"def {name}") if name else ("print", "stdout", "write"))


def _day(text: str) -> date:
    return date(*map(int, [*text.split("_"), "1"][:3]))


@functools.cache
def named(name: str) -> Benchmark | None:
    """The benchmark `livecodebench_v6_2025_02_2025_05`: what release 6 has from February 2025 up to the end of April.

    The window ends before the second date. Both dates may have a day, as `2025_02_15`. None for other names.
    """
    parts = _NAME.fullmatch(name)
    if parts is None:
        return None
    try:
        start, end = map(_day, parts.groups()[1:])
    except ValueError:
        return None
    files = [file for file in _FILES[: int(parts[1])] if file.before > start]
    if not files or start >= end:
        return None
    return Benchmark(
        name=name,
        title=f"LiveCodeBench v{parts[1]}, {start} to {end}",
        order=29,
        kind="code",
        source=Source(
            hub="livecodebench/code_generation_lite",
            split="+".join(file.name for file in files),
            num_rows=sum(file.num_rows for file in files),
            is_file=True,
            sorted_by="date",
            longest_row=_LONGEST_ROW,
            columns={
                "question_id": ID,
                "contest_date": _DATE,
                **dict.fromkeys(("question_content", "starter_code", "metadata"), TEXT),
                **dict.fromkeys(("public_test_cases", "private_test_cases"), TEXT),
            },
        ),
        gold=_gold,
        ours=Prompts(
            user=_user,
            gold_text=_no_program,
            filters={"first": _program},
            normalise=functools.partial(_as_read, start, end),
            version="1.1",
        ),
        id_column="question_id",
        test=_test,
        rows_of="livecodebench",
        settings_of="humaneval",
    )


# The windows of many reports: 131 problems, and 279.
BENCHMARK = named("livecodebench_v6_2025_02_2025_05")
VARIANTS = (named("livecodebench_v5_2024_08_2025_02"),)
