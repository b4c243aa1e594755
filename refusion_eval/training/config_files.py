"""Configuration files of training runs: named files in the package, YAML elsewhere, and settings of the command line.

`base: other.yaml` takes the settings of another file, relative to this file, and replaces those that this file names.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from refusion_eval.config import build, check_keys, read_yaml
from refusion_eval.errors import ConfigError
from refusion_eval.training.config import RunConfig
from refusion_eval.training.data.hub import is_hub_id

FOLDER = Path(__file__).parent / "configs"
COMMAND_LINE = "--set"


def config_names() -> list[str]:
    """Names of the configurations in the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


Config = TypeVar("Config", bound=RunConfig)


def read_run_config(
    name_or_path: str,
    overrides: Sequence[str] = (),
    settings: type[Config] = RunConfig,  # type: ignore[assignment]  # the bound is the default
) -> Config:
    """Reads a configuration.

    Args:
        name_or_path: a name of `config_names`, or a YAML file. In a file, data files and directories that begin with
            "./" or "../" are relative to the file.
        overrides: "section.key=value", where the value is YAML; later ones win. Paths in them are relative to the
            current folder.

    Raises:
        ConfigError: there is no such file, a key is unknown, or a value is wrong; the message names the likeliest key.
    """
    path = _find(name_or_path)
    values = _read(path)
    for override in overrides:
        _apply(values, override)
    data = values.get("data")
    if isinstance(data, dict) and isinstance(data.get("files"), str):
        data["files"] = [data["files"]]  # the name of a file may hold a comma, which separates the items of other lists
    return build(settings, values, path.name)


def _find(name_or_path: str) -> Path:
    path = Path(name_or_path).expanduser()
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise ConfigError(f"--config: there is no file {path}; the named ones are {', '.join(config_names())}")
        return path
    check_keys([name_or_path], config_names(), "--config", what="configuration")
    return FOLDER / f"{name_or_path}.yaml"


def _read(path: Path, *including: Path) -> dict[str, Any]:
    """Values of a file over those of its base; `including` are the files whose bases led to this one."""
    if path in including:
        raise ConfigError(f"{path} is its own base, by way of {including[-1]}; correct base:")
    values = _absolute(read_yaml(path, str(path)), path.resolve().parent)
    base = values.pop("base", None)
    return values if base is None else _merged(_read(path.parent / str(base), *including, path), values)


def _merged(lower: dict[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values, where those of `upper` replace those of `lower`."""
    merged = dict(lower)
    for name, value in upper.items():
        below = merged.get(name)
        merged[name] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _absolute(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Values with absolute paths in place of those that are relative to the file."""
    data, backbone = values.get("data"), values.get("backbone")
    if isinstance(data, dict) and isinstance(data.get("files"), list):
        files = {file: folder / Path(file).expanduser() for file in data["files"]}
        data["files"] = [file if is_hub_id(file) and not path.exists() else str(path) for file, path in files.items()]
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
