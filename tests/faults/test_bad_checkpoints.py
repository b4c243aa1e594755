"""Damaged, foreign and hostile checkpoints, through the command line: one error that names the file and what to do."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.faults.front_end import copy_checkpoint, error_of, records

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
RUN = ("--decoder", "autoregressive", "--set", "gen_length=8", "--warmup", "0", "--tasks", "mini_gsm8k")


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def edit_json(folder, name, **changes):
    path = folder / name
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def edit_tensor(name, change):
    def damage(folder):
        tensors = load_file(folder / WEIGHTS)
        tensors[name] = change(tensors[name])
        save_file(tensors, folder / WEIGHTS)

    return damage


def with_value(value):
    def change(tensor):
        tensor[-1] = value
        return tensor

    return change


def shard(folder):
    """Two shards and their index in place of the one file."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for file, half in zip(files, halves, strict=True):
        save_file({name: tensors[name] for name in half}, folder / file)
    weight_map = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / WEIGHTS).unlink()
    return files


def missing_shard(folder):
    (folder / shard(folder)[1]).unlink()


def absent_tensor(folder):
    """The index promises a tensor that its file does not hold."""
    second = folder / shard(folder)[1]
    tensors = load_file(second)
    del tensors["model.norm.weight"]
    save_file(tensors, second)


def index_of(content):
    def damage(folder):
        shard(folder)
        (folder / INDEX).write_text(content)

    return damage


def cut(name, keep):
    def damage(folder):
        path = folder / name
        path.write_bytes(path.read_bytes()[:keep])

    return damage


def only_pickled(folder):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder / "exploded")))
    (folder / WEIGHTS).unlink()


def pickle_named_safetensors(folder):
    torch.save({"bomb": Bomb(folder / "exploded")}, folder / WEIGHTS)


def pickle_in_index(folder):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder / "exploded")))
    index_of(json.dumps({"weight_map": {"model.norm.weight": "pytorch_model.bin"}}))(folder)


def outside_index(folder):
    shutil.copy(folder / WEIGHTS, folder.parent / "elsewhere.safetensors")
    index_of(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}))(folder)


def remote_code(folder):
    edit_json(folder, "config.json", model_type="own", auto_map={"AutoModelForCausalLM": "modeling.Own"})
    (folder / "modeling.py").write_text(f"open({str(folder / 'exploded')!r}, 'w')")


def remote_tokenizer(folder):
    edit_json(
        folder,
        "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": ["own.OwnTokenizer", None]},
    )
    (folder / "tokenizer.json").unlink()
    (folder / "own.py").write_text(f"open({str(folder / 'exploded')!r}, 'w')")


def without(name):
    return lambda folder: (folder / name).unlink()


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def config(**changes):
    return lambda folder: edit_json(folder, "config.json", **changes)


def generation(**changes):
    return lambda folder: edit_json(folder, "generation_config.json", **changes)


def more_tokens(folder):
    """The tokenizer knows tokens that the embedding has no row for."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    model = content["model"]["vocab"]
    model.update({f"extra{number}": 1837 + number for number in range(5)})
    digits = {str(digit): 3000 + digit for digit in range(10)}
    model.update({key: digits[key] for key in digits if key in model})
    path.write_text(json.dumps(content))


def pipe(name):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def template(text):
    return written("chat_template.jinja", text)


def loops(depth):
    return "{% for a in range(99999) %}" * depth + "{% endfor %}" * depth


DEEP = '{"a":' * 50_000 + "1" + "}" * 50_000
TENSOR = "model.layers.2.mlp.down_proj.weight"

# What is done to a checkpoint, and words that the error must hold: the thing, and what to do.
CASES = {
    "no weights": (without(WEIGHTS), ("checkpoint has no weights", INDEX)),
    "missing shard": (missing_shard, ("model-00002-of-00002.safetensors", "download")),
    "index names an absent tensor": (absent_tensor, ("model.norm.weight", "incomplete")),
    "index without a map": (index_of("{}"), (INDEX, "download")),
    "index that is no JSON": (index_of("{"), (INDEX, "download")),
    "index with numbers": (index_of('{"weight_map": {"model.norm.weight": 3}}'), (INDEX, "download")),
    "index that leads outside": (outside_index, (INDEX, "../elsewhere.safetensors")),
    "index that names a pickle": (pickle_in_index, (INDEX, "pytorch_model.bin", "safetensors")),
    "header cut": (cut(WEIGHTS, 20), (WEIGHTS, "truncated", "download")),
    "body cut": (cut(WEIGHTS, 1_000_000), (WEIGHTS, "truncated", "download")),
    "empty weights": (cut(WEIGHTS, 0), (WEIGHTS, "truncated", "download")),
    "wrong shape": (edit_tensor(TENSOR, lambda it: it[:, :-1].contiguous()), (WEIGHTS, TENSOR, "shape", "same")),
    "int8": (edit_tensor(TENSOR, lambda it: it.to(torch.int8)), (WEIGHTS, TENSOR, "int8", "quantised")),
    "float8": (edit_tensor(TENSOR, lambda it: it.to(torch.float8_e4m3fn)), (WEIGHTS, TENSOR, "quantised")),
    "complex": (edit_tensor(TENSOR, lambda it: it.to(torch.complex64)), (WEIGHTS, TENSOR, "complex")),
    "NaN": (edit_tensor(TENSOR, with_value(float("nan"))), (WEIGHTS, TENSOR, "NaN", "download")),
    "infinite": (edit_tensor(TENSOR, with_value(float("inf"))), (WEIGHTS, TENSOR, "infinite", "download")),
    "NaN in a norm": (edit_tensor("model.norm.weight", with_value(float("nan"))), ("model.norm.weight", "NaN")),
    "only pickled weights": (only_pickled, ("pytorch_model.bin", "pickled", "convert")),
    "a pickle named safetensors": (pickle_named_safetensors, (WEIGHTS, "not safetensors")),
    "no config": (without("config.json"), ("config.json", "directory")),
    "garbled config": (written("config.json", "{oops"), ("config.json", "JSON", "download")),
    "config in UTF-16": (written("config.json", '{"a": 1}'.encode("utf-16")), ("config.json", "download")),
    "config that is a list": (written("config.json", "[]"), ("config.json", "list", "download")),
    "unknown family": (config(model_type="mamba"), ("config.json", "mamba", "qwen3")),
    "code of its own": (remote_code, ("config.json", "own", "qwen3")),
    "config with a text for a size": (config(hidden_size="big"), ("config.json", "hidden_size", "whole number")),
    "config with a negative size": (config(num_hidden_layers=-4), ("config.json", "num_hidden_layers")),
    "config without a size": (config(vocab_size=...), ("config.json", "vocab_size")),
    "config with a text for epsilon": (config(rms_norm_eps="small"), ("config.json", "rms_norm_eps")),
    "config with a list for theta": (config(rope_parameters={"rope_theta": [1]}), ("config.json", "rope_theta")),
    "config with a text for rotary scaling": (config(rope_parameters="yarn"), ("config.json", "rope_parameters")),
    "config of another size": (config(intermediate_size=640), (WEIGHTS, "shape", "config.json")),
    "quantised": (config(quantization_config={"bits": 4}), ("config.json", "quantised", "unquantised")),
    "mask token as text": (config(mask_token_id="<|mask|>"), ("config.json", "mask_token_id")),
    "EOS as text": (generation(eos_token_id="</s>"), ("generation_config.json", "eos_token_id")),
    "EOS as a float": (generation(eos_token_id=[1.5]), ("generation_config.json", "eos_token_id")),
    "EOS outside the vocabulary": (generation(eos_token_id=999_999), ("999999", "vocabulary")),
    "garbled generation config": (written("generation_config.json", "no"), ("generation_config.json", "download")),
    "no tokenizer": (without("tokenizer.json"), ("checkpoint", "tokenizer.json")),
    "garbled tokenizer": (written("tokenizer.json", "{"), ("tokenizer.json", "JSON", "download")),
    "empty tokenizer": (written("tokenizer.json", "{}"), ("checkpoint", "tokenizer")),
    "tokenizer config that is a list": (written("tokenizer_config.json", "[1]"), ("tokenizer_config.json", "list")),
    "tokenizer code of its own": (remote_tokenizer, ("checkpoint", "tokenizer")),
    "more tokens than embeddings": (more_tokens, ("tokenizer", "1837", "vocabulary")),
    **{
        f"{name} that is a pipe": (pipe(name), (name, "named pipe"))
        for name in ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json", WEIGHTS, "x.bin")
    },
    **{
        f"{name} that is deep": (written(name, DEEP), (name, "deep"))
        for name in ("config.json", "tokenizer_config.json", "generation_config.json")
    },
    "tokenizer that is deep": (written("tokenizer.json", DEEP), ("tokenizer",)),
    "config of holes": (lambda folder: os.truncate(folder / "config.json", 1 << 36), ("config.json", "larger than")),
    "endless chat template": (template(loops(3)), ("chat template", "processor time")),
    "endless chat template after a text": (template("{{ messages[0].content }}" + loops(3)), ("processor time",)),
    "chat template of powers": (template("{% set x = 3 ** (9 ** 9) %}{{ x ** x }}"), ("chat template",)),
    "chat template that fills memory": (template("{{ 'x' * 9000000000 }}"), ("chat template", "MemoryError")),
    "chat template that formats": (template("{{ '%900000000d' | format(3) }}"), ("chat template", "MemoryError")),
    "chat template that doubles": (
        template("{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}"),
        ("chat template", "MemoryError"),
    ),
    "chat template that is long": (template("{{ 'x' * 9000000 }}"), ("chat template", "characters")),
    "chat template that calls itself": (
        template("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
        ("chat template", "RecursionError"),
    ),
    "chat template that speaks": (
        template("{{ raise_exception('\x1b]0;title\x07') }}"),
        ("chat template", "\\x1b]0;title\\x07"),
    ),
    "garbled chat template": (written("chat_template.jinja", "{% for"), ("chat_template", "Jinja")),
    "chat template that fails": (written("chat_template.jinja", "{{ messages[7].role.x }}"), ("chat template",)),
    "chat template in Latin-1": (
        written("chat_template.jinja", b"\xe9{{ messages }}"),
        ("chat_template.jinja", "UTF-8"),
    ),
}


@pytest.fixture(scope="session")
def finished_run(server, tmp_path_factory):
    """A run directory with results of the sound checkpoint."""
    folder = tmp_path_factory.mktemp("earlier")
    checkpoint = copy_checkpoint(folder / "checkpoint")
    status, text = server.run(
        ["run", "--model", str(checkpoint), "--run-dir", str(folder / "run"), "--limit", "2", *RUN]
    )
    assert status == 0, text
    return folder / "run"


@pytest.fixture
def earlier(finished_run, tmp_path):
    """The same, to be written into."""
    return Path(shutil.copytree(finished_run, tmp_path / "earlier"))


@pytest.mark.parametrize("name", CASES)
def test_a_bad_checkpoint_is_one_error_that_names_it_and_earlier_results_stay(
    name, own_checkpoint, earlier, front_end, tmp_path
):
    damage, words = CASES[name]
    damage(own_checkpoint)
    before = records(earlier)
    command = ("run", "--model", own_checkpoint, "--limit", "3", *RUN)
    message = front_end.refusal(*command, "--run-dir", earlier)
    if "belongs to a different run" in message:  # other weights are told before they are looked at
        message = front_end.refusal(*command, "--run-dir", tmp_path / "new")
    assert all(word in message for word in words), message
    assert records(earlier) == before
    assert not (own_checkpoint / "exploded").exists()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("missing shard", marks=pytest.mark.slow),
        pytest.param("a pickle named safetensors", marks=pytest.mark.slow),
        "code of its own",
    ],
)
def test_a_process_of_its_own_refuses_likewise(name, own_checkpoint, tmp_path):
    damage, words = CASES[name]
    damage(own_checkpoint)
    command = ["run", "--model", own_checkpoint, "--run-dir", tmp_path / "run", "--limit", "1", *RUN]
    done = subprocess.run([sys.executable, "-m", "refusion_eval", *command], capture_output=True, text=True)
    assert done.returncode == 1
    message = error_of(done.stderr)
    assert all(word in message for word in words), message
    assert not (own_checkpoint / "exploded").exists()
