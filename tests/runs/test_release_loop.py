"""Checkpoints decoded by the loops that they were published with, for which the stand-ins of `release_code` stand."""

import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.errors import CheckpointError, ConfigError, DecodeError
from refusion_eval.exports.source import read_exported
from refusion_eval.models.stock import load_stock
from refusion_eval.results.measured import read_measurements
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.release import Entry, ReleaseSettings, find_entry
from refusion_eval.runs.system import System, build_manifest
from refusion_eval.scaleout import messages
from refusion_eval.store.run_store import RunReader
from tests.models import tiny
from tests.scaleout.two_processes import jobs_of

CODE = Path(__file__).with_name("release_code")
LENGTH = 8
# Kind -> the family of the tiny weights, the classes, and the files of code.
KINDS = {
    "dream": (
        "Dream",
        {"AutoConfig": "dream_like.DreamLikeConfig", "AutoModel": "dream_like.DreamLike"},
        ["dream_like"],
    ),
    "llada": ("qwen3", {"AutoModelForCausalLM": "whole_text.WholeText"}, ["whole_text", "llada_like"]),
    "sdar": ("qwen3", {"AutoModelForCausalLM": "whole_text.WholeText"}, ["whole_text", "sdar_like"]),
    "llada2": ("qwen3", {"AutoModelForCausalLM": "llada2_like.Llada2Like"}, ["llada2_like"]),
    "plain": ("qwen3", {}, []),
}
DECODERS = {"plain": "autoregressive", "llada2": "autoregressive"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folders = {}

    def make(kind):
        if kind not in folders:
            family, auto_map, files = KINDS[kind]
            folders[kind] = folder = tmp_path_factory.mktemp("checkpoints") / kind
            tiny.save_checkpoint(folder, family=family, max_position_embeddings=4096)
            tiny.save_word_tokenizer(folder, tiny.MASK_ID)
            for file in files:
                shutil.copy(CODE / f"{file}.py", folder)
            path = folder / "config.json"
            added = {"auto_map": auto_map} if auto_map else {}
            added |= {"decoders": ["llada"]} if kind == "llada" else {}
            path.write_text(json.dumps(json.loads(path.read_text()) | added))
        return str(folders[kind])

    return make


def arguments(made, kind, **more):
    code = {"allow_code": True} if KINDS[kind][1] else {}
    decoder = DECODERS.get(kind, kind)
    given = {"pretrained": made(kind), "decoder": decoder, "loop": "release", "gen_length": LENGTH, "warmup": 0}
    return {**given, **code, **more}


def test_a_loop_without_a_decoder_is_called_by_its_checkpoint():
    given = {"pretrained": "lab/NewModel-7B", "loop": "release"}
    assert parse_model_args(given).system_name == "NewModel-7B (release-loop)"
    assert parse_model_args(given | {"decoder": "dream"}).system_name == "Dream (release-loop)"
    assert parse_model_args(given | {"system": "Ours"}).system_name == "Ours (release-loop)"


# The number of forwards, and rows and cached rows of the first and the last, for a prompt of five tokens.
@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "settings", "entry", "forwards", "rows"),
    [
        ("dream", {"steps": 4}, "diffusion_generate of dream_like.py", 4, [(13, 0), (13, 0)]),
        ("llada", {"steps": 4, "block_length": 4}, "generate of llada_like.py", 4, [(13, 0), (13, 0)]),
        ("sdar", {"denoising_steps": 2}, "block_diffusion_generate of sdar_like.py", 4, [(9, 0), (13, 0)]),
        ("llada2", {"eos_ids": (60,)}, "generate of llada2_like.py", 9, [(5, 0), (1, 12)]),
    ],
)
def test_the_code_of_a_checkpoint_decodes_in_a_process_of_its_own(
    made, monkeypatch, kind, settings, entry, forwards, rows
):
    monkeypatch.setenv("A_SECRET_KEY", "x")
    system = System(parse_model_args(arguments(made, kind, **{"eos_ids": (60,), **settings})))
    (sample,) = system.run(jobs_of(system, 1))
    assert sample.error is None
    assert (len(sample.tokens), sample.num_forwards, sample.stop) == (LENGTH, forwards, "length")
    made_forwards = [event for event in sample.trace if event[0] == "forward"]
    assert [tuple(event[3:]) for event in (made_forwards[0], made_forwards[-1])] == rows
    assert 0 < sample.prefill_seconds <= sample.seconds
    assert not any(name.startswith("transformers_modules") for name in sys.modules)
    said = build_manifest(system, {}).settings["release_loop"]
    assert said["entry"] == entry
    assert said["runs"] == "in a process of its own, without the keys of the environment"
    assert len(said["code"]) == 64


def test_a_class_of_transformers_gives_the_tokens_of_this_engine(made):
    samples = []
    for loop in ("engine", "release"):
        system = System(parse_model_args(arguments(made, "plain", loop=loop)))
        samples.append(list(system.run(jobs_of(system, 2))))
    ours, theirs = ([(one.tokens, one.num_forwards, one.stop) for one in of_loop] for of_loop in samples)
    assert ours == theirs


def test_what_the_loop_returns_is_cut_after_its_end_token(made):
    free = System(parse_model_args(arguments(made, "plain")))
    (whole,) = free.run(jobs_of(free, 1))
    third = whole.tokens[2]
    system = System(parse_model_args(arguments(made, "plain", eos_ids=(third,))))
    (sample,) = system.run(jobs_of(system, 1))
    assert (sample.tokens, sample.stop) == (whole.tokens[: whole.tokens.index(third) + 1], "eos")


def test_a_process_of_a_launcher_runs_the_code_that_its_own_command_allows(made, monkeypatch):
    setup = messages.Setup(**asdict(messages.Setup.of(System(parse_model_args(arguments(made, "llada2"))))))
    worker, devices = setup.open_system("cpu", 2, allow_code=True), []
    setup.check(worker)
    with pytest.raises(ConfigError, match="add --allow-code"):
        setup.check(setup.open_system("cpu", 2))
    monkeypatch.setattr(worker.backend, "device", "cuda")
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    (sample,) = messages.decode(worker, iter(jobs_of(worker, 1)))
    assert (sample.error, devices) == (None, [torch.device("cpu")])


def test_no_code_runs_without_leave(made):
    without = arguments(made, "dream", allow_code=False)
    with pytest.raises(ConfigError, match="its loop is code of the checkpoint; read it, then add --allow-code"):
        _ = System(parse_model_args(without)).files
    with pytest.raises(ConfigError, match="allow_code is for loop=release only"):
        parse_model_args({"pretrained": "x", "allow_code": True})


def test_a_folder_that_replaces_generate_and_pickled_weights_are_refused(made, tmp_path):
    shutil.copytree(made("llada2"), tmp_path / "replaced")
    (tmp_path / "replaced" / "custom_generate").mkdir()
    with pytest.raises(ConfigError, match="in the place of `generate`, and no record would say so"):
        _ = System(parse_model_args(arguments(made, "llada2") | {"pretrained": str(tmp_path / "replaced")})).files
    shutil.copytree(made("plain"), tmp_path / "pickled")
    weights = load_file(tmp_path / "pickled" / "model.safetensors")
    torch.save(weights, tmp_path / "pickled" / "pytorch_model.bin")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        load_stock(AutoModelForCausalLM, tmp_path / "pickled", torch.float32, torch.device("cpu"))


GOOD = {"tokens": [1], "stop": "eos", "seconds": 0.5, "prefill_seconds": None, "trace": [["forward", 0, "all", 4, 0]]}


@pytest.mark.parametrize(
    "changes",
    [
        *({"trace": []}, {"seconds": -1}, {"stop": "xyz"}, {"tokens": ["1"]}, {"more": 1}, {"seconds": None}),
        *(
            {"trace": 3},
            {"tokens": [-1]},
            {"tokens": [2**31]},
            {"prefill_seconds": 0.6},
            {"prefill_seconds": -0.1},
            {"seconds": 10**400},
        ),
    ],
)
def test_what_no_loop_answers_is_an_error_of_the_item(made, monkeypatch, changes):
    system = System(parse_model_args(arguments(made, "llada2")))
    loop = system.backend._loop
    settings = ReleaseSettings(gen_length=4, eos_ids=(1,))
    monkeypatch.setattr(loop._child, "ask", lambda *given: GOOD)
    assert loop.run([2, 3], settings).tokens == (1,)
    monkeypatch.setattr(loop._child, "ask", lambda *given: GOOD | changes)
    with pytest.raises(DecodeError, match="gave an answer that is none"):
        loop.run([2, 3], settings)


def test_the_entry_and_its_arguments_are_read_from_the_files(made):
    entry = find_entry(Path(made("llada")), None, allow_code=True)
    settings = ReleaseSettings(gen_length=4, steps=2, mask_id=9, eos_ids=(1, 2))
    assert entry.arguments(settings) == {"gen_length": 4, "steps": 2, "mask_id": 9}
    method = find_entry(Path(made("llada2")), "llada2_like.py:generate", allow_code=True)
    assert method.arguments(settings) == {"gen_length": 4, "steps": 2, "mask_id": 9, "eos_id": 1}
    with pytest.raises(ConfigError, match=r"no \.py file has a function other"):
        find_entry(Path(made("llada")), "other", allow_code=True)


MODELING = """
class Helper:
    def block_diffusion_generate(self, inputs): ...

class Mixin:
    def diffusion_generate(self, inputs, **given): ...

class Base(Mixin):
    def generate(self, inputs, of_base): ...

class Model(library.Base):
    def generate(self, inputs, of_model): ...
"""


def test_a_method_is_of_the_class_of_the_model_or_of_its_bases(tmp_path):
    (tmp_path / "modeling.py").write_text(MODELING)
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "someone/code--modeling.Model"}}))
    assert find_entry(tmp_path, None, allow_code=True).name == "diffusion_generate"
    assert find_entry(tmp_path, "modeling.py:generate", allow_code=True).takes == ("of_model",)
    with pytest.raises(ConfigError, match="a function block_diffusion_generate, or a method of the model's class"):
        find_entry(tmp_path, "block_diffusion_generate", allow_code=True)
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling.Helper"}}))
    assert find_entry(tmp_path, None, allow_code=True).name == "block_diffusion_generate"
    (tmp_path / "config.json").write_text("{}")
    assert str(find_entry(tmp_path, None, allow_code=True)) == "generate of transformers"


def test_settings_of_both_versions_of_llada2_reach_their_loop():
    takes = ("gen_length", "max_post_steps", "num_to_transfer")
    entry = Entry("generate", "a.py", is_method=True, prompt="inputs", is_mapping=False, takes=takes)
    settings = ReleaseSettings(gen_length=4, max_post_steps=0, num_to_transfer=2)
    assert entry.arguments(settings) == {"gen_length": 4, "max_post_steps": 0, "num_to_transfer": 2}


@pytest.mark.process
def test_without_a_loop_in_the_files_the_defaults_of_the_checkpoint_do_not_count(made, tmp_path):
    found = []
    for name, defaults in (
        ("without", {}),
        ("with", {"do_sample": True, "repetition_penalty": 9.0, "eos_token_id": 3}),
    ):
        folder = tmp_path / name
        shutil.copytree(made("llada"), folder)
        (folder / "llada_like.py").unlink()
        (folder / "generation_config.json").write_text(json.dumps(defaults))
        code = "class WholeText(Qwen3ForCausalLM):\n    pass\n"
        (folder / "whole_text.py").write_text(f"from transformers import Qwen3ForCausalLM\n\n\n{code}")
        given = arguments(made, "llada", eos_ids=(60,), decoder="autoregressive") | {"pretrained": str(folder)}
        system = System(parse_model_args(given))
        (sample,) = system.run(jobs_of(system, 1))
        assert sample.error is None
        found.append((sample.tokens, sample.num_forwards))
        third = sample.tokens[2]
    assert found[0] == found[1]
    system = System(parse_model_args(given | {"eos_ids": (third,)}))
    (sample,) = system.run(jobs_of(system, 1))
    assert sample.stop == "eos"
    assert sample.num_forwards == len(sample.tokens)  # the loop itself ends there


def test_each_item_has_a_seed_of_its_own_as_a_loop_may_draw_by_default(made):
    system = System(parse_model_args(arguments(made, "sdar")))
    seeds = [job.settings(system.backend.detokenizer).seed for job in jobs_of(system, 3)]
    assert len({0, *seeds}) == 4
    given = arguments(made, "plain", samples=2)
    with pytest.raises(ConfigError, match="samples=2, but generate of transformers is greedy without a temperature"):
        list(jobs_of(System(parse_model_args(given)), 1))


def test_a_setting_that_the_loop_does_not_have_is_refused(made):
    with pytest.raises(ConfigError, match=r"generate of llada_like\.py has no argument for alg; it has steps, "):
        _ = System(parse_model_args(arguments(made, "llada", alg="entropy"))).checkpoint_settings


def test_code_that_cannot_be_read_is_one_error(tmp_path):
    (tmp_path / "bad.py").write_text("def (")
    with pytest.raises(CheckpointError, match=r"bad\.py cannot be read as Python"):
        find_entry(tmp_path, None, allow_code=True)


def test_log_likelihoods_are_not_asked_of_the_loop(made):
    with pytest.raises(ConfigError, match="log-likelihoods are not asked of loop=release"):
        _ = System(parse_model_args(arguments(made, "plain"))).model


def test_tables_keep_a_run_by_the_loop_of_the_release_apart(made, tmp_path):
    command = ["run", "--model", made("plain"), "--decoder", "autoregressive", "--tasks", "mini_gsm8k", "--limit", "2"]
    for loop in ("engine", "release"):
        words = [*command, "--set", f"gen_length={LENGTH}", "--loop", loop, "--run-dir", str(tmp_path / loop)]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    measured = read_measurements([tmp_path / "engine", tmp_path / "release"])
    assert {entry.label for entry in measured} == {"AR", "AR (release-loop)"}
    assert {entry.system for entry in measured} == {"autoregressive", "autoregressive+release-loop"}
    with RunReader.open(tmp_path / "release") as reader:
        assert reader.run.manifest.decoder == "release_loop"
        assert "allow_code" not in reader.run.manifest.arguments
    (exported,) = read_exported([tmp_path / "release"])
    assert exported.engine[0] == "transformers"
    told = {"release_loop": {"entry": "generate of a.py", "code": "f" * 64}}
    run = replace(exported.run, manifest=replace(exported.run.manifest, settings=told))
    assert exported._replace(run=run).engine == ("generate of a.py", "f" * 12)
    csv = tmp_path / "results.csv"
    done = CliRunner().invoke(app, ["table", str(tmp_path / "release"), "--csv", str(csv)])
    assert done.exit_code == 0, done.output
    assert {entry.system for entry in read_measurements([csv])} == {"autoregressive+release-loop"}


def test_check_says_which_code_would_run(made):
    words = ["check", "--model", made("dream"), "--decoder", "dream", "--loop", "release"]
    done = CliRunner().invoke(app, [*words, "--allow-code"])
    place = "in a process of its own, without the keys of the environment"
    assert f"decoded by diffusion_generate of dream_like.py, {place}" in done.stdout
    assert json.loads(CliRunner().invoke(app, [*words, "--allow-code", "--json"]).stdout)["runs"] == place


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("dream", ["steps=4", "alg=maskgit_plus", "confidence_temperature=1", "confidence_top_p=1"]),
        ("llada", ["steps=4", "block_length=4"]),
        ("plain", []),
    ],
)
def test_check_finds_the_release_equal(made, tmp_path, kind, settings):
    given = [word for setting in (f"gen_length={LENGTH}", *settings) for word in ("--set", setting)]
    words = ["check", "--model", made(kind), "--decoder", DECODERS.get(kind, kind), "--against-release", "2"]
    code = ["--allow-code"] if KINDS[kind][1] else []
    done = CliRunner().invoke(app, [*words, *code, *given, "--out", str(tmp_path / "parity.json")])
    assert done.exit_code == 0, done.output
    assert "2 of 2 prompts have the same tokens and forwards" in done.stdout
    told = json.loads((tmp_path / "parity.json").read_text())
    assert told["equal"]
    assert [item["position"] for item in told["tasks"]["mini_gsm8k"]["items"]] == [None, None]


def test_check_says_where_the_two_part_and_by_how_much(made, tmp_path, monkeypatch):
    monkeypatch.setattr("refusion_eval.runs.stock_loop._tokens", lambda output: [*output[0, :-3].tolist(), 7, 7, 7])
    words = ["check", "--model", made("plain"), "--decoder", "autoregressive", "--against-release", "1", "--json"]
    done = CliRunner().invoke(app, [*words, "--set", f"gen_length={LENGTH}"])
    assert done.exit_code == 4, done.output
    (item,) = json.loads(done.stdout)["tasks"]["mini_gsm8k"]["items"]
    assert (item["position"], item["tokens"][1], item["equal"]) == (LENGTH - 3, 7, False)
    assert item["margin"] > 0
