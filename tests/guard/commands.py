"""Runs commands one after another in one process, so that torch is imported once; says how each ended."""

import contextlib
import io
import json
import runpy
import sys
import time
import traceback
from pathlib import Path


def outcome(module: str, arguments: list[str]) -> dict:
    """Status and output of `python -m MODULE ARGUMENTS`."""
    printed, told = io.StringIO(), io.StringIO()
    status: object = 0
    started = time.process_time()
    sys.argv = [module, *arguments]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code or 0
        except BaseException:  # noqa: BLE001 - what a command raises is its outcome, and the next one is run
            traceback.print_exc()
            status = "raised"
    return {
        "status": status,
        "stdout": printed.getvalue(),
        "stderr": told.getvalue()[-4000:],
        "seconds": time.process_time() - started,
    }


if __name__ == "__main__":
    asked, answers = map(Path, sys.argv[1:])
    done: dict[str, dict] = {}
    for name, module, arguments in json.loads(asked.read_text()):
        done[name] = outcome(module, arguments)
        # After each, so that what ends this process takes no more than one command with it.
        answers.write_text(json.dumps(done))
