"""Values as they arrive from a command line, brought to the types that our settings declare.

lm-eval types `--model_args a=b,c=d` by its own rules (a folder called 2025 arrives as an int, "-1" as the float -1.0),
and differently again where it parses a string or JSON. Nothing here guesses: a value either has one reading as the
declared type or is refused.
"""

import difflib
import math
import re
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from refusion_eval.errors import ConfigError

# Names that users bring along from lm-eval, Transformers or the public ReFusion script.
OTHER_NAMES = {
    "model_path": "pretrained",
    "model": "pretrained",
    "path": "pretrained",
    "torch_dtype": "dtype",
    "attn_implementation": "attention",
    "attn": "attention",
    "max_gen_toks": "gen_length",
    "max_new_tokens": "gen_length",
    "max_tokens": "gen_length",
    "slot_threshold": "tau_slot",
    "token_threshold": "tau_token",
    "serial_num_blocks": "block_size",
    "k": "slot_size",
    "b": "block_size",
}


def field_types(settings_type: type) -> dict[str, Any]:
    """Maps a dataclass' fields to their resolved types, without those that take no part in comparison (callbacks)."""
    hints = typing.get_type_hints(settings_type)
    return {field.name: hints[field.name] for field in fields(settings_type) if field.init and field.compare}


def check_keys(
    keys: Collection[str],
    known: Collection[str],
    where: str,
    *,
    what: str = "key",
    offered: Collection[str] | None = None,
) -> None:
    """Refuses unknown keys, with the likeliest known one.

    Args:
        keys: what was given.
        known: what is allowed.
        where: where the keys stand, for messages; empty where `what` says enough.
        what: what a key is called in messages.
        offered: names to offer in messages instead of `known`.

    Raises:
        ConfigError: a key is not among `known`.
    """
    for key in keys:
        if key in known:
            continue
        other = OTHER_NAMES.get(key)
        names = known if offered is None else offered
        near = [other] if other in known else difflib.get_close_matches(key, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known {what}s: {', '.join(sorted(names))}"
        raise ConfigError(f"{f'{where}: ' if where else ''}unknown {what} {key!r}; {hint}")


def convert(key: str, value: Any, wanted: Any, where: str) -> Any:
    """Brings one value to the declared type.

    Args:
        key: its name, for messages.
        value: what arrived.
        wanted: bool, int, float, str, a Literal, a tuple of these, or an optional of one of them.
        where: where the value stands, for messages.

    Raises:
        ConfigError: the value has no single reading as that type.
    """
    origin = typing.get_origin(wanted)
    if origin in (typing.Union, types.UnionType):
        inner = [option for option in typing.get_args(wanted) if option is not type(None)]
        if value is None or value == "None" or (value in ("none", "null") and inner[0] is not str):
            return None
        return convert(key, value, inner[0], where)
    if origin is typing.Literal:
        options = typing.get_args(wanted)
        if value in options:
            return value
        raise ConfigError(f"{where}: {key}={value!r}; choose one of {', '.join(map(str, options))}")
    if origin in (tuple, list):
        items = _items(value)
        return tuple(convert(key, item, typing.get_args(wanted)[0], where) for item in items)
    converted = _SCALARS[wanted](value) if wanted in _SCALARS else value
    if converted is None:
        hint = "; pass the arguments as JSON, with the value in quotes" if wanted is str else ""
        raise ConfigError(f"{where}: {key}={value!r} is not {_WORDS[wanted]}{hint}")
    return converted


def _items(value: Any) -> list[Any]:
    """The items of a list; as text they are separated by commas, spaces or plus signs (lm-eval takes commas itself)."""
    if isinstance(value, str):
        if value.lower() in ("", "none", "null"):
            return []
        return re.split(r"[\s,+]+", value.strip("[]() "))
    return list(value) if isinstance(value, list | tuple) else [value]


def convert_all(values: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`check_keys` and `convert` for a whole mapping."""
    check_keys(values.keys(), wanted.keys(), where)
    return {key: convert(key, value, wanted[key], where) for key, value in values.items()}


def _bool(value: Any) -> bool | None:
    # lm-eval hands true and false over as bools, but 1 and 0 as ints; as text where --set or JSON carried them.
    if isinstance(value, bool | int):
        return bool(value) if value in (0, 1) else None
    return {"true": True, "1": True, "false": False, "0": False}.get(value.lower()) if isinstance(value, str) else None


def _int(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _float(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else number


def _str(value: Any) -> str | None:
    # An int keeps its digits ("2025"); of a float the spelling is lost ("1e5" arrives as 100000.0).
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None


_SCALARS: dict[Any, Any] = {bool: _bool, int: _int, float: _float, str: _str}
_WORDS: dict[Any, str] = {bool: "true or false (1 or 0)", int: "a whole number", float: "a number", str: "text"}
