"""Every example runs, on the embedded models, and prints what it says; one of them as a user starts it."""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script in this process, which has imported torch already, and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")

    def run_here(path: str | Path, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(EXAMPLES / path), run_name="__main__")
        return capsys.readouterr().out

    return run_here


@pytest.mark.process
def test_decoding_says_which_forward_made_each_token_final(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "decode_and_watch.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert printed.count("made final by forward:  0") + printed.count("made final by forward:  1") == 3
    assert printed.count("The answer is") == 3


def test_an_evaluation_prints_a_table_whose_runs_are_read_and_drawn(run: Run, tmp_path: Path) -> None:
    printed = run("evaluate.py", "runs")
    assert "| mini_gsm8k | ReFusion [limited 4 of 100] | 4 |" in printed
    assert printed.count("complete") == 2
    printed = run("read_runs.py", "runs/refusion", "runs/autoregressive", "--out", "tpf.png")
    assert "mini_arc_challenge" in printed
    assert (tmp_path / "tpf.png").read_bytes().startswith(b"\x89PNG")


def test_a_decoder_of_ones_own_makes_fewer_forwards_when_each_fixes_more(run: Run) -> None:
    lines = run("own_decoder.py").splitlines()
    forwards = [int(line.split(", ")[1].split()[0]) for line in lines]
    assert len(forwards) == 3
    assert forwards == sorted(forwards, reverse=True)
    assert all("The answer is" in line for line in lines)


def test_a_benchmark_of_ones_own_is_asked_and_judged(run: Run) -> None:
    lines = run("own_benchmark.py").splitlines()
    assert [line[:2] for line in lines] == ["a:", "b:", "c:"]
    for line in lines:
        right, text = line.split("right: ")[1].split(" text: ")
        is_right = text.rstrip(".").endswith(f" {right.strip()}")
        assert ("correct" in line.split("right: ")[0]) == is_right


def test_the_frame_of_a_template_stays_and_its_holes_are_filled(run: Run) -> None:
    filled, count = run("json_template.py").strip().rsplit("\n", 1)
    assert re.fullmatch(
        r'There are 12 books on a shelf\.\n\{"number": .*, "things": ".*", "place": ".*"\}\n?', filled, re.DOTALL
    )
    assert re.fullmatch(r"10 tokens were filled in, in 10 forwards", count)


def test_transformers_hands_a_batch_to_refusion(run: Run) -> None:
    printed = run("transformers_generate.py")
    assert all(re.search(rf"^row {row}: \d+ tokens in \d+ forwards$", printed, re.MULTILINE) for row in (0, 1))
    assert re.findall(r"The answer is (\d+)\.$", printed, re.MULTILINE) == ["25", "13"]


def test_the_notebook_runs_from_top_to_bottom(run: Run, tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    script = tmp_path / "notebook.py"
    checks = (
        "assert len(samples) == 8",
        # Samples and figures have one TPF.
        'assert totals["tpf"].to_dict() == tpf.set_index("system")["value"].to_dict()',
    )
    script.write_text("\n".join([*cells, *checks]), encoding="utf-8")
    run(script)


def test_every_example_is_named_in_a_page() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    scripts = [path.name for path in EXAMPLES.glob("*.py")]
    assert len(scripts) == 8
    assert [name for name in scripts if f"examples/{name}" not in pages] == []
