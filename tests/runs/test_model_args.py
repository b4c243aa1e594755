"""Model arguments, and the published systems that stand for some of them."""

import pytest
from lm_eval._cli.utils import handle_cli_value_string
from lm_eval.utils import simple_parse_args_string
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.decoders import DECODERS, fitting_decoders
from refusion_eval.errors import ConfigError
from refusion_eval.models.card import CARDS
from refusion_eval.paths import embedded_path
from refusion_eval.runs.model_args import ModelArgs, parse_model_args
from refusion_eval.runs.systems import published_systems, system_arguments


def typed_by_the_command_line(text):
    pairs = (pair.split("=", 1) for pair in text.split(","))
    return {key: handle_cli_value_string(value) for key, value in pairs}


@pytest.mark.parametrize("typed", [typed_by_the_command_line, simple_parse_args_string])
def test_both_of_lm_evals_parsers_give_the_same_arguments(typed):
    text = "pretrained=2025,decoder=refusion,gen_length=1_000,tau_slot=1,slot_size=8,block_size=16,seed=3,dtype=float32"
    args = parse_model_args(typed(text))
    assert args.pretrained == "2025"
    assert args.settings["tau_slot"] == 1.0
    assert isinstance(args.settings["tau_slot"], float)
    assert (args.settings["slot_size"], args.settings["block_size"], args.settings["seed"]) == (8, 16, 3)
    assert args.settings["gen_length"] == 1000


@pytest.mark.parametrize("typed", [typed_by_the_command_line, simple_parse_args_string])
def test_optional_settings_arrive_from_both_of_lm_evals_parsers(typed):
    args = parse_model_args(typed("pretrained=x,left_to_right=1,fuse=false,row_cost=0.01,free_rows=0"))
    assert args.settings == {"left_to_right": True, "fuse": False, "row_cost": 0.01, "free_rows": 0}
    assert [type(value) for value in args.settings.values()] == [bool, bool, float, int]
    assert parse_model_args(typed("pretrained=x,fuse=1")).settings["fuse"] is True


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "pretrained is missing"),
        ({"model_path": "x"}, "unknown key 'model_path'; did you mean pretrained"),
        ({"pretrained": "x", "gen_lenght": 5}, "did you mean gen_length"),
        ({"pretrained": "x", "decoder": "refuson"}, "^unknown decoder 'refuson'; did you mean refusion"),
        ({"pretrained": "x", "decoder": "foo"}, "^unknown decoder 'foo'; known decoders: autoregressive, .*refusion"),
        ({"pretrained": "x", "decoder": 1}, "^unknown decoder '1'; known decoders: "),
        ({"pretrained": "x", "decoder": "autoregressive", "tau_slot": 0.5}, "unknown key 'tau_slot'"),
        ({"pretrained": "x", "trust_remote_code": True}, "code from a checkpoint is never run"),
        ({"pretrained": 100000.0}, "pass the arguments as JSON"),
        ({"pretrained": "x", "batch_size": 0}, "batch_size=0; it must be at least 1"),
        ({"pretrained": "x", "mc_samples": 0}, "mc_samples=0; it must be at least 1"),
        ({"pretrained": "x", "tps_samples": -1}, "tps_samples=-1; it must be at least 0"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_to_do(given, message):
    with pytest.raises(ConfigError, match=message):
        parse_model_args(given)


def test_lm_evals_own_device_is_a_wish_and_ours_an_order():
    assert parse_model_args({"pretrained": "x"}, {"device": "cuda:0"}).device == "auto"
    assert parse_model_args({"pretrained": "x", "device": "cuda:0"}, {"device": "cuda:0"}).device == "cuda:0"
    assert parse_model_args({"pretrained": "x"}, {"device": "cpu"}).device == "cpu"


@pytest.mark.parametrize(("flag", "expected"), [("4", 4), (2, 2), ("auto", None), ("auto:4", None)])
def test_batch_size_of_the_flag_arrives(flag, expected):
    args = parse_model_args({"pretrained": "x"}, {"batch_size": flag, "max_batch_size": None})
    assert args.batch_size == expected


def test_decoder_settings_are_kept_apart():
    args = parse_model_args({"pretrained": "x", "decoder": "autoregressive", "temperature": 0.5, "dtype": "float32"})
    assert args.settings == {"temperature": 0.5}
    assert args.dtype == "float32"


def test_another_checkpoint_of_the_package_is_a_system_of_its_own() -> None:
    args = ModelArgs(pretrained="embedded:autoregressive_sft", decoder="autoregressive")
    assert args.system_name == "AR-SFT"
    assert ModelArgs(pretrained="embedded", decoder="autoregressive").system_name == "AR"
    assert ModelArgs(pretrained="embedded:refusion", decoder="bd3lm").checkpoint == str(embedded_path("refusion"))
    with pytest.raises(ConfigError, match=r"no embedded checkpoint for nonsense, only for .*refusion"):
        _ = ModelArgs(pretrained="embedded:nonsense").checkpoint


def test_every_decoder_has_a_system_and_every_known_checkpoint_fits_its_decoder():
    systems = published_systems()
    assert {system.decoder for system in systems.values()} == {*DECODERS, "server"}
    for system in systems.values():
        assert bool(system.serve) == bool(system.source) == (system.decoder == "server")
        if system.pretrained and system.decoder not in ("autoregressive", "server"):
            card = CARDS[system.pretrained]
            assert system.decoder in fitting_decoders(card.kind, card.decoders)


def test_the_labels_are_those_of_the_papers_first_table(reference_data):
    rows = (reference_data / "published" / "table1.csv").read_text().splitlines()[1:]
    labels = {system.label for system in published_systems().values()}
    assert {row.split(",")[1] for row in rows} <= labels


def test_a_checkpoint_of_ones_own_leaves_the_published_adapter_out():
    published = system_arguments("d2f_llada", None)
    assert published["pretrained"] == "GSAI-ML/LLaDA-8B-Instruct"
    assert published["adapter"] == "SJTU-Deng-Lab/D2F_LLaDA_Instruct_8B_Lora"
    own = system_arguments("d2f_llada", "some/merged")
    assert (own["pretrained"], own["adapter"], own["decoder"]) == ("some/merged", None, "d2f_llada")


def test_an_unknown_system_is_refused_with_the_likeliest_one():
    with pytest.raises(ConfigError, match="unknown system 'fast_dlm_llada'; did you mean fast_dllm_llada"):
        system_arguments("fast_dlm_llada", None)
    with pytest.raises(ConfigError, match="bd3lm: no checkpoint of it was published; give one with --model"):
        system_arguments("bd3lm", None)


def test_the_command_lists_them():
    listed = CliRunner().invoke(app, ["systems"])
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(published_systems())
