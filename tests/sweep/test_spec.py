import runpy
from pathlib import Path

import pytest
import yaml

from refusion_eval.errors import ConfigError
from refusion_eval.sweep.run import planned_points
from refusion_eval.sweep.spec import read_spec, shipped_specs, with_model, with_samples

REFUSION = {"pretrained": "embedded", "decoder": "refusion"}


def _write(folder: Path, **system: object) -> str:
    path = folder / "mine.yaml"
    content = {"tasks": ["gsm8k"], "limit": 2, "systems": {"r": {"arguments": REFUSION, **system}}}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return str(path)


def test_the_table_comes_first_and_equal_points_once(tmp_path: Path) -> None:
    spec = read_spec(
        _write(
            tmp_path,
            grid={"tau_slot": [0.5, 0.9], "tau_token": [0.2]},
            around={"tau_slot": [0.9, "0.5"], "slot_size": [4]},
            points=[{"tau_token": 0.2, "tau_slot": 0.50}, {"slot_size": 8, "block_size": 32}],
        )
    )
    assert [(point.name, point.origin) for point in spec.systems[0].points] == [
        ("table", "table"),
        ("tau_slot=0.5+tau_token=0.2", "grid"),
        ("tau_slot=0.9+tau_token=0.2", "grid"),
        ("tau_slot=0.9", "around"),
        ("tau_slot=0.5", "around"),
        ("slot_size=4", "around"),
        ("block_size=32+slot_size=8", "points"),
    ]
    assert (spec.name, spec.tasks, spec.limit) == ("mine", ("gsm8k",), 2)


def test_around_varies_what_settings_fix(tmp_path: Path) -> None:
    (system,) = read_spec(_write(tmp_path, settings={"tau_slot": 0.5}, around={"tau_slot": [0.6]})).systems
    assert (system.settings, [dict(point.settings) for point in system.points]) == (
        {"tau_slot": 0.5},
        [{}, {"tau_slot": 0.6}],
    )


def test_what_belongs_to_a_checkpoint_goes_with_it(tmp_path: Path) -> None:
    own = {"revision": "0123", "adapter": "a/b", "preset": "p.yaml", "chat_template": "none", "backbone": "c/d"}
    spec = read_spec(_write(tmp_path, arguments={**REFUSION, **own, "dtype": "float32"}))
    (system,) = with_model(spec, "other/checkpoint").systems
    assert system.arguments["pretrained"] == "other/checkpoint"
    assert system.arguments["dtype"] == "float32"
    assert not own.keys() & system.arguments.keys()


def test_shipped_sweeps_can_be_read_and_planned() -> None:
    assert {"figure4", "figure6", "figure8", "mini_figure4", "mini_figure6", "mini_figure8"} == set(shipped_specs())
    for name in shipped_specs():
        assert len(list(planned_points(read_spec(name)))) > 1


def test_the_sweep_of_orders_has_the_rows_of_its_table() -> None:
    root = Path(__file__).parents[2]
    ways = runpy.run_path(str(root / "plots" / "orders.py"))["WAYS"]
    spec = read_spec(str(root / "results" / "embedded" / "orders.yaml"))
    assert [f"refusion-{point.name}" for system in spec.systems for point in system.points] == list(ways)


@pytest.mark.parametrize(
    ("system", "message"),
    [
        ({"around": {"tau_slt": [0.5]}}, "did you mean tau_slot"),
        ({"arond": {}}, "did you mean around"),
        ({"around": {"tau_slot": 0.5}}, "around.tau_slot=0.5; input should be a valid list"),
        ({"grid": {"tau_slot": []}}, "grid.tau_slot=.*should have at least 1 item"),
        ({"around": {"slot_size": ["many"]}}, "slot_size='many' is not a whole number"),
        ({"settings": {"tau_slot": 0.5}, "grid": {"tau_slot": [0.6]}}, "tau_slot is both fixed"),
        ({"arguments": {**REFUSION, "tau_slot": 0.5}}, "settings go under `settings:`"),
        ({"points": ["tau_slot"]}, "points='tau_slot'; input should be a valid dictionary"),
        ({"around": {"tau_slot": [0.12345671, 0.12345672]}}, "two points would be called tau_slot=0.123457"),
        ({"frontier": {"setting": "tau_slots", "low": 0, "high": 1}}, "did you mean tau_slot"),
        ({"frontier": {"setting": "tau_slot", "low": 1, "high": 0}}, "low must be below high"),
        ({"frontier": {"setting": "tau_slot", "low": 0, "high": 1, "scale": "log"}}, "above 0 on a log scale"),
    ],
)
def test_what_is_wrong_in_a_system_is_named(tmp_path: Path, system: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_spec(_write(tmp_path, **system))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a list", "is a list"),
        ("systems: {}", "needs `systems:`"),
        ("systems: {r: {arguments: {pretrained: x}}}\nlimit: 0", "limit=0; it must be at least 1"),
        ("systems: {a/b: {arguments: {pretrained: x}}}", "part of folder names"),
        ("systems: {r: {arguments: {decoder: refusion}}}", "pretrained is missing"),
        ("systems: {r: [}", "mine.yaml"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_spec(str(path))


def test_a_missing_file_names_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match="mini_figure4"):
        read_spec("figure99")


def test_the_sweep_of_the_guide_is_read_as_it_is_printed(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "sweeps.md").read_text(encoding="utf-8")
    path = tmp_path / "mine.yaml"
    path.write_text(guide.partition("```yaml\n")[2].partition("```")[0])
    assert list(planned_points(read_spec(str(path)))) == [
        "refusion-settings (settings)",
        "refusion-tau_slot=0.3 (around)",
        "refusion-tau_slot=0.6 (around)",
        "refusion-tau_slot=0.9 (around)",
    ]


def test_samples_are_asked_of_every_system() -> None:
    spec = with_samples(read_spec("mini_figure4"), 4)
    assert {system.arguments["samples"] for system in spec.systems} == {4}
