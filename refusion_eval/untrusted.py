"""Files, texts and computations of strangers, within bounds."""

import ast
import contextlib
import functools
import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from refusion_eval.own_time import OwnTime, Proc, longest_wall_s

LARGEST = 64 << 20  # of a file that is read whole, and of a JSON text: the largest tokenizers have files of some 35 MB
MOST_VALUES = 6_000_000  # of one JSON text: each takes up to 200 bytes once it is parsed
# Lists and mappings inside each other. Python's own limit is near 1000, and functions that walk through a value need
# several calls for each level.
DEEPEST = 64

# The first answer of a process also waits for its imports, which take some seconds, and more from a slow disk.
_START_SECONDS = 180.0
# Where a process dies of itself, is slow to start, or gets no time: nothing of that says anything about the question.
_ATTEMPTS = 2
_TICK_SECONDS = 0.05

# Python 3.11.0 to 3.11.7 and 3.12.0 to 3.12.1 count the depth of all trees that threads build at the same time in one
# number, and then end with SystemError or with the RecursionError of a text that is too deep.
_PARSER = threading.RLock()

# Variables without secrets, and beginnings of the names of such.
_PLAIN = {"PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"}
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH")
_PLAIN_BEGINNINGS = ("LC_", "OMP_", "MKL_", "CUDA_", "NVIDIA_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_")

# Control characters (C0 and C1), marks that reorder or hide text, line separators, and halves of surrogate pairs.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: str, keep: str = "") -> str:
    r"""Text that a terminal shows and does not obey: each character with an effect is written as its escape (\x1b)."""
    return _UNSAFE.sub(lambda match: match[0] if match[0] in keep else match[0].encode("unicode_escape").decode(), text)


@contextlib.contextmanager
def python_parser() -> Iterator[None]:
    """Python's parser for this thread alone, without its warnings, whose filters are those of all threads, too."""
    with _PARSER, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def parse_python(code: str) -> ast.Module:
    """`ast.parse` for any number of threads; its errors."""
    with python_parser():
        return ast.parse(code)


def names_code(decoder: str) -> bool:
    """Whether a decoder is given by the place of its code, FILE.py:NAME or MODULE:NAME, and not by its own name."""
    return ":" in decoder


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a plain file, or a link to a file; OSError at once for a pipe, which may have no writer for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(21, "it is a folder", os.fspath(path))
    raise OSError(f"it is a {kind_of(mode)}, not a plain file")


def kind_of(mode: int) -> str:
    """The kind of a file in words, by its `st_mode`."""
    kinds = {"l": "symbolic link", "p": "named pipe", "s": "socket", "d": "folder", "-": "file"}
    return kinds.get(stat.filemode(mode)[0], "device")


def read_plain(path: str | os.PathLike[str], largest: int = LARGEST) -> bytes:
    """The content of a plain file; OSError for more than `largest` bytes, and as `open_plain`."""
    with open_plain(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(f"it is larger than {largest >> 20} MiB")
    return content


def read_text(path: str | os.PathLike[str], largest: int = LARGEST) -> str:
    """The text of a UTF-8 file with line feeds as line ends; OSError as `read_plain`, or UnicodeDecodeError."""
    return read_plain(path, largest).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def parse_json(
    text: str | bytes,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
    largest: int = LARGEST,
) -> Any:
    """The value of a JSON text; ValueError if it is malformed, too long, or nested too deeply. See `json.loads`."""
    if len(text) > largest:
        raise ValueError(f"longer than {largest >> 20} MiB")
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # json.loads would take other encodings
    counts = [text.count(mark) for mark in ",[{"]
    if sum(counts) > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES} values")
    try:
        value = json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if sum(counts[1:]) > DEEPEST:
        check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raises ValueError for lists and mappings that are nested too deeply for functions that walk through them."""
    level = [value] if type(value) in (list, dict) else []
    for _ in range(DEEPEST):
        children = [node.values() if type(node) is dict else node for node in level if node]
        level = [child for values in children for child in values if type(child) is list or type(child) is dict]
    if level:
        raise ValueError("nested too deeply")


@functools.cache
def _proc() -> Proc:  # one open descriptor for all
    return Proc()


def environment_without_keys() -> dict[str, str]:
    """The variables of this process that a program needs to start and compute, and no other, which may be a key."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _PLAIN or (name.startswith(_PLAIN_BEGINNINGS) and not _SECRET.search(name))
    }


class NoTimeError(TimeoutError):
    """The machine was too busy to give a process its time."""


class Child:
    """A process that computes what may hang or use up its memory, started when first asked and again after each death.

    Only one thread at a time may ask. The script reads questions as JSON lines, the first of them `first`, and answers
    each with a JSON line. Its time is the own time of the process, of its threads and of its children. Without
    `environment` it has the variables of this process. `start_s` is the own time that it may need until it answers
    `first`.
    """

    def __init__(
        self, script: Path, first: Any, environment: Mapping[str, str] | None = None, start_s: float = _START_SECONDS
    ) -> None:
        self._script, self._first, self._environment, self._start_s = script, first, environment, start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._is_given_up = False
        self._proc = _proc()
        self.seconds = 0.0  # of own time that all answers took

    def ask(self, question: Any, timeout_s: float) -> Any | None:
        """The answer; None if it took too long, or if the process died and its replacement as well.

        Raises:
            ChildProcessError: the process ends before it has started; says what it wrote last.
            TimeoutError: it has not started in time, at two attempts.
            NoTimeError: the machine gave it no time to answer, at two attempts.
        """
        for attempt in range(_ATTEMPTS):
            if self._is_given_up:
                break
            process = self._running()
            try:
                line = self._ask(process, question, timeout_s)
            except NoTimeError:
                self.close()
                if attempt + 1 == _ATTEMPTS:
                    raise
                continue
            if line and line.endswith(b"\n"):
                return json.loads(line)
            # A script may limit itself: SIGPROF, which a timer of its processor time sends, counts as too long.
            if self.close() == -signal.SIGPROF or line is None:
                break
        return None

    def _ask(self, process: subprocess.Popen[bytes], question: Any, timeout_s: float) -> bytes | None:
        """The answer's line, not a whole one if the process died; None for none in time, or for one without an end."""
        assert process.stdin is not None
        assert process.stdout is not None
        own = OwnTime(self._proc.work(self._proc.tree(process.pid)).cpu_s)
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return b""
        line = b""
        while True:
            has_answered = bool(select.select([process.stdout], [], [], _TICK_SECONDS)[0])
            work = self._proc.work(self._proc.tree(process.pid))
            own.update(work.cpu_s, work.is_ready or (has_answered and work.num_tasks > 0))
            if has_answered:
                part = os.read(process.stdout.fileno(), 1 << 20)  # a line may come in parts, with no end at all
                line += part
                if not part or b"\n" in part:
                    self.seconds += own.seconds
                    end = line.find(b"\n") + 1
                    return line[:end] if end else line
                if len(line) > LARGEST:
                    return None
            elif process.poll() is not None:  # and a process that it left behind has the pipe
                return line
            if own.seconds > timeout_s:
                return None
            if own.wall_s > longest_wall_s(timeout_s):
                raise NoTimeError(f"{self._script.name} got too little time in {own.wall_s:.0f} s (busy machine)")

    def _running(self) -> subprocess.Popen[bytes]:
        # After a fork the parent still reads from the pipes of its process, so the fork starts a process of its own.
        if self._process is not None and self._owner == os.getpid():
            return self._process
        for _ in range(_ATTEMPTS):
            # -P keeps the modules of the script's folder from shadowing others.
            command = [sys.executable, "-P", str(self._script)]
            pipe = subprocess.PIPE
            with tempfile.TemporaryFile() as told:
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=told, env=self._environment)
                self._owner = os.getpid()
                line: bytes | None = None
                with contextlib.suppress(NoTimeError):
                    line = self._ask(self._process, self._first, self._start_s)
                if line:
                    return self._process
                status = self.close()
                if line is not None:
                    told.seek(0)
                    words = told.read(LARGEST).decode("utf-8", "replace").strip().rpartition("\n")[2]
                    raise ChildProcessError(f"{self._script.name} ended at its start ({words or f'status {status}'})")
        raise TimeoutError(
            f"{self._script.name} did not start within {self._start_s:g} s (busy machine), at {_ATTEMPTS} attempts"
        )

    def kill(self) -> None:
        """Ends the process while another thread waits for its answer; that thread sees the end of the pipe."""
        self._is_given_up = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> int | None:
        """Kills the process, if there is one of this process, and frees its pipes. Returns its exit status."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return None
        below = self._proc.tree(process.pid)[1:]  # which have its pipes
        process.kill()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Its pipes are not read to their end, which a process that it left behind may keep open.
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return process.wait()
