"""The command line as its users meet it, and what a refusal must look like."""

import logging
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from refusion_eval.cli import main
from refusion_eval.paths import embedded_path

DATABASE = "records.sqlite"


class FrontEnd:
    """Runs commands in this process, as `python -m refusion_eval` does."""

    def __init__(self, monkeypatch, capsys):
        self._monkeypatch, self._capsys = monkeypatch, capsys
        # Libraries log to what stderr was when they were imported: another test's, which is closed by now.
        monkeypatch.setattr(logging, "raiseExceptions", False)

    def run(self, *arguments):
        """Returns exit status and error output; an exception that is no refusal comes through."""
        self._monkeypatch.setattr(sys, "argv", ["refusion-eval", *map(str, arguments)])
        logger = logging.getLogger("refusion_eval")
        before, logger.handlers = logger.handlers, []  # each command adds its own
        self._capsys.readouterr()
        try:
            main()
            status = 0
        except SystemExit as stopped:
            status = stopped.code
        finally:
            logger.handlers = before
        return status, self._capsys.readouterr().err

    def refusal(self, *arguments):
        """Runs what must be refused and returns the error's text behind "error: "."""
        status, text = self.run(*arguments)
        assert status not in (0, None), text
        return error_of(text)


def error_of(text):
    """The one error in what a command wrote to stderr: one line, the last one."""
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, text
    assert text.splitlines()[-1] == errors[0], f"more than one line:\n{text}"
    assert "Traceback" not in text, text
    return errors[0].removeprefix("error: ")


def records(run_dir):
    """Every stored sample, trace and score of a run, byte for byte."""
    with closing(sqlite3.connect(run_dir / DATABASE)) as connection:
        return [
            sorted(connection.execute(f"SELECT * FROM {table}").fetchall(), key=repr) for table in ("samples", "scores")
        ]


def copy_checkpoint(target):
    """A copy of a small checkpoint of the package, to be damaged."""
    shutil.copytree(embedded_path("refusion"), target, dirs_exist_ok=True)
    return Path(target)
