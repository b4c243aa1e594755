"""Configuration files of training runs: named ones in the package, YAML elsewhere, and settings of the command line.

`base: other.yaml` takes the settings of another file, found beside this one, and changes those that this one names.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from refusion_eval.config import check_keys, convert, field_types, read_yaml
from refusion_eval.errors import ConfigError
from refusion_eval.training.run_config import RunConfig

FOLDER = Path(__file__).parent / "configs"
COMMAND_LINE = "--set"


def config_names() -> list[str]:
    """The named configurations of the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_run_config(name_or_path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a configuration.

    Args:
        name_or_path: a name of `config_names`, or a YAML file.
        overrides: "section.key=value", where the value is YAML; later ones win. Paths in them are relative to the
            current folder.

    Raises:
        ConfigError: there is no such file, a key is unknown, or a value is wrong; the message names the likeliest key.
    """
    path = _find(name_or_path)
    values = _read(path)
    for override in overrides:
        _apply(values, override)
    return _build(RunConfig, values, "", path.name)


def _find(name_or_path: str) -> Path:
    path = Path(name_or_path).expanduser()
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise ConfigError(f"--config: there is no file {path}; the named ones are {', '.join(config_names())}")
        return path
    check_keys([name_or_path], config_names(), "--config", what="configuration")
    return FOLDER / f"{name_or_path}.yaml"


def _read(path: Path, *above: Path) -> dict[str, Any]:
    """A file's values over those of the file that it names as its base; `above` are those that led to it."""
    if path in above:
        raise ConfigError(f"{path} is its own base, by way of {above[-1]}; correct base:")
    values = _absolute(_parse(path), path.resolve().parent)
    base = values.pop("base", None)
    return values if base is None else _over(_read(path.parent / str(base), *above, path), values)


def _over(lower: dict[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values with those of `upper` in place of `lower`'s."""
    merged = dict(lower)
    for name, value in upper.items():
        below = merged.get(name)
        merged[name] = _over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _parse(path: Path) -> dict[str, Any]:
    return read_yaml(path, str(path))


def _absolute(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same with paths that were relative to the file."""
    data, backbone = values.get("data"), values.get("backbone")
    if isinstance(data, dict) and isinstance(data.get("files"), list):
        data["files"] = [str(folder / Path(file).expanduser()) for file in data["files"]]
    for name in ("model", "tokenizer"):
        if isinstance(backbone, dict) and str(backbone.get(name)).startswith(("./", "../")):
            backbone[name] = str((folder / backbone[name]).resolve())
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    """Puts "section.key=value" into nested values."""
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"{COMMAND_LINE} {override}: write section.key=value, such as optimisation.lr=1e-5")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise ConfigError(f"{COMMAND_LINE} {override}: {text!r} is not YAML ({problem})") from problem
    *sections, name = key.strip().split(".")
    for section in sections:
        inner = values.get(section)
        if inner is None:
            inner = values[section] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{COMMAND_LINE} {override}: {section} is one value, not a section")
        values = inner
    values[name] = value


def _build(wanted: type, values: Mapping[str, Any], section: str, where: str) -> Any:
    """A settings dataclass, whose fields may be such dataclasses, from nested values."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: {section} is {values!r}; write its settings below it, one a line")
    types_of = field_types(wanted)
    prefix = f"{section}." if section else ""
    check_keys(values.keys(), types_of.keys(), f"{where}: {section}" if section else where)
    required = [
        field.name
        for field in dataclasses.fields(wanted)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"{where}: {prefix}{missing[0]} is missing; add it, or give it with {COMMAND_LINE}")
    settings = {}
    for name, value in values.items():
        inner = _dataclass_in(types_of[name])
        if inner is not None and value is not None:
            settings[name] = _build(inner, value, prefix + name, where)
        elif isinstance(value, Mapping):
            settings[name] = dict(value)
        elif types_of[name] == tuple[str, ...] and isinstance(value, str):
            settings[name] = (value,)  # names of files may hold what separates the items of other lists
        else:
            settings[name] = convert(prefix + name, value, types_of[name], where)
    return wanted(**settings)


def _dataclass_in(wanted: Any) -> type | None:
    """The dataclass that a type is, or is an optional of."""
    options = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    return next((option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)), None)
