"""The guides for what is a user's own are run as they are printed."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from refusion_eval.models.checkpoint import read_family
from tests.engine.test_full_context import save as save_gpt2
from tests.faults.conftest import server
from tests.faults.runs import ForkServer

__all__ = ["server"]

ROOT = Path(__file__).resolve().parents[2]


def blocks(guide: str, language: str) -> list[str]:
    """The code blocks of a guide in one language."""
    text = (ROOT / "docs" / "guides" / f"{guide}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(guide: str, word: str) -> list[str]:
    """The command lines of a guide that have a word in them."""
    return [line for block in blocks(guide, "bash") for line in block.splitlines() if word in line]


def words_of(command: str) -> list[str]:
    """The arguments of a command line of this project."""
    words = shlex.split(command, comments=True)
    assert words[0] == "refusion-eval"
    return words[1:]


def run(command: str, folder: Path) -> str:
    """What a command line of this project prints."""
    done = subprocess.run(
        [sys.executable, "-m", "refusion_eval", *words_of(command)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "cache")},
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def run_here(server: ForkServer, tmp_path: Path) -> Callable[[str], str]:
    """The same in the folder of the test, without the seconds that a process needs to import its libraries."""

    def run_forked(command: str) -> str:
        environment = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
        status, output = server.run(words_of(command), cwd=str(tmp_path), environment=environment)
        assert status == 0, f"{command}\n{output}"
        return str(output)

    return run_forked


@pytest.mark.slow
def test_a_task_file_of_ones_own_gets_one_table_of_accuracy_and_speed(
    run_here: Callable[[str], str], tmp_path: Path
) -> None:
    (tmp_path / "sums.yaml").write_text(blocks("own-benchmark", "yaml")[0])
    (tmp_path / "sums.jsonl").write_text(blocks("own-benchmark", "json")[0])
    suite, *others = [line for line in commands("own-benchmark", "sums.yaml") if "eval.sh" not in line]
    table = run_here(f"{suite} --rounds 1").rpartition("┏")[2]
    rows = [line.split("│") for line in table.splitlines() if line.startswith("│ sums")]
    assert {row[2].split()[0].strip(",") for row in rows} == {"AR", "ReFusion"}
    assert all("100.0" in row[4] and row[5].strip() for row in rows)
    printed = [run_here(line.replace(",gsm8k", ",gsm8k --limit 3")) for line in others[:2]]
    assert all("mini_gsm8k" in text and "sums" in text for text in printed)
    assert "sums" in run(commands("own-benchmark", "compare runs")[0], tmp_path)


@pytest.mark.slow
def test_a_decoder_of_ones_own_runs_from_its_file(run_here: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "own_decoder.py").write_bytes((ROOT / "examples" / "own_decoder.py").read_bytes())
    *runs, table = commands("own-decoder", "runs/")
    for line in runs:
        run_here(line.replace("--limit 20", "--limit 3"))
    rows = [line.split("│") for line in run(table, tmp_path).splitlines() if line.startswith("│ mini_gsm8k")]
    tpf = {row[2].split()[0]: row[6].split()[0] for row in rows}  # behind the label stands what the limit leaves out
    assert tpf["Leftmost"] > "1"
    assert tpf.keys() == {"Leftmost", "AR"}


def test_a_layout_file_is_read_as_it_is_printed(tmp_path: Path) -> None:
    (layout,) = (block for block in blocks("own-checkpoint", "json") if "like" in block)
    (tmp_path / "refusion_layout.json").write_text(layout)
    family = read_family(tmp_path, "mine")
    assert family is not None
    assert (family.qk_norm, family.kind, family.keys.num_layers) == (True, "llada", "n_layers")
    assert (family.tensors.out, family.tensors.q) == ("attention.o", "self_attn.q_proj")


@pytest.mark.slow
def test_any_architecture_runs_under_the_forward_of_transformers(tmp_path: Path) -> None:
    save_gpt2("gpt2", tmp_path / "my-gpt2")
    (line,) = commands("own-checkpoint", "--backend transformers")
    assert "│ mini_gsm8k │ AR" in run(line.replace("--limit 20", "--limit 1"), tmp_path)
