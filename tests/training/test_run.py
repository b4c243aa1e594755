"""Whole training runs on the CPU (`refusion_eval.training.run`): the same curve however they are shared out or cut."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import refusion_eval
from refusion_eval.training.run import main
from refusion_eval.training.trainer import read_log
from tests.training.runs import train

STEPS = ("optimisation.max_steps=6", "output.log_every=1", "output.save_every=2")
MEASURED = ("step", "ar", "mdm", "total", "lr", "grad_norm", "tokens", "epoch")  # the others are of time


def curve(run_dir: Path) -> list[list[float]]:
    return [[float(row[name]) for name in MEASURED] for row in read_log(run_dir / "log.csv")]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model" / "model.safetensors")


def assert_alike(run_dir: Path, reference: Path) -> None:
    """Equal but for the order of sums."""
    torch.testing.assert_close(torch.tensor(curve(run_dir)), torch.tensor(curve(reference)), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weights(run_dir), weights(reference), rtol=1e-2, atol=2e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """An undisturbed run of one process, with two forwards a step."""
    assert train(folder / "whole", *STEPS) == [0]
    return folder / "whole"


def test_a_run_writes_its_log_and_what_it_was(whole: Path) -> None:
    losses = curve(whole)
    assert [row[0] for row in losses] == [1, 2, 3, 4, 5, 6]
    assert all(row[1] > 0 and row[2] > 0 for row in losses)
    assert all(row[3] == pytest.approx(row[1] + row[2], rel=1e-5) for row in losses)
    facts = json.loads((whole / "run.json").read_text())
    assert (facts["steps"], facts["data"]["samples"], facts["processes"]) == (6, 84, 1)
    assert facts["config"]["objective"]["slot_sizes"] == [4, 8]
    assert 0 < facts["data"]["eos_filling"] < 0.6
    assert [path.name for path in (whole / "checkpoints").iterdir()] == ["checkpoint-6"]


def test_the_model_opens_in_transformers_and_here(whole: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    model = AutoModelForCausalLM.from_pretrained(whole / "model")
    assert model.config.mask_token_id == tokenizer.mask_token_id
    turn = [{"role": "user", "content": "How many pens?"}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert model(torch.tensor([ids])).logits.isfinite().all()
    loaded = refusion_eval.load_model(str(whole / "model"), device="cpu")
    out = refusion_eval.generate(loaded, ids, decoder="refusion", gen_length=8, slot_size=4, block_size=8)
    assert len(out.tokens) <= 8


def test_two_processes_train_as_one(folder: Path, whole: Path) -> None:
    assert train(folder / "two", *STEPS, num_processes=2) == [0, 0]
    assert_alike(folder / "two", whole)


def test_weights_shared_out_over_two_processes_train_as_one(folder: Path, whole: Path) -> None:
    settings = (*STEPS, "parallelism=fsdp")
    assert train(folder / "fsdp", *settings, num_processes=2, death=("training", 3))[0] == -signal.SIGKILL
    assert train(folder / "fsdp", *settings, num_processes=2) == [0, 0]
    assert_alike(folder / "fsdp", whole)


@pytest.mark.parametrize("num_forwards", [1, 4])
def test_the_number_of_forwards_changes_nothing(folder: Path, whole: Path, num_forwards: int) -> None:
    run_dir = folder / f"forwards_{num_forwards}"
    settings = ("data.loader_workers=1",) if num_forwards == 4 else ()
    assert train(run_dir, *STEPS, *settings, f"optimisation.num_forwards={num_forwards}") == [0]
    assert_alike(run_dir, whole)


def test_a_killed_run_goes_on_to_the_same_curve_and_weights(folder: Path, whole: Path) -> None:
    run_dir = folder / "killed"
    assert train(run_dir, *STEPS, death=("saving", 4)) == [-signal.SIGKILL]
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == [".part", "checkpoint-2"]  # the last whole one, and a part of the next
    assert train(run_dir, *STEPS, death=("training", 5)) == [-signal.SIGKILL]
    assert [row[0] for row in curve(run_dir)] == [1, 2, 3, 4, 5]
    assert train(run_dir, *STEPS) == [0]
    assert curve(run_dir) == curve(whole)
    written = (run_dir / "model" / "model.safetensors").read_bytes()
    assert written == (whole / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(run_dir / "model")  # as if it had been killed behind the last step
    assert train(run_dir, *STEPS) == [0]
    assert (run_dir / "model" / "model.safetensors").read_bytes() == written


def test_a_finished_run_is_not_run_again_and_its_folder_not_taken(whole: Path) -> None:
    files = (whole / "model" / "model.safetensors", whole / "run.json")
    written = [file.stat().st_mtime_ns for file in files]
    assert train(whole, *STEPS) == [0]
    assert [file.stat().st_mtime_ns for file in files] == written
    assert train(whole, *STEPS, "optimisation.lr=1e-4") == [2]
    assert "other settings (optimisation.lr was 0.003, is 0.0001)" in whole.with_suffix(".err").read_text()


@pytest.mark.parametrize(
    ("setting", "module"),
    [
        ("backbone.lora={rank: 2, alpha: 4, dropout: 0.1}", "refusion_eval.training.run"),
        ("optimisation.optimizer=muon", "miniature.run"),
    ],
)
def test_adapters_and_muon_go_on_too(folder: Path, setting: str, module: str) -> None:
    name, settings = setting.partition("=")[0], (*STEPS, setting)
    assert train(folder / name, *settings, module=module) == [0]
    assert train(folder / f"{name}_killed", *settings, module=module, death=("training", 3)) == [-signal.SIGKILL]
    assert train(folder / f"{name}_killed", *settings, module=module) == [0]
    assert curve(folder / f"{name}_killed") == curve(folder / name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.files=[]"], "data: files is empty"),
        (["data.files=no/such.jsonl"], "no/such.jsonl: no such file"),
        (["objective.objective=refusoin"], "objective.objective='refusoin'; choose one of"),
        (["backbone.tokenizer=no/such/folder"], "no/such/folder"),
        (["data.max_length=100000"], "positions"),
        (["output.tensorboard=true"], "needs the package tensorboard"),
        (["output.tracker=mlflow"], "output.tracker=mlflow needs the package mlflow, which is not installed"),
        (["attention=flash", "optimisation.compute_dtype=bfloat16"], "needs the package flash-attn"),
        (["parallelism=zero2"], "needs the package deepspeed"),
    ],
)
def test_what_cannot_be_run_is_refused_by_the_check(
    settings: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = {"deepspeed": None, "flash_attn": None, "tensorboard": None, "mlflow": None}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: hidden.get(name))
    assert main(["--config", "tiny", "--check", "1", *(part for s in settings for part in ("--set", s))]) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    assert any(part in error for part in message.split("|"))


def test_a_check_passes_and_counts_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "tiny", "--check", "2"]) == 0
    assert main(["--config", "tiny", "--check", "3"]) == 2
    assert "2 forwards cannot be shared evenly by 3 processes" in capsys.readouterr().err


@pytest.mark.parametrize("has_it", [True, False])
def test_a_processor_without_bfloat16_is_told_that_it_is_slow(
    has_it: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_it)
    for dtype, slow in (("bfloat16", not has_it), ("float32", False)):
        assert main(["--config", "tiny", "--check", "1", "--set", f"optimisation.compute_dtype={dtype}"]) == 0
        assert ("has no instructions for bfloat16" in capsys.readouterr().err) == slow


@pytest.mark.parametrize(
    ("objective", "trained"),
    [
        ("objective: pretrain", {"ar"}),
        ("objective: sft", {"ar"}),
        ("objective: refusion, slot_sizes: [4], eos_multiple: 8", {"ar", "mdm"}),
        ("objective: llada, eos_multiple: 8", {"mdm"}),
        ("objective: bd3lm, eos_multiple: 8, block_size: 4", {"mdm"}),
        ("objective: wedlm, block_size: 4", {"ar", "mdm"}),
    ],
)
def test_each_objective_learns_a_constant_answer(folder: Path, objective: str, trained: set[str]) -> None:
    rows, run_dir = folder / "constant.jsonl", folder / objective.split(",")[0].removeprefix("objective: ")
    rows.write_text('{"query": "How many?", "response": "Two pens."}\n' * 16)
    settings = ("optimisation.max_steps=40", "optimisation.lr=1e-2", "output.log_every=4", "output.save_every=40")
    assert train(run_dir, *settings, f"data.files={rows}", f"objective={{{objective}}}") == [0]
    log = read_log(run_dir / "log.csv")
    for term in ("ar", "mdm"):
        first, last = float(log[0][term]), float(log[-1][term])
        assert last < 0.4 * first if term in trained else first == last == 0


def test_too_few_samples_for_a_step_are_refused(folder: Path) -> None:
    settings = ("optimisation.max_steps=null", "optimisation.epochs=2", "data.max_samples=7")
    assert train(folder / "few", *settings) == [2]
    assert "7 samples in 2 epochs are fewer than one step of 16" in (folder / "few.err").read_text()
