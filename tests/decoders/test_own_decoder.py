"""A decoder of a user's own: named by its file, its module or an entry point, or given as it is."""

import dataclasses
import functools
import hashlib
import re
import sys
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

import refusion_eval
from refusion_eval import decoders
from refusion_eval.cli import app
from refusion_eval.decoders import DECODERS, find_decoder, name_with_code
from refusion_eval.errors import ConfigError, StoreError
from refusion_eval.evaluation.loop import evaluate
from refusion_eval.protocol.compare import protocol_differences
from refusion_eval.protocol.spec import read_protocol
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.seeds import means_over_seeds
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.system import System
from tests.models import tiny

CODE = """
from refusion_eval.decoders import Decoder, Reads
from refusion_eval.decoders.llada import DECODER as LLADA

DECODER = Decoder(LLADA.decode, LLADA.Settings, label="Mine", reads=Reads("causal", masked="own"))
OTHER = 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine_in_a_file.py").write_text(CODE)
    return tmp_path / "mine_in_a_file.py"


def test_a_file_and_a_module_name_it(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    found = find_decoder(f"{file}:DECODER")
    assert found.label == "Mine"
    assert find_decoder(f"{file}:DECODER") is found
    assert find_decoder("mine_in_a_file:DECODER").label == "Mine"
    assert str(file.parent) not in sys.path


def test_an_entry_point_names_it(file, monkeypatch):
    entry = EntryPoint("mine", f"{file}:DECODER", decoders.ENTRY_POINTS)
    monkeypatch.setattr(decoders, "entry_points", lambda group: [entry] if group == decoders.ENTRY_POINTS else [])
    assert find_decoder("mine").label == "Mine"
    with pytest.raises(ConfigError, match=r"unknown decoder 'min'; did you mean mine\?"):
        find_decoder("min")


def test_a_file_of_the_current_folder_does_not_stand_for_an_installed_decoder(tmp_path, monkeypatch):
    (tmp_path / "installed_elsewhere.py").write_text("open('ran', 'w')\n" + CODE)
    entry = EntryPoint("mine", "installed_elsewhere:DECODER", decoders.ENTRY_POINTS)
    monkeypatch.setattr(decoders, "entry_points", lambda group: [entry])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="cannot be imported"):
        find_decoder("mine")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:DECODER", r"cannot be imported \(ModuleNotFoundError: .*path/to/file.py:DECODER"),
        ("FILE:NOTHING", r"cannot be imported \(AttributeError"),
        ("FILE:OTHER", "it is a int, not a refusion_eval.decoders.Decoder"),
        ("refusoin", r"unknown decoder 'refusoin'; did you mean refusion\?"),
    ],
)
def test_what_is_no_decoder_is_refused(file, name, message):
    with pytest.raises(ConfigError, match=message):
        find_decoder(name.replace("FILE", str(file)))


def test_it_runs_tasks_on_any_checkpoint_that_has_what_it_reads(file, tmp_path):
    args = parse_model_args(
        {
            "pretrained": "embedded:refusion",
            "decoder": f"{file}:DECODER",
            "run_dir": str(tmp_path / "run"),
            "gen_length": 8,
            "block_length": 8,
            "steps": 4,
            "warmup": 0,
        }
    )
    assert evaluate(args, ["mini_arc_challenge"], limit=2).is_complete
    figures = {figure.metric: figure for figure in run_measurements([tmp_path / "run"])}
    assert figures["accuracy"].system == "Mine"
    assert figures["tpf"].value == 2


def test_the_log_names_its_defaults(file, caplog):
    given = {"pretrained": "embedded:refusion", "decoder": f"{file}:DECODER", "gen_length": 64}
    with caplog.at_level("INFO", logger="refusion_eval"):
        System(parse_model_args(given)).resolve("mini_parts", {})
    assert "gen_length=64 [model_args]" in caplog.text
    assert re.search(r"block_length=\d+ .*\[default\]", caplog.text)


def test_its_code_is_part_of_its_name_in_records_but_that_of_this_package_is_not(file, tmp_path, monkeypatch):
    (other := tmp_path / "changed_code_in_a_file.py").write_text(f"{CODE}# another line\n")
    name, changed = (name_with_code(f"{each}:DECODER") for each in (file, other))
    assert name == f"{file}:DECODER@{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    assert changed.rpartition("@")[2] != name.rpartition("@")[2]
    assert name_with_code("refusion_eval.decoders.llada:DECODER") == "refusion_eval.decoders.llada:DECODER"
    assert name_with_code("llada") == "llada"


def test_the_code_of_a_module_is_that_of_its_whole_package(tmp_path, monkeypatch):
    names = []
    for number in (1, 2):
        (package := tmp_path / str(number) / f"mine_in_package_{number}").mkdir(parents=True)
        for file, text in (("__init__", ""), ("helper", f"VALUE = {number}"), ("decoder", CODE)):
            (package / f"{file}.py").write_text(text)
        monkeypatch.chdir(package.parent)
        names.append(name_with_code(f"mine_in_package_{number}.decoder:DECODER"))
    assert len({name.rpartition("@")[2] for name in names}) == 2


def test_other_code_is_another_protocol_and_continues_no_run(tmp_path, monkeypatch):
    file, run_dir = tmp_path / "mine_of_a_protocol.py", tmp_path / "run"
    file.write_text(CODE)
    (tmp_path / "mine.yaml").write_text(
        f"tasks: [parts]\nlimit: 1\nrounds: 1\nsystems:\n  mine:\n    arguments: {{pretrained: 'embedded:refusion', "
        f"decoder: '{file}:DECODER', warmup: 0}}\n    settings: {{gen_length: 8, block_length: 8, steps: 4}}\n"
    )
    command = ["run", "--protocol", f"{tmp_path}/mine.yaml:mine", "--run-dir", str(run_dir), "--allow-code"]
    read_mine = functools.partial(read_protocol, f"{tmp_path}/mine.yaml", allow_code=True)
    differing = functools.partial(protocol_differences, f"{tmp_path}/mine.yaml", str(run_dir), allow_code=True)
    assert (done := CliRunner().invoke(app, command)).exit_code == 0, done.output
    assert differing() == []
    label = read_mine().label
    file.write_text(CODE.replace("OTHER = 3", "OTHER = 4"))
    decoders._decoder_at.cache_clear()  # as in another process
    assert read_mine().label != label
    assert any("arguments.decoder" in line for line in differing())
    again = CliRunner().invoke(app, command)
    assert isinstance(again.exception, StoreError)
    assert f"the code of {file}:DECODER changed" in str(again.exception)


def test_seeds_of_different_code_have_no_mean(file, tmp_path):
    given = {"pretrained": "embedded:refusion", "decoder": f"{file}:DECODER", "gen_length": 8, "block_length": 8}
    given |= {"steps": 4, "warmup": 0}
    for seed in (0, 1):
        file.write_text(CODE.replace("OTHER = 3", f"OTHER = {seed}"))
        decoders._decoder_at.cache_clear()
        args = parse_model_args({**given, "run_dir": str(tmp_path / f"run{seed}"), "seed": seed})
        evaluate(args, ["mini_parts"], limit=1)
    assert means_over_seeds(run_measurements([tmp_path / "run0", tmp_path / "run1"])) == []


def test_generate_takes_the_entry_itself():
    model = refusion_eval.load_model("embedded")
    options = {"gen_length": 16, "slot_size": 8, "block_size": 8, "fuse": False}
    by_name = refusion_eval.generate(model, [1, 2, 3], decoder="refusion", **options)
    entry = DECODERS["refusion"]
    assert refusion_eval.generate(model, [1, 2, 3], decoder=entry, **options).tokens == by_name.tokens
    (out,) = refusion_eval.generate_many(model, [[1, 2, 3]], decoder=entry, **options)
    assert out.tokens == by_name.tokens


def test_a_decoder_that_does_not_fit_names_the_way_out(file, tmp_path):
    tiny.save_checkpoint(tmp_path / "plain", family="qwen3")
    plain = refusion_eval.load_model(str(tmp_path / "plain"), device="cpu")
    plain.card = dataclasses.replace(plain.card, mask_id=None)
    with pytest.raises(ConfigError, match=r"needs a mask token and .* names none; give its id as mask_id"):
        refusion_eval.decoder_settings(plain, f"{file}:DECODER")
    with pytest.raises(ConfigError, match=r'or write "decoders": \["dream"\] into its config.json'):
        refusion_eval.decoder_settings(refusion_eval.load_model("embedded:llada"), "dream")
