"""lm-eval's files: results_DATE.json, and samples_TASK_DATE.jsonl for each task, as `lm_eval --log_samples` writes."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from refusion_eval.exports.source import ExportedTask, JudgedSample, file_name, plain, runs_of, safe_name
from refusion_eval.results.measurement import Measurement
from refusion_eval.results.metric_list import SCORES, is_cost
from refusion_eval.store.atomic_write import write_output
from refusion_eval.store.records import BY_FILTER


def write(tasks: Iterable[ExportedTask], out: Path) -> list[Path]:
    """Writes OUT/RUN/results_DATE.json and OUT/RUN/samples_TASK_DATE.jsonl. DATE is that of the last record."""
    paths = []
    for run_id, own in runs_of(tasks).items():
        date = f"{max(task.created for task in own):%Y-%m-%dT%H-%M-%S.%f}"
        folder = out / safe_name(run_id)
        paths.append(folder / f"results_{date}.json")
        write_output(paths[-1], json.dumps(_results(own), indent=2) + "\n")
        for task in own:
            if task.samples:
                paths.append(folder / f"samples_{file_name(task, own)}_{date}.jsonl")
                of_items = groupby(task.samples, lambda judged: judged.sample.key.doc_hash)
                rows = (_item(task, number, list(judged)) for number, (_, judged) in enumerate(of_items))
                write_output(paths[-1], "".join(json.dumps(row) + "\n" for row in rows))
    return paths


def _score(task: ExportedTask) -> tuple[str, str]:
    """lm-eval's names of the score and of the filter that found the answers."""
    known = task.known
    if known is None:
        return task.facts.score_name, "none"
    return known.benchmark.metric, known.benchmark.default_filter


def _key(task: ExportedTask, metric: str) -> tuple[str, str]:
    """Metric and filter; those that lm-eval judged have its own names already."""
    score, filter_name = _score(task)
    if metric in SCORES:
        return score, filter_name
    if metric.startswith(BY_FILTER):
        return score, metric.removeprefix(BY_FILTER)
    name, _, other = metric.partition(",")
    return name, other or "none"


def _metrics(task: ExportedTask) -> dict[str, Any]:
    """Values and standard errors by lm-eval's keys. Shares are between 0 and 1."""
    values: dict[str, Any] = {}
    for entry in task.measurements:
        name, filter_name = _key(task, entry.metric)
        scale = 100 if entry.unit == "percent" else 1
        values[f"{name},{filter_name}"] = entry.value / scale
        if (error := _standard_error(entry)) is not None:
            values[f"{name}_stderr,{filter_name}"] = error / scale
    return values


def _standard_error(entry: Measurement) -> float | None:
    if entry.by_item is None or entry.n < 2:
        return None
    error = float(entry.by_item.replicates.std())
    return error if math.isfinite(error) else None


def _results(tasks: Sequence[ExportedTask]) -> dict[str, Any]:
    run, manifest, (engine, _) = tasks[0].run, tasks[0].run.manifest, tasks[0].engine
    engine = "refusion" if engine == "refusion_eval" else plain(engine)  # lm-eval's name of this project's models
    named = {file_name(task, tasks): task for task in tasks}
    asked = {name: task.facts.extent.expected or len(task.facts.asked) for name, task in named.items()}
    limited = [task.facts.extent.expected for task in tasks if task.facts.extent.limited]
    return {
        "results": {
            name: {"alias": name, "sample_len": len(task.facts.asked), **_metrics(task)} for name, task in named.items()
        },
        "group_subtasks": {name: [] for name in named},
        "configs": {name: _config(task) for name, task in named.items()},
        "versions": {name: task.facts.task_version for name, task in named.items()},
        "n-shot": {name: task.num_fewshot for name, task in named.items() if task.num_fewshot is not None},
        "higher_is_better": {
            name: {_key(task, entry.metric)[0]: not is_cost(entry.metric) for entry in task.measurements}
            for name, task in named.items()
        },
        "n-samples": {
            name: {"original": task.facts.extent.whole or asked[name], "effective": len(task.facts.asked)}
            for name, task in named.items()
        },
        "config": {
            "model": engine,
            "model_args": dict(manifest.arguments),
            "model_dtype": manifest.dtype,
            "model_revision": manifest.checkpoint_revision,
            "batch_size": str(manifest.batch_size),
            "device": manifest.device,
            "limit": max(limited, default=None),
            "random_seed": manifest.seed,
        },
        "git_hash": manifest.git_commit,
        "date": max(task.created for task in tasks).timestamp(),
        "lm_eval_version": manifest.versions.get("lm-eval"),
        "transformers_version": manifest.versions.get("transformers"),
        "model_source": engine,
        "model_name": plain(manifest.system),
        "model_name_sanitized": safe_name(run.run_id),
        "total_evaluation_time_seconds": str(sum(sample.seconds for task in tasks for sample in task.facts.samples)),
        "refusion_eval": {
            "version": manifest.package_version,
            "hardware": sorted({label for task in tasks for label in task.facts.hardware}),
            "origin": {name: task.origin for name, task in named.items()},
        },
    }


def _config(task: ExportedTask) -> dict[str, Any]:
    known = task.known
    source = known.benchmark.source if known and not known.mini else None
    return {
        "task": task.facts.task,
        "dataset_path": source and source.hub,
        "dataset_name": source and task.config,
        "test_split": source and source.split,
        "output_type": "generate_until",
        "num_fewshot": task.num_fewshot,
        "repeats": max((judged.sample.key.sample + 1 for judged in task.samples or ()), default=1),
        "generation_kwargs": dict(task.facts.settings),
        "metadata": {"version": task.facts.task_version},
    }


def _item(task: ExportedTask, number: int, judged: Sequence[JudgedSample]) -> dict[str, Any]:
    """The samples of one item, as lm-eval logs a document."""
    score, filter_name = _score(task)
    sample, _, prompt, gold = judged[0]
    return {
        "doc_id": number,
        "doc": {"id": plain(sample.item_id)},
        "target": gold,
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": dict(sample.settings)}},
        "resps": [[plain(one.sample.text) for one in judged]],
        "filtered_resps": [plain(one.verdict.extracted or "") for one in judged],
        "filter": filter_name,
        "metrics": [score],
        "doc_hash": sample.key.doc_hash,
        "prompt_hash": sample.key.prompt_hash,
        "target_hash": hashlib.sha256(gold.encode()).hexdigest(),
        score: sum(one.verdict.value for one in judged) / len(judged),
    }
