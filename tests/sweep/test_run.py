import csv
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.decoders.refusion import RefusionSettings
from refusion_eval.errors import ConfigError
from refusion_eval.paper.points import frontier
from refusion_eval.paper.studies import sort_sources
from refusion_eval.results.facts import read_facts
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.measurement import Measurement
from refusion_eval.results.results_file import read_csv
from refusion_eval.runs import hardware, system
from refusion_eval.runs.plan import Plan, PlannedRun, Turn
from refusion_eval.sweep.run import plan_sweep, run_sweep
from refusion_eval.sweep.spec import SweepSpec, read_spec, shipped_specs, with_model

ARGUMENTS = {"pretrained": "embedded", "decoder": "refusion"}


def _spec(folder: Path, **of_refusion: object) -> SweepSpec:
    path = folder / "mine.yaml"
    system = {"arguments": ARGUMENTS, "settings": {"block_size": 32}, **of_refusion}
    content = {"tasks": ["parts"], "limit": 2, "systems": {"refusion": system}}
    path.write_text(yaml.safe_dump(content))
    return read_spec(str(path))


def _points(out: Path) -> list[dict[str, str]]:
    with (out / "points.csv").open() as file:
        return list(csv.DictReader(file))


def _tokens(run_dir: Path) -> list[tuple[int, int]]:
    return [(one.tokens, one.forwards) for task in read_facts(run_dir).tasks for one in task.samples]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepSpec, Path]:
    folder = tmp_path_factory.mktemp("sweep")
    # The table says tau_slot 0.9 for this task, so that one point has the settings of the first under another name.
    spec = _spec(
        folder, around={"tau_slot": [0.9, 0.1]}, frontier={"setting": "tau_token", "low": 0.1, "high": 0.9, "points": 3}
    )
    run_sweep(spec, folder / "out")
    return spec, folder / "out"


def test_every_point_is_a_run_and_the_operating_point_is_marked(swept: tuple[SweepSpec, Path]) -> None:
    _, out = swept
    points = _points(out)
    assert [(point["run_id"], point["varied"]) for point in points][:5] == [
        ("refusion-settings", ""),
        ("refusion-settings", "tau_slot=0.9"),
        ("refusion-tau_slot=0.1", "tau_slot=0.1"),
        ("refusion-tau_token=0.1", "tau_token=0.1"),
        ("refusion-tau_token=0.9", "tau_token=0.9"),
    ]
    assert len(points) <= 6
    marked = {point["run_id"] for point in points if point["operating_point"] == "yes"}
    assert marked == {"refusion-settings"}
    rows = read_csv(out / "sweep.csv")
    assert {row.run_id for row in rows} == {point["run_id"] for point in points}
    values = {row.run_id: row.settings["tau_slot"] for row in rows}
    assert (values["refusion-tau_slot=0.1"], values["refusion-settings"]) == ("0.1", "0.9")


def test_a_program_reads_the_figures_of_a_sweep_and_of_a_repeated_run(
    swept: tuple[SweepSpec, Path], tmp_path: Path
) -> None:
    out = shutil.copytree(swept[1], tmp_path / "out")
    done = CliRunner().invoke(app, ["sweep", str(swept[1].parent / "mine.yaml"), "--out", str(out), "--json"])
    figures = json.loads(done.stdout)
    assert {row["run_id"] for row in figures} == {point["run_id"] for point in _points(out)}
    assert {row["metric"] for row in figures} >= {"accuracy", "tpf"}
    again = ["rerun", str(out / "runs" / "refusion-settings"), "--out", str(tmp_path / "again"), "--json"]
    found = json.loads(CliRunner().invoke(app, again).stdout)
    assert found["num_samples"] == 2
    assert not any(found["differing"].values())


def test_a_program_reads_the_points_of_a_dry_run(tmp_path: Path) -> None:
    frontier: dict[str, object] = {"setting": "tau_token", "low": 0.1, "high": 0.9, "points": 3}
    _spec(tmp_path, around={"tau_slot": [0.9, 0.1]}, frontier=frontier)
    options = ["--out", str(tmp_path / "out"), "--dry-run", "--json"]
    done = CliRunner().invoke(app, ["sweep", str(tmp_path / "mine.yaml"), *options])
    points = json.loads(done.stdout)
    assert [(point["point"], point["origin"], point["varied"]) for point in points] == [
        ("refusion-settings", "settings", {}),
        ("refusion-tau_slot=0.9", "around", {"tau_slot": 0.9}),
        ("refusion-tau_slot=0.1", "around", {"tau_slot": 0.1}),
        (None, "frontier", {}),
    ]
    assert [Path(point["run_dir"] or "").name for point in points] == [
        *("refusion-settings", "refusion-settings", "refusion-tau_slot=0.1"),  # the first two have equal settings
        "",
    ]
    assert points[2]["settings"] == {"block_size": 32, "tau_slot": 0.1}
    assert (points[0]["decoder"], points[0]["tasks"]) == ("refusion", ["mini_parts"])
    assert [point["frontier"] for point in points] == [
        None,
        None,
        None,
        {**frontier, "scale": "linear", "multiple_of": 0},
    ]


def test_a_low_threshold_takes_fewer_forwards(swept: tuple[SweepSpec, Path]) -> None:
    _, out = swept
    first, low = (_tokens(out / "runs" / name) for name in ("refusion-settings", "refusion-tau_slot=0.1"))
    assert sum(forwards for _, forwards in low) <= sum(forwards for _, forwards in first)


def test_points_of_equal_settings_are_decoded_once_and_drawn_in_the_panel_of_each(tmp_path: Path) -> None:
    spec = _spec(tmp_path, grid={"tau_slot": [0.9]}, around={"tau_token": [0.2], "block_size": [64, 96]})
    said: list[str] = []
    result = run_sweep(spec, tmp_path / "out", on_point=said.append)
    # The settings table of this task has tau_slot 0.9 and tau_token 0.2; its responses have 96 tokens.
    assert [path.name for path in result.run_dirs] == [
        "refusion-settings",
        "refusion-block_size=64",
        "refusion-block_size=96",
    ]
    assert result.num_points == 5
    assert "refusion-tau_slot=0.9 has the settings of refusion-settings, whose run stands for both" in said
    assert len([row for row in read_csv(tmp_path / "out" / "sweep.csv") if row.metric == "tpf"]) == 3
    assert {measurement.system for measurement in sort_sources([tmp_path / "out"])[1]} == {
        *("refusion@tau_slot=0.9", "refusion@tau_token=0.2", "refusion@block_size=32"),
        *("refusion@block_size=64", "refusion@block_size=96"),
    }
    assert len(frontier([tmp_path / "out"], "parts")) == 3


def test_a_second_call_decodes_nothing_and_a_lost_point_is_made_again(
    swept: tuple[SweepSpec, Path], tmp_path: Path
) -> None:
    spec, finished = swept
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    before = (out / "points.csv").read_text()
    lost = out / "runs" / "refusion-tau_slot=0.1"
    expected = _tokens(lost)
    shutil.rmtree(lost)
    run_sweep(spec, out)
    assert (out / "points.csv").read_text() == before
    # How forwards are fused rests on a measurement of the machine, the tokens do not.
    assert [tokens for tokens, _ in _tokens(lost)] == [tokens for tokens, _ in expected]


def test_points_of_one_checkpoint_share_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    original = system.api.LoadedModel
    monkeypatch.setattr(system.api, "LoadedModel", lambda wanted: opened.append(wanted) or original(wanted))
    run_sweep(_spec(tmp_path, around={"tau_slot": [0.5, 0.1]}), tmp_path / "out")
    assert len(opened) == 1


def test_points_take_turns_and_speed_covers_the_rounds(tmp_path: Path) -> None:
    said: list[str] = []
    spec = _spec(tmp_path, around={"tau_slot": [0.5]})
    run_sweep(spec, tmp_path / "out", rounds=2, on_point=said.append)
    turns = [line.split(": ") for line in said if line.startswith("point")]
    names = ["refusion-settings", "refusion-tau_slot=0.5"]
    assert turns == [
        [f"point {number} of 2, round {turn} of 2", name] for turn in (1, 2) for number, name in enumerate(names, 1)
    ]
    (task,) = read_facts(tmp_path / "out" / "runs" / names[0]).tasks
    assert sorted(sample.round for sample in task.samples) == [1, 2]


def test_an_impossible_point_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    spec = _spec(tmp_path, around={"tau_slot": [0.5], "slot_size": [4, 7]})
    with pytest.raises(ConfigError, match=r"point slot_size=7: .*block_size"):
        run_sweep(spec, tmp_path / "out")
    assert not (tmp_path / "out" / "runs").exists()


def test_an_interrupted_sweep_writes_what_it_has(tmp_path: Path) -> None:
    spec = _spec(tmp_path, around={"tau_slot": [0.5]})

    def interrupted(text: str) -> None:
        if "tau_slot" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(spec, tmp_path / "out", on_point=interrupted)
    assert [point["run_id"] for point in _points(tmp_path / "out")] == ["refusion-settings"]
    assert {row.run_id for row in read_csv(tmp_path / "out" / "sweep.csv")} == {"refusion-settings"}


@pytest.mark.parametrize(
    ("settings", "setting", "reason", "change"),
    [
        ({"slot_size": 8, "block_size": 8}, "tau_slot", "a block holds one slot (slot_size = block_size = 8)", None),
        ({"slot_size": 16, "block_size": 16}, "tau_slot", "slot", {"slot_size": 4, "block_size": 32}),
        ({"slot_size": 1}, "tau_token", "a slot holds one token", {"slot_size": 4, "block_size": 32}),
        ({"order": "random"}, "tau_slot", "order=random", {"left_to_right": False, "order": "confidence"}),
        ({"serial": True}, "tau_token", "serial=true", {"serial": False}),
        ({"completion": "verifier", "temperature": 1.0}, "tau_token", "completion=verifier", {"temperature": 0}),
    ],
)
def test_a_setting_that_changes_nothing_is_refused_with_the_reason_and_the_settings_that_mend_it(
    tmp_path: Path, settings: dict[str, object], setting: str, reason: str, change: dict[str, object] | None
) -> None:
    settings = {"slot_size": 8, "block_size": 32, **settings}
    spec = _spec(tmp_path, settings=settings, around={setting: [0.5]})
    message = rf"point {setting}=0\.5: {setting} changes nothing: .*{re.escape(reason)}.*vary another setting"
    with pytest.raises(ConfigError, match=message) as refusal:
        run_sweep(spec, tmp_path / "out")
    with pytest.raises(ConfigError, match=message):  # a dry run says it too
        plan_sweep(spec, tmp_path / "out")
    assert not (tmp_path / "out" / "runs").exists()
    advised = yaml.safe_load(re.search(r"settings: (\{.*?\})", str(refusal.value))[1])  # type: ignore[index]
    assert change in (None, advised)
    assert setting not in RefusionSettings(mask_id=0, **settings | advised).without_effect


@pytest.mark.parametrize("name", shipped_specs())
def test_shipped_sweeps_are_of_the_paper_s_algorithm(name: str) -> None:
    (refusion,) = (system for system in read_spec(name).systems if system.name == "refusion")
    assert refusion.settings["fuse"] is False


def test_a_point_that_decodes_as_another_one_is_marked_in_log_and_csv(tmp_path: Path) -> None:
    spec = _spec(tmp_path, around={"tau_slot": [0.9, 0.90001, 0.1]})
    said: list[str] = []
    result = run_sweep(spec, tmp_path / "out", on_point=said.append)
    same = {row.run_id: row.same_decode_as for row in read_csv(tmp_path / "out" / "sweep.csv")}
    assert same["refusion-settings"] == ""
    assert same["refusion-tau_slot=0.90001"] == "refusion-settings"
    assert any("refusion-tau_slot=0.90001: mini_parts is the same decode as refusion-settings" in line for line in said)
    assert {row.run_id: row.same_decode_as for row in result.figures} == same
    header = (tmp_path / "out" / "sweep.csv").read_text().splitlines()[0]
    assert "same_decode_as" in header.split(",")


def test_a_sweep_goes_on_only_on_the_machine_that_it_was_begun_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = _spec(tmp_path)
    run_sweep(spec, tmp_path / "out")
    monkeypatch.setattr(hardware, "_cpu_model", lambda: "another processor")
    with pytest.raises(ConfigError, match=r"refusion-settings was measured on .*this is another processor"):
        run_sweep(spec, tmp_path / "out")


def test_another_checkpoint_is_that_of_the_refusion_systems_only() -> None:
    spec = with_model(read_spec("figure4"), "some/copy")
    checkpoints = {system.arguments["decoder"]: system.arguments["pretrained"] for system in spec.systems}
    assert checkpoints == {"autoregressive": "Qwen/Qwen3-8B", "refusion": "some/copy"}
    with pytest.raises(ConfigError, match="no system with decoder refusion"):
        with_model(replace(spec, systems=spec.systems[:1]), "some/copy")


def test_the_command_ends_with_a_table_the_path_of_its_figures_and_the_next_command(tmp_path: Path) -> None:
    _spec(tmp_path)
    done = CliRunner().invoke(
        app, ["sweep", str(tmp_path / "mine.yaml"), "--model", "embedded", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    *table, points, following = done.stdout.rstrip().splitlines()
    assert "Accuracy" in "".join(table)
    assert points == f"1 points: {tmp_path / 'sweep.csv'}"
    assert following.startswith("Next: refusion-eval report ")


@pytest.mark.parametrize(("at_fastest", "at_first", "warns"), [(30.0, 1.0, True), (30.0, 28.0, False)])
def test_a_sweep_warns_where_its_fastest_point_has_more_collapsed_answers(
    swept: tuple[SweepSpec, Path], monkeypatch: pytest.MonkeyPatch, at_fastest: float, at_first: float, warns: bool
) -> None:
    spec, out = swept

    def measured(runs: list[Path]) -> list[Measurement]:
        values = {("refusion-settings", "tpf"): 2.0, ("refusion-tau_slot=0.1", "tpf"): 99.0}
        values |= {("refusion-settings", "collapsed"): at_first, ("refusion-tau_slot=0.1", "collapsed"): at_fastest}
        figures = run_measurements(runs)
        return [replace(one, value=values.get((one.run_id, one.metric), one.value)) for one in figures]

    monkeypatch.setattr("refusion_eval.sweep.run.run_measurements", measured)
    said: list[str] = []
    run_sweep(spec, out, on_point=said.append)
    told = "refusion-tau_slot=0.1: 30 % of its answers to mini_parts are collapsed, of refusion-settings 1 %"
    assert any(line.startswith(told) for line in said) == warns


def test_an_interrupted_sweep_compares_with_no_other_point_than_the_first_one_of_its_grid(
    swept: tuple[SweepSpec, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec, out = swept[0], Path(shutil.copytree(swept[1], tmp_path / "out"))

    def without_the_first(plan: Plan, take: Callable[[PlannedRun, Turn | None], bool]) -> None:
        for run in plan.runs[1:3]:
            take(run, plan.turns[0])
        raise KeyboardInterrupt

    def measured(runs: list[Path]) -> list[Measurement]:
        values = {("refusion-tau_token=0.1", "tpf"): 99.0, ("refusion-tau_token=0.1", "collapsed"): 80.0}
        figures = run_measurements(runs)
        return [replace(one, value=values.get((one.run_id, one.metric), one.value)) for one in figures]

    monkeypatch.setattr("refusion_eval.sweep.run.run_in_turns", without_the_first)
    monkeypatch.setattr("refusion_eval.sweep.run.run_measurements", measured)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_sweep(spec, out, on_point=said.append)
    assert not [line for line in said if "collapsed" in line]


def test_a_frontier_goes_on_where_one_of_its_ends_decodes_nothing(tmp_path: Path) -> None:
    ends = {"setting": "gen_length", "low": 32, "high": 2**19, "points": 3, "multiple_of": 32}
    result = run_sweep(_spec(tmp_path, frontier=ends), tmp_path / "out")
    assert [path.name.partition("=")[2] for path in result.run_dirs[1:]] == ["32", "524288", "262144"]


def test_points_that_decode_nothing_are_not_told_to_be_the_same(tmp_path: Path) -> None:
    settings = {"block_size": 32, "gen_length": 2**19}  # which exceeds the context with any prompt
    said: list[str] = []
    result = run_sweep(
        _spec(tmp_path, settings=settings, around={"tau_slot": [0.1]}), tmp_path / "out", on_point=said.append
    )
    assert len(result.incomplete) == 2
    assert not [line for line in said if "same decode" in line]
