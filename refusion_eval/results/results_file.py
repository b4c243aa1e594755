"""Results files: measurements as CSV, and as the details of an export, written and read again."""

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from refusion_eval.errors import StoreError
from refusion_eval.results.cautions import MINI_NOTE
from refusion_eval.results.measurement import AVERAGE, GENERATE, MEAN_TASK, OF_LOOPS, VARIES, Measurement
from refusion_eval.results.published import system_key
from refusion_eval.results.render import cell_text, csv_records, csv_text
from refusion_eval.runs.systems import decoder_of_system
from refusion_eval.store.atomic_write import write_output
from refusion_eval.untrusted import parse_json, read_plain

SETTING_PREFIX = "setting_"

# Columns of the CSV file of measurements, with what they mean, before and after those of the settings.
_BEFORE_SETTINGS = {
    "run_id": "name of the run directory",
    "system": "label of the system in tables",
    "backbone": "model that the system was made from",
    "task": f"the task; `{MEAN_TASK}` for a mean over tasks",
    "n": "items that the figure rests on",
    "metric": "name of the metric ([Metrics](metrics.md))",
    "value": "the figure; empty where nothing could be computed",
    "ci_low": "lower bound of the 95% interval by item; empty for none",
    "ci_high": "upper bound of that interval",
    "unit": "unit of the value and its bounds; empty for a plain ratio",
    "batch_size": "requests decoded at the same time; several joined by a vertical line",
    "dtype": "type of weights and cache",
    "device": "`cpu` or `cuda`",
}

_OF_A_SETTING = f"the decoder setting NAME in force; `{VARIES}` for a mean over tasks that differ in it"

_AFTER_SETTINGS = {
    "forwards": "forwards of all samples together; empty where a server does not tell them",
    "tokens": "tokens kept of all samples together; empty where a server does not tell them",
    "seconds": "decoding time of all samples together",
    "benchmark": "the benchmark that the task asks; empty for a mean",
    "mini": f"whether the task is a {MINI_NOTE}",
    "samples": "samples that the figure rests on",
    "errors": "samples that failed and are in no figure",
    "attention": "attention backend",
    "hardware": "machine with its threads, or name of a server; several joined by a vertical line",
    "note": "all that a reader must know of the figure, in sentences",
    "task_version": "version of the task; several joined by a vertical line",
}

_COLUMNS = (*_BEFORE_SETTINGS, *_AFTER_SETTINGS)


# Columns that are there where a measurement has another value than the usual one: those of files and data frames, ...
_WHERE_USED = {
    "prompts": "wording of the prompts: of this project (`ours`), of the release (`release`), or `other`",
    "num_cut": "responses that reached the length of the settings, and so may lack their end",
    "num_unscored": "samples without a verdict",
    "num_rounds": "rounds in which the systems took turns",
    "num_refused": "those of the errors that recur at every attempt, such as a prompt beyond the context",
    "card": "GPU, else processor, without threads; empty for a server, whose card is not known",
}

# ... and those of files alone, after all others.
_IN_FILES = {
    "num_tasks": "tasks that the figure is a mean over",
    "finished": "whether all samples that were asked for are there",
    "scored": "whether all samples have a verdict",
    "isolated": "whether all programs ran in isolation, so that no verdict can be forged",
    "generate": "whether transformers' own `generate` decoded",
    "slowed_by": "what made speeds lower than need be, sentences joined by a vertical line",
    "same_decode_as": "run of a sweep, of other settings, with the same tokens and forwards for every item",
    "unfinished": "`26 of 40` samples that were asked for are there; empty for all",
    "limited": "`40 of 100` samples of the task were asked for; empty for all",
    "missing": "of a task without rows, and so without samples: what to do",
    "one_answer": "`96 of 100 are C` where most answers to choices are one letter",
    "collapsed": "`12 of 100: 10 repeating, 3 empty` where answers show signs of collapse",
    "counts_encoder": "whether forwards of an encoder are in the figure, which its release leaves out",
    "num_seeds": "seeds, or samples of an item, that the figure is a mean over",
    "seed_sd": "standard deviation over these seeds or samples",
    "server_notes": "what a reader must know of a server's answers, sentences joined by a vertical line",
    "protocol": "NAME@HASH of the protocol of the samples",
    "records": "SHA-256 of the records that the figure is from",
}
_OPTIONAL = _WHERE_USED | _IN_FILES
_USUAL = {entry.name: entry.default for entry in fields(Measurement)} | {"finished": True, "generate": False}


def column_meanings() -> dict[str, str]:
    """Every column that a results file may have, in order, with its meaning."""
    decoder = "name of the decoder, where `system` does not say it"
    settings = {f"{SETTING_PREFIX}NAME": _OF_A_SETTING}
    return {**_BEFORE_SETTINGS, **settings, **_AFTER_SETTINGS, **_OPTIONAL, "decoder": decoder}


def csv_columns(measurements: Sequence[Measurement]) -> list[str]:
    """Column names in order: identity and number, conditions, settings of all, totals and provenance."""
    settings = sorted({SETTING_PREFIX + name for entry in measurements for name in entry.settings})
    return [*_BEFORE_SETTINGS, *settings, *_AFTER_SETTINGS, *_unusual(_WHERE_USED, measurements)]


def _unusual(names: Iterable[str], measurements: Sequence[Measurement]) -> list[str]:
    return [name for name in names if any(getattr(one, name) != _USUAL[name] for one in measurements)]


def csv_values(measurement: Measurement) -> dict[str, Any]:
    values = {name: getattr(measurement, name) for name in (*_COLUMNS, *_WHERE_USED)}
    values |= {"system": measurement.label, "benchmark": "" if measurement.is_mean else measurement.benchmark}
    return values | {SETTING_PREFIX + name: value for name, value in measurement.settings.items()}


def write_csv(measurements: Sequence[Measurement], path: str | os.PathLike[str]) -> None:
    write_output(path, csv_text(*measurement_cells(measurements)))


def measurement_cells(measurements: Sequence[Measurement]) -> tuple[list[str], list[list[Any]]]:
    """Column names of a results file, and the values of the measurements."""
    facts = _unusual(_IN_FILES, measurements)
    # A user may give a run any name, also that of a system with another decoder.
    if not all(one.generate or one.decoder in ("", decoder_of_system(one.base_system)) for one in measurements):
        facts.append("decoder")
    columns = [*csv_columns(measurements), *facts]
    rows = (csv_values(one) | {name: getattr(one, name) for name in facts} for one in measurements)
    return columns, [[row.get(column) for column in columns] for row in rows]


def measurement_texts(measurement: Measurement) -> dict[str, str]:
    """The cells that a results file has of one measurement, without empty ones."""
    columns, (row,) = measurement_cells([measurement])
    return {name: text for name, text in zip(columns, map(cell_text, row), strict=True) if text}


def read_json(path: str | os.PathLike[str]) -> list[Measurement]:
    """The measurements of a file of `export --format every-eval-ever`. Raises StoreError if it is no such file."""
    try:
        results = parse_json(read_plain(path).decode("utf-8"))["evaluation_results"]
        texts = [result["score_details"]["details"] for result in results]
        records = [dict.fromkeys(_COLUMNS, "") | dict(cells) for cells in texts]
        if not all(isinstance(cell, str) for record in records for cell in record.values()):
            raise TypeError("a detail of a score is no text")
    except (OSError, ValueError, LookupError, TypeError) as error:
        advice = "name a file that export --format every-eval-ever wrote"
        raise StoreError(f"{path} is no export of this project ({type(error).__name__}: {error}); {advice}") from error
    return [_measurement(record, path) for record in records]


def read_csv(path: str | os.PathLike[str]) -> list[Measurement]:
    """The measurements of a file that `write_csv` wrote. Raises StoreError if it is missing, empty or damaged."""
    try:
        _, records = csv_records(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StoreError(f"{path} cannot be read ({error}); write it with the table command") from error
    if not records:
        raise StoreError(f"{path} holds no rows of results; write it with the table command")
    return [_measurement(record, path) for _, record in records]


def _measurement(record: Mapping[str, str], path: str | os.PathLike[str]) -> Measurement:
    if missing := [name for name in _COLUMNS if record.get(name) is None]:
        lacks = f"a row lacks the columns {', '.join(missing[:3])}" + f" and {len(missing) - 3} more" * (
            len(missing) > 3
        )
        raise StoreError(f"{path} is no file of results, {lacks}; name a run, or a CSV file of the table command")
    values: dict[str, Any] = {name: record[name] for name in _COLUMNS}
    try:
        values |= {name: int(record[name]) for name in ("n", "samples", "errors")}
        values |= {name: int(record[name]) if record[name] else None for name in ("forwards", "tokens")}
        values |= {name: float(record[name] or "nan") for name in ("value", "ci_low", "ci_high", "seconds")}
        values |= {name: _fact(record[name], _USUAL[name]) for name in _OPTIONAL if record.get(name)}
    except ValueError as error:
        raise StoreError(f"{path}: {error}; write it with the table command") from error
    in_force = {name: cell for name, cell in record.items() if cell and name.startswith(SETTING_PREFIX)}
    settings = {name.removeprefix(SETTING_PREFIX): cell for name, cell in in_force.items()}
    label, task, generate = values.pop("system"), values["task"], values.pop("generate", False)
    if not values.pop("finished", True):  # files of version 1.0 do not say how much is there
        values.setdefault("unfinished", "some")
    notes = [note for note in values.pop("note").split("; ") if note and note != MINI_NOTE]
    values["mini"] = record["mini"] == "yes"
    values["benchmark"] = AVERAGE if task == MEAN_TASK else values["benchmark"] or task
    values["decoder"] = record.get("decoder") or ""
    loop = GENERATE if generate else OF_LOOPS.get(values["decoder"], "")
    system = system_key(label, values["backbone"], settings, loop=loop)
    read = Measurement(origin="measured", system=system, label=label, settings=settings, **values)
    said = read.note.split("; ")  # by its cautions, which its fields give again
    return replace(read, notes=tuple(note for note in notes if note not in said))


def _fact(cell: str, usual: Any) -> Any:
    return cell == "yes" if isinstance(usual, bool) else type(usual)(cell)
