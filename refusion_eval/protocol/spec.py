"""The file of a protocol, YAML of systems, tasks and analysis (docs/guides/protocol.md), and the hash of its meaning.

The hash is over what the file means: published systems, settings tables and defaults are resolved first, and versions
of tasks are added. So comments, the order of keys and defaults that are spelled out change nothing, and a settings
table that gets another value does.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Le, MinLen

from refusion_eval import config
from refusion_eval.benchmarks import Task
from refusion_eval.config import NonNegativeInt, PositiveInt
from refusion_eval.decoders import name_with_code
from refusion_eval.errors import ConfigError
from refusion_eval.evaluation.tasks import find_tasks, is_sorted, task_names
from refusion_eval.metrics import RESAMPLES
from refusion_eval.results.tables import SUMMARY_COLUMNS
from refusion_eval.runs.model_args import (
    LAUNCH_ARGUMENTS,
    ModelArgs,
    check_used,
    file_arguments,
    parse_model_args,
    settings_type,
)
from refusion_eval.runs.settings_tables import load_tables, resolve_task
from refusion_eval.store.records import as_json, dump
from refusion_eval.untrusted import read_text

FILES = Path(__file__).parent / "files"
MOST_SYSTEMS, MOST_RUNS, MOST_ROUNDS = 50, 1000, 1000
DEFAULT = "eval"  # what `suite` and eval.sh run without options

METRICS = tuple(column.metric for column in SUMMARY_COLUMNS)

# Model arguments that are places, names or launches. Settings tables (`preset`) are in the content with their values.
_NO_PART = (
    *("run_dir", "data_dir", "preset", "system", "base_url", "server_name", "api_key_env", "timeout", "patience"),
    *("settings", "protocol", *LAUNCH_ARGUMENTS),
)


@config.settings_class("analysis")
class Analysis:
    """How numbers are made of records. Each value is what this package computes, and any other is refused."""

    interval: Literal[95] = 95  # percent, of the bootstrap
    resamples: PositiveInt = RESAMPLES
    unit: Literal["item"] = "item"  # what is resampled, and what differences are paired by

    def __post_init__(self) -> None:
        if self.resamples != RESAMPLES:
            raise ConfigError(f"resamples={self.resamples}: intervals are made of {RESAMPLES} resamples; write that")


@config.settings_class()
class _Entry:
    arguments: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)


@config.settings_class()
class Protocol:
    """One protocol. `systems` are mappings with `arguments` (of the model) and `settings` (of the decoder)."""

    name: str
    # Of the form of the file and of its hash. It is raised when the default of a model argument changes, because
    # arguments at their default are not in the content that is hashed.
    schema: Literal[1] = 1
    about: str = ""
    tasks: tuple[str, ...] = ()
    prompts: Literal["ours", "release"] | None = None
    limit: PositiveInt | None = None
    seeds: Annotated[tuple[NonNegativeInt, ...], MinLen(1)] = (0,)
    rounds: Annotated[int, Ge(1), Le(MOST_ROUNDS)] = 3
    metrics: Annotated[tuple[str, ...], MinLen(1)] = METRICS
    baseline: str | None = None
    analysis: Analysis = field(default_factory=Analysis)
    systems: Mapping[str, Any] = field(default_factory=dict)
    whole: Any = None  # the protocol that this one is a part of, whose content and hash it has; never in a file

    def __post_init__(self) -> None:
        if not self.systems:
            raise ConfigError("needs `systems:` with one or more entries")
        config.check_number(
            len(self.seeds) * len(self.systems), MOST_RUNS, "seeds", "runs, of each system with each seed,"
        )
        config.check_keys(self.metrics, METRICS, "metrics", what="metric")
        if self.baseline is not None:
            config.check_keys([self.baseline], self.systems, "baseline", what="system")
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds: one of {', '.join(map(str, self.seeds))} stands twice; name each once")

    def changed(self, arguments: Mapping[str, Any] | None = None, **values: Any) -> Self:
        """A protocol with other values that are not None, and with these model arguments in every system."""
        given = {name: value for name, value in values.items() if value}
        if arguments:
            given["systems"] = {
                name: entry | {"arguments": entry["arguments"] | dict(arguments)}
                for name, entry in self.systems.items()
            }
        return replace(self, **given) if given else self

    def part(self, tasks: tuple[str, ...], limit: int | None) -> Self:
        """Some of the tasks, or fewer items of each; another protocol where it has not these tasks or items."""
        asked = self.changed(tasks=tasks, limit=limit)
        is_part = (asked.limit or math.inf) <= (self.limit or math.inf) and all(
            set(asked.tasks_of(system)) <= set(self.tasks_of(system)) for system in self.systems
        )
        return replace(asked, whole=self) if is_part and asked is not self else asked

    def runs(self) -> list[tuple[str, str, int]]:
        """The runs of every system in their order: name of the run directory, system and seed."""
        several = len(self.seeds) > 1
        return [
            (f"{system}-seed{seed}" if several else system, system, seed)
            for system in self.systems
            for seed in self.seeds
        ]

    def arguments(self, system: str, seed: int | None = None) -> ModelArgs:
        """The model arguments of a system, with the settings of its decoder; without a seed the first counts."""
        config.check_keys([system], self.systems, f"protocol {self.name}", what="system")
        entry, first = self.systems[system], self.seeds[0]
        seed = first if seed is None else seed
        if seed not in self.seeds:
            raise ConfigError(f"protocol {self.name}: its seeds are {', '.join(map(str, self.seeds))}, not {seed}")
        seeds = {"seed": seed} if seed or first else {}
        try:
            return parse_model_args({**entry["arguments"], **entry["settings"], **seeds})
        except ConfigError as error:
            raise ConfigError(f"protocol {self.name}: systems: {system}: {error}") from error

    def task_names(self, system: str) -> list[str]:
        """The names of a system's tasks, as `run` understands them."""
        return task_names(self.tasks, self.arguments(system).pretrained, prompts=self.prompts)

    def tasks_of(self, system: str) -> list[Task]:
        """The tasks of a system; ConfigError for one that is not of this project, whose version is not known here."""
        try:
            return find_tasks(self.task_names(system))
        except ConfigError as error:
            where = f"protocol {self.name}: tasks: {error}"
            raise ConfigError(
                f"{where} (a protocol has tasks of this project; those of lm-eval go to `run`)"
            ) from error

    def content(self) -> dict[str, Any]:
        """All that decides a number, resolved, as JSON. Checkpoints are not opened, so their tokens are left out."""
        if self.whole is not None:
            return self.whole.content()
        systems: dict[str, Any] = {}
        versions: dict[str, str] = {}
        spread: set[str] = set()
        tables: dict[str, Any] = {}  # read so far
        for system in self.systems:
            tasks = self.tasks_of(system)
            versions |= {task.name: task.benchmark.prompts.version for task in tasks}
            spread |= {task.name for task in tasks if self.limit and is_sorted(task)}
            args = self.arguments(system)
            systems[system] = {"arguments": _deciding_arguments(args), "settings": self._settings(args, tasks, tables)}
        # With more rounds than items, the suite makes as many rounds as there are items.
        rounds = min(self.rounds, self.limit or self.rounds)
        return as_json(
            {"schema": self.schema, "limit": self.limit, "rounds": rounds, "baseline": self.baseline}
            | {"seeds": sorted(self.seeds), "metrics": sorted(self.metrics), "analysis": asdict(self.analysis)}
            | {"tasks": versions, "systems": systems}
            # Which items a limit leaves of them; there is no such entry where it leaves the first ones.
            | ({"spread": sorted(spread)} if spread else {})
        )

    def _settings(self, args: ModelArgs, tasks: Iterable[Task], read: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Stop strings, and the settings of each task but the tokens of the checkpoint and the seed."""
        known = {"mask_id": 0, "eos_ids": (1,)}  # stand for the checkpoint's
        tokens = {name: value for name, value in known.items() if name in config.field_types(args.settings_type)}
        settings: dict[str, dict[str, Any]] = {}
        try:
            decided_by = repr((args.decoder, args.loop, args.preset, *map(args.settings.get, known)))
            if decided_by not in read:
                read[decided_by] = load_tables(args, tokens)
            tables = read[decided_by]
            for task in tasks:
                until = {"until": list(task.benchmark.prompts.stop_strings)}
                resolved = resolve_task(task.name, args, until, tables, tokens)
                decided = {name for name, source in resolved.sources.items() if source != "checkpoint"} - {"seed"}
                kept = {name: value for name, value in resolved.values.items() if name in decided}
                settings[task.name] = kept | {"until": list(resolved.until)}
        except ConfigError as error:
            raise ConfigError(f"protocol {self.name}: {error}") from error
        return settings

    @property
    def hash(self) -> str:
        return _hash(self.content())

    @property
    def label(self) -> str:
        """Name and short hash, as records, tables and figures have them."""
        return self.label_of(self.content())

    def label_of(self, content: Mapping[str, Any]) -> str:
        """The label, where the content is at hand."""
        return f"{self.name}@{_hash(content)[:12]}"

    def stamped(self, system: str, seed: int | None, content: Mapping[str, Any]) -> ModelArgs:
        """The model arguments of one run, which its records then say to be of this protocol, whose content is given."""
        own = {**content, "systems": {system: content["systems"][system]}}
        stamp = {"label": self.label_of(content), "hash": _hash(content), "system": system, "content": own}
        return replace(self.arguments(system, seed), protocol=stamp)


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(dump(content).encode("ascii")).hexdigest()


def deciding(values: Mapping[str, Any]) -> dict[str, Any]:
    """The model arguments that decide a number and are not at their default."""
    defaults = {entry.name: entry.default for entry in fields(ModelArgs)}
    return {name: value for name, value in values.items() if name not in _NO_PART and value != defaults[name]}


def _deciding_arguments(args: ModelArgs) -> dict[str, Any]:
    given = {entry.name: getattr(args, entry.name) for entry in fields(args)}
    if (template := Path(args.chat_template or "").expanduser()).is_file():  # stands in records by its hash, too
        given["chat_template"] = hashlib.sha256(read_text(template).encode()).hexdigest()[:32]
    return deciding(given | {"decoder": name_with_code(args.decoder)})


def shipped_protocols() -> list[str]:
    return sorted(path.stem for path in FILES.glob("*.yaml"))


def protocol_file(name: str) -> Path:
    """The file of a protocol, given as its path or as the name of one of the package."""
    path = FILES / f"{name}.yaml" if name in shipped_protocols() else Path(name)
    if not path.is_file():
        found = "a folder, not a file (diff compares a run directory)" if path.is_dir() else "no such file"
        raise ConfigError(f"protocol {name}: {found}; give a YAML file, or one of {', '.join(shipped_protocols())}")
    return path


def read_protocol(
    name: str,
    *,
    allow_code: bool = False,
    of_servers: Mapping[str, Any] = MappingProxyType({}),
    is_alone: bool = True,
) -> Protocol:
    """Reads and checks a protocol; raises ConfigError for an unknown field, name or value.

    Args:
        allow_code: whether the file may name code, which is imported then.
        of_servers: arguments of every system that a server decodes, over those of the file.
        is_alone: whether it has to use them, because no other file is read beside it.
    """
    path, where = protocol_file(name), f"protocol {name}"
    config.check_name(path.stem, f"{where}: the name of the file")
    content = {key: value for key, value in config.read_yaml(path, where).items() if value is not None}
    config.check_keys(content, config.field_types(Protocol).keys() - {"name", "whole"}, where)
    rows = config.mapping(content.get("systems"), f"{where}: systems")
    config.check_number(len(rows), MOST_SYSTEMS, where, "systems")
    systems = {
        system: _entry(f"{where}: systems: {system}", system, row, allow_code, of_servers)
        for system, row in rows.items()
    }
    if is_alone:
        check_used(of_servers, (entry["arguments"] for entry in systems.values()), where)
    protocol = config.build(Protocol, {**content, "name": path.stem, "systems": systems}, where)
    for system in systems:
        protocol.arguments(system)
    return protocol


def _entry(where: str, name: str, row: Any, allow_code: bool, of_servers: Mapping[str, Any]) -> dict[str, Any]:
    config.check_name(name, where)
    entry = config.build(_Entry, config.mapping(row, where), where)
    if "seed" in entry.settings:
        raise ConfigError(f"{where}: seed is no setting of one system; write `seeds:` for all of them")
    arguments = file_arguments(entry.arguments, where, allow_code=allow_code, of_servers=of_servers)
    kind = settings_type(arguments["decoder"], arguments["loop"])
    return {"arguments": arguments, "settings": config.read_values(kind, entry.settings, f"{where}: settings")}
