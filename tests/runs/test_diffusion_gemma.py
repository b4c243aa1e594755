"""DiffusionGemma from the command line: runs, views of them, and the release's own loop."""

import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.decoders.diffusion_gemma import DiffusionGemmaSettings
from refusion_eval.errors import ConfigError
from refusion_eval.results.measured import read_measurements
from refusion_eval.runs.settings_tables import read_generation_kwargs
from refusion_eval.store.run_store import RunReader
from refusion_eval.types import ForwardDone
from tests.models import tiny

SETTINGS = [word for text in ("gen_length=16", "max_denoising_steps=5") for word in ("--set", text)]
WHOLE = 18  # 16 tokens in canvases of 6
ENDLESS = ("--set", "eos_ids=0")  # as good as none: the weights never prefer it


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "canvas"
    tiny.save_diffusion_gemma(folder)
    return str(folder)


def invoke(*words, code=0):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout


def run(checkpoint, folder, *more, loop="engine"):
    given = ["--model", checkpoint, "--decoder", "diffusion_gemma", "--tasks", "mini_gsm8k", "--limit", "2"]
    invoke("run", *given, "--loop", loop, "--run-dir", folder, *SETTINGS, *more)
    with RunReader.open(folder) as reader:
        return list(reader.samples())


def kinds(sample):
    return Counter(event.kind for event in sample.events().of(ForwardDone))


def test_a_run_has_records_and_every_view_shows_them(checkpoint, tmp_path):
    folder = tmp_path / "run"
    samples = run(checkpoint, folder, *ENDLESS)
    assert [(sample.error, sample.stop, sample.num_tokens) for sample in samples] == [(None, "length", 16)] * 2
    assert [kinds(sample) for sample in samples] == [{"encode": 3, "denoise": 15}] * 2
    assert {sample.settings["canvas_length"] for sample in samples} == {tiny.CANVAS}
    assert samples[0].settings_source["canvas_length"] == "checkpoint"
    measured = {entry.metric: entry for entry in read_measurements([folder])}
    assert measured["tpf"].value == pytest.approx(16 / 18)
    assert measured["tpf_decoder"].value == pytest.approx(16 / 15)
    assert not {"mbu", "one_token_share"} & measured.keys()  # what its forwards read is not known
    assert "TPF of DiffusionGemma counts the forwards of its encoder too" in " ".join(invoke("table", folder).split())
    (steps,) = json.loads(invoke("speed", folder, "--steps", "--json"))
    assert (steps["by_kind"], steps["block"]) == ("encode 3.0 denoise 15.0", tiny.CANVAS)
    assert steps["forwards_of_block"] == pytest.approx(6)
    assert "denoise: 6 rows" in invoke("replay", folder, "--seconds", "0.02")
    invoke("report", folder, "--out", tmp_path / "page.html")
    assert "DiffusionGemma" in (tmp_path / "page.html").read_text()


def test_a_batch_gives_the_texts_of_requests_alone(checkpoint, tmp_path):
    alone = run(checkpoint, tmp_path / "alone")
    together = run(checkpoint, tmp_path / "together", "--batch-size", "2")
    assert [(one.tokens, one.num_forwards) for one in together] == [(one.tokens, one.num_forwards) for one in alone]


def test_several_samples_of_an_item_differ(checkpoint, tmp_path):
    samples = run(checkpoint, tmp_path / "run", "--samples", "2")
    assert len(samples) == 4
    assert len({tuple(sample.tokens) for sample in samples}) == 4


def test_the_loop_of_the_release_counts_encoder_and_decoder_apart(checkpoint, tmp_path):
    samples = run(checkpoint, tmp_path / "run", *ENDLESS, loop="release")
    assert [sample.num_tokens for sample in samples] == [WHOLE] * 2  # the release keeps whole canvases
    assert [kinds(sample) for sample in samples] == [{"encode": 3, "denoise": 15}] * 2
    first, second, *_ = samples[0].events().of(ForwardDone)
    assert (first.cached, second.rows, second.cached) == (0, tiny.CANVAS, first.rows)
    told = invoke("table", tmp_path / "run", "--csv", tmp_path / "table.csv")
    assert "TPF of DiffusionGemma counts the forwards of its encoder too" in " ".join(told.split())


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("confidence_threshold=2", "entropy_bound=4"),
        ("confidence_threshold=4", "stability_threshold=0"),
        ("t_min=1e-6", "t_max=2e-6", "stability_threshold=2"),
        ("eos_ids=0",),
    ],
)
def test_check_replays_the_draws_of_the_release_and_finds_it_equal(checkpoint, tmp_path, settings):
    given = [*SETTINGS, *(word for text in settings for word in ("--set", text))]
    words = ["check", "--model", checkpoint, "--decoder", "diffusion_gemma", "--against-release", "3"]
    told = invoke(*words, *given, "--out", tmp_path / "parity.json")
    assert "3 of 3 prompts have the same tokens and forwards by generate of transformers" in told
    items = json.loads((tmp_path / "parity.json").read_text())["tasks"]["mini_gsm8k"]["items"]
    assert [item["num_tokens"][0] == item["num_tokens"][1] > 0 for item in items] == [True] * 3


def test_check_says_by_which_margin_another_token_was_chosen(checkpoint, monkeypatch):
    monkeypatch.setattr("refusion_eval.runs.stock_loop._tokens", lambda output: [*output.sequences[0, :-1].tolist(), 7])
    words = ["check", "--model", checkpoint, "--decoder", "diffusion_gemma", "--against-release", "1", "--json"]
    (item,) = json.loads(invoke(*words, *SETTINGS, *ENDLESS, code=4))["tasks"]["mini_gsm8k"]["items"]
    assert (item["position"], item["tokens"][1]) == (WHOLE - 1, 7)
    assert item["margin"] > 0


def test_an_argument_of_greedy_decoding_has_no_effect_and_another_temperature_is_refused():
    def read(**arguments):
        return read_generation_kwargs(arguments, DiffusionGemmaSettings, "gsm8k").values

    assert read(temperature=0.0, do_sample=False, max_gen_toks=64) == {"gen_length": 64}
    with pytest.raises(ConfigError, match=r"temperature=0\.7 cannot be obeyed by this decoder"):
        read(temperature=0.7)


def test_check_describes_the_checkpoint(checkpoint):
    words = ["check", "--model", checkpoint, "--decoder", "diffusion_gemma"]
    assert "diffusion_gemma, 2 layers, eos_ids=(1,), canvas_length=6, vocab_size=61" in invoke(*words)
    assert "entropy_bound, t_min, t_max" in invoke(*words, "--loop", "release")


def test_what_is_about_forwards_of_this_project_refuses_it(checkpoint, tmp_path):
    for words, message in (
        (("bench", "--predict", "H100", "--model", checkpoint), "--predict is for forwards of this project"),
        (
            ("convert", checkpoint, tmp_path / "out.gguf", "--to", "gguf"),
            "can be decoded, with decoder=diffusion_gemma",
        ),
    ):
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert message in str(done.exception)
