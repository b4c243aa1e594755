"""Counts the files and functions of the package that one prompt enters on its way from the command to the table.

    python performance/trace_prompt.py [--tasks gsm8k] [--list]

Runs `refusion-eval run --model embedded --limit 1` in this process under a profiler. Calls that happen while a module
is being imported do not count: they are the same for every prompt, and for none.
"""

import argparse
import contextlib
import io
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import refusion_eval
from refusion_eval.cli import main

PACKAGE = f"{Path(refusion_eval.__file__).parent}/"
INNER = ("<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Calls:
    """Functions of the package that were entered, by file."""

    def __init__(self) -> None:
        self.entered: dict[str, set[tuple[str, int]]] = defaultdict(set)

    def profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        """What `sys.setprofile` calls."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in INNER:
            function = (code.co_name, code.co_firstlineno)
            known = self.entered.get(code.co_filename[len(PACKAGE) :], ())
            if function not in known and not _is_importing(frame):
                self.entered[code.co_filename[len(PACKAGE) :]].add(function)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def trace(tasks: str) -> Calls:
    """Runs one item of every task, and returns what was entered."""
    calls = Calls()
    with tempfile.TemporaryDirectory() as run_dir:
        what = ["--model", "embedded", "--tasks", tasks, "--limit", "1"]
        sys.argv = ["refusion-eval", "run", *what, "--run-dir", run_dir]
        sys.setprofile(calls.profile)
        threading.setprofile(calls.profile)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                main()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    return calls


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="gsm8k", help="Benchmarks or task names, separated by commas.")
    parser.add_argument("--list", action="store_true", help="Also print the functions of each file.")
    options = parser.parse_args()
    found = trace(options.tasks).entered
    for file, functions in sorted(found.items()):
        names = " ".join(name for name, _ in sorted(functions, key=lambda function: function[1]))
        print(f"{len(functions):4} {file}" + (f"  {names}" if options.list else ""))
    print(f"{len(found)} files, {sum(map(len, found.values()))} functions")
