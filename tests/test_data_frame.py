import json

import pytest

import refusion_eval
from refusion_eval.errors import ConfigError

SHORT = {"gen_length": 8, "slot_size": 4, "block_size": 8}


def test_figures_of_a_checkpoint_and_of_a_loaded_model_are_equal(tmp_path):
    model = refusion_eval.load_model("embedded", device="cpu")
    loaded = refusion_eval.evaluate(model, "gsm8k", limit=2, **SHORT)
    named = refusion_eval.evaluate("embedded", ["mini_gsm8k"], limit=2, run_dir=tmp_path / "run", device="cpu", **SHORT)
    assert set(loaded.task) == set(named.task) == {"mini_gsm8k"}
    counted = ["accuracy", "tpf", "tokens_mean"]
    values = [frame.set_index("metric").loc[counted, ["value", "n", "errors"]] for frame in (loaded, named)]
    assert values[0].equals(values[1])
    assert (tmp_path / "run" / "run.json").is_file()


def test_what_a_loaded_model_has_decided_cannot_be_asked_for():
    model = refusion_eval.load_model("embedded", device="cpu")
    with pytest.raises(ConfigError, match="dtype: the loaded model has decided that"):
        refusion_eval.evaluate(model, "gsm8k", limit=1, dtype="bfloat16")


def test_no_option_of_a_loaded_checkpoint_is_ignored():
    model = refusion_eval.load_model("embedded", device="cpu")
    for option, value in {"backend": "transformers", "revision": "main", "tune": True, "pretrained": "other"}.items():
        with pytest.raises(ConfigError, match=f"^{option}: the loaded model has decided that"):
            refusion_eval.evaluate(model, "gsm8k", limit=1, **{option: value})


def test_the_record_names_the_options_of_the_loaded_checkpoint(tmp_path):
    model = refusion_eval.load_model("embedded:autoregressive", device="cpu", backend="transformers", kv_budget_gib=1)
    refusion_eval.evaluate(model, "gsm8k", limit=1, run_dir=tmp_path / "run", gen_length=2)
    recorded = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert recorded["manifest"]["arguments"]["backend"] == "transformers"
    assert recorded["manifest"]["arguments"]["kv_budget_gib"] == 1
    assert recorded["manifest"]["attention"] == "transformers"
    assert recorded["manifest"]["hardware"]["threads"] == model.num_threads


def test_the_interface_is_listed_and_evaluate_is_a_function_whatever_was_imported():
    import refusion_eval.evaluation.loop

    assert {"evaluate", "generate", "load_model"} <= set(dir(refusion_eval))
    assert callable(refusion_eval.evaluate)
