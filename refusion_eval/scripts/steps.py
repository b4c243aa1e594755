"""Commands that a script runs one after the other: options, printing, signals and exit status."""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

# Exit status of a command that finished, but with samples that failed or differ.
EXIT_INCOMPLETE = 3

# A sender such as `timeout` signals a process both alone and with its group: two equal signals this close are one.
SAME_SIGNAL_SECONDS = 1.0


class Parser(argparse.ArgumentParser):
    """Options of a script. A shell script puts --called-by SCRIPT FOLDER PYTHON check|run before those of the user."""

    def __init__(self, arguments: Sequence[str], command: str, description: str) -> None:
        self.script, here, self.python, stage, self.options = "", os.getcwd(), sys.executable, "run", list(arguments)
        if arguments[:1] == ["--called-by"]:
            _, self.script, here, self.python, stage, *self.options = arguments
        self.here, self.checks_only = Path(here), stage == "check"
        variables = (
            "Environment: PYTHON (python3), REFUSION_EVAL_VENV (.venv), REFUSION_EVAL_TORCH_INDEX (index of PyTorch's\n"
            "builds; `default` is that of pip or uv; unset, a Linux machine without an NVIDIA GPU gets the CPU build)."
        )
        super().__init__(
            prog=f"bash {self.script}" if self.script else f"refusion-eval {command}",
            description=description,
            epilog=variables if self.script else None,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("--dry-run", action="store_true", help="print the commands instead of running them")
        if self.script:
            self.add_argument("--setup", action="store_true", help="make the environment and stop")

    def read(self) -> argparse.Namespace:
        """Reads the user's options. An option that is not given becomes an empty text."""
        given = self.parse_args(self.options)
        return argparse.Namespace(**{name: "" if value is None else value for name, value in vars(given).items()})

    def error(self, message: str) -> NoReturn:
        """Prints one line about a wrong option and exits with status 2."""
        message = re.sub(r"^unrecognized arguments: (\S+).*", r"unknown option '\1'", message)
        message = re.sub(r"^argument (\S+): expected one argument", r"\1 needs a value", message)
        message = re.sub(r"^argument (\S+): ", r"\1", message)
        print(f"{self.script or self.prog}: {message}; {self.prog} --help lists the options", file=sys.stderr)
        sys.exit(2)

    # Types of options. The text of each error follows the name of the option.

    def path(self, text: str) -> str:
        """A path, which may be relative to the user's folder."""
        return text if text.startswith("/") else f"{self.here}/{self.text(text)}"

    def folder(self, text: str) -> str:
        """A folder that exists."""
        if not os.path.isdir(self.path(text)):
            raise argparse.ArgumentTypeError(f": there is no directory '{text}'")
        return self.path(text)

    def checkpoint(self, text: str) -> str:
        """A folder, which becomes absolute, or a hub id."""
        return self.path(text) if os.path.isdir(self.path(text)) else text

    def tasks(self, text: str) -> str:
        """Names of tasks, separated by commas, and task files, which become absolute."""
        is_file = (".yaml", ".yml")
        return ",".join(self.path(name) if name.endswith(is_file) else name for name in self.text(text).split(","))

    @staticmethod
    def text(text: str) -> str:
        """Text that is not empty."""
        if not text:
            raise argparse.ArgumentTypeError(" needs a value")
        return text


def whole_number(rule: str, low: int) -> Callable[[str], str]:
    """Returns the type of an option that takes a whole number of at least `low`; messages say `rule`."""

    def read(text: str) -> str:
        if not (text.isascii() and text.isdigit()) or int(text) < low:
            raise argparse.ArgumentTypeError(f" is '{text}', it must be a whole number {rule}")
        return text

    return read


def base_name(path: str) -> str:
    """Returns the last part of a path or a hub id."""
    return path.rstrip("/").rpartition("/")[2]


class Steps:
    """Prints and runs commands one at a time, and sends signals on to the running command; a dry run only prints.

    Each command is a process group of its own, so that a key such as Ctrl-C reaches it once, through this process.
    After a signal the running command may finish its work; then the script ends with the command's status.
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
        """Prints a command, runs it and returns its exit status: 128 + N if signal N ended it, 0 in a dry run.

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
