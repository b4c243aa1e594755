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
from tests.faults.runs import ForkServer, command

SECONDS, MIB = 2, 200
LONGEST = 60  # seconds until a command counts as one that never ends
OUT = "OUT"
COMMANDS = {
    "table": ("table", "RUN", "--csv", f"{OUT}/table.csv", "--markdown", f"{OUT}/table.md"),
    "compare": ("compare", "SOUND", "RUN", "--markdown", f"{OUT}/compare.md", "--csv", f"{OUT}/compare.csv"),
    "speed": ("speed", "RUN", "--csv", f"{OUT}/speed.csv", "--markdown", f"{OUT}/speed.md"),
    "report": ("report", "RUN", "--out", f"{OUT}/report.html"),
    "export": ("export", "RUN", "--out", f"{OUT}/samples.jsonl"),
    "replay": ("replay", "RUN"),
    "plot": ("plot", "figure5", "RUN", "--out", OUT),
    "claims": ("claims", "RUN", "--out", OUT),
    "cost": ("cost", "RUN", "--csv", f"{OUT}/cost.csv"),
    "paper-table": ("paper-table", "all", "RUN", "--out", OUT),
    "rescore": ("rescore", "RUN", "--tasks", "mini_gsm8k", "--out", OUT),
    "rescore beside": ("rescore", "RUN", "--tasks", "mini_gsm8k"),
    "rescore canvas": ("rescore", "RUN", "--tasks", "mini_gsm8k", "--filter", "whole-canvas", "--out", OUT),
    "rerun": ("rerun", "RUN", "--out", f"{OUT}/again"),
    "run": tuple(command("RUN")),
}
WRITERS = ("run", "rescore beside")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A fork server that has imported what the commands import."""
    server = ForkServer(tmp_path_factory.mktemp("fork_server"))
    yield server
    server.close()


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
    """A changed copy of the run, a file of the user that nobody may touch, and what commands did."""

    def __init__(self, server, sound, folder, make):
        self.server, self.sound, self.folder = server, sound, folder
        self.run_dir, self.victim = folder / "run", folder / "victim"
        shutil.copytree(sound, self.run_dir)
        self.victim.write_text("of value\n")
        make(self.run_dir, self.victim)

    def read_by(self, name, **options):
        """Runs a command; returns its status and output. It ends soon, in little memory, and touches nothing."""
        before, cost = state(self.run_dir), self.folder / "cost.json"
        words = filled(COMMANDS[name], self.run_dir, self.sound, self.folder / "out")
        status, output = self.server.run(words, longest=LONGEST, cost=str(cost), **options)
        assert status in (0, 1, 2, 3), f"{name}: {status}\n{output}"
        assert "Traceback" not in output, f"{name}:\n{output}"
        if status in (1, 2):
            error_of(output)
            spent = json.loads(cost.read_text())
            assert spent["seconds"] < SECONDS, (name, spent)
            assert spent["mib"] < MIB, (name, spent)
        if status in (1, 2) or name not in WRITERS:
            assert state(self.run_dir) == before, name
        assert self.victim.read_text() == "of value\n", name
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", output), f"{name}: {output!r}"
        return status, output


@pytest.fixture
def attacked(server, sound, tmp_path):
    return lambda make: Attacked(server, sound, tmp_path, make)


@pytest.mark.parametrize("name", hostile.REFUSED)
def test_every_command_refuses_a_directory_that_no_run_leaves(name, attacked):
    case = attacked(hostile.REFUSED[name])
    for reader in COMMANDS:
        status, output = case.read_by(reader)
        assert status == 1, f"{reader}: {output}"
        assert str(case.run_dir) in error_of(output), output
        assert not any((case.folder / "out").rglob("*")), reader


@pytest.mark.parametrize("name", hostile.DAMAGED)
def test_a_damaged_trace_is_one_line_wherever_it_is_read(name, attacked):
    case = attacked(hostile.DAMAGED[name])
    statuses = {reader: case.read_by(reader)[0] for reader in COMMANDS}
    assert statuses["table"] == statuses["report"] == statuses["replay"] == 1


@pytest.mark.parametrize("name", hostile.HARMLESS)
def test_no_command_is_led_by_what_lies_in_a_directory(name, attacked):
    case = attacked(hostile.HARMLESS[name])
    statuses = {reader: case.read_by(reader)[0] for reader in COMMANDS}
    assert statuses["table"] == 0
