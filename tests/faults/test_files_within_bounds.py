"""Files of strangers whose sizes, numbers and names would cost time, lead elsewhere, or act on a terminal or a page."""

import json
import re
import shutil
import time
from contextlib import nullcontext

import pytest
from typer.testing import CliRunner

from refusion_eval import config
from refusion_eval.cli import app
from refusion_eval.errors import ConfigError, StoreError
from refusion_eval.exports.source import safe_name
from refusion_eval.protocol.compare import protocol_differences
from refusion_eval.protocol.spec import read_protocol
from refusion_eval.results.facts import natural_order
from refusion_eval.store.records import LONGEST_TEXT
from refusion_eval.sweep.spec import read_spec
from tests.faults import hostile

SECONDS = 20  # until a reader counts as slow; a refusal takes a fraction of one
SYSTEM = "{arguments: {pretrained: embedded}}"


def written(folder, text, name="file.yaml"):
    (folder / name).write_text(text)
    return str(folder / name)


def systems(*rows):
    return "systems: {" + ", ".join(rows) + "}\n"


ONE = systems(f"a: {SYSTEM}")
SIXTY = ":".join(["59"] * 3000)
PROTOCOLS = {
    "seeds": (f"seeds: {list(range(100_000))}\n{ONE}", "more than 20000 keys and values"),
    "some seeds": (f"seeds: {list(range(1001))}\n{ONE}", "1,001 runs, of each system with each seed, are too many"),
    "seed": (f"seeds: [{'9' * 30}]\n{ONE}", "is not a whole number below"),
    "systems": (systems(*(f"s{number}: {SYSTEM}" for number in range(20_000))), "more than 20000 keys and values"),
    "some systems": (systems(*(f"s{number}: {SYSTEM}" for number in range(51))), "51 systems are too many"),
    "sexagesimal": (f"limit: {SIXTY}\n{ONE}", "a number of 8999 characters is not read"),
    "sexagesimal fraction": (f"limit: {SIXTY}.5\n{ONE}", "a number of 9001 characters is not read"),
    "hexadecimal": (f"limit: 0x{'f' * 9000}\n{ONE}", "a number of 9002 characters is not read"),
    "digits": (f"limit: {'9' * 4000}\n{ONE}", "a number of 4000 characters is not read"),
    "digits as text": (f"limit: '{'9' * 4000}'\n{ONE}", "is not a whole number below"),
    "samples": (
        systems(f"a: {{arguments: {{pretrained: embedded, samples: 1{'0' * 30}}}}}"),
        "not a whole number below",
    ),
    "more samples": (
        systems("a: {arguments: {pretrained: embedded, samples: 100000000}}"),
        "samples=100000000; it must be at most 10000",
    ),
    "number": ("5\n", "is a int (5); write `key: value` lines"),
    "date alone": ("2026-11-27\n", "is a date"),
    "rounds": (f"rounds: 1000000000\n{ONE}", "rounds=1000000000; it must be at most 1000"),
    "large": (f"about: {'x' * (1 << 21)}\n{ONE}", "larger than 1 MiB"),
    "key": (f"{'k' * 1000}: 1\n{ONE}", "unknown key 'kkk"),
    "value": (f"limit: {'v' * 100_000}\n{ONE}", "is not a whole number"),
    "nested": (f"tasks: {'[' * 100}{']' * 100}\n{ONE}", "nested too deeply"),
    "date": (f"limit: 2026-99-99\n{ONE}", "cannot be read as YAML"),
    "parent": (systems(f"'..': {SYSTEM}"), "'..' is part of folder names"),
    "here": (systems(f"'.': {SYSTEM}"), "'.' is part of folder names"),
    "long": (systems(f"{'n' * 101}: {SYSTEM}"), "is part of folder names"),
    "line": (systems(f'"a\\n": {SYSTEM}'), "is part of folder names"),
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_beyond_the_bounds_is_one_short_line_at_once(name, tmp_path):
    text, message = PROTOCOLS[name]
    started = time.monotonic()
    done = CliRunner().invoke(app, ["protocol", "check", written(tmp_path, text)])
    assert time.monotonic() - started < SECONDS
    assert isinstance(done.exception, ConfigError), done.exception
    assert message in str(done.exception)
    assert len(str(done.exception)) < 1000


@pytest.mark.parametrize("name", ["..yaml", "...yaml", "...."])
def test_a_file_of_dots_names_no_folder(name, tmp_path):
    for read in (read_protocol, read_spec):
        with pytest.raises(ConfigError, match="dots"):
            read(written(tmp_path, ONE, name))


SWEEPS = {
    "grid": (
        f"grid: {{tau_slot: {[n / 99 for n in range(99)]}, tau_token: {[n / 99 for n in range(99)]}}}",
        "9,802 points are too many",
    ),
    "points": (f"points: [{', '.join('{tau_slot: 0.5}' for _ in range(1001))}]", "1,002 points are too many"),
    "frontier": ("frontier: {setting: tau_slot, low: 0.1, high: 0.9, points: 1000000000}", "points are too many"),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_has_only_so_many_points(name, tmp_path):
    text, message = SWEEPS[name]
    file = written(tmp_path, f"systems: {{a: {{arguments: {{pretrained: embedded}}, {text}}}}}")
    with pytest.raises(ConfigError, match=message):
        read_spec(file)


def test_systems_of_a_sweep_share_the_number_of_points(tmp_path):
    values = [number / 600 for number in range(600)]
    row = f"{{arguments: {{pretrained: embedded}}, around: {{tau_slot: {values}}}}}"
    with pytest.raises(ConfigError, match="1,202 points are too many"):
        read_spec(written(tmp_path, systems(f"a: {row}", f"b: {row}")))


@pytest.mark.parametrize("argument", ["pretrained", "chat_template", "preset", "revision"])
def test_a_long_text_is_no_traceback(argument, tmp_path):
    text = "x" * 5000 + (".yaml" if argument == "preset" else "")
    arguments = {"pretrained": "embedded", argument: text}
    file = written(tmp_path, json.dumps({"systems": {"a": {"arguments": arguments}}}))
    for words in (["protocol", "check", file], ["sweep", file, "--dry-run", "--out", str(tmp_path / "o")]):
        done = CliRunner().invoke(app, words)
        assert done.exception is None or isinstance(done.exception, SystemExit | ConfigError), done.exception


def test_names_of_files_lead_nowhere_else():
    assert {safe_name(text) for text in ("..", ".", "../..", "", "\0", "\x1b]0;x\x07".strip("x0"))} <= {
        "unnamed",
        "0-x",
    }
    long = [safe_name("n" * 5000 + end) for end in "ab"]
    assert len(set(long)) == 2
    assert all(len(name) < 150 for name in long)


def test_long_digits_in_a_name_have_an_order():
    assert natural_order("9" * 4096) > natural_order("5")


# --- run directories ---


def sample(path, value):
    return hostile.sql((f"UPDATE samples SET body = json_set(body, '$.{path}', json(?))", (json.dumps(value),)))


def manifest(path, value):
    statement = f"UPDATE meta SET value = json_set(value, '$.{path}', json(?)) WHERE name = 'manifest'"
    return hostile.sql((statement, (json.dumps(value),)))


def score(path, value):
    return hostile.sql((f"UPDATE scores SET body = json_set(body, '$.{path}', json(?))", (json.dumps(value),)))


DAMAGED = {
    **{f"dropped {value!r}": sample("server", {"dropped": value}) for value in (5, "x", {"a": 1}, [5], None)},
    **{f"server {key}": sample("server", {key: value}) for key, value in {
        "tokens": 5, "prompt": [], "model": {}, "id": 1, "attempts": "3", "completion_tokens": "9", "queue_seconds": [],
        "accepted_tokens": -1, "own": 1, "first_byte_seconds": 1e300, "template": 1,
    }.items() if key != "own"},
    "forced tokens": sample("num_forced_tokens", 10**9),
    "thought tokens": sample("num_thought_tokens", 10**9),
    "sample number": sample("key.sample", -1),
    "number of a sample": sample("key.sample", 10**30),
    "many settings": sample("settings", {f"s{number}": number for number in range(200_000)}),
    "many sources": sample("settings_source", {f"s{number}": "x" for number in range(2_000)}),
    "large setting": sample("settings", {"s": "x" * (2 << 20)}),
    "nested settings": sample("settings", {"s": [[0] * 9 for _ in range(200_000)]}),
    "long text": sample("text", "x" * (LONGEST_TEXT + 1)),
    "long name": sample("item_id", "9" * 5000),
    "long stop": sample("stop", "x" * 5000),
    "seconds": sample("seconds", 1e300),
    **{f"protocol {value!r:.30}": manifest("protocol", value) for value in (
        {"label": "a@1", "hash": "1", "system": {"a": 1}, "content": {}},
        {"label": 5, "hash": "1", "system": "a", "content": {}},
        {"label": "a@1", "hash": "1", "system": "a", "content": []},
        {"label": "a@1"},
    )},
    **{f"manifest {name}": manifest(f"settings.{name}", 5) for name in ("tables", "model_args", "server")},
    "table": manifest("settings.tables", {"t": 5}),
    "row of a table": manifest("settings.tables", {"t": {"gsm8k": 5}}),
    "seed": manifest("seed", 10**30),
    "score": score("value", 10**30),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_record_beyond_the_bounds_is_one_line(name, calm, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(calm, run_dir)
    DAMAGED[name](run_dir, None)
    started = time.monotonic()
    for words in (["table", str(run_dir)], ["export", str(run_dir), "--out", str(tmp_path / "o")]):
        done = CliRunner().invoke(app, words)
        assert isinstance(done.exception, StoreError), (done.exception, done.output)
        assert str(run_dir) in str(done.exception)
        assert len(str(done.exception)) < 1000
    assert time.monotonic() - started < 2 * SECONDS


@pytest.mark.parametrize("created", ["yesterday", "0001-01-01T00:00:00+00:00"])
def test_a_moment_that_is_none_is_one_line_where_it_is_read(created, calm, tmp_path):
    shutil.copytree(calm, tmp_path / "run")
    sample("created", created)(tmp_path / "run", None)
    words = (["speed", "--concurrency"], ["export", "--format", "hf", "--out", str(tmp_path / "out")])
    for name, *options in words:
        done = CliRunner().invoke(app, [name, str(tmp_path / "run"), *options])
        assert isinstance(done.exception, StoreError), done.exception


def test_arguments_of_another_type_are_one_line_in_a_comparison(calm, tmp_path):
    file = written(tmp_path, ONE, "one.yaml")
    for number, arguments in enumerate(({"samples": 0}, {"samples": "many"}, {"samples": ["a"]})):
        run_dir = tmp_path / f"run{number}"
        shutil.copytree(calm, run_dir)
        manifest("arguments", arguments)(run_dir, None)
        manifest("protocol", {"label": "a@1", "hash": "1", "system": "a", "content": {}})(run_dir, None)
        with pytest.raises(StoreError, match=re.escape(str(run_dir))) if arguments["samples"] else nullcontext():
            protocol_differences(file, str(run_dir))


@pytest.mark.parametrize("checkpoint", ["../..", "a\0b/c", "\x1b[31m/\x1b]0;x\x07", "./.", f"{'n' * 300}/m"])
def test_an_export_stays_in_its_folder_and_prints_no_escape(checkpoint, calm, tmp_path):
    run_dir, out = tmp_path / "run", tmp_path / "a" / "b" / "out"
    shutil.copytree(calm, run_dir)
    manifest("checkpoint", checkpoint)(run_dir, None)
    manifest("checkpoint_revision", "1")(run_dir, None)
    before = set(tmp_path.rglob("*"))
    done = CliRunner().invoke(app, ["export", str(run_dir), "--format", "every-eval-ever", "--out", str(out)])
    assert done.exit_code == 0, done.exception
    made = [path for path in set(tmp_path.rglob("*")) - before if path.is_file()]
    assert made
    assert all(len(path.relative_to(out).parts) == 5 for path in made)
    assert all(path.name.isascii() and path.name.isprintable() for path in made)
    assert "\x1b" not in done.output


def test_the_heading_of_a_model_card_is_escaped_as_its_table_is(calm, tmp_path):
    run_dir, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(calm, run_dir)
    manifest("system", hostile.SPEAKING)(run_dir, None)
    assert CliRunner().invoke(app, ["export", str(run_dir), "--format", "hf", "--out", str(out)]).exit_code == 0
    card = (out / "run" / "README.md").read_text().partition("\n---\n")[2]
    assert "onerror" in card
    assert "<img" not in card.replace("\\<", "")
    assert "](javascript" not in card.replace("\\]", "").replace("\\(", "")
    assert "\x1b" not in card


def test_bounds_of_whole_numbers_are_those_of_every_argument():
    with pytest.raises(ConfigError, match="is not a whole number below"):
        config.read_values(
            read_protocol("eval").arguments("embedded-autoregressive").__class__, {"samples": 10**30}, "a"
        )
