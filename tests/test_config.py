import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from refusion_eval.config import (
    Fraction,
    PositiveInt,
    build,
    check_keys,
    field_types,
    read_values,
    read_yaml,
    settings_class,
)
from refusion_eval.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "wanted", "expected"),
    [
        (2025, str, "2025"),
        (-1.0, int, -1),
        ("-1", int, -1),
        (8.0, int, 8),
        (1, float, 1.0),
        ("1e-3", float, 0.001),
        ("True", bool, True),
        ("false", bool, False),
        (1, bool, True),
        (0, bool, False),
        ("1", bool, True),
        ("0", bool, False),
        (False, bool | None, False),
        (0, bool | None, False),
        ("None", bool | None, None),
        (0, int | None, 0),
        ("0", int | None, 0),
        (0.01, float | None, 0.01),
        (0, float | None, 0.0),
        ("None", int | None, None),
        (None, str | None, None),
        (3, int | None, 3),
        ([1, 2.0], tuple[int, ...], (1, 2)),
        (5, tuple[int, ...], (5,)),
        ("5", tuple[int, ...], (5,)),
        ("5+7", tuple[int, ...], (5, 7)),
        ("[5, 7]", tuple[int, ...], (5, 7)),
        ("none", tuple[int, ...], ()),
        ("none", float | None, None),
        ("none", str | None, "none"),
        ("cpu", Literal["cpu", "cuda"], "cpu"),
        (np.int64(8), int, 8),
        (np.float32(8.0), int, 8),
        (np.float32(0.5), float, 0.5),
        (np.int16(3), float | None, 3.0),
        (np.bool_(True), bool, True),
        (np.array([5, 7]), tuple[int, ...], (5, 7)),
        (np.array(5), tuple[int, ...], (5,)),
        (np.int64(2025), str, "2025"),
    ],
)
def test_value_with_one_reading_is_converted(value, wanted, expected):
    converted = read_values(make_dataclass("One", [("key", wanted)]), {"key": value}, "here")["key"]
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (1.5, int),
        (True, int),
        ("many", int),
        (float("nan"), float),
        ("nan", float),
        (False, float),
        (100000.0, str),
        (2, bool),
        (1.0, bool),
        ("yes", bool),
        (2, bool | None),
        (True, int | None),
        ("tpu", Literal["cpu", "cuda"]),
        (5, tuple[str, ...]),
        (np.float32(8.5), int),
        (np.bool_(True), int),
        (np.array([8]), int),
        (np.array([5.5]), tuple[int, ...]),
        ({5, 7}, tuple[int, ...]),
    ],
)
def test_value_without_one_reading_is_refused_by_name(value, wanted):
    with pytest.raises(ConfigError, match="here: key="):
        read_values(make_dataclass("One", [("key", wanted)]), {"key": value}, "here")


@pytest.mark.parametrize(("typo", "meant"), [("tau_slt", "tau_slot"), ("slot_threshold", "tau_slot")])
def test_unknown_key_names_the_likeliest_known_one(typo, meant):
    with pytest.raises(ConfigError, match=f"unknown key '{typo}'; did you mean {meant}"):
        check_keys([typo], ["tau_slot", "gen_length"], "here")


def test_unknown_key_like_none_lists_the_known_ones():
    with pytest.raises(ConfigError, match="known keys: gen_length, tau_slot"):
        check_keys(["zzz"], ["tau_slot", "gen_length"], "here")


def test_callbacks_are_no_settings():
    @dataclass(frozen=True)
    class Example:
        size: int = 1
        hook: object = field(default=None, compare=False)

    assert field_types(Example) == {"size": int}


@settings_class("decoder")
class Settings:
    """A settings class with a range, a choice, a list, a callback and a rule of its own."""

    size: PositiveInt
    share: Fraction = 0.5
    choice: Literal["one", "two"] = "one"
    ids: tuple[int, ...] = ()
    callback: Callable[[int], bool] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self):
        if self.size in self.ids:
            raise ConfigError(f"decoder: size {self.size} is among ids; change one")


@settings_class()
class Nested:
    """Settings with a section."""

    inner: Settings
    maybe: Settings | None = None


def test_settings_convert_their_values_and_stay_ordinary_dataclasses():
    settings = Settings(size="4", share="1e-3", ids="5+7")
    assert (settings.size, settings.share, settings.ids) == (4, 0.001, (5, 7))
    assert [entry.name for entry in fields(Settings)] == ["size", "share", "choice", "ids", "callback"]
    assert replace(settings, size=8) == Settings(size=8, share=0.001, ids=(5, 7))
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert hash(settings) == hash(replace(settings, callback=bool))
    with pytest.raises(AttributeError):
        settings.size = 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 0}, "^decoder: size=0; it must be at least 1$"),
        ({"size": 1, "share": 1.5}, "^decoder: share=1.5; it must be at most 1$"),
        ({"size": 1, "share": "inf"}, "^decoder: share=inf; it must be finite$"),
        ({"size": 1, "choice": "three"}, "^decoder: choice='three'; choose one of one, two$"),
        ({"size": 1, "ids": [1]}, "^decoder: size 1 is among ids; change one$"),
        ({"size": 1, "shore": 1}, "^decoder: unknown key 'shore'; did you mean share"),
        ({}, "^decoder: size is missing"),
    ],
)
def test_a_direct_call_refuses_a_value_in_one_sentence(values, message):
    with pytest.raises(ConfigError, match=message):
        Settings(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inner": {"size": -1}}, r"^a.yaml: inner.size=-1; it must be at least 1$"),
        (
            {"inner": {"size": 1}, "maybe": {"size": 2, "shore": 1}},
            r"^a.yaml: maybe: unknown key .shore.; did you",
        ),
        ({"inner": {"share": 1}}, r"^a.yaml: inner.size is missing"),
        ({"inner": 5}, r"^a.yaml: inner=5; write its settings below it"),
        ({"inner": {"size": 1, "ids": "1"}}, r"^a.yaml: inner: decoder: size 1 is among ids"),
        ({"iner": {}}, r"^a.yaml: unknown key 'iner'; did you mean inner"),
        ({"inner": {"size": 1, "callback": None}, "maybe": None}, None),
    ],
)
def test_settings_of_a_file_are_refused_by_place_section_and_key(values, message):
    if message is None:
        assert build(Nested, values, "a.yaml").maybe is None
        return
    with pytest.raises(ConfigError, match=message):
        build(Nested, values, "a.yaml")


def test_callbacks_cannot_be_given_as_settings():
    with pytest.raises(ConfigError, match="unknown key 'callback'"):
        build(Settings, {"size": 1, "callback": None}, "here")


def test_some_values_are_read_without_the_others():
    assert read_values(Settings, {"share": "0.25"}, "here") == {"share": 0.25}
    with pytest.raises(ConfigError, match="here: share=2; it must be at most 1"):
        read_values(Settings, {"share": 2}, "here")


@pytest.mark.parametrize("value", ["!!bool maybe", '!!int ""', '!!float ""', "!!timestamp now", "!!map [1]"])
def test_a_value_that_does_not_fit_its_yaml_tag_is_refused(value: str, tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text(f"key: {value}")
    with pytest.raises(ConfigError, match=r"^a\.yaml: cannot be read as YAML: a value does not fit its tag"):
        read_yaml(path, "a.yaml")


def test_what_is_done_to_the_content_of_a_file_changes_no_later_reading(tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text("outer: {inner: [1]}")
    read_yaml(path, "a")["outer"]["inner"].append(2)
    assert read_yaml(path, "a") == {"outer": {"inner": [1]}}
    path.write_text("outer: 3")
    assert read_yaml(path, "a") == {"outer": 3}
