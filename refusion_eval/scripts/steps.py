"""Commands that a script runs one after the other: options, printing, signals and exit status."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

# What the shell scripts put before the user's own options; see `read_caller`.
CALLER = "--called-by"

# A sender such as `timeout` signals a process both alone and with its group: two equal signals this close are one.
SAME_SIGNAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asked for the steps.

    Attributes:
        script: eval.sh or train.sh; empty for `refusion-eval`.
        command: the command line that error messages point to.
        here: folder that relative paths of the user start from.
        python: the interpreter that runs the steps.
        checks_only: whether the options are checked and nothing is printed or run.
    """

    script: str
    command: str
    here: Path
    python: str
    checks_only: bool

    def fail(self, message: str) -> SystemExit:
        """Returns the exit with status 2 after printing one line about a wrong option."""
        print(f"{self.script or self.command}: {message}; {self.command} --help lists the options", file=sys.stderr)
        return SystemExit(2)

    def absolute(self, path: str) -> str:
        """Returns a path as seen from where the user stands."""
        return path if path.startswith("/") else f"{self.here}/{path}"

    def checkpoint(self, name: str) -> str:
        """Makes a folder absolute and leaves a hub id as it is."""
        path = self.absolute(name)
        return path if os.path.isdir(path) else name


def read_caller(arguments: Sequence[str], command: str) -> tuple[Caller, list[str]]:
    """Separates what a shell script put before the options: CALLER SCRIPT FOLDER PYTHON check|run.

    Args:
        arguments: all arguments.
        command: name of the command of `refusion-eval` that does the same.
    """
    if arguments[:1] != [CALLER]:
        here = Path.cwd()
        caller = Caller(
            script="", command=f"refusion-eval {command}", here=here, python=sys.executable, checks_only=False
        )
        return caller, list(arguments)
    script, here_text, python, stage = arguments[1:5]
    checks_only = stage == "check"
    caller = Caller(
        script=script, command=f"bash {script}", here=Path(here_text), python=python, checks_only=checks_only
    )
    return caller, list(arguments[5:])


@dataclass(frozen=True, slots=True)
class Options:
    """Options as the user gave them.

    Attributes:
        values: option -> its last value.
        flags: options without a value that were given.
        repeated: option and value of those that may be repeated, in order.
    """

    values: Mapping[str, str]
    flags: Set[str]
    repeated: Sequence[tuple[str, str]]


def read_options(
    arguments: Sequence[str],
    caller: Caller,
    *,
    with_value: Collection[str],
    flags: Collection[str],
    repeatable: Collection[str] = (),
) -> Options:
    """Reads "--option value" and "--flag".

    Raises:
        SystemExit: an option is unknown or lacks its value.
    """
    values: dict[str, str] = {}
    given: set[str] = set()
    repeated: list[tuple[str, str]] = []
    rest = list(arguments)
    while rest:
        option = rest.pop(0)
        if option in flags:
            given.add(option)
        elif option in with_value or option in repeatable:
            if not rest or not rest[0]:
                raise caller.fail(f"{option} needs a value")
            value = rest.pop(0)
            if option in repeatable:
                repeated.append((option, value))
            else:
                values[option] = value
        else:
            raise caller.fail(f"unknown option '{option}'")
    return Options(values, given, repeated)


def whole_number(option: str, text: str, low: int, caller: Caller) -> int:
    """Reads a whole number of at least `low`.

    Raises:
        SystemExit: the text is no such number.
    """
    if not (text.isascii() and text.isdigit()) or int(text) < low:
        raise caller.fail(f"{option} is '{text}', it must be a whole number of at least {low}")
    return int(text)


class Steps:
    """Runs commands one at a time, each printed first, and hands signals to the command that runs.

    Each command is a process group of its own, so that a key such as Ctrl-C reaches it once, from here. After a signal
    the running command may finish what it has to; then the script ends with the command's status.

    Args:
        dry_run: only print the commands.
    """

    def __init__(self, *, dry_run: bool) -> None:
        self.dry_run = dry_run
        self._process: subprocess.Popen | None = None
        self._starting = False
        self._missed: int | None = None  # a signal that arrived while the process was being started
        self._last: int | None = None
        self._last_time = 0.0
        if dry_run:
            return
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
                signal.signal(number, self._hand_on)
        signal.signal(signal.SIGTSTP, self._pause)

    def run(self, *command: str) -> int:
        """Prints a command and runs it.

        Returns:
            Its exit status, 128 + N if signal N ended it; 0 in a dry run.

        Raises:
            SystemExit: a signal asked the script to end.
        """
        print("+", shlex.join(command), flush=True)
        if self.dry_run:
            return 0
        self._starting = True
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
        self._starting = False
        if self._missed is not None:
            self._process.send_signal(self._missed)
        status = self._process.wait()
        self._process = None
        if status < 0:
            status = 128 - status
        if self._last is not None:
            raise SystemExit(status if status > 128 else 128 + self._last)
        return status

    def _hand_on(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if number == self._last and now - self._last_time < SAME_SIGNAL_SECONDS:
            return
        self._last, self._last_time = number, now
        if self._process is not None:
            self._process.send_signal(number)
        elif self._starting:
            self._missed = number
        else:
            raise SystemExit(128 + number)

    def _pause(self, _: int, __: FrameType | None) -> None:
        """Stops the running command and the script at Ctrl-Z, and lets both go on together."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
