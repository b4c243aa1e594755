"""The file of a protocol: what its hash rests on, what is refused, and the protocols of the package."""

import re

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.config import read_yaml
from refusion_eval.errors import ConfigError
from refusion_eval.protocol.compare import protocol_differences
from refusion_eval.protocol.spec import DEFAULT, METRICS, read_protocol, shipped_protocols
from refusion_eval.results.measurement import TASKS
from refusion_eval.results.published import published_backbone, published_measurements, system_key
from refusion_eval.runs import settings_tables

SMALL = """
tasks: [gsm8k, parts]
limit: 4
systems:
  refusion:
    arguments: {pretrained: embedded, decoder: refusion}
    settings: {tau_slot: 0.5}
  ar:
    arguments: {pretrained: embedded, decoder: autoregressive}
"""


@pytest.fixture
def protocol(tmp_path):
    def read(text=SMALL, name="small"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return read_protocol(str(path))

    return read


def test_content_names_the_tasks_of_which_a_limit_leaves_spread_rows(protocol):
    content = protocol(SMALL.replace("[gsm8k, parts]", "[refusion_bbh, refusion_gsm8k]").replace("4", "7")).content()
    assert (content["limit"], content["spread"]) == (7, ["refusion_bbh"])
    assert "spread" not in protocol().content()
    assert "spread" not in protocol(SMALL.replace("[gsm8k, parts]\nlimit: 4", "[refusion_bbh]")).content()


def test_the_hash_is_of_the_meaning_of_a_file(protocol):
    reordered = """
# A comment.
schema: 1
systems:
  ar: {arguments: {decoder: autoregressive, pretrained: embedded, dtype: auto, batch_size: 1}}
  refusion: {settings: {tau_slot: 5e-1, temperature: 0}, arguments: {decoder: refusion, pretrained: embedded}}
about: Words.
seeds: [0]
rounds: 3
metrics: [speedup, tpf, tps, accuracy]
analysis: {interval: 95, resamples: 2000, unit: item}
limit: 4
tasks: [gsm8k, parts]
"""
    assert protocol(reordered, "other").hash == protocol().hash
    assert protocol(reordered, "other").label == f"other@{protocol().hash[:12]}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("limit: 4", "limit: 5"),
        ("limit: 4", "limit: 4\nseeds: [1]"),
        ("limit: 4", "limit: 4\nrounds: 2"),
        ("limit: 4", "limit: 4\nmetrics: [accuracy]"),
        ("limit: 4", "limit: 4\nbaseline: ar"),
        ("[gsm8k, parts]", "[gsm8k]"),
        ("tau_slot: 0.5", "tau_slot: 0.6"),
        ("decoder: autoregressive}", "decoder: autoregressive, dtype: bfloat16}"),
        ("decoder: autoregressive}", "decoder: autoregressive, revision: abc}"),
        ("  ar:", "  baseline:"),
    ],
)
def test_whatever_changes_a_number_changes_the_hash(protocol, old, new):
    assert old in SMALL
    assert protocol(SMALL.replace(old, new)).hash != protocol().hash


def test_a_settings_table_is_hashed_by_its_values(protocol, tmp_path):
    table = tmp_path / "own.yaml"
    file = SMALL.replace("decoder: autoregressive}", f"decoder: autoregressive, preset: {table}}}")

    def hash_with(length):
        rows = "".join(f"  {task}: {{gen_length: {length}}}\n" for task in ("gsm8k", "parts"))
        table.write_text(f"decoder: autoregressive\nbenchmarks:\n{rows}")
        return protocol(file).hash

    assert hash_with(96) == protocol().hash  # the table of the package says this too
    assert hash_with(80) != protocol().hash


def test_a_check_reads_each_settings_table_once_for_each_hash_whatever_the_number_of_systems(tmp_path, monkeypatch):
    path, read = tmp_path / "many.yaml", []
    names = [f"  s{number}: {{arguments: {{pretrained: embedded, decoder: refusion}}}}" for number in range(20)]
    path.write_text("tasks: [mini_gsm8k]\nlimit: 1\nsystems:\n" + "\n".join(names))
    monkeypatch.setattr(settings_tables, "read_yaml", lambda *which: read.append(which) or read_yaml(*which))
    assert CliRunner().invoke(app, ["protocol", "check", str(path)]).exit_code == 0
    assert len(read) == 2 * len(set(read)) == 4  # when the file is read, and for what is shown


def test_a_path_or_a_place_is_no_part_of_the_hash(protocol):
    moved = SMALL.replace("decoder: autoregressive}", "decoder: autoregressive, data_dir: /elsewhere, workers: null}")
    assert protocol(moved).hash == protocol().hash


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("task: [gsm8k]", "unknown key 'task'; did you mean tasks?"),
        ("metrics: [acuracy]", "metrics: unknown metric 'acuracy'; did you mean accuracy?"),
        ("baseline: a", "baseline: unknown system 'a'; did you mean ar?"),
        ("analysis: {resamples: 100}", "intervals are made of 2000 resamples; write that"),
        ("analysis: {intervall: 95}", "unknown key 'intervall'; did you mean interval?"),
        ("seeds: [1, 1]", "stands twice; name each once"),
        ("schema: 2", "schema=2"),
        ("prompts: theirs", "prompts='theirs'; choose one of ours, release"),
    ],
)
def test_what_is_wrong_is_named_with_the_nearest_name(protocol, line, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        protocol(f"{line}\n{SMALL}")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("arguments: {pretrained", "argument: {pretrained", "systems: refusion: unknown key 'argument'"),
        ("tau_slot", "tau_slott", "systems: refusion: settings: unknown key 'tau_slott'; did you mean tau_slot?"),
        ("decoder: refusion", "dekoder: refusion", "systems: refusion: model_args: unknown key 'dekoder'"),
        ("tau_slot: 0.5", "seed: 1", "write `seeds:` for all of them"),
        ("  ar:", "  a/r:", "'a/r' is part of folder names"),
    ],
)
def test_what_is_wrong_with_a_system_is_named(protocol, old, new, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        protocol(SMALL.replace(old, new, 1))


def test_a_task_is_one_of_this_project(protocol):
    with pytest.raises(ConfigError, match=r"unknown task 'gsm8'; did you mean gsm8k\?.*those of lm-eval go to `run`"):
        protocol(SMALL.replace("gsm8k", "gsm8")).content()


def test_seeds_are_runs_of_their_own(protocol):
    seeded = protocol(SMALL.replace("limit: 4", "seeds: [3, 1]"))
    assert [folder for folder, *_ in seeded.runs()] == ["refusion-seed3", "refusion-seed1", "ar-seed3", "ar-seed1"]
    assert seeded.arguments("ar", 1).settings["seed"] == 1
    with pytest.raises(ConfigError, match="its seeds are 3, 1, not 0"):
        seeded.arguments("ar", 0)


def test_the_protocols_of_the_package_hold():
    assert shipped_protocols() == ["eval", "smollm2", "table1", "table2"]
    for name in shipped_protocols():
        assert read_protocol(name).content()["systems"]


@pytest.mark.parametrize(("name", "artefact"), [("table1", "table1"), ("table2", "table2_v2")])
def test_the_protocol_of_a_table_has_its_systems_tasks_and_prompts(name, artefact):
    protocol = read_protocol(name)
    keys = set()
    for system in protocol.systems:
        args = protocol.arguments(system)
        in_paper = next(iter(_published_keys(args.system_name)), "")
        keys.add(system_key(args.system_name, args.backbone or published_backbone(in_paper), {}, loop=""))
    assert keys == {entry.system for entry in published_measurements((artefact,))}
    assert protocol.tasks == TASKS
    assert all(task.endswith("_release") for task in protocol.content()["tasks"])


def _published_keys(label):
    plain = label.removesuffix(" (paper_implied)")
    return {entry.system for entry in published_measurements() if entry.label == plain}


def test_refusion_in_table_1_has_the_settings_of_table_6():
    settings = read_protocol("table1").content()["systems"]["refusion"]["settings"]["refusion_math_release"]
    names = ("gen_length", "tau_slot", "tau_token", "slot_size", "block_size", "fuse")
    assert [settings[name] for name in names] == [512, 0.8, 0.6, 32, 64, False]


def lines_of(*arguments):
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def test_the_suite_without_options_runs_the_protocol_eval():
    runs = [line.partition(" run ")[2] for line in lines_of("suite", "--dry-run") if " run " in line]
    protocol = read_protocol(DEFAULT)
    wanted = [
        f"--run-dir results/runs/{name} --protocol {DEFAULT}:{name} --round {number}/{protocol.rounds}"
        for number in range(1, protocol.rounds + 1)
        for name in protocol.systems
    ]
    assert runs == wanted
    assert not any("--protocol" in line for line in lines_of("suite", "--dry-run", "--system", "all"))


def test_check_says_what_would_be_run_and_what_is_not_pinned():
    shown = " ".join(lines_of("protocol", "check", "table1", "--limit", "10"))
    for part in ("not pinned, adapter not pinned", "70", "630", "refusion_gsm8k_release", "; 10 items of each"):
        assert part in shown
    assert "pinned (b179c9523d0e)" in " ".join(lines_of("protocol", "check", "smollm2"))


def test_a_folder_is_said_to_be_none_of_the_files(tmp_path):
    with pytest.raises(ConfigError, match=r"a folder, not a file \(diff compares a run directory\); give a YAML file"):
        read_protocol(str(tmp_path))


def test_a_difference_is_named_field_by_field(protocol, tmp_path):
    protocol()
    protocol(SMALL.replace("0.5", "0.6").replace("limit: 4", "limit: 5"), "other")
    first, second = (str(tmp_path / f"{name}.yaml") for name in ("small", "other"))
    assert protocol_differences(first, first) == []
    limit, *settings = protocol_differences(first, second)
    assert limit == f"limit: {first} 4, {second} 5"
    where = [f"systems.refusion.settings.mini_{task}.tau_slot" for task in ("gsm8k", "parts")]
    assert settings == [f"{name}: {first} 0.5, {second} 0.6" for name in where]
    protocol(SMALL.replace("[gsm8k, parts]", "[gsm8k]").replace("  ar:", "  base:"), "fewer")
    version = read_protocol(first).content()["tasks"]["mini_parts"]
    assert protocol_differences(first, fewer := str(tmp_path / "fewer.yaml")) == [
        f'systems.ar: {first} "there", {fewer} nothing',
        f'systems.base: {first} nothing, {fewer} "there"',
        f'tasks.mini_parts: {first} "{version}", {fewer} nothing',
    ]
    done = CliRunner().invoke(app, ["protocol", "diff", first, second])
    assert done.exit_code == 1
    assert CliRunner().invoke(app, ["protocol", "diff", first, first]).exit_code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--system", "llada"], "decides system"),
        (["--model", "embedded"], "decides pretrained"),
        (["--set", "tau_slot=1"], "decides set"),
        (["--prompts", "ours"], "decides prompts"),
    ],
)
def test_an_option_that_a_protocol_decides_is_refused_beside_it(options, said):
    done = CliRunner().invoke(app, ["run", "--protocol", f"{DEFAULT}:embedded-autoregressive", *options])
    assert isinstance(done.exception, ConfigError)
    assert said in str(done.exception)


def test_metrics_are_the_columns_of_tables():
    assert METRICS == ("accuracy", "tps", "tpf", "speedup")
