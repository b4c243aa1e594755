"""Settings tables, and the decoder settings of a task: its table's, the checkpoint's and the user's."""

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
from refusion_eval.paths import tasks_path
from refusion_eval.runs.model_args import RELEASE, ModelArgs

log = logging.getLogger(__name__)

DEFAULT = "default"  # source of a setting that nothing gives
# Generation arguments with values that change nothing, so a decoder that does not know them accepts these values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "num_beams": (1,),
    "repetition_penalty": (1,),
    "use_cache": (True,),
    "temperature": (0, None),  # of DiffusionGemma, which has a schedule of its own and no greedy decoding
}


# Names of lm-eval for the length of the response. The first that is given counts, as in lm-eval.
LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


_TABLE_KEYS = ("decoder", "source", "common", "benchmarks")


class Table(NamedTuple):
    """A settings table: the decoder's settings for each benchmark, and where each row comes from."""

    label: str  # in messages and records, with the name of the table if its file has several
    benchmarks: Mapping[str, Mapping[str, Any]]
    sources: Mapping[str, str]
    is_own: bool = False  # of the user, who means every benchmark to have a row


class Generation(NamedTuple):
    """Generation arguments of a request: decoder settings, and strings at whose first occurrence the text is cut."""

    values: Mapping[str, Any]
    until: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    settings: Any  # an instance of the decoder's settings class
    sources: Mapping[str, str]  # setting -> model_args, generation_kwargs, a table and benchmark, checkpoint, ...
    until: tuple[str, ...] = ()  # strings at whose first occurrence the text is cut
    task: Task | None = None  # the task of this project that it is, or that a task of lm-eval corresponds to
    values: Mapping[str, Any] = field(init=False)  # the settings as they are recorded
    digest: str = field(init=False)  # hash of settings and stop strings; it is part of the key of a sample

    def __post_init__(self) -> None:
        values = recorded_values(self.settings)
        text = json.dumps([values, self.until], sort_keys=True, default=str)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest()[:16])

    def describe(self, before: "Resolved | None" = None, *, with_defaults: bool = False) -> str:
        """The settings on one line for the log, grouped by source: those that are not defaults, or not as before.

        Args:
            with_defaults: also name the defaults, which no page lists for a decoder of a user's own.
        """
        by_source: dict[str, list[str]] = {}
        for key, value in self.values.items():
            is_named = with_defaults or self.sources[key] != DEFAULT
            if is_named if before is None else before.values.get(key) != value:
                by_source.setdefault(self.sources[key], []).append(f"{key}={value}")
        described = [f"{' '.join(pairs)} [{source}]" for source, pairs in by_source.items()]
        if before is None or before.until != self.until:
            described.append(f"stop at {list(self.until)}")
        return "; ".join(described) or "as before"


def own_table(preset: str | None) -> Path | None:
    """The file with a settings table of the user's own, if that is what `preset` is, and not the name of a table."""
    path = Path(preset or "").expanduser()
    return path if path.suffix in (".yaml", ".yml") else None


def check_preset(decoder: str, preset: str | None) -> None:
    """Raises ConfigError if a decoder has no settings table of this name, or it cannot be read; no row is checked."""
    _choose(own_table(preset) or tasks_path() / "settings" / f"{decoder}.yaml", decoder, preset)


def _choose(path: Path, decoder: str, preset: str | None) -> tuple[str, dict[str, Any]]:
    """Where a settings table stands, for messages, and its content; of several in a file the first by default."""
    is_own = own_table(preset) is not None
    where = str(path) if is_own else f"tasks/settings/{path.name}"
    content = read_yaml(path, where) if is_own or path.exists() else {}
    check_keys(content, (*_TABLE_KEYS, "presets"), where)
    if content and content.get("decoder") != decoder:
        raise ConfigError(f"{where}: the file has to say `decoder: {decoder}`")
    if is_own or "presets" not in content:
        if preset is not None and not is_own:
            raise ConfigError(f"{where} has no presets, so leave out preset={preset}")
        return where, content
    check_keys(content, ("decoder", "presets"), where)
    presets = mapping(content["presets"], f"{where}: presets")
    name = next(iter(presets)) if preset is None else preset
    check_keys([name], presets, where, what="preset")
    return f"{where}:{name}", mapping(presets[name], f"{where}: {name}")


def load_table(
    folder: Path,
    decoder: str,
    mini: bool,
    settings_type: type,
    checkpoint: Mapping[str, Any],
    preset: str | None = None,
) -> Table | None:
    """Reads and checks a settings table, for the benchmarks or the mini tasks; None if the decoder has no such file."""
    # A file holds one table, or several under `presets`: the authors' own settings and those of a comparison differ.
    # The row of a benchmark outranks `common`, and may have a source of its own.
    own = own_table(preset)
    path = own or folder / f"{'mini_' if mini else ''}{decoder}.yaml"
    if own is None and not path.exists():
        return None
    where, content = _choose(path, decoder, preset)
    check_keys(content, _TABLE_KEYS, where)
    rows, common = mapping(content.get("benchmarks"), f"{where}: benchmarks"), mapping(content.get("common"), where)
    if not rows:
        raise ConfigError(f"{where}: has no benchmarks; write benchmarks: with one or more of {', '.join(BENCHMARKS)}")
    check_keys(rows, BENCHMARKS, where)
    benchmarks: dict[str, Mapping[str, Any]] = {}
    sources: dict[str, Any] = {}
    for benchmark, row in rows.items():
        row = mapping(row, f"{where}: {benchmark}")
        values = {key: value for key, value in {**common, **row}.items() if key != "source"}
        sources[benchmark] = row.get("source", content.get("source", own and own.name))
        if not sources[benchmark]:
            raise ConfigError(f"{where}: {benchmark} needs a source, its own or the table's")
        # Built only to check the whole row; which settings a task has is known once all sources are merged.
        checked: Any = build(settings_type, {**checkpoint, **values}, f"{where}: {benchmark}")
        benchmarks[benchmark] = {key: getattr(checked, key) for key in values}
    trained = checkpoint.get("block_length")
    lengths = {row["block_length"] for row in benchmarks.values() if "block_length" in row}
    if trained is not None and lengths - {trained}:
        others = ", ".join(map(str, sorted(lengths)))
        advice = f"give --set block_length={trained} and the steps of such a block, or your own table"
        log.warning("%s: block_length %s, but config.json says block_size %d; %s", where, others, trained, advice)
    if own is None:
        return Table(where, benchmarks, sources)
    digest = hashlib.sha256(own.read_bytes()).hexdigest()[:12]
    return Table(f"{own.name}@{digest}", benchmarks, sources, is_own=True)


def load_tables(args: ModelArgs, checkpoint: Mapping[str, Any]) -> dict[bool, Table | None]:
    """The settings tables of a run's decoder: for the benchmarks (False) and for the mini tasks (True)."""
    # The user may have to name the tokens of a checkpoint without a card. A row of the table that needs an EOS must not
    # stop the tasks of other rows, so every row is read with one. What a task has is checked later, as it is.
    tokens = {**checkpoint, **{key: value for key, value in args.settings.items() if key in ("mask_id", "eos_ids")}}
    if "block_length" in args.settings:  # then it is no matter that a table has another one than the checkpoint
        tokens.pop("block_length", None)
    tokens["eos_ids"] = tokens.get("eos_ids") or (0 if tokens.get("mask_id") else 1,)
    # The package's settings of the mini tasks have no presets.
    presets = {False: args.preset, True: args.preset if own_table(args.preset) else None}
    if args.loop == RELEASE:  # the tables have the names of this project's decoders
        return dict.fromkeys(presets)
    folder = tasks_path() / "settings"
    return {
        mini: load_table(folder, args.decoder, mini, args.settings_type, tokens, preset)
        for mini, preset in presets.items()
    }


def resolve_task(
    task: str,
    args: ModelArgs,
    generation_kwargs: Mapping[str, Any],
    tables: Mapping[bool, Table | None],
    checkpoint: Mapping[str, Any],
) -> Resolved:
    """The settings of a task in a run; see `resolve`."""
    task_here, settings_type = find_task(task), args.settings_type
    return resolve(
        task,
        settings_type,
        model_args=args.settings,
        generation=read_generation_kwargs(generation_kwargs, settings_type, task),
        table=tables[task_here.mini] if task_here else None,
        checkpoint=checkpoint,
        # Fusing gives the same tokens in fewer forwards, so the paper's TPF is counted without them.
        paper={"fuse": False} if "fuse" in field_types(settings_type) else {},
    )


def read_generation_kwargs(kwargs: Mapping[str, Any], settings_type: type, where: str) -> Generation:
    """Translates generation arguments into settings of a decoder; ConfigError for what the decoder cannot do."""
    types = field_types(settings_type)
    rest = dict(kwargs)
    until = rest.pop("until", None) or ()
    lengths = [value for name in LENGTH_NAMES if (value := rest.pop(name, None)) is not None]
    if lengths:
        rest.setdefault("gen_length", lengths[0])
    # Sampling follows lm-eval: no argument about it is greedy, do_sample=True without a temperature samples at 1.
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
    return Generation(values, tuple(map(str, filter(None, until))))


def resolve(
    task: str,
    settings_type: type,
    *,
    model_args: Mapping[str, Any],
    generation: Generation,
    table: Table | None,
    checkpoint: Mapping[str, Any],
    paper: Mapping[str, Any] | None = None,  # where the paper's algorithm differs from the decoder's defaults
) -> Resolved:
    """Merges the sources of one task's settings by their precedence; ConfigError if they contradict each other."""
    task_here = find_task(task)
    # Lowest first: the decoder's defaults, the paper's algorithm, the mask and end tokens of the checkpoint, the table,
    # the task's generation arguments (its YAML's, updated by --gen_kwargs), the model arguments.
    layers: list[tuple[str, Mapping[str, Any]]] = [("paper", paper or {}), ("checkpoint", checkpoint)]
    if table is not None and task_here is not None:
        benchmark = task_here.benchmark
        name = benchmark.name
        if name not in table.benchmarks and benchmark.settings_of in table.benchmarks:
            name = benchmark.settings_of
        if name in table.benchmarks:
            row = table.benchmarks[name]
            layers.append((f"{table.label}:{name}", row))
            length = row.get("gen_length", benchmark.gen_length)
            if name != benchmark.name and length < benchmark.gen_length:
                # A response that is one block stays one.
                keys = ("gen_length", *(["block_length"] if row.get("block_length") == length else []))
                layers.append((f"benchmark {benchmark.name}", dict.fromkeys(keys, benchmark.gen_length)))
        elif table.is_own:
            raise ConfigError(
                f"{table.label}: has no row for {name}; add it under benchmarks, or leave out task {task}"
            )
    layers += [("generation_kwargs", generation.values), ("model_args", model_args)]
    values: dict[str, Any] = {}
    sources = dict.fromkeys(field_types(settings_type), DEFAULT)
    for source, layer in layers:
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    given = ", ".join(f"{key}={value} from {sources[key]}" for key, value in values.items())
    settings: Any = build(settings_type, values, f"task {task} ({given or 'defaults'})")
    recorded = {key: sources[key] for key in recorded_values(settings)}
    return Resolved(settings=settings, sources=recorded, until=generation.until, task=task_here)
