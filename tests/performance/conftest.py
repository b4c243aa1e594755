"""Runs the scripts of `performance/` in this process."""

import sys

import pytest
from command import run_script


@pytest.fixture
def script(monkeypatch, capsys):
    """Runs a script's command and returns its exit status, output and error output."""

    def run(command, *arguments):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            run_script(command)
        return stopped.value.code or 0, *capsys.readouterr()

    return run
