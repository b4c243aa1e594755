"""Configurations of training runs: what is read, and what is refused before anything is loaded."""

import dataclasses
from pathlib import Path

import pytest

from refusion_eval.errors import ConfigError
from refusion_eval.training.config import RunConfig, config_names, read_run_config
from refusion_eval.training.run import process_from_environment
from refusion_eval.training.trainer import training_arguments

DATA = "data.files=rows.jsonl"
ZERO2_WEIGHTS = ("backbone.dtype=bfloat16", "optimisation.compute_dtype=bfloat16", "parallelism=zero2")


def tiny(*overrides: str) -> RunConfig:
    return read_run_config("tiny", overrides)


def test_the_papers_training() -> None:
    config = read_run_config("refusion_8b", [DATA])
    assert config.backbone.model == "Qwen/Qwen3-8B"
    assert (config.data.max_length, config.data.files) == (4096, ("rows.jsonl",))
    assert (config.objective.slot_sizes, config.objective.mdm_weight) == ((4, 8, 16, 32), 1.0)
    optimisation = config.optimisation
    assert (optimisation.global_batch_size, optimisation.lr, optimisation.epochs) == (512, 2e-5, 4)
    assert (optimisation.micro_batch_size, optimisation.warmup_steps, optimisation.weight_decay) == (4, 0, 0)
    assert config.parallelism == "zero2"
    config.check_world(128)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((), []),
        (("output.tracker=trackio",), ["trackio"]),
        (("output.tracker=wandb", "output.tensorboard=true"), ["tensorboard", "wandb"]),
    ],
)
def test_the_log_goes_to_the_trackers_that_are_named_and_to_no_other(overrides: tuple[str, ...], told: list) -> None:
    assert training_arguments(tiny(*overrides), 1).report_to == told


def test_the_controlled_comparison_differs_in_the_objective_only() -> None:
    names = [name for name in config_names() if name.startswith("controlled_")]
    configs = {name.removeprefix("controlled_"): read_run_config(name, [DATA]) for name in names}
    assert set(configs) == {"refusion", "sft", "llada", "bd3lm"}
    assert configs["bd3lm"].objective.block_size == 8
    for name, config in configs.items():
        assert config.objective.objective == name
        assert (config.data.max_samples, config.optimisation.epochs) == (120_000, 10)
        alike = dataclasses.replace(config, objective=configs["refusion"].objective, output=configs["refusion"].output)
        assert alike == configs["refusion"]


def test_the_comparison_on_smollm2_differs_in_the_objective_only() -> None:
    names = [name for name in config_names() if name.startswith("smollm2_")]
    configs = {name.removeprefix("smollm2_"): read_run_config(name) for name in names}
    objectives = {name: config.objective.objective for name, config in configs.items()}
    masked = {"refusion": "refusion", "bd3lm": "bd3lm", "llada": "llada", "idlm": "idlm"}
    assert objectives == {"ar_sft": "sft", **masked}
    of_refusion = configs["refusion"]
    assert (of_refusion.backbone.model, of_refusion.optimisation.epochs) == ("smollm2", None)
    assert of_refusion.data.files == ("runs/smollm2/train.jsonl",)  # of the current folder, not of the package
    for name, config in configs.items():
        assert dataclasses.replace(config, objective=of_refusion.objective, output=of_refusion.output) == of_refusion
        run_dir = dataclasses.replace(of_refusion.output, run_dir=f"runs/smollm2/{name}")
        assert config.output == run_dir


def test_every_named_configuration_is_whole() -> None:
    for name in config_names():
        read_run_config(name, [DATA])


def test_paths_in_a_file_are_relative_to_it_and_later_settings_win(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "lower.yaml").write_text(
        "backbone: {model: ../weights, dtype: float32}\ndata: {files: [a.jsonl, /b.jsonl]}\n"
        "objective: {objective: sft}\noptimisation: {epochs: 2, global_batch_size: 8}\noutput: {run_dir: r}\n"
    )
    path = tmp_path / "sub" / "upper.yaml"
    path.write_text("base: ../lower.yaml\noptimisation: {epochs: 3, lr: 1e-5}\n")
    config = read_run_config(
        str(path), ["optimisation.lr=3e-5", "optimisation.lr=4e-5", "data.files=[x.jsonl, y+z.jsonl]"]
    )
    assert config.backbone.model == str(tmp_path.parent / "weights")
    assert config.data.files == ("x.jsonl", "y+z.jsonl")
    assert (config.optimisation.epochs, config.optimisation.lr) == (3, 4e-5)
    unchanged = read_run_config(str(path))
    assert unchanged.data.files == (str(tmp_path / "a.jsonl"), "/b.jsonl")
    assert unchanged.output.run_dir == str(tmp_path / "r")


def test_a_name_in_a_file_is_the_folder_beside_it_or_else_a_hub_id(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine.yaml"
    text = "base: tiny\nbackbone: {{model: {}, shape: null, tokenizer: {}}}\n"
    text += "data: {{files: rows.jsonl, cache_dir: tokens}}\n"
    path.write_text(text.format("mine", "Qwen/Qwen3-8B"))
    config = read_run_config(str(path))
    assert (config.backbone.model, config.backbone.tokenizer) == (str(tmp_path / "mine"), "Qwen/Qwen3-8B")
    assert (config.data.files, config.data.cache_dir) == ((str(tmp_path / "rows.jsonl"),), str(tmp_path / "tokens"))
    path.write_text(text.format("other", "../elsewhere"))
    config = read_run_config(str(path))
    assert (config.backbone.model, config.backbone.tokenizer) == ("other", str(tmp_path.parent / "elsewhere"))


@pytest.mark.parametrize("base", ["tiny", "tiny.yaml"])
def test_a_base_is_a_file_beside_it_or_a_configuration_of_the_package(tmp_path: Path, base: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: {base}\noptimisation: {{lr: 1}}\n")
    config = read_run_config(str(path))
    assert (config.optimisation.lr, config.optimisation.max_steps) == (1, 12)
    # The package's own files are read where they are, and what they write lies in the current folder.
    assert Path(config.data.files[0]).is_file()
    assert config.output.run_dir == "runs/tiny"
    (tmp_path / base).write_text("base: refusion_8b\noptimisation: {epochs: 9}\n")
    assert read_run_config(str(path)).optimisation.epochs == 9


def test_what_a_run_must_keep_is_all_but_output_and_helpers() -> None:
    config = tiny()
    same = tiny("output.save_every=6", "data.workers=3", "data.cache_dir=elsewhere", "data.loader_workers=4")
    assert same.identity() == config.identity()
    for change in ("optimisation.lr=1", "data.max_length=9", "parallelism=fsdp", "backbone.seed=1", "data.share=0.5"):
        assert tiny(change).identity() != config.identity()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimisation.learning_rate=1"], r"tiny.yaml: optimisation: unknown key 'learning_rate'"),
        (["optimisation.warmup_step=1"], "unknown key 'warmup_step'; did you mean warmup_steps"),
        (["optimizer.lr=1"], "unknown key 'optimizer'; did you mean optimisation"),
        (["backbone.lora.rnk=1"], "unknown key 'rnk'; did you mean rank"),
        (["backbone.lora={}"], "backbone.lora.rank is missing"),
        (["optimisation=3"], "optimisation=3; write its settings below it"),
        (["optimisation.lr.x=3"], "lr is one value, not a section"),
        (["lr"], "write section.key=value"),
        (["data.files=[a"], "is not YAML"),
        (["optimisation.lr=2026-99-99"], "is not YAML"),
        (["optimisation.lr=!!int ''"], "is not YAML"),
        (["optimisation.lr=fast"], "optimisation.lr='fast' is not a number"),
        (["data.files=[]"], "data: files is empty"),
        (["data.on_bad=ignore"], "data.on_bad='ignore'; choose one of fail, skip"),
        (["data.max_length=1"], "data.max_length=1; it must be at least 2"),
        (["data.max_samples=5", "data.share=0.5"], "tiny.yaml: data: max_samples is 5 and share 0.5; give one of them"),
        (["data.max_samples=0"], "data.max_samples=0; it must be at least 1"),
        (["data.share=1.5"], "data.share=1.5; it must be at most 1"),
        (["data.share=0"], "data.share=0; it must be above 0"),
        (["objective.objective=refusoin"], "objective='refusoin'; choose one of pretrain, sft, refusion"),
        (["objective.eos_multiple=4"], r"b=4 and slot_sizes go up to k=8; the paper needs b >= k"),
        (["objective.block_size=8"], "objective=refusion has no blocks"),
        (["objective.objective=idlm"], "block_size is 0; objective=idlm has blocks"),
        (["objective.mdm_weight=-1"], "mdm_weight=-1; it must be at least 0"),
        (["objective.objective=sft", "objective.mdm_weight=2"], "sft has one term only"),
        (["attention=flash"], "set optimisation.compute_dtype=bfloat16"),
        (["attention=flash", "objective.objective=llada"], "attention=flash cannot mask as objective=llada"),
        (
            ["attention=flash", "objective.objective=bd3lm", "objective.block_size=8"],
            "attention=flash cannot mask as objective=bd3lm",
        ),
        (["attention=fast"], "attention='fast'; choose one of auto, flash"),
        (["parallelism=zero3"], "parallelism='zero3'; choose one of ddp, zero2, fsdp"),
        (["optimisation.epochs=1"], "tiny.yaml: optimisation: epochs is 1.0 and max_steps 12; give one"),
        (["backbone.model=x"], "tiny.yaml: backbone: both of model and shape given"),
        (["optimisation.max_steps=null"], "give one of them"),
        (["optimisation.max_steps=0"], "max_steps=0; it must be at least 1"),
        (["optimisation.max_steps=null", "optimisation.epochs=0"], "epochs=0; it must be above 0"),
        (["optimisation.global_batch_size=18"], "global_batch_size is 18 and micro_batch_size 4"),
        (["optimisation.global_batch_size=0"], "global_batch_size=0; it must be at least 1"),
        (["optimisation.num_forwards=0"], "num_forwards=0; it must be at least 1"),
        (["optimisation.num_forwards=5"], "num_forwards is 5; a step of 16 samples has 4 micro-batches"),
        (["optimisation.micro_batch_size=0"], "micro_batch_size=0; it must be at least 1"),
        (["optimisation.lr=0"], "optimisation.lr=0; it must be above 0"),
        (["optimisation.beta2=1"], "optimisation.beta2=1; it must be below 1"),
        (["optimisation.warmup_steps=-1"], "optimisation.warmup_steps=-1; it must be at least 0"),
        (["output.save_every=5"], "save_every is 5 and log_every 2"),
        (["output.keep=0"], "output.keep=0; it must be at least 1"),
        (["backbone.dtype=bfloat16"], "set backbone.dtype=float32 as well"),
        (["backbone.dtype=bfloat16", "optimisation.compute_dtype=bfloat16"], "would round most of AdamW's steps"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(*overrides)


def test_weights_in_bfloat16_are_for_zero2_and_adapters() -> None:
    tiny(*ZERO2_WEIGHTS)
    tiny(*ZERO2_WEIGHTS[:2], "backbone.lora={rank: 2, alpha: 4}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "is a list"),
        ("a: [b\n", "cannot be read as YAML"),
        ("base: self.yaml\n", "is its own base"),
        (
            "base: other.yaml\n",
            r"base: there is no file .*other\.yaml; the configurations of the package are .*refusion_8b",
        ),
        ("optimisation: {}\n", "backbone is missing"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "self.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_run_config(str(tmp_path / "self.yaml"))


def test_an_unknown_configuration_is_answered_with_the_likeliest() -> None:
    with pytest.raises(ConfigError, match="unknown configuration 'refusion8b'; did you mean refusion_8b"):
        read_run_config("refusion8b")
    with pytest.raises(ConfigError, match=r"there is no file no\.yaml; the named ones are controlled_bd3lm"):
        read_run_config("no.yaml")


def test_the_number_of_processes_must_divide_the_step() -> None:
    config = tiny("optimisation.num_forwards=4")
    for world_size in (1, 2, 4):
        config.check_world(world_size)
    for world_size in (0, 3, 8):
        with pytest.raises(ConfigError, match=f"4 forwards cannot be shared evenly by {world_size} processes"):
            config.check_world(world_size)


def test_without_a_number_every_micro_batch_is_a_forward() -> None:
    assert tiny("optimisation.num_forwards=null").optimisation.forwards_of_step == 4


def test_rank_and_world_size_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert process_from_environment("ddp") == (0, 1)
    with pytest.raises(ConfigError, match="parallelism=fsdp needs torchrun"):
        process_from_environment("fsdp")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="RANK is 2 and WORLD_SIZE 1"):
        process_from_environment("fsdp")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert process_from_environment("fsdp") == (2, 4)
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(ConfigError, match="RANK is 2 and WORLD_SIZE four"):
        process_from_environment("ddp")


def test_the_papers_training_is_on_the_papers_data() -> None:
    for name in ("refusion_8b", "refusion_qwen25_7b", "controlled_refusion", "controlled_bd3lm"):
        assert read_run_config(name).data.files == ("GSAI-ML/ReFusion",)
    fixed = read_run_config("refusion_8b", ["data.files=GSAI-ML/ReFusion@abc123"])
    assert fixed.data.files == ("GSAI-ML/ReFusion@abc123",)


def test_settings_that_were_added_later_count_only_where_they_are_used() -> None:
    default = read_run_config("refusion_8b").identity()
    assert "masking" not in default["objective"]
    assert "new_rows" not in default["backbone"]
    used = read_run_config("refusion_8b", ["objective.masking=exact", "backbone.new_rows=mean"]).identity()
    assert (used["objective"]["masking"], used["backbone"]["new_rows"]) == ("exact", "mean")
    with pytest.raises(ConfigError, match="masking=exact; objective=sft has no slots"):
        read_run_config("controlled_sft", ["objective.masking=exact"])
    with pytest.raises(ConfigError, match=r"prefix_share=0.5; objective=sft has no slots"):
        read_run_config("controlled_sft", ["objective.prefix_share=0.5"])
    with pytest.raises(ConfigError, match=r"half_filled_share=1.0; objective=llada has no slots"):
        read_run_config("controlled_llada", ["objective.half_filled_share=1.0"])
