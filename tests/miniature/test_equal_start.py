"""Courses of several systems from one start, and what is measured of them (`miniature.equal_start`)."""

import json
from dataclasses import replace
from pathlib import Path

import pandas
import pytest

from miniature import equal_start
from miniature.equal_start import (
    ANSWER_COLUMNS,
    ANSWERS,
    ROWS,
    SETTING_COLUMNS,
    SETTINGS,
    START,
    SYSTEMS,
    VARIANTS,
    main,
    measure_all,
    settings_of,
    table,
    trained,
    trained_rows,
    variant_of,
)
from miniature.family import EQUAL_START
from miniature.measure import Answer, Measured
from miniature.run import MiniatureConfig
from miniature.systems import NUM_EQUAL
from miniature.train import config_of
from refusion_eval.decoders import DECODERS
from refusion_eval.paths import embedded_path
from refusion_eval.training.checkpoints.backbone import load_tokenizer
from refusion_eval.training.config import RunConfig, read_run_config
from refusion_eval.training.data.token_cache import build_cache
from refusion_eval.training.run import RUN_FILE

STAGES = ("autoregressive_sft", "refusion", "llada", "bd3lm", "idlm", "wedlm")


def config(name: str, seed: int = 1) -> RunConfig:
    settings = settings_of(name, seed, Path("start"), Path("work"))
    return read_run_config(str(config_of(EQUAL_START, variant_of(name).stage)), settings, MiniatureConfig)


@pytest.mark.parametrize("name", STAGES)
def test_courses_differ_in_their_objective_alone(name: str) -> None:
    one, other = config("autoregressive_sft"), config(name)
    assert other.optimisation == one.optimisation
    assert other.backbone == one.backbone
    assert (other.data.files, other.data.share) == (one.data.files, None)
    assert (other.objective == one.objective) == (name == "autoregressive_sft")


def test_a_seed_changes_the_seed_alone_and_has_a_folder_of_its_own() -> None:
    one, other = config("refusion"), config("refusion", 7)
    changed = {key for key, value in one.identity().items() if other.identity()[key] != value}
    assert changed == {"optimisation"}
    assert (other.optimisation.seed, other.output.run_dir != one.output.run_dir) == (7, True)


def test_a_folder_may_have_any_name() -> None:
    settings = settings_of("refusion", 1, Path("start"), Path("work #1: two"))
    read = read_run_config(str(config_of(EQUAL_START, "refusion")), settings, MiniatureConfig)
    assert read.output.run_dir.endswith("work #1: two/refusion_1")


def test_only_courses_of_equal_rows_have_fewer_samples() -> None:
    assert {name for name in (*STAGES, *VARIANTS) if config(name).data.share} == {"idlm_equal_rows", "bd3lm_equal_rows"}


def finished(work_dir: Path, name: str, seed: int, num_samples: int = 2) -> Path:
    """A course that is finished, with two tokenised samples and without weights."""
    rows = work_dir / ROWS
    rows.parent.mkdir(exist_ok=True)
    rows.write_text('{"query": "1 + 1", "response": "2"}\n' * num_samples)
    options: dict = {"max_length": 64, "on_bad": "fail", "workers": 0}
    tokenizer = load_tokenizer(replace(config(name).backbone, model=str(embedded_path(START))))
    cache = build_cache([str(rows)], tokenizer, work_dir / "tokens", **options)
    course = work_dir / f"{name}_{seed}"
    (course / "model").mkdir(parents=True)
    identity = config(name, seed).identity() | {"tokens": cache.directory.stem}
    (course / RUN_FILE).write_text(json.dumps({"identity": identity}))
    return course


def test_copies_and_fillings_are_trained_rows_and_samples_left_out_are_not(tmp_path: Path) -> None:
    for name in (*STAGES, "idlm_equal_rows"):
        finished(tmp_path, name, 1, num_samples=100)
    found = {name: trained_rows(tmp_path, name, 1) / 100 for name in (*STAGES, "idlm_equal_rows")}
    prompt, answer = found["autoregressive_sft"] - 2, 2  # the digit and EOS
    assert found["idlm"] == prompt + 2 * answer
    assert found["idlm_equal_rows"] == pytest.approx(0.74 * found["idlm"])
    assert (found["refusion"], found["llada"]) == (prompt + 32, prompt + 96)
    assert found["bd3lm"] == prompt + 32 + 24  # three of four blocks of 8 have a copy


def test_all_systems_have_as_many_valid_settings() -> None:
    for system in SYSTEMS:
        assert len({str(sorted(point.items())) for point in system.grid}) == len(system.grid)
        assert len(system.grid) == (1 if system.decoder == "autoregressive" else NUM_EQUAL)
        for point in system.grid:
            names = DECODERS[system.decoder].Settings.__dataclass_fields__
            shared = {name: value for name, value in {"mask_id": 0, "eos_ids": (1,)}.items() if name in names}
            DECODERS[system.decoder].Settings(gen_length=EQUAL_START.gen_length, **shared, **point)


def test_finished_courses_are_found(tmp_path: Path) -> None:
    (tmp_path / "refusion_2514" / "model").mkdir(parents=True)
    (tmp_path / "idlm_equal_rows_2515" / "model").mkdir(parents=True)
    (tmp_path / "bd3lm_2514").mkdir()  # not finished
    assert trained(tmp_path).keys() == {("refusion", 2514), ("idlm_equal_rows", 2515)}


def test_each_course_is_measured_once_with_the_settings_chosen_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work_dir, out = tmp_path / "work", tmp_path / "out"
    finished(work_dir, "refusion", 2515)
    out.mkdir()
    loaded = []

    def measure(model: object, decoder: str, benchmark: object, chosen: list, **settings: object) -> Measured:
        right = settings.get("slot_size") == 16 and settings["tau_token"] == 0.4
        return Measured([Answer(right, 8, 2 if settings.get("block_size") == 32 else 4, 30)] * len(chosen))

    monkeypatch.setattr(equal_start, "measure", measure)
    monkeypatch.setattr("miniature.frontier.measure", measure)
    monkeypatch.setattr("refusion_eval.api.load_model", lambda name: loaded.append(name))
    family = replace(EQUAL_START, draws={"gsm8k": EQUAL_START.draws["gsm8k"]})
    measure_all(family, work_dir, 3, out)
    answers = pandas.read_csv(out / ANSWERS)
    assert list(answers.columns) == list(ANSWER_COLUMNS)
    without_course = ["AR-SFT, before the course", "AR-SFT, the backbone alone"]
    assert answers.groupby("system").size().to_dict() == dict.fromkeys(
        ("ReFusion", "ReFusion, verifier", *without_course), 100
    )
    assert set(answers.itertuples(index=False, name=None)) >= {("ReFusion", "refusion", 2515, "gsm8k", 0, 1, 8, 2, 30)}
    settings = pandas.read_csv(out / SETTINGS)
    is_trained = ~settings.system.isin(without_course)
    assert not settings[~is_trained].trained_rows.any()
    settings = settings[is_trained]
    assert set(settings.trained_rows) == {trained_rows(work_dir, "refusion", 2515)}
    assert all('"slot_size": 16, "block_size": 32' in text for text in settings.settings)
    untrained = {str(embedded_path(name)) for name in ("autoregressive", "autoregressive_sft")}
    assert set(loaded) == {str(work_dir / "refusion_2515" / "model")} | untrained
    finished(work_dir, "refusion_half_filled", 2514)
    measure_all(family, work_dir, 3, out)
    answers = pandas.read_csv(out / ANSWERS)
    assert set(answers[answers.model == "refusion_half_filled"].system) == {
        "ReFusion, half-filled slots",
        "ReFusion, verifier, half-filled slots",
    }
    loaded.clear()
    measure_all(family, work_dir, 3, out)  # nothing is measured twice
    assert not loaded
    assert len(pandas.read_csv(out / ANSWERS)) == len(answers)


def test_the_table_has_a_row_for_each_system(tmp_path: Path) -> None:
    rows = [
        (system, model, seed, task, item, int(item >= wrong), 8, 2 if model == "refusion" else 8, 30)
        for system, model, wrong in (("AR-SFT", "autoregressive_sft", 2), ("ReFusion", "refusion", 4))
        for seed in (1, 2)
        for task in ("gsm8k", "math")
        for item in range(10)
    ]
    pandas.DataFrame(rows, columns=list(ANSWER_COLUMNS)).to_csv(tmp_path / ANSWERS, index=False)
    chosen = [(system, model, seed, task, "{}", 80, 1, 42) for system, model, seed, task, item, *_ in rows if not item]
    pandas.DataFrame(chosen, columns=list(SETTING_COLUMNS)).to_csv(tmp_path / SETTINGS, index=False)
    found = table(tmp_path).set_index("system")
    assert found["seeds"].tolist() == [2, 2]
    assert found.loc["ReFusion", "accuracy, %"].startswith("60.0 [")
    assert found.loc["ReFusion", "minus AR-SFT"].startswith("-20.0 [")
    assert found.loc["ReFusion", ["trained rows", "TPF", "rows a token"]].tolist() == [42, 4, 3.8]


def test_an_unknown_course_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for run in ("dream:1", "backbone:1"):
        monkeypatch.setattr("sys.argv", ["equal_start", "train", "--work-dir", "x", "--runs", f"refusion:2514,{run}"])
        with pytest.raises(SystemExit):
            main()
        assert f"{run} is no course" in capsys.readouterr().err
