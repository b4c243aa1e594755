"""Training of tiny models for the mini tasks (`miniature.train`), by the training run of the package."""

import hashlib
import json
import re
import runpy
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import torch
from safetensors.torch import load_file

from miniature import curve
from miniature import train as training
from miniature.family import EMBEDDED, Course
from miniature.frontier import measured
from miniature.run import MiniatureConfig
from miniature.train import (
    BACKBONE,
    CONTINUES,
    STAGES,
    VARIANTS,
    config_of,
    export,
    main,
    measure_stage,
    prepare,
    runs_of,
    settings_of,
    train_stage,
    write_rows,
)
from refusion_eval import api
from refusion_eval.errors import ConfigError
from refusion_eval.training.config import RunConfig, read_run_config

FINE_TUNES = [stage for stage in STAGES if stage != BACKBONE]
SMALL = (
    "backbone.shape={model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, tie_word_embeddings: true}",
    "optimisation.epochs=null",
    "optimisation.max_steps=20",
    "optimisation.compute_dtype=float32",  # many processors compute bfloat16 ten times more slowly
    "optimisation.lr=1e-2",
    "optimisation.warmup_steps=5",
    "output.log_every=5",
    "output.save_every=10",
)


FEW_ROWS = Course(seed=1, num_items=60, num_drills=dict.fromkeys(EMBEDDED.drills, 20))
FEW_EMBEDDED = replace(
    EMBEDDED,
    vocabulary_size=400,
    num_tokenizer_items=50,
    courses=tuple(replace(FEW_ROWS, seed=seed) for seed in (1, 2, 3, 4)),
)


def config(stage: str, changes: Sequence[str] = ()) -> RunConfig:
    return read_run_config(str(config_of(EMBEDDED, stage)), settings_of(stage, Path("work"), changes), MiniatureConfig)


def run_here(command: Sequence[str], *, check: bool) -> None:
    """Runs `python -m MODULE ARGUMENTS` in this process, which has imported torch already."""
    _, _, module, *arguments = command
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__")
    assert not (check and ended.value.code), command


@pytest.fixture
def trained_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training runs take no process of their own."""
    monkeypatch.setattr(training, "subprocess", SimpleNamespace(run=run_here))


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ReFusion stage of four runs of 20 steps, from a backbone that was not trained."""
    folder = tmp_path_factory.mktemp("work")
    prepare(FEW_EMBEDDED, folder, SMALL)
    (folder / BACKBONE).mkdir()
    (folder / BACKBONE / "model").symlink_to(folder / "initial")
    first, *others = runs_of("refusion")
    train_stage(FEW_EMBEDDED, first, folder, SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "subprocess", SimpleNamespace(run=run_here))
        for run in others:
            train_stage(FEW_EMBEDDED, run, folder, SMALL)
    return folder


@pytest.mark.parametrize(
    ("course", "digest"),
    [
        (
            replace(EMBEDDED.courses[0], num_items=300, num_drills=dict.fromkeys(EMBEDDED.drills, 300)),
            "994d6fb246c5b5e1f5669fd6f77722a276658129b9ccda045ab8e6ea86972a3e",
        ),
        pytest.param(
            EMBEDDED.courses[0],
            "9a0b396a93a36cb9bb03d26041f51adf9df3b000c1792be7098449f083067f87",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            EMBEDDED.courses[1],
            "d5b4ff26043c4aa331d0ebce15091269c437e0f98eacd173917482a3ec03416b",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            EMBEDDED.courses[2],
            "b2047463c29a2d22cd64054da556fd09643d41aa3032dbb3d964ab9626bd257e",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            EMBEDDED.courses[3],
            "0f181272520d390bb59972cfe567466c5fce038c7d0ed34bb058b05437a2f604",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["few", "first", "second", "third", "fourth"],
)
def test_the_training_rows_stay_as_they_are(tmp_path: Path, course: Course, digest: str) -> None:
    write_rows(EMBEDDED, course, tmp_path / "rows.jsonl")
    assert hashlib.sha256((tmp_path / "rows.jsonl").read_bytes()).hexdigest() == digest


def test_a_folder_with_the_rows_of_another_version_is_refused(work_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").symlink_to(work_dir / "tokenizer")
    (tmp_path / "train.jsonl").write_text('{"query": "What is 1+1?", "response": "2"}\n')
    with pytest.raises(ConfigError, match="drawn by another version of the mini tasks; name another folder"):
        prepare(FEW_EMBEDDED, tmp_path, SMALL)


def test_refusion_learns_from_rows_of_the_mini_tasks(work_dir: Path) -> None:
    log = pandas.read_csv(work_dir / "refusion" / "log.csv")
    assert log.step.tolist() == [5, 10, 15, 20]
    for term in ("ar", "mdm"):
        assert log[term].iloc[-1] < 0.8 * log[term].iloc[0]
    facts = json.loads((work_dir / "refusion" / "run.json").read_text())
    assert facts["data"]["samples"] == 8 * 60 + 3 * 20
    assert facts["config"]["objective"]["slot_sizes"] == [4, 8, 16]


def test_what_is_there_is_not_made_again(work_dir: Path) -> None:
    made = {path: path.stat().st_mtime_ns for path in work_dir.rglob("*") if path.is_file()}
    prepare(FEW_EMBEDDED, work_dir, SMALL)
    assert {path: path.stat().st_mtime_ns for path in made} == made


def test_a_checkpoint_is_exported_in_bfloat16_with_its_card_and_decodes(work_dir: Path, tmp_path: Path) -> None:
    for name in ("run.json", "log.csv"):
        (work_dir / BACKBONE / name).write_bytes((work_dir / "refusion" / name).read_bytes())
    export(FEW_EMBEDDED, "refusion", work_dir, tmp_path)
    target = tmp_path / "refusion"
    trained = load_file(work_dir / "refusion_fourth" / "model" / "model.safetensors")
    written = load_file(target / "model.safetensors")
    assert all(torch.equal(value, trained[name].to(torch.bfloat16)) for name, value in written.items())
    assert trained.keys() == written.keys()
    readme = (target / "README.md").read_text()
    assert "# Embedded ReFusion fine-tune" in readme
    assert "- Data: 2560 synthetic conversations after the backbone's 640, disjoint from `tasks/mini/*/test" in readme
    for run in runs_of("refusion"):
        assert f"| {run} | refusion | muon | 20 | 32 | 0.01 | 2514 |" in readme
    sizes = pandas.read_csv(target / "loss.csv").groupby("stage").size().to_dict()
    assert sizes == {BACKBONE: 4, **dict.fromkeys(runs_of("refusion"), 4)}
    model = api.load_model(str(target), dtype="float32", device="cpu", attention="sdpa")
    decoded = api.generate(model, [1, 2, 3, 4, 5], "refusion", gen_length=8, slot_size=4, block_size=8)
    assert 0 < len(decoded.tokens) <= 8


@pytest.mark.usefixtures("trained_here")
def test_a_family_is_trained_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family, work = FEW_EMBEDDED, tmp_path / "work"
    changes = (*SMALL, "optimisation.max_steps=2", "output.log_every=1", "output.save_every=1")
    prepare(family, work, changes)
    (work / BACKBONE).mkdir()
    (work / BACKBONE / "model").symlink_to(work / "initial")
    train_stage(family, "refusion", work, changes)
    two_tasks = replace(family, draws={name: family.draws[name] for name in ("humaneval", "parts")})
    for run in runs_of("refusion")[1:]:
        train_stage(family, run, work, changes)
    measure_stage(two_tasks, "refusion", work, 2)
    printed = re.findall(r"^refusion (\w+): [\d.]+ % of 2 held-out draws, TPF", capsys.readouterr().out, re.MULTILINE)
    assert printed == ["humaneval", "parts"]
    (system,) = (replace(one, model="model", grid=one.grid[-1:]) for one in family.systems if one.name == "ReFusion")
    rows = measured(family, f"{work / 'refusion'}/", [system], ["parts"], 2, tmp_path / "frontiers.csv")
    assert rows.task.tolist() == ["parts"]

    out = tmp_path / "curves.csv"
    curve.measured(two_tasks, work, ["refusion"], 1, out)
    before = out.read_bytes()
    rows = curve.measured(two_tasks, work, ["refusion"], 1, out)
    assert out.read_bytes() == before
    assert rows[["step", "samples", "task"]].values.tolist() == [
        [step, 32 * step, task] for step in range(1, 9) for task in two_tasks.draws
    ]
    curve.draw(two_tasks, rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_curve_measures_the_weights_of_each_checkpoint(work_dir: Path) -> None:
    found = {step: (samples, model) for step, samples, model in curve.models(work_dir, "refusion", [])}
    assert {step: samples for step, (samples, _) in found.items()} == {step: step * 32 for step in range(10, 81, 10)}
    last = found[80][1]
    model = api.load_model(str(work_dir / "refusion_fourth" / "model"))
    assert api.generate(last, [1, 2, 3], gen_length=8).tokens == api.generate(model, [1, 2, 3], gen_length=8).tokens


def test_the_shape_of_the_models_and_the_objectives_of_the_stages() -> None:
    settings = ("data.files=[x]", "backbone.tokenizer=x")
    shape = read_run_config(str(config_of(EMBEDDED, BACKBONE)), settings, MiniatureConfig).backbone.shape
    assert shape is not None
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert [shape[name] for name in (*sizes, "head_dim")] == [192, 512, 6, 4, 2, 64]
    objectives = {stage: config(stage).objective for stage in FINE_TUNES}
    assert objectives["refusion"].slot_sizes == (4, 8, 16)
    assert {stage: one.eos_multiple for stage, one in objectives.items()} == {
        "refusion": 32, "autoregressive_sft": 0, "llada": 96, "bd3lm": 32, "idlm": 0, "wedlm": 32,
    }  # fmt: skip
    assert config(BACKBONE).optimisation.epochs == 0.5
    assert {config(stage).optimisation.optimizer for stage in STAGES} == {"muon"}


def test_all_fine_tunes_take_the_same_samples_in_the_same_steps_from_the_backbone() -> None:
    own = [stage for stage in FINE_TUNES if stage not in CONTINUES]
    assert own == ["refusion", "autoregressive_sft", "llada", "bd3lm"]
    first, *others = configs = [config(stage) for stage in own]
    later = [[config(runs_of(stage)[course]) for stage in own] for course in (1, 2, 3)]
    assert 0 < (first.optimisation.epochs or 0) <= 1  # no sample is seen twice
    assert [one.objective.objective for one in configs] == ["refusion", "sft", "llada", "bd3lm"]
    assert first.backbone.model == str(Path("work", BACKBONE, "model"))
    for other in others:
        assert (other.data, other.optimisation, other.backbone) == (first.data, first.optimisation, first.backbone)
    for before, course in enumerate(later):
        for stage, one, other in zip(own, configs, course, strict=True):
            assert other.backbone.model == str(Path("work", runs_of(stage)[before], "model"))
            assert (other.objective, other.data) == (one.objective, course[0].data)
            assert other.optimisation == course[0].optimisation
    assert [course[0].data.files for course in later] == [
        (f"work/{name}.jsonl",) for name in ("second", "third", "fourth")
    ]
    for stage, before_it in CONTINUES.items():
        last = config(stage)
        assert last.backbone.model == str(Path("work", runs_of(before_it)[-2], "model"))
        assert (last.data, last.optimisation) == (later[-1][0].data, later[-1][0].optimisation)
        assert last.objective.objective == stage
    assert config(BACKBONE).backbone.model == str(Path("work", "initial"))


def test_variants_differ_from_the_refusion_stage_in_their_samples_and_slots_only() -> None:
    refusion = asdict(config("refusion"))
    for name in VARIANTS:
        variant = asdict(config(name))
        changed = {
            f"{section}.{key}"
            for section in ("backbone", "data", "objective", "optimisation")
            for key, value in variant[section].items()
            if value != refusion[section][key]
        }
        _, kind, number = name.split("_")
        assert changed - {"optimisation.warmup_steps"} == {"data.share"} | (
            {"objective.slot_sizes"} if kind == "slots" else set()
        )
        assert variant["data"]["share"] == (int(number) / 100 if kind == "data" else 0.1)


def test_settings_of_the_command_line_replace_those_of_the_stage() -> None:
    changed = config("refusion", ["objective.slot_sizes=[4, 32]", "optimisation.lr=1e-3"])
    assert changed.objective.slot_sizes == (4, 32)
    assert changed.optimisation.lr == 1e-3
    with pytest.raises(ConfigError, match="did you mean lr"):
        config("refusion", ["optimisation.lrr=1"])


def test_an_unknown_stage_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train", "--work-dir", str(tmp_path / "work"), "--stages", "llada,lada"])
    with pytest.raises(SystemExit):
        main()
    assert "no stage 'lada'; known: autoregressive, refusion" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_stages_run_in_order_after_the_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(training, "prepare", lambda *given: calls.append(("prepare",)))
    for name in ("train_stage", "measure_stage", "export"):
        monkeypatch.setattr(training, name, lambda family, stage, *given, name=name: calls.append((name, stage)))
    monkeypatch.setattr("sys.argv", ["train", "--stages", "llada, bd3lm", "--out-dir", str(tmp_path)])
    main()
    assert calls == [
        ("prepare",),
        ("train_stage", BACKBONE),
        *(
            call
            for stage in ("llada", "bd3lm")
            for call in (*(("train_stage", run) for run in runs_of(stage)), ("measure_stage", stage), ("export", stage))
        ),
    ]
