"""Trials of ReFusion's recipe (`miniature.trials`)."""

import json
from itertools import islice
from pathlib import Path

import pandas
import pytest

from miniature import trials
from miniature.data import items
from miniature.family import EMBEDDED
from miniature.measure import Answer, Measured
from miniature.run import MiniatureConfig
from miniature.train import ROWS, TRIALS, TWICE, config_of, settings_of, trial_stage
from miniature.trials import main, with_result_twice, write_results_twice
from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.scoring.judge import judge_texts
from refusion_eval.training.config import read_run_config


@pytest.mark.parametrize("task", ["gsm8k", "math"])
def test_a_result_written_twice_is_right_and_stands_in_the_last_calculation(task: str) -> None:
    drawn = list(islice(items(task, test=False, seed=3), 30))
    texts = [with_result_twice(item.response) for item in drawn]
    answers = [(dict(item.prompt_row), text) for item, text in zip(drawn, texts, strict=True)]
    assert all(verdict.passed for verdict in judge_texts(BENCHMARKS[task], answers))
    for item, text in zip(drawn, texts, strict=True):
        assert text.count("=") == item.response.count("=") + 1


def test_other_responses_stay_as_they_are(tmp_path: Path) -> None:
    others = [task for task in EMBEDDED.draws if task not in ("gsm8k", "math")]
    rows = [{"query": task, "response": next(items(task, test=False, seed=3)).response} for task in others]
    (tmp_path / ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_results_twice(tmp_path)
    assert (tmp_path / TWICE).read_text() == (tmp_path / ROWS).read_text()


def test_a_trial_differs_from_the_first_one_in_what_it_changes() -> None:
    work = Path("work")
    configs = {
        name: read_run_config(
            str(config_of(EMBEDDED, trial_stage(name))), settings_of(trial_stage(name), work), MiniatureConfig
        )
        for name in TRIALS
    }
    first = configs.pop("release")
    assert configs["paper_normalisation"].objective.normalisation == "paper"
    assert configs["exact_masking"].objective.masking == "exact"
    assert (first.optimisation.optimizer, configs["adamw"].optimisation.optimizer) == ("muon", "adamw")
    rates = [configs[name].optimisation.lr for name in ("half_rate", "double_rate")]
    assert rates == [first.optimisation.lr / 2, first.optimisation.lr * 2]
    assert configs["results_twice"].data.files == (str(work / TWICE),)
    for config in configs.values():
        assert config.optimisation.max_steps == first.optimisation.max_steps == 500
        assert config.backbone == first.backbone
        assert config.optimisation.seed == first.optimisation.seed


def test_a_csv_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []

    def train_stage(family: object, stage: str, work_dir: Path) -> None:
        trained.append(stage)
        folder = work_dir / stage
        folder.mkdir(exist_ok=True)
        (folder / "log.csv").write_text("step,ar,mdm\n500,0.5,0.25\n")
        (folder / "run.json").write_text('{"config": {"optimisation": {"global_batch_size": 32}}}')

    monkeypatch.setattr(trials, "prepare", lambda family, work_dir: None)
    monkeypatch.setattr(trials, "train_stage", train_stage)
    monkeypatch.setattr(trials.api, "load_model", lambda path: path)
    monkeypatch.setattr(
        trials, "measure", lambda *given, **settings: Measured([Answer(True, 20, 5, 9), Answer(False, 10, 5, 9)])
    )
    out = tmp_path / "trials.csv"
    command = ["trials", "--work-dir", str(tmp_path), "--out", str(out), "--held-out", "2"]
    for names in ("release", "release,exact_masking"):
        monkeypatch.setattr("sys.argv", [*command, "--trials", names])
        main()
    assert trained.count(trial_stage("release")) == 1
    rows = pandas.read_csv(out)
    assert rows.groupby("trial", sort=False).size().to_dict() == {"release": 8, "exact_masking": 8}
    assert set(rows.tpf) == {3.0}
    assert set(rows.samples) == {500 * 32}
    monkeypatch.setattr("sys.argv", [*command, "--trials", "nothing"])
    with pytest.raises(SystemExit):
        main()
