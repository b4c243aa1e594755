"""Arguments out of range, misspelt settings and damaged YAML, through the command line: one error, nothing written."""

import contextlib
import os
import shutil
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from refusion_eval.config import field_types, read_values
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError
from refusion_eval.paths import tasks_path
from refusion_eval.runs.model_args import ModelArgs, parse_model_args
from tests.examples import examples

ODD = ("-1", "1e400", "nan", "inf", "-inf", "text", "", "0x10", "1.5", "[]", "9" * 5000, "\ud800", "None", "1,2")
NUMERIC = sorted(
    (decoder, name)
    for decoder in DECODERS
    for name, kind in field_types(DECODERS[decoder].Settings).items()
    if getattr(kind, "__origin__", kind) in (int, float)
)


@pytest.mark.parametrize(("decoder", "name"), NUMERIC)
def test_a_number_out_of_range_is_refused_by_name_or_taken(decoder, name):
    """Whatever arrives for a numeric setting: the settings are built, or a ConfigError names the setting."""
    kinds = field_types(DECODERS[decoder].Settings)
    refusals = []
    for value in (*ODD, float("nan"), float("inf"), -1, 10**30, True, None, [], {}):
        try:
            converted = read_values(DECODERS[decoder].Settings, {name: value}, "model_args")
            DECODERS[decoder].Settings(**tokens_of(kinds) | converted)
        except ConfigError as error:
            refusals.append(str(error))
    assert len(refusals) >= len(ODD) - 4
    assert all(name in text and len(text.splitlines()) == 1 for text in refusals), refusals


def tokens_of(kinds):
    return {key: value for key, value in {"mask_id": 5, "eos_ids": (1,)}.items() if key in kinds}


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(ODD),
    st.lists(st.one_of(st.integers(), st.floats(), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.binary(max_size=3),
)


@examples(300, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_arguments_are_built_or_refused_with_one_error(data):
    decoder = data.draw(st.sampled_from(sorted(DECODERS)))
    names = st.sampled_from(sorted({**field_types(DECODERS[decoder].Settings), **field_types(ModelArgs), "typo": int}))
    given_arguments = data.draw(st.dictionaries(names, VALUES, max_size=4))
    with contextlib.suppress(ConfigError):  # any other exception is a failure
        args = parse_model_args({"pretrained": "x", "decoder": decoder, **given_arguments})
        settings_type = DECODERS[decoder].Settings
        settings_type(**tokens_of(field_types(settings_type)) | dict(args.settings))


RUN = ("run", "--tasks", "mini_gsm8k", "--limit", "1")
COMMANDS = {
    "unknown setting": (("--set", "tau_slt=1"), ("tau_slt", "did you mean tau_slot")),
    "setting without a value": (("--set", "tau_slot"), ("KEY=VALUE",)),
    "threshold above 1": (("--set", "tau_slot=1.5"), ("tau_slot", "1.5")),
    "threshold nan": (("--set", "tau_slot=nan"), ("tau_slot", "nan")),
    "length 0": (("--set", "gen_length=0"), ("gen_length", "0")),
    "length as text": (("--set", "gen_length=long"), ("gen_length", "whole number")),
    "length infinite": (("--set", "gen_length=inf"), ("gen_length", "whole number")),
    "block below slot": (("--set", "slot_size=32", "--set", "block_size=8"), ("slot_size", "block_size")),
    "mask outside the vocabulary": (("--set", "mask_id=99999999"), ("mask", "vocabulary")),
    "negative temperature": (("--set", "temperature=-1"), ("temperature", "-1")),
    "unknown decoder": (("--decoder", "refuson"), ("refuson", "refusion")),
    "unknown dtype": (("--dtype", "int4"), ("dtype", "int4", "bfloat16")),
    "unknown device": (("--device", "abacus"), ("device", "abacus", "cuda")),
    "GPU that is not there": (("--device", "cuda:77"), ("cuda:77", "CUDA devices")),
    "unknown attention": (("--attention", "full"), ("attention", "full", "sdpa")),
    "batch of 0": (("--batch-size", "0"), ("batch_size", "at least 1")),
    "batch as text": (("--batch-size", "many"), ("batch_size", "whole number")),
    "infinite KV budget": (("--kv-budget-gib", "inf"), ("kv_budget_gib", "inf")),
    "unknown task": (("--tasks", "gsm9k"), ("gsm9k", "did you mean gsm8k")),
    "chat template that is not there": (("--chat-template", "/no/such.jinja"), ("/no/such.jinja", "Jinja")),
    "revision of a folder": (("--revision", "v1"), ("revision", "local directory")),
    "no such model": (("--model", "/no/such/model"), ("/no/such/model", "directory")),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_bad_argument_is_one_error(name, front_end, tmp_path):
    arguments, words = COMMANDS[name]
    message = front_end.refusal(*RUN, "--run-dir", tmp_path / "run", *arguments)
    assert all(word in message for word in words), message
    assert not (tmp_path / "run" / "results.csv").exists()


TABLE = "mini_refusion.yaml"
BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvwxyz"))
YAML = {
    "unknown key": ("commn: {}\n", ("commn", "common")),
    "tab": ("\tcommon: {}\n", (TABLE, "line")),
    "unclosed": ("common: [1,\n", (TABLE, "line")),
    "a text": ("just text\n", (TABLE, "str")),
    "a list": ("- 1\n", (TABLE, "list")),
    "empty": ("", (TABLE,)),
    "key twice": ("decoder: refusion\ndecoder: refusion\nbenchmarks: {}\n", (TABLE, "decoder", "twice")),
    "Latin-1": (b"# caf\xe9\n", (TABLE, "UTF-8")),
    "wrong type": ("decoder: refusion\nsource: s\nbenchmarks: {gsm8k: {gen_length: long}}\n", (TABLE, "gen_length")),
    "row as text": ("decoder: refusion\nsource: s\nbenchmarks: {gsm8k: 5}\n", (TABLE, "gsm8k")),
    "benchmarks as list": ("decoder: refusion\nsource: s\nbenchmarks: [gsm8k]\n", (TABLE, "benchmarks")),
    "aliases of aliases": (BOMB, (TABLE, "alias", "write the value")),
    "an alias of itself": ("a: &a [*a]\n", (TABLE, "alias")),
    "deep": ("a: " + "[" * 20_000, (TABLE, "recursion")),
    "an object of Python": ("a: !!python/object/apply:os.system [touch exploded]\n", (TABLE, "python/object")),
    "no benchmarks": ("decoder: refusion\nsource: s\n", (TABLE, "benchmarks")),
    "unknown benchmark": ("decoder: refusion\nsource: s\nbenchmarks: {gsm9k: {}}\n", (TABLE, "gsm9k", "gsm8k")),
}


@pytest.fixture
def own_tasks(tmp_path, monkeypatch):
    """A copy of the settings folder that runs read."""
    folder = tmp_path / "tasks"
    shutil.copytree(tasks_path() / "settings", folder / "settings")
    for module in ("settings_tables", "systems"):
        monkeypatch.setattr(f"refusion_eval.runs.{module}.tasks_path", lambda: folder)
    return folder


@pytest.mark.parametrize("name", YAML)
def test_a_damaged_settings_table_is_one_error_with_its_file(name, own_tasks, front_end, tmp_path):
    content, words = YAML[name]
    path = own_tasks / "settings" / TABLE
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = front_end.refusal(*RUN, "--run-dir", tmp_path / "run")
    assert all(word in message for word in words), message


def test_a_settings_table_that_is_a_pipe_is_one_error(own_tasks, front_end, tmp_path):
    path = own_tasks / "settings" / TABLE
    path.unlink()
    os.mkfifo(path)
    message = front_end.refusal(*RUN, "--run-dir", tmp_path / "run")
    assert TABLE in message
    assert "named pipe" in message


SWEEPS = {
    "aliases of aliases": BOMB,
    "deep": "a: " + "[" * 20_000,
    "tab": "systems:\n\tmine: {}\n",
    "a list": "- 1\n",
    "empty": "",
    "no arguments": "systems: {a: {}}\n",
    "unknown key": "systms: {}\n",
    "key twice": "systems: {a: {arguments: {pretrained: embedded}}}\nsystems: {b: {}}\n",
    "system as text": "systems: {a: text}\n",
    "grid as text": "systems: {a: {arguments: {pretrained: embedded}, grid: text}}\n",
    "tasks as number": "tasks: 5\nsystems: {a: {arguments: {pretrained: embedded}}}\n",
    "limit as text": "limit: all\nsystems: {a: {arguments: {pretrained: embedded}}}\n",
    "arguments as text": "systems: {a: {arguments: text}}\n",
    "number as name": "systems: {5: {arguments: {pretrained: embedded}}}\n",
    "frontier as text": "systems: {a: {arguments: {pretrained: embedded}, frontier: tau_slot}}\n",
}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_damaged_sweep_is_one_error(name, front_end, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(SWEEPS[name])
    assert "mine.yaml" in front_end.refusal("sweep", path, "--dry-run")
