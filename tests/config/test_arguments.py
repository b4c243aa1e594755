from dataclasses import dataclass, field
from typing import Literal

import pytest

from refusion_eval.config.arguments import check_keys, convert, field_types
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
    ],
)
def test_value_with_one_reading_is_converted(value, wanted, expected):
    converted = convert("key", value, wanted, "here")
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
    ],
)
def test_value_without_one_reading_is_refused_by_name(value, wanted):
    with pytest.raises(ConfigError, match="here: key="):
        convert("key", value, wanted, "here")


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
