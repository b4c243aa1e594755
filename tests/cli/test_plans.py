"""The plan of a run, and the words that stand for it."""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command
from typer.testing import CliRunner

from refusion_eval.cli import app, evaluate, suite_runs
from refusion_eval.cli.plans import plan_of, words_of
from refusion_eval.cli.protocol_runs import default_runs
from refusion_eval.errors import ConfigError
from refusion_eval.runs.plan import Plan, PlannedRun, Turn, turns

RUNNER = CliRunner()
SUITES = {
    "embedded": [],
    "family": ["--system", "all", "--set", "temperature=0.5", "--samples", "2"],
    "model": ["--model", "some/model", "--set", "tau_slot=0.5", "--tasks", "gsm8k,math", "--limit", "2"],
    "systems": ["--system", "refusion,qwen3,d2f_dream", "--fused", "--verifier", "--no-cuda-graphs"],
    "adapter": ["--system", "d2f_llada", "--model", "some/base", "--adapter", "some/lora", "--sandbox", "none"],
    "server": ["--system", "server:http://127.0.0.1:9,qwen3", "--server-name", "one", "--timeout", "7"],
    "2026": ["--suite", "2026", "--model", "some/copy", "--prompts", "ours"],
}


def command_of(name):
    group = get_command(app)
    return group.get_command(typer.Context(group), name)


def parsed(words):
    """The options that a command line gives, those at their default left out."""
    name, *rest = words
    command = command_of(name)
    context = command.make_context(name, list(rest))
    return {key: value for key, value in context.params.items() if context.get_parameter_source(key).name != "DEFAULT"}


def of_run():
    """A strategy for the options of `run`, each with a value of its kind."""
    texts = st.text("abcXYZ019 ._=/-,'\"", min_size=1).filter(lambda text: not text.startswith("-"))
    kinds = {int: st.integers(1, 99), str: texts}
    values = {}
    for name, option in ((one.name, one) for one in command_of("run").params):
        kind = option.type_descriptor
        value = st.sampled_from(kind.choices) if getattr(kind, "choices", ()) else kinds.get(kind.annotation)
        if option.is_flag:  # one without an opposite is only given or left out
            value = st.booleans() if option.secondary_opts else st.just(True)
        if value is not None and name not in ("help", "verbose", "quiet"):
            values[name] = st.lists(value, min_size=1, max_size=3) if option.multiple else value
    return st.fixed_dictionaries({}, optional=values)


@given(of_run())
def test_words_are_the_inverse_of_the_parser(options):
    found = parsed(words_of("run", options))
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()} == options


@pytest.fixture
def carried_out(monkeypatch):
    """The plans that commands would carry out."""
    plans = []
    for module in (evaluate, suite_runs):
        monkeypatch.setattr(module, "carry_out", lambda plan, **_: plans.append(plan) or 0)
    monkeypatch.setattr(suite_runs, "run_command", lambda *words: 0)
    return plans


def test_a_suite_and_a_protocol_are_plans_before_anything_runs(carried_out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--tasks", "mini_gsm8k", "--rounds", "2"]
    given, of_protocol = (
        SimpleNamespace(**command_of("suite").make_context("suite", [*more, *words]).params)
        for more in (["--system", "all"], [])
    )
    for plan in (suite_runs.Suite(given).plan(), default_runs(of_protocol).plan()):
        assert {run.tasks for run in plan.runs} == {("mini_gsm8k",)}
        assert [str(turn) for turn in plan.turns] == ["1/2", "2/2"]
    assert {run.args.protocol["label"].partition("@")[0] for run in plan.runs} == {"eval"}
    assert (carried_out, list(tmp_path.iterdir())) == ([], [])


def facts_of(run):
    return asdict(replace(run, options={}, name=""))


@pytest.mark.parametrize("kind", SUITES)
def test_the_commands_that_a_suite_prints_make_its_runs(kind, carried_out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = RUNNER.invoke(app, ["suite", *SUITES[kind], "--rounds", "2"])
    assert done.exit_code == 0, done.output
    started = list(carried_out)
    assert started
    carried_out.clear()
    for plan in started:
        (run,), (turn,) = plan.runs, plan.turns
        again = RUNNER.invoke(app, words_of("run", {**run.options, "turn": str(turn)}))
        assert again.exit_code == 0, again.exception
    assert [(facts_of(plan.runs[0]), plan.turns) for plan in carried_out] == [
        (facts_of(plan.runs[0]), plan.turns) for plan in started
    ]


def test_a_setting_goes_to_the_systems_that_have_it_and_is_refused_where_none_has(carried_out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["suite", "--model", "some/model", "--rounds", "1", "--set"]
    assert RUNNER.invoke(app, [*command, "tau_slot=0.5"]).exit_code == 0
    refusion, baseline = (plan.runs[0] for plan in carried_out)
    assert refusion.args.settings["tau_slot"] == 0.5
    assert "tau_slot" not in baseline.args.settings
    refused = RUNNER.invoke(app, [*command, "tau_slit=0.5"])
    assert "--set tau_slit=0.5: no decoder of this suite has such a setting" in str(refused.exception)
    assert len(carried_out) == 2


def test_requests_at_once_are_runs_in_folders_of_their_own():
    plan = plan_of({"decoder": "autoregressive", "run_dir": "there", "concurrency": "1,4", "tasks": "parts"})
    assert [(run.run_dir.name, run.args.batch_size) for run in plan.runs] == [("there-c1", 1), ("there-c4", 4)]
    assert plan.turns == (None,)
    with pytest.raises(ConfigError, match="exclude each other"):
        plan_of({"concurrency": "1,4", "turn": "1/2"})


def test_the_loop_of_a_release_names_a_folder_without_a_decoder():
    plan = plan_of({"model": "embedded", "loop": "release", "allow_code": True, "tasks": "parts"})
    assert plan.runs[0].run_dir == Path("results/runs/embedded-release-loop")
    refused = RUNNER.invoke(app, ["check", "--loop", "release", "--against-release", "1"])
    assert "leave --loop out" in str(refused.exception)


def test_turns_are_not_more_than_items():
    assert turns(3, None) == (Turn(1, 3), Turn(2, 3), Turn(3, 3))
    assert turns(3, 2) == (Turn(1, 2), Turn(2, 2))


def test_a_plan_is_a_value():
    plan = plan_of({"run_dir": "there", "tasks": "parts"})
    assert plan == plan_of({"run_dir": "there", "tasks": "parts"})
    assert isinstance(plan, Plan)
    assert isinstance(plan.runs[0], PlannedRun)
    with pytest.raises(AttributeError):
        plan.runs[0].limit = 3
