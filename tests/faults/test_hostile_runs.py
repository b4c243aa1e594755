"""Run directories of strangers, through every command that reads one: data, whatever they hold."""

import hashlib
import json
import os
import re
import shutil
import stat

import pytest

from tests.faults import hostile
from tests.faults.front_end import error_of
from tests.faults.runs import command

SECONDS, MIB = 2, 200
LONGEST = 60  # seconds until a command counts as one that never ends
OUT = "OUT"
COMMANDS = {
    "table": ("table", "RUN", "--csv", f"{OUT}/table.csv", "--markdown", f"{OUT}/table.md"),
    "compare": ("compare", "SOUND", "RUN", "--markdown", f"{OUT}/compare.md", "--csv", f"{OUT}/compare.csv"),
    "speed": ("speed", "RUN", "--csv", f"{OUT}/speed.csv", "--markdown", f"{OUT}/speed.md"),
    "report": ("report", "RUN", "--out", f"{OUT}/report.html"),
    "export": ("export", "RUN", "--out", f"{OUT}/samples.jsonl"),
    "export every-eval-ever": ("export", "RUN", "--format", "every-eval-ever", "--out", OUT),
    "leaderboard": ("leaderboard", "RUN", "--out", OUT),
    "replay": ("replay", "RUN"),
    "plot": ("plot", "figure5", "RUN", "--out", OUT),
    "claims": ("claims", "RUN", "--out", OUT),
    "paper-table": ("paper-table", "all", "RUN", "--out", OUT),
    "rescore": ("rescore", "RUN", "--tasks", "mini_gsm8k", "--out", OUT),
    "rescore beside": ("rescore", "RUN", "--tasks", "mini_gsm8k"),
    "rescore canvas": ("rescore", "RUN", "--tasks", "mini_gsm8k", "--filter", "whole-canvas", "--out", OUT),
    "rerun": ("rerun", "RUN", "--out", f"{OUT}/again"),
    "run": tuple(command("RUN")),
}
WRITERS = ("run", "rescore beside", "rescore canvas")


@pytest.fixture(scope="module")
def sound(server, tmp_path_factory):
    """A finished run, which every command has read once."""
    folder = tmp_path_factory.mktemp("sound")
    status, output = server.run(command(folder / "run"))
    assert status == 0, output
    copy = shutil.copytree(folder / "run", folder / "copy")
    server.ask({"warm": [filled(words, copy, folder / "run", folder / "out") for words in COMMANDS.values()]})
    return folder / "run"


def filled(words, run, sound, out):
    places = {"RUN": run, "SOUND": sound}
    return [str(places.get(word, word.replace(OUT, str(out)))) for word in words]


def state(folder):
    """What lies in a folder: kind of each file, and the content of plain ones that is not made of holes."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = os.lstat(path)
        if stat.S_ISDIR(kind.st_mode):
            continue
        content = b""
        if stat.S_ISREG(kind.st_mode) and kind.st_size < 1 << 28:
            content = hashlib.sha256(path.read_bytes()).digest()
        elif stat.S_ISLNK(kind.st_mode):
            content = os.readlink(path)
        found[str(path.relative_to(folder))] = (stat.S_IFMT(kind.st_mode), kind.st_size, content)
    return found


class Attacked:
    """A changed copy of the run, a file of the user that nobody may touch, and what commands do."""

    def __init__(self, server, sound, folder, make):
        self._server, self._sound, self.out = server, sound, folder / "out"
        self.run_dir, self._victim = folder / "run", folder / "victim"
        shutil.copytree(sound, self.run_dir)
        self._victim.write_text("of value\n")
        make(self.run_dir, self._victim)

    def read(self, *names):
        """Runs commands one after another, as `fork_server` does; they end soon, in little memory, and touch nothing.

        Returns:
            Status and output of each.
        """
        results = self.out.with_name("results.json")
        commands = {name: filled(COMMANDS[name], self.run_dir, self._sound, self.out) for name in names}
        before = state(self.run_dir)
        status, output = self._server.run([], commands=commands, results=str(results), longest=LONGEST)
        assert status == 0, output
        found = json.loads(results.read_text())
        for name, result in found.items():
            assert result["status"] in (0, 1, 2, 3), (name, result["output"])
            assert "Traceback" not in result["output"], (name, result["output"])
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", result["output"]), (name, result)
            if result["status"] in (1, 2):
                error_of(result["output"])
                assert result["seconds"] < SECONDS, (name, result)
            assert result["mib"] < MIB, (name, result)
        if not any(name in WRITERS and result["status"] not in (1, 2) for name, result in found.items()):
            assert state(self.run_dir) == before
        assert self._victim.read_text() == "of value\n"
        return {name: (result["status"], result["output"]) for name, result in found.items()}


@pytest.fixture
def attacked(server, sound, tmp_path):
    return lambda make: Attacked(server, sound, tmp_path, make)


@pytest.mark.parametrize("name", hostile.REFUSED)
def test_every_command_refuses_a_directory_that_no_run_leaves(name, attacked):
    case = attacked(hostile.REFUSED[name])
    for reader, (status, output) in case.read(*COMMANDS).items():
        assert status == 1, (reader, output)
        assert str(case.run_dir) in error_of(output), output
    assert not [path for path in case.out.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", hostile.DAMAGED)
def test_a_damaged_trace_is_one_line_wherever_it_is_read(name, attacked):
    case = attacked(hostile.DAMAGED[name])
    found = case.read(*COMMANDS)
    for reader in ("table", "report", "replay", "run"):
        status, output = found[reader]
        assert status == 1
        assert f"{case.run_dir}: the stored trace of mini_" in error_of(output)


@pytest.mark.parametrize("name", hostile.HARMLESS)
def test_no_command_is_led_by_what_lies_in_a_directory(name, attacked):
    case = attacked(hostile.HARMLESS[name])
    assert case.read(*(reader for reader in COMMANDS if reader not in WRITERS))["table"][0] == 0
    case.read(*WRITERS)


@pytest.mark.parametrize("name", ["no records", "empty records", "records whose log is lost", "no meta"])
def test_a_run_whose_records_are_lost_is_not_told_to_run_again(name, attacked):
    for _, output in attacked(hostile.REFUSED[name]).read("table", "run").values():
        assert "its records are gone; restore them, remove the folder" in output
        assert "again" not in output
