"""The commands that measure the embedded family again (`miniature.results`)."""

import base64
import gzip
import hashlib
import json
import re
import runpy
import shutil
from pathlib import Path

import pandas
import pytest

from miniature.pictures import FACTS, PAGE, PICTURES, facts
from miniature.results import choices, main, speeds, tables
from miniature.train import STAGES, VARIANTS, runs_of
from refusion_eval.paper.names import system_label
from refusion_eval.results.metric_list import SCORES
from refusion_eval.results.results_file import read_csv

ROOT = Path(__file__).parents[2]
# What else is there: files of training, of the machine, and what the commands read.
OTHERS = {
    "bench_0.6B_inflated.json", "bench_train.json", "courses", "digits.csv", "learning_curves.csv",
    "extraction.csv", "extraction_judged.csv", "learning_curves.png", "orders.yaml", "processors.csv", "sandbox.json",
    "scaleout.csv", "soak.json", "trials.csv", "verdicts_elsewhere.csv",
}  # fmt: skip


def answers_of(path: Path) -> pandas.DataFrame:
    """The answers in a report page with the columns of `verdicts.csv` but the rows."""
    texts = dict(re.findall(r'<script type="[\w/]+" id="(\w+)">(.*?)</script>', path.read_text(encoding="utf-8"), re.S))
    index = json.loads(texts["index"])
    answers = []
    for cell in index["cells"]:
        if cell["list"]:
            (columns,) = json.loads(gzip.decompress(base64.b64decode(texts[cell["list"]])))
            found = pandas.DataFrame(columns).rename(columns={"item_id": "item"})[["item", "tokens", "forwards"]]
            right = [int(state == "right") for state in columns["state"]]
            of_cell = {"task": cell["task"], "system": cell["system"], "hardware": ", ".join(cell["hardware"])}
            answers.append(found.assign(right=right, **of_cell))
    return pandas.concat(answers, ignore_index=True)


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    """A folder with a record of each training run, of 10 steps of 4 samples."""
    facts = {"steps": 10, "config": {"optimisation": {"global_batch_size": 4}}}
    for run in {run for stage in (*STAGES, *VARIANTS) for run in runs_of(stage)}:
        (tmp_path / run).mkdir()
        (tmp_path / run / "run.json").write_text(json.dumps(facts))
    return tmp_path


def test_every_file_of_the_family_is_made_by_a_command(work_dir: Path) -> None:
    words = {word for part in (choices, speeds, tables) for command in part(work_dir) for word in command}
    made = {Path(word).name for word in words if word.startswith("results/embedded/")}
    # Files that are copied from the folder of the runs, and the text beside a picture.
    made |= {"frontiers.csv", "frontiers.png", "verifier.csv", "overview.txt", Path(FACTS).name}
    assert {path.name for path in (ROOT / "results/embedded").iterdir()} - OTHERS <= made
    scripts = {word for word in words if word.startswith(("plots/", "docs/", "eval.sh", "tasks/"))}
    assert all((ROOT / script).exists() for script in scripts)
    assert len(scripts) == 6


def test_the_scaling_counts_the_samples_of_all_courses(work_dir: Path) -> None:
    (command,) = (command for command in tables(work_dir) if "plots/scaling.py" in command)
    samples = [word.partition("=")[0] for word in command if "=" in word]
    assert samples == ["40", "40", "40", "40", "160"]


@pytest.mark.parametrize("picture", PICTURES)
def test_a_picture_shows_the_weights_and_figures_that_are_shipped(picture: str) -> None:
    assert facts(picture) == json.loads((ROOT / FACTS).read_text(encoding="utf-8"))[picture]


def test_the_answers_in_the_sample_report_are_those_of_the_tables() -> None:
    names = ["task", "item", "system", "right", "tokens", "forwards", "hardware"]
    verdicts = pandas.read_csv(ROOT / "results/embedded/verdicts.csv")[names]
    shown = answers_of(ROOT / PAGE)[names]
    assert set(shown.system) == {"AR-SFT", "BD3-LM, merged", "ReFusion", "ReFusion, verifier"}
    expected = verdicts[verdicts.system.isin(set(shown.system))]
    order = names[:3]
    assert shown.sort_values(order).values.tolist() == expected.sort_values(order).values.tolist()


def test_the_single_verdicts_are_those_of_the_table() -> None:
    verdicts = pandas.read_csv(ROOT / "results/embedded/verdicts.csv")
    accuracy = 100 * verdicts.groupby(["task", "system"]).right.mean()
    rows = [row for row in read_csv(ROOT / "results/embedded/family.csv") if row.metric in SCORES and not row.is_mean]
    assert {(row.task, system_label(row)): row.value for row in rows} == pytest.approx(accuracy.to_dict())
    assert set(verdicts.hardware) == {row.hardware for row in rows}


def test_what_a_picture_shows_is_told_from_what_is_shipped(tmp_path: Path) -> None:
    (tmp_path / "results/embedded").mkdir(parents=True)
    shutil.copy(ROOT / "results/embedded/family.csv", tmp_path / "results/embedded")
    (tmp_path / PAGE).write_bytes(b"page")
    found = facts(PAGE, tmp_path)
    assert found["sha256"] == hashlib.sha256(b"page").hexdigest()
    assert set(found["weights"]) == {"autoregressive_sft", "bd3lm", "refusion"}
    assert {label: len(tasks) for label, tasks in found["accuracy"].items()} == dict.fromkeys(
        ("AR-SFT", "BD3-LM, merged", "ReFusion", "ReFusion, verifier"), 9
    )
    mean = next(
        row for row in read_csv(ROOT / "results/embedded/family.csv") if row.label == "ReFusion" and row.is_mean
    )
    assert found["accuracy"]["ReFusion"]["mean"] == mean.value


def test_the_overview_is_drawn_from_the_figures_of_the_family(tmp_path: Path) -> None:
    overview = runpy.run_path(str(ROOT / "plots/overview.py"))
    overview["draw"](read_csv(ROOT / "results/embedded/family.csv"), tmp_path / "overview.png")
    stored = (ROOT / "results/embedded/overview.txt").read_text(encoding="utf-8")
    assert (tmp_path / "overview.txt").read_text(encoding="utf-8") == stored


def test_a_dry_run_prints_the_commands(
    work_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["results", "--work-dir", str(work_dir), "--dry-run"])
    main()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == sum(1 for part in (choices, speeds, tables) for _ in part(work_dir))
    assert all(line.startswith("$ ") for line in printed)
    variants = [line for line in printed if " run --model " in line]
    assert len(variants) == len(VARIANTS)
    assert sum("slot_size=16" in line for line in variants) == 1
