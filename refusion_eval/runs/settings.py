"""The decoder settings of each task, with the source of every value.

Precedence, highest first: model arguments; the task's generation arguments (its YAML's, updated by `--gen_kwargs`); the
settings table of the decoder (`tasks/settings/<decoder>.yaml`, for mini tasks `mini_<decoder>.yaml`); the checkpoint
(its mask and end tokens); the paper's algorithm, where the decoder's defaults differ from it; the decoder's defaults.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from refusion_eval.benchmarks import BENCHMARKS, Task, find_task
from refusion_eval.config import build, check_keys, field_types, mapping, read_values, read_yaml, recorded_values
from refusion_eval.errors import ConfigError

log = logging.getLogger(__name__)

MODEL_ARGS = "model_args"
GENERATION_KWARGS = "generation_kwargs"
CHECKPOINT = "checkpoint"
PAPER = "paper"
DEFAULT = "default"

# Names of lm-eval for the length of the response. The first that is given counts, as in lm-eval.
LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")

# Generation arguments with values that change nothing, so a decoder that does not know them accepts these values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "num_beams": (1,),
    "repetition_penalty": (1,),
    "use_cache": (True,),
}


@dataclass(frozen=True, slots=True)
class Table:
    """A settings table: the decoder's settings for each benchmark.

    Attributes:
        path: the file of the table.
        preset: name of the table in the file; None if the file has one table only.
    """

    path: Path
    preset: str | None
    benchmarks: Mapping[str, Mapping[str, Any]]
    sources: Mapping[str, str]

    @property
    def label(self) -> str:
        """Name of the table in messages and records."""
        return f"tasks/settings/{self.path.name}" + (f":{self.preset}" if self.preset else "")


class Generation(NamedTuple):
    """Generation arguments of a request: decoder settings, and strings at whose first occurrence the text is cut."""

    values: Mapping[str, Any]
    until: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The settings that one task is decoded with.

    Attributes:
        settings: an instance of the decoder's settings class.
        sources: setting -> source of its value: model_args, generation_kwargs, a file and benchmark, checkpoint, paper
            or default.
        until: strings at whose first occurrence the text is cut.
        task: the task of this project, or the task that a task of lm-eval corresponds to; None for any other.
        values: the settings as they are recorded.
        digest: hash of the settings and stop strings. It is part of the key of a sample.
    """

    settings: Any
    sources: Mapping[str, str]
    until: tuple[str, ...] = ()
    task: Task | None = None
    values: Mapping[str, Any] = field(init=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        values = recorded_values(self.settings)
        text = json.dumps([values, self.until], sort_keys=True, default=str)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest()[:16])

    def describe(self, before: "Resolved | None" = None) -> str:
        """The settings on one line for the log, grouped by source: those that are not defaults, or not as before."""
        by_source: dict[str, list[str]] = {}
        for key, value in self.values.items():
            is_new = self.sources[key] != DEFAULT if before is None else before.values.get(key) != value
            if is_new:
                by_source.setdefault(self.sources[key], []).append(f"{key}={value}")
        described = [f"{' '.join(pairs)} [{source}]" for source, pairs in by_source.items()]
        if before is None or before.until != self.until:
            described.append(f"stop at {list(self.until)}")
        return "; ".join(described) or "as before"


def choose_preset(path: Path, preset: str | None) -> tuple[str | None, dict[str, Any]]:
    """Reads one table of a settings file, by default the first, without checking its settings.

    Returns its name (None if the file has one table only) and its content; a missing file is an empty table.
    """
    where = f"tasks/settings/{path.name}"
    content = read_yaml(path, where) if path.exists() else {}
    if "presets" not in content:
        if preset is not None:
            raise ConfigError(f"{where} has no presets, so leave out preset={preset}")
        return None, content
    check_keys(content, ("decoder", "presets"), where)
    presets = mapping(content["presets"], f"{where}: presets")
    name = next(iter(presets)) if preset is None else preset
    check_keys([name], presets, where, what="preset")
    return name, {"decoder": content.get("decoder"), **mapping(presets[name], f"{where}: {name}")}


def load_table(
    folder: Path,
    decoder: str,
    mini: bool,
    settings_type: type,
    checkpoint: Mapping[str, Any],
    preset: str | None = None,
) -> Table | None:
    """Reads and checks a settings table, for the benchmarks or the mini tasks; None if the decoder has no such file.

    A file holds one table, or several under `presets`: the authors' own settings and those of a comparison differ. The
    row of a benchmark outranks `common`, the settings of all benchmarks, and may have a source of its own.
    """
    path = folder / f"{'mini_' if mini else ''}{decoder}.yaml"
    if not path.exists():
        return None
    preset, content = choose_preset(path, preset)
    where = f"tasks/settings/{path.name}" + (f":{preset}" if preset else "")
    check_keys(content, ("decoder", "source", "common", "benchmarks"), where)
    if content.get("decoder") != decoder:
        raise ConfigError(f"{where}: the file has to say `decoder: {decoder}`")
    rows, common = mapping(content.get("benchmarks"), f"{where}: benchmarks"), mapping(content.get("common"), where)
    if not rows:
        raise ConfigError(f"{where}: has no benchmarks; write benchmarks: with one or more of {', '.join(BENCHMARKS)}")
    check_keys(rows, BENCHMARKS, where)
    benchmarks: dict[str, Mapping[str, Any]] = {}
    sources: dict[str, Any] = {}
    for benchmark, row in rows.items():
        row = mapping(row, f"{where}: {benchmark}")
        values = {key: value for key, value in {**common, **row}.items() if key != "source"}
        sources[benchmark] = row.get("source", content.get("source"))
        if not sources[benchmark]:
            raise ConfigError(f"{where}: {benchmark} needs a source, its own or the table's")
        # Built only to check the whole row; which settings a task has is known once all sources are merged.
        checked: Any = build(settings_type, {**checkpoint, **values}, f"{where}: {benchmark}")
        benchmarks[benchmark] = {key: getattr(checked, key) for key in values}
    return Table(path, preset, benchmarks, sources)


def read_generation_kwargs(kwargs: Mapping[str, Any], settings_type: type, where: str) -> Generation:
    """Translates generation arguments into settings of a decoder; ConfigError for what the decoder cannot do.

    All names of the length become gen_length. Sampling follows lm-eval: do_sample=False, or no argument about sampling,
    is greedy; do_sample=True without a temperature samples at 1; if do_sample and temperature contradict each other,
    do_sample counts and a warning says so.
    """
    types = field_types(settings_type)
    rest = dict(kwargs)
    until = rest.pop("until", None) or ()
    lengths = [value for name in LENGTH_NAMES if (value := rest.pop(name, None)) is not None]
    if lengths:
        rest.setdefault("gen_length", lengths[0])
    do_sample = rest.pop("do_sample", None)
    for key, neutral in NEUTRAL.items():
        if key not in types and key in rest:
            value = rest.pop(key)
            if value not in neutral:
                raise ConfigError(f"{where}: {key}={value!r} cannot be obeyed by this decoder; leave it out")
    where = f"{where}: generation_kwargs"
    values = read_values(settings_type, rest, where)
    if "temperature" in types:
        temperature = values.get("temperature")
        if do_sample is False:
            if temperature:
                log.warning("%s: temperature=%s has no effect with do_sample=False: greedy", where, temperature)
            values["temperature"] = 0.0
        elif do_sample is True and temperature is None:
            values["temperature"] = 1.0
        elif do_sample is True and temperature == 0:
            log.warning("%s: do_sample=True with temperature=0 is greedy", where)
    elif do_sample:
        raise ConfigError(f"{where}: do_sample=True, but this decoder has no temperature; leave it out")
    until = (until,) if isinstance(until, str) else until
    return Generation(values, tuple(str(stop) for stop in until if stop))


def resolve(
    task: str,
    settings_type: type,
    *,
    model_args: Mapping[str, Any],
    generation: Generation,
    table: Table | None,
    checkpoint: Mapping[str, Any],
    paper: Mapping[str, Any] | None = None,
) -> Resolved:
    """Merges the sources of one task's settings by their precedence; ConfigError if they contradict each other.

    `paper` has the settings in which the paper's algorithm differs from the decoder's defaults.
    """
    task_here = find_task(task)
    layers: list[tuple[str, Mapping[str, Any]]] = [(PAPER, paper or {}), (CHECKPOINT, checkpoint)]
    if table is not None and task_here is not None and (name := task_here.benchmark.name) in table.benchmarks:
        layers.append((f"{table.label}:{name}", table.benchmarks[name]))
    layers += [(GENERATION_KWARGS, generation.values), (MODEL_ARGS, model_args)]
    values: dict[str, Any] = {}
    sources = dict.fromkeys(field_types(settings_type), DEFAULT)
    for source, layer in layers:
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    given = ", ".join(f"{key}={value} from {sources[key]}" for key, value in values.items())
    settings: Any = build(settings_type, values, f"task {task} ({given or 'defaults'})")
    recorded = {key: sources[key] for key in recorded_values(settings)}
    return Resolved(settings=settings, sources=recorded, until=generation.until, task=task_here)
