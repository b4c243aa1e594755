"""Runs as pandas data frames: one row a sample, or one row a figure with its interval."""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from refusion_eval.benchmarks import is_mini
from refusion_eval.results.facts import costs, extents_of, row_of
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.results_file import csv_columns, csv_values
from refusion_eval.store.records import PASSED, Sample, ScoreRow, dump
from refusion_eval.store.run_store import Run, RunReader

RunDirs = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

# Columns of `load` in order.
SAMPLE_COLUMNS = (
    *("run_id", "system", "backbone", "decoder", "task", "task_version", "benchmark", "mini", "item_id", "sample"),
    *("text", "extracted", "verdict", "reason", "passed", "error", "stop"),
    *("prompt_tokens", "tokens", "forwards", "tpf", "seconds", "prefill_seconds", "batch_size", "warm", "hardware"),
    *("settings", "settings_hash", "doc_hash", "prompt_hash", "scores", "unfinished", "limited", "protocol"),
)
# Facts that `figures` has after the columns of the CSV.
FIGURE_FACTS = (
    *("system_key", "decoder", "finished", "unfinished", "limited", "scored", "isolated", "fused", "complete"),
    *("records", "protocol"),
)
# Types of columns. Text is of type object, because it may hold lone surrogates, which pandas' own type refuses.
_TYPES = {
    **dict.fromkeys(("sample", "prompt_tokens", "batch_size", "n", "samples", "errors"), "int64"),
    **dict.fromkeys(("tokens", "forwards"), "Int64"),  # missing where a server does not tell them
    **dict.fromkeys(("tpf", "seconds", "prefill_seconds", "value", "ci_low", "ci_high"), "float64"),
    **dict.fromkeys(("mini", "warm", "finished", "scored", "isolated", "fused", "complete"), "bool"),
    "passed": "boolean",
}


def load(run_dirs: RunDirs) -> pd.DataFrame:
    """All samples of some runs, one row each, failed ones included.

    Args:
        run_dirs: a run directory, or several.

    Returns:
        Rows in the order of the runs, and in each of task, item and sample number. The columns (`SAMPLE_COLUMNS`):

        - run_id, system, backbone, decoder: the run, and its system as tables print it.
        - task, task_version, benchmark, mini: the task; mini if it is a synthetic look-alike of its benchmark.
        - item_id, sample: the benchmark's own name of the item, and the number of the sample among those of the item.
        - text: the response.
        - extracted, verdict, reason, passed: the answer found in the text, and the verdict on it; missing without one.
        - error: message of a failed attempt, missing for a good sample.
        - stop: why decoding ended.
        - prompt_tokens, tokens, forwards, tpf: tokens of the prompt, tokens kept and model calls (both missing
          where a server does not tell them), tokens per forward.
        - seconds, prefill_seconds: decoding time, and the part of it up to the end of the first forward.
        - batch_size, warm: requests decoded at the same time; whether the warm-up was over. Only rows with batch_size 1
          and warm are timings.
        - hardware: machine.
        - settings, settings_hash: decoder settings in force, as JSON and as a hash.
        - doc_hash, prompt_hash: equal across runs for the same item, and for the same rendered prompt.
        - scores: metrics that scorers named themselves, as a dict.
        - unfinished, limited: `26 of 40` samples of the task are there, `40 of 100` were asked for; empty for all.
        - protocol: NAME@HASH of the protocol that the sample was made under; missing for none.

    Raises:
        StoreError: a directory holds no readable run.
    """
    return frame(list(sample_rows(run_dirs)), SAMPLE_COLUMNS)


def figures(run_dirs: RunDirs, *, baseline: str | None = None) -> pd.DataFrame:
    """All figures of some runs, one row each: a metric of a task of a run, or its mean over tasks.

    Args:
        run_dirs: a run directory, or several; speed-ups are among them.
        baseline: run id that speed-ups are relative to; by default the one autoregressive run of the same backbone.

    Returns:
        The columns of the CSV of `refusion-eval table` that every such file has, then `FIGURE_FACTS`:

        - run_id, system, backbone, task, n (items): what was measured.
        - metric, value, ci_low, ci_high, unit: the figure and its 95% interval by item, NaN for none.
        - batch_size, dtype, device, setting_NAME (one column for each decoder setting, as text): how. The batch size is
          a number; if a figure rests on samples of several sizes, or on none, the column is text, such as `1|8`.
        - forwards, tokens, seconds, samples, errors: totals over the samples; failed ones are in no figure.
        - benchmark, mini, attention, hardware, note, task_version: the rest; the reference page of records has
          the meaning of each.
        - system_key, decoder: key in systems.toml, and name of the decoder.
        - unfinished, limited: `26 of 40` samples are there, `40 of 100` samples of the task were asked for; empty for
          all of them.
        - finished, scored, isolated, complete: whether all samples that were asked for are there, all have a verdict,
          all programs ran in isolation, and no sample is missing from the figure.
        - fused: whether forwards that verify and plan at once are in the figure.
        - records: SHA-256 of the records that the figure is from.
        - protocol: NAME@HASH of the protocol of the samples; empty for none.

    Raises:
        StoreError: a directory holds no readable run, two have the same name, or the baseline is not among them.
    """
    measured = run_measurements(_as_list(run_dirs), baseline=baseline, hash_records=True)
    rows = [
        {**csv_values(figure), "system_key": figure.system} | {name: getattr(figure, name) for name in FIGURE_FACTS[1:]}
        for figure in measured
    ]
    return frame(rows, [*csv_columns(measured), *FIGURE_FACTS])


def frame(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Rows of `sample_rows` or figures as a frame whose columns have their types."""
    made = pd.DataFrame(rows, columns=list(columns), dtype=object)
    numbers = [name for name in columns if _TYPES.get(name) == "float64"]
    made[numbers] = made[numbers].replace("", np.nan)  # the cell of a figure that does not exist
    types = {name: _TYPES[name] for name in columns if name in _TYPES}
    if not all(str(size).isdecimal() for size in made["batch_size"]):
        del types["batch_size"]  # a figure of samples with several batch sizes, or without a sample, has text there
    return made.astype(types)


def _as_list(run_dirs: RunDirs) -> list[str | os.PathLike[str]]:
    return [run_dirs] if isinstance(run_dirs, str | os.PathLike) else list(run_dirs)


def sample_rows(run_dirs: RunDirs) -> Iterator[dict[str, Any]]:
    """The rows of `load` one by one, each from column to value. Raises StoreError as `load` does."""
    for run_dir in _as_list(run_dirs):
        with RunReader.open(run_dir) as reader:
            scores, extents = reader.scores_by_sample(), extents_of(reader)
            for sample in reader.samples(traces=False):
                extent = extents[row_of(sample)]
                row = _sample_row(reader.run, sample, scores.get(sample.key, {}))
                yield row | {"unfinished": extent.unfinished, "limited": extent.limited}


def _sample_row(run: Run, sample: Sample, scores: dict[str, ScoreRow]) -> dict[str, Any]:
    verdict = scores.get(PASSED)
    row: dict[str, Any] = dict.fromkeys(SAMPLE_COLUMNS)
    for source in (run.manifest, sample.key, sample, verdict):  # of a field that two of them have, the later counts
        row |= {name: getattr(source, name) for name in SAMPLE_COLUMNS if hasattr(source, name)}
    return row | {
        "run_id": run.run_id,
        "mini": is_mini(sample.key.task),
        "passed": None if verdict is None else verdict.value > 0,
        "prompt_tokens": sample.prompt_num_tokens,
        "tokens": sample.num_tokens,
        "forwards": costs(sample)["forwards"],
        "tpf": (sample.num_decoded or 0) / sample.num_forwards if sample.num_forwards else None,
        "hardware": run.hardware(sample.process_id).label(),
        "settings": dump(sample.settings),
        "scores": {metric: score.value for metric, score in scores.items() if metric != PASSED},
    }
