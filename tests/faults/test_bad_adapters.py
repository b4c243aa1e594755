"""LoRA adapters that are missing, damaged or another model's, through the command line: one error, nothing written."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

from refusion_eval.paths import embedded_path

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
RANK = 2


def settings(**changes):
    return {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none", **changes}


def weights(width=None):
    """The two factors of every query projection, as PEFT names them."""
    config = json.loads((embedded_path("refusion") / "config.json").read_text())
    heads = config["num_attention_heads"] * config.get(
        "head_dim", config["hidden_size"] // config["num_attention_heads"]
    )
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    found = {}
    for layer in range(config["num_hidden_layers"]):
        found[name.format(layer, "A")] = torch.zeros(RANK, width or config["hidden_size"])
        found[name.format(layer, "B")] = torch.zeros(heads, RANK)
    return found


class Exploding:
    """A pickle that would leave a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def pickled(folder):
    (folder / WEIGHTS).rename(folder / "sound")
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Exploding(folder / "exploded")))
    (folder / "sound").unlink()


def cut(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:200])


def written(name, text):
    return lambda folder: (folder / name).write_text(text)


def without(name):
    return lambda folder: (folder / name).unlink()


def gone(folder):
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def a_file(folder):
    gone(folder)
    folder.write_text("hello")


CASES = {
    "missing": (gone, ("adapter",)),
    "a file": (a_file, ("adapter",)),
    "no config": (without(CONFIG), (CONFIG,)),
    "garbled config": (written(CONFIG, "{oops"), (CONFIG,)),
    "config that is a list": (written(CONFIG, "[]"), (CONFIG,)),
    "config without a rank": (written(CONFIG, json.dumps({"peft_type": "LORA"})), (CONFIG,)),
    "config with a text for a rank": (written(CONFIG, json.dumps(settings(r="two"))), (CONFIG,)),
    "config with a rank of none": (written(CONFIG, json.dumps(settings(r=0))), (CONFIG,)),
    "config with a text for alpha": (written(CONFIG, json.dumps(settings(lora_alpha="x"))), (CONFIG,)),
    "another kind": (written(CONFIG, json.dumps(settings(peft_type="IA3"))), (CONFIG, "IA3")),
    "no weights": (without(WEIGHTS), (WEIGHTS,)),
    "only a pickle": (pickled, ("adapter_model.bin", "pickled", "convert")),
    "cut weights": (cut, (WEIGHTS,)),
    "empty weights": (written(WEIGHTS, ""), (WEIGHTS,)),
    "another width": (lambda folder: save_file(weights(width=24), folder / WEIGHTS), ("24",)),
    "half of a pair": (
        lambda folder: save_file({name: one for name, one in weights().items() if "lora_A" in name}, folder / WEIGHTS),
        ("lora_",),
    ),
    "another rank": (written(CONFIG, json.dumps(settings(r=7))), ("7",)),
    "a layer that is not there": (
        lambda folder: save_file(
            {n.replace("layers.0", "layers.99"): w for n, w in weights().items()}, folder / WEIGHTS
        ),
        ("99",),
    ),
    "unknown names": (lambda folder: save_file({"x.y": torch.zeros(2)}, folder / WEIGHTS), ("x.y",)),
}


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(settings()))
    save_file(weights(), folder / WEIGHTS)
    return folder


RUN = ("--tasks", "mini_gsm8k", "--limit", "1", "--warmup", "0", "--set", "gen_length=8", "--set", "slot_size=4")


def command(adapter, run_dir):
    more = ("--set", "block_size=8", "--decoder", "refusion")
    return ("run", "--model", embedded_path("refusion"), "--adapter", adapter, "--run-dir", run_dir, *RUN, *more)


def test_the_undamaged_adapter_is_taken(adapter, front_end, tmp_path):
    status, text = front_end.run(*command(adapter, tmp_path / "run"))
    assert status == 0, text


@pytest.mark.parametrize("name", CASES)
def test_a_bad_adapter_is_one_error_that_names_it(name, adapter, front_end, tmp_path):
    damage, words = CASES[name]
    damage(adapter)
    message = front_end.refusal(*command(adapter, tmp_path / "run"))
    assert all(word in message for word in words), message
    assert not (adapter / "exploded").exists()


def test_the_base_that_is_not_there_is_named(adapter, front_end, tmp_path):
    arguments = list(command(adapter, tmp_path / "run"))
    arguments[2] = tmp_path / "nowhere"
    assert "nowhere" in front_end.refusal(*arguments)
