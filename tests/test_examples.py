"""Every example runs, on the embedded models, and prints what it says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


def run(name: str, folder: Path, *arguments: object) -> str:
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_decoding_says_which_forward_made_each_token_final(tmp_path: Path) -> None:
    printed = run("decode_and_watch.py", tmp_path)
    assert printed.count("made final by forward:  0") + printed.count("made final by forward:  1") == 3
    assert printed.count("The answer is") == 3


def test_an_evaluation_prints_a_table_whose_runs_are_read_and_drawn(tmp_path: Path) -> None:
    printed = run("evaluate.py", tmp_path, "runs")
    assert "| mini_gsm8k | ReFusion | 4 |" in printed
    assert printed.count("complete") == 2
    printed = run("read_runs.py", tmp_path, "runs/refusion", "runs/autoregressive", "--out", "tpf.png")
    assert "mini_arc_challenge" in printed
    assert (tmp_path / "tpf.png").read_bytes().startswith(b"\x89PNG")


def test_a_decoder_of_ones_own_makes_fewer_forwards_when_each_fixes_more(tmp_path: Path) -> None:
    lines = run("own_decoder.py", tmp_path).splitlines()
    forwards = [int(line.split(", ")[1].split()[0]) for line in lines]
    assert len(forwards) == 3
    assert forwards == sorted(forwards, reverse=True)
    assert all("The answer is" in line for line in lines)


def test_a_benchmark_of_ones_own_is_asked_and_judged(tmp_path: Path) -> None:
    lines = run("own_benchmark.py", tmp_path).splitlines()
    assert [line[:2] for line in lines] == ["a:", "b:", "c:"]
    for line in lines:
        right, text = line.split("right: ")[1].split(" text: ")
        is_right = text.rstrip(".").endswith(f" {right.strip()}")
        assert ("correct" in line.split("right: ")[0]) == is_right


def test_transformers_hands_a_batch_to_refusion(tmp_path: Path) -> None:
    printed = run("transformers_generate.py", tmp_path)
    assert all(re.search(rf"^row {row}: \d+ tokens in \d+ forwards$", printed, re.MULTILINE) for row in (0, 1))
    assert re.findall(r"The answer is (\d+)\.$", printed, re.MULTILINE) == ["25", "13"]


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    script = tmp_path / "notebook.py"
    script.write_text("\n".join([*cells, "assert len(samples) == 8 and len(tpf) == 2"]), encoding="utf-8")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_example_is_named_in_a_page() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    scripts = [path.name for path in EXAMPLES.glob("*.py")]
    assert len(scripts) == 6
    assert [name for name in scripts if f"examples/{name}" not in pages] == []
