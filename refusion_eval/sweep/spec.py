"""The file of a sweep: YAML of systems, tasks and the settings that vary; docs/guides/sweeps.md describes it."""

import hashlib
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, MinLen

from refusion_eval import config
from refusion_eval.errors import ConfigError
from refusion_eval.evaluation.tasks import LM_EVAL
from refusion_eval.runs.model_args import check_code, check_used, file_arguments, settings_type

SPECS = Path(__file__).parent / "specs"
MOST_SYSTEMS, MOST_POINTS = 50, 1000
_LONGEST_POINT = 150  # characters of a point's name; the longest name of a file is 255 with that of the system
# Arguments that belong to one checkpoint, and say nothing of another one.
_OF_CHECKPOINT = ("adapter", "revision", "preset", "chat_template", "backbone")

Origin = Literal["table", "settings", "grid", "around", "points", "frontier"]
Values = dict[str, Annotated[list[Any], MinLen(1)]]  # setting -> its values


class TaskResult(NamedTuple):
    tpf: float
    accuracy: float


@config.settings_class("frontier")
class Frontier:
    """One setting whose values are chosen so that the curve of accuracy against tokens per forward is known evenly."""

    setting: str
    low: float
    high: float
    points: Annotated[int, Ge(2)] = 8
    scale: Literal["linear", "log"] = "linear"
    multiple_of: config.NonNegativeInt = 0

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.scale == "log" and self.low <= 0):
            raise ConfigError(
                f"{self.setting}: low={self.low}, high={self.high}, scale={self.scale}; "
                "low must be below high, and above 0 on a log scale"
            )

    def next_value(self, measured: Mapping[float, Sequence[TaskResult]]) -> float | None:
        """The next value of the setting, or None when there are enough values.

        The two ends come first, then always the middle of the two neighbouring values whose results lie farthest apart:
        Euclidean distance in the plane of TPF and accuracy, each divided by its range, averaged over the tasks.
        """
        # The choice depends on the results alone, so that a resumed sweep makes the same choices.
        for end in (self.low, self.high):
            if end not in measured:
                return end
        if len(measured) >= self.points:
            return None
        values = sorted(measured)
        results = np.array([measured[value] for value in values]).reshape(len(values), -1, 2)  # [values, tasks, 2]
        ranges = np.ptp(results, axis=0)
        steps = np.diff(results, axis=0) / np.where(ranges, ranges, 1.0)
        largest, next_middle = 0.0, None
        for left, right, step in zip(values, values[1:], steps, strict=False):
            middle = self._middle(left, right)
            distance = sum(math.hypot(*of_task) for of_task in step) / max(len(step), 1)
            if left < middle < right and distance > largest:
                largest, next_middle = distance, middle
        return next_middle

    def _middle(self, left: float, right: float) -> float:
        middle = math.sqrt(left * right) if self.scale == "log" else (left + right) / 2
        if self.multiple_of:
            return float(round(middle / self.multiple_of) * self.multiple_of)
        # Four digits, because the value is written into the name of the run directory.
        return float(f"{middle:.4g}")


@config.settings_class()
class _SystemEntry:
    """One entry of `systems:` as the file has it; see the top of this module."""

    arguments: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    grid: Values = field(default_factory=dict)
    around: Values = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)
    frontier: Frontier | None = None

    @property
    def num_points(self) -> int:
        """As many as it varies, equal ones included."""
        of_frontier = 0 if self.frontier is None else self.frontier.points
        grid = math.prod(map(len, self.grid.values())) if self.grid else 0
        return 1 + grid + sum(map(len, self.around.values())) + len(self.points) + of_frontier

    def varied(self) -> Iterator[tuple[Origin, dict[str, Any]]]:
        yield "settings" if self.settings else "table", {}
        combinations = itertools.product(*self.grid.values()) if self.grid else ()
        yield from (("grid", dict(zip(self.grid, values, strict=True))) for values in combinations)
        yield from (("around", {key: value}) for key, values in self.around.items() for value in values)
        yield from (("points", settings) for settings in self.points)


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    settings: Mapping[str, Any]  # the varied ones, sorted by name
    origin: Origin

    @property
    def name(self) -> str:
        """Name of the run directory after the system's name; that of the point that varies nothing is its origin."""
        parts = [f"{key}={_text(value)}" for key, value in self.settings.items()]
        name = re.sub(r"[^A-Za-z0-9_.=+-]", "_", "+".join(parts)) or self.origin
        if len(name) <= _LONGEST_POINT:
            return name
        return f"{name[: _LONGEST_POINT // 2]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, kw_only=True)
class SweptSystem:
    name: str
    arguments: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    points: Sequence[SweepPoint] = ()  # without those of the frontier; the first varies nothing
    frontier: Frontier | None = None

    @property
    def decoder_settings(self) -> type:
        return settings_type(self.arguments["decoder"], self.arguments["loop"])

    def point(self, settings: Mapping[str, Any], origin: Origin) -> SweepPoint:
        """A point of this system; equal settings get the same form, whatever way they are written."""
        converted = config.read_values(self.decoder_settings, settings, f"sweep: {self.name}")
        return SweepPoint(settings=dict(sorted(converted.items())), origin=origin)

    def frontier_point(self, value: float) -> SweepPoint:
        assert self.frontier is not None
        return self.point({self.frontier.setting: value}, "frontier")

    @property
    def known_points(self) -> list[SweepPoint]:
        ends = () if self.frontier is None else (self.frontier.low, self.frontier.high)
        return [*self.points, *map(self.frontier_point, ends)]


@config.settings_class()
class SweepSpec:
    name: str
    tasks: tuple[str, ...] = ()
    limit: config.PositiveInt | None = None
    systems: tuple[SweptSystem, ...]


def shipped_specs() -> list[str]:
    return sorted(path.stem for path in SPECS.glob("*.yaml"))


def read_spec(
    name: str, of_servers: Mapping[str, Any] = MappingProxyType({}), *, allow_code: bool = False
) -> SweepSpec:
    """Reads a sweep; raises ConfigError for an unknown field, name or value.

    Args:
        of_servers: arguments of every system that a server decodes, over those of the file.
        allow_code: whether the file may name code, which is imported then.
    """
    path = SPECS / f"{name}.yaml" if name in shipped_specs() else Path(name)
    if not path.is_file():
        raise ConfigError(f"sweep {name}: no such file; give a YAML file, or one of {', '.join(shipped_specs())}")
    where = f"sweep {name}"
    if not path.stem.strip("."):  # becomes the name of a folder
        raise ConfigError(f"{where}: the name of the file has dots alone; rename it")
    content = config.read_yaml(path, where)
    if not content.get("systems"):
        raise ConfigError(f"{where}: needs `systems:` with one or more entries")
    systems = config.mapping(content["systems"], f"{where}: systems")
    config.check_number(len(systems), MOST_SYSTEMS, where, "systems")
    content["systems"] = swept = []
    for key, row in systems.items():
        swept.append(_system(f"{where}: {key}", key, row, allow_code, of_servers))
        config.check_number(sum(len(system.points) for system in swept), MOST_POINTS, where, "points")
    check_used(of_servers, (system.arguments for system in swept), where)
    spec = config.build(SweepSpec, {**_without_none(content), "name": path.stem}, where)
    # A task file of lm-eval may name functions of a Python file beside it.
    files = [task for task in spec.tasks if os.path.isfile(task.removeprefix(LM_EVAL))]
    check_code(files, f"{where}: tasks", allow_code=allow_code)
    return spec


def with_model(spec: SweepSpec, model: str) -> SweepSpec:
    """A sweep with another checkpoint for every system that decodes as ReFusion; `_OF_CHECKPOINT` are left out."""

    def on_model(system: SweptSystem) -> SweptSystem:
        if system.arguments["decoder"] != "refusion":
            return system
        kept = {name: value for name, value in system.arguments.items() if name not in _OF_CHECKPOINT}
        return replace(system, arguments=kept | {"pretrained": model})

    systems = tuple(map(on_model, spec.systems))
    if all(system.arguments["decoder"] != "refusion" for system in systems):
        raise ConfigError(f"sweep {spec.name} has no system with decoder refusion, so --model {model} changes nothing")
    return replace(spec, systems=systems)


def with_samples(spec: SweepSpec, samples: int) -> SweepSpec:
    systems = (replace(system, arguments={**system.arguments, "samples": samples}) for system in spec.systems)
    return replace(spec, systems=tuple(systems))


def _without_none(row: Mapping[str, Any]) -> dict[str, Any]:
    # A key without a value stands for its default.
    return {key: value for key, value in row.items() if value is not None}


def _system(where: str, name: str, row: Any, allow_code: bool, of_servers: Mapping[str, Any]) -> SweptSystem:
    entry = config.build(_SystemEntry, _without_none(config.mapping(row, where)), where)
    config.check_name(name, where)
    config.check_number(entry.num_points, MOST_POINTS, where, "points")
    given = file_arguments(entry.arguments, where, allow_code=allow_code, of_servers=of_servers)
    system = SweptSystem(name=name, arguments=given)
    settings = system.point(entry.settings, "settings").settings
    if entry.frontier is not None:
        config.check_keys([entry.frontier.setting], config.field_types(system.decoder_settings), f"{where}: frontier")
    points: dict[str, SweepPoint] = {}
    for origin, values in entry.varied():
        point = system.point(values, origin)
        if origin != "around" and (doubled := settings.keys() & point.settings.keys()):
            raise ConfigError(f"{where}: {', '.join(sorted(doubled))} is both fixed under settings and varied")
        if points.setdefault(point.name, point).settings != point.settings:
            raise ConfigError(f"{where}: two points would be called {point.name}; write values that differ more")
    return replace(system, settings=settings, points=tuple(points.values()), frontier=entry.frontier)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return format(value, ".6g")
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
