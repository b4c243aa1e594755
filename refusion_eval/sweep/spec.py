"""What a sweep runs: a YAML file of systems, tasks and the settings that vary.

    tasks: [gsm8k, mbpp]              # benchmark or task names
    limit: 100                        # items of each task; all if left out
    systems:
      refusion:                       # a name of your own; run directories begin with it
        arguments: {pretrained: embedded, decoder: refusion}      # model arguments; {system: NAME}: a published one's
        settings: {gen_length: 256}   # of every point
        grid: {tau_slot: [0.5, 0.9], tau_token: [0.2, 0.4]}       # every combination
        around: {tau_slot: [0.5, 0.9], tau_token: [0.2, 0.4]}     # one at a time, the others as in the settings table
        points: [{slot_size: 4, block_size: 32}]                  # settings that belong together
        frontier: {setting: tau_slot, low: 0.1, high: 0.99, points: 8, scale: linear}   # chosen while it runs

The settings table's own point, the published operating point where the table is the paper's, is always run.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from refusion_eval.config import build, check_keys, field_types, mapping, read_values, read_yaml
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.published import system_arguments

SPECS = Path(__file__).parent / "specs"
_SYSTEM_KEYS = ("arguments", "settings", "grid", "around", "points", "frontier")

TABLE = "table"  # name of the point that has the settings table's values
Origin = Literal["table", "grid", "around", "points", "frontier"]


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """One setting whose values are chosen where the curve of accuracy against TPF is least known.

    Attributes:
        setting: its name.
        low, high: the first two values.
        points: how many values at most, these two included.
        scale: how the middle between two values is found: "linear" or "log".
        multiple_of: values are rounded to multiples of it; 0 is any number, 1 whole numbers.
    """

    setting: str
    low: float
    high: float
    points: int = 8
    scale: Literal["linear", "log"] = "linear"
    multiple_of: int = 0

    def __post_init__(self) -> None:
        if not self.low < self.high or self.points < 2 or (self.scale == "log" and self.low <= 0):
            raise ConfigError(
                f"frontier of {self.setting}: low={self.low}, high={self.high}, points={self.points}, "
                f"scale={self.scale}; low must be below high, and above 0 on a log scale, with 2 points or more"
            )


@dataclass(frozen=True, kw_only=True)
class Point:
    """Settings of one run.

    Attributes:
        settings: those that differ from the settings table, in the order of their names.
        origin: which part of the file asks for it first.
    """

    settings: Mapping[str, Any]
    origin: Origin

    @property
    def name(self) -> str:
        """What its run directory is called after the system, the same for equal settings."""
        parts = [f"{key}={_text(value)}" for key, value in self.settings.items()]
        return re.sub(r"[^A-Za-z0-9_.=+-]", "_", "+".join(parts)) or TABLE


@dataclass(frozen=True, kw_only=True)
class SweptSystem:
    """One system and its points.

    Attributes:
        name: as the file has it.
        arguments: model arguments, without decoder settings.
        settings: decoder settings of all its points.
        points: known before anything is run; the settings table's own is the first.
        frontier: what else is run, or None.
    """

    name: str
    arguments: Mapping[str, Any]
    settings: Mapping[str, Any]
    points: Sequence[Point]
    frontier: Frontier | None

    @property
    def setting_types(self) -> dict[str, Any]:
        """Names and types of the decoder's settings."""
        return field_types(DECODERS[self.arguments["decoder"]].Settings)

    def point(self, settings: Mapping[str, Any], origin: Origin) -> Point:
        """A point of this system, in the one form that equal settings have.

        Raises:
            ConfigError: a setting is unknown or of the wrong type.
        """
        converted = read_values(DECODERS[self.arguments["decoder"]].Settings, settings, f"sweep: {self.name}")
        return Point(settings=dict(sorted(converted.items())), origin=origin)


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """A sweep.

    Attributes:
        name: of the file, without its ending.
        tasks: benchmark or task names; empty for all seven.
        limit: items of each task, None for all.
        systems: at least one.
    """

    name: str
    tasks: tuple[str, ...]
    limit: int | None
    systems: Sequence[SweptSystem]


def shipped_specs() -> list[str]:
    """Names of the sweeps that come with the package."""
    return sorted(path.stem for path in SPECS.glob("*.yaml"))


def read_spec(name: str) -> SweepSpec:
    """Reads and checks a file.

    Args:
        name: path of a YAML file, or the name of a shipped one.

    Raises:
        ConfigError: there is no such file, or it is malformed; says where.
    """
    path = SPECS / f"{name}.yaml" if name in shipped_specs() else Path(name)
    if not path.is_file():
        raise ConfigError(f"sweep {name}: no such file; give a YAML file, or one of {', '.join(shipped_specs())}")
    content = read_yaml(path, f"sweep {name}")
    if not isinstance(content.get("systems"), dict) or not content["systems"]:
        raise ConfigError(f"sweep {name}: needs `systems:` with one or more entries")
    check_keys(content, ("tasks", "limit", "systems"), f"sweep {name}")
    limit = content.get("limit")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ConfigError(f"sweep {name}: limit is {limit!r}; it must be a whole number above 0")
    tasks = content.get("tasks") or []
    if not isinstance(tasks, str) and not (isinstance(tasks, list) and all(isinstance(task, str) for task in tasks)):
        raise ConfigError(f"sweep {name}: tasks is {tasks!r}; write a list of names")
    return SweepSpec(
        name=path.stem,
        tasks=tuple(tasks.split(",") if isinstance(tasks, str) else tasks),
        limit=limit,
        systems=[
            _system(f"sweep {name}: {key}", key, mapping(row, f"sweep {name}: {key}"))
            for key, row in mapping(content["systems"], f"sweep {name}: systems").items()
        ],
    )


def _system(where: str, name: str, row: dict[str, Any]) -> SweptSystem:
    check_keys(row, _SYSTEM_KEYS, where)
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ConfigError(f"{where}: a system's name is part of folder names; use letters, digits, _, - and . only")
    row = row | {
        key: mapping(row.get(key), f"{where}: {key}") or None
        for key in ("arguments", "settings", "grid", "around", "frontier")
    }
    given = dict(row.get("arguments") or {})
    if "system" in given and "pretrained" not in given and "decoder" not in given:
        given = system_arguments(given.pop("system"), given.pop("model", None)) | given
    try:
        parsed = parse_model_args(given)  # types every argument and refuses unknown ones
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if parsed.settings or parsed.run_dir:
        raise ConfigError(f"{where}: arguments hold run_dir or decoder settings; settings go under `settings:`")
    frontier = row.get("frontier")
    if frontier is not None:
        frontier = build(Frontier, frontier, f"{where}: frontier")
    given["decoder"] = parsed.decoder
    system = SweptSystem(name=name, arguments=given, settings={}, points=(), frontier=frontier)
    settings = system.point(row.get("settings") or {}, "table").settings
    if frontier is not None:
        check_keys([frontier.setting], system.setting_types, f"{where}: frontier")
    points: dict[str, Point] = {}
    for origin, values in _points(where, row):
        point = system.point(values, origin)
        if doubled := settings.keys() & point.settings.keys():
            raise ConfigError(f"{where}: {', '.join(sorted(doubled))} is both fixed under settings and varied")
        points.setdefault(point.name, point)
    return SweptSystem(name=name, arguments=given, settings=settings, points=tuple(points.values()), frontier=frontier)


def _points(where: str, row: Mapping[str, Any]) -> Iterator[tuple[Origin, Mapping[str, Any]]]:
    yield "table", {}
    for origin in ("grid", "around"):
        for key, values in (row.get(origin) or {}).items():
            if not isinstance(values, list) or not values:
                raise ConfigError(f"{where}: {origin}: {key} needs a list of values")
    grid = row.get("grid") or {}
    if grid:
        for combination in itertools.product(*grid.values()):
            yield "grid", dict(zip(grid, combination, strict=True))
    for key, values in (row.get("around") or {}).items():
        for value in values:
            yield "around", {key: value}
    for values in row.get("points") or []:
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: points: {values!r} is no mapping of settings")
        yield "points", values


def _text(value: Any) -> str:
    if isinstance(value, float):
        return format(value, ".6g")
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
