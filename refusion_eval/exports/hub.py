"""What the Hugging Face hub reads: a model card with `model-index`, and `.eval_results` of benchmarks that it ranks."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from refusion_eval.errors import ConfigError
from refusion_eval.exports.source import ExportedTask, file_name, plain, runs_of, safe_name
from refusion_eval.results.cautions import MINI_NOTE
from refusion_eval.results.measurement import Measurement
from refusion_eval.results.metric_list import SCORES, SPEED_METRICS
from refusion_eval.results.render import markdown_text
from refusion_eval.results.tables import summary, summary_table
from refusion_eval.store.atomic_write import write_output

# The hub's own libraries load in half a second, so they are imported inside the functions that need them.

METRICS = (*SCORES, "tps", "tpf")

# Benchmarks with a leaderboard on the hub -> the name of the task in the `eval.yaml` of their dataset.
HUB_TASKS = {"gsm8k": "gsm8k", "mmlu_pro": "mmlu_pro", "gpqa_diamond": "diamond"}


def write(tasks: Iterable[ExportedTask], out: Path) -> list[Path]:
    """Writes OUT/RUN/README.md and OUT/RUN/.eval_results/TASK.yaml, to be copied into the repository of the model."""
    paths = []
    for run_id, own in runs_of(tasks).items():
        folder = out / safe_name(run_id)
        paths.append(folder / "README.md")
        write_output(paths[-1], _card(own))
        for task in own:
            if entries := _entries(task):
                paths.append(folder / ".eval_results" / f"{file_name(task, own)}.yaml")
                write_output(paths[-1], yaml.safe_dump(entries, sort_keys=False, allow_unicode=True))
    return paths


def _card(tasks: Sequence[ExportedTask]) -> str:
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    results = [
        EvalResult(
            task_type="text-generation",
            metric_type=entry.metric,
            metric_name=_metric_name(entry),
            metric_value=entry.value,
            metric_args=_conditions(task, entry),
            **_dataset(task),
        )
        for task in tasks
        for entry in task.measurements
        if entry.metric in METRICS
    ]
    manifest = tasks[0].run.manifest
    data = ModelCardData(model_name=plain(manifest.system), eval_results=results)
    table = summary_table(summary([entry for task in tasks for entry in task.measurements])).markdown()
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n# {plain(markdown_text(manifest.system))}\n\n{plain(table)}"))


def _metric_name(entry: Measurement) -> str:
    """Metric, unit, and what the hub's page, which shows this name and the value alone, would hide of the number."""
    of_speed = entry.metric in SPEED_METRICS
    labels = [one.label for one in entry.cautions if of_speed or one.scope == "task"]
    labels += ["one round"] if of_speed and entry.num_rounds == 1 else []
    return ", ".join(filter(None, (entry.metric, entry.unit, *labels)))


def _dataset(task: ExportedTask) -> dict[str, Any]:
    known = task.known
    if known is None or known.mini or known.benchmark.source.hub is None:
        note = f" ({MINI_NOTE})" if task.facts.mini else ""
        return {"dataset_type": task.facts.task, "dataset_name": f"{task.facts.task}{note}"}
    source = known.benchmark.source
    facts = {"dataset_type": source.hub, "dataset_name": known.benchmark.title, "dataset_split": source.split}
    return facts | ({"dataset_config": task.config} if task.config else {})


def _conditions(task: ExportedTask, entry: Measurement) -> dict[str, Any]:
    """What the number rests on; the hub's page shows the value alone, and the notes stand below the card's table."""
    facts: dict[str, Any] = {"n": entry.n, **task.origin, "settings": task.settings, "notes": None}
    facts |= {"ci_low": entry.ci_low, "ci_high": entry.ci_high} if entry.has_interval else {}
    facts |= {"hardware": entry.hardware, "batch_size": entry.batch_size, "dtype": entry.dtype}
    return {name: value for name, value in facts.items() if value}


def _entries(task: ExportedTask) -> list[dict[str, Any]]:
    known = task.known
    score = next((entry for entry in task.measurements if entry.metric in SCORES), None)
    if known is None or known.mini or known.benchmark.name not in HUB_TASKS or score is None:
        return []
    try:
        from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml
    except ImportError as error:
        raise ConfigError(
            "this huggingface_hub cannot write .eval_results; install version 1.4 or a later one"
        ) from error
    notes = [f"refusion_eval {task.run.manifest.package_version}", task.run.manifest.decoder]
    notes += [f"limited: {task.facts.extent.limited}"] if task.facts.extent.limited else []
    notes += [f"unfinished: {task.facts.extent.unfinished}"] if task.facts.extent.unfinished else []
    entry = EvalResultEntry(
        dataset_id=str(known.benchmark.source.hub),
        task_id=HUB_TASKS[known.benchmark.name],
        value=score.value,
        date=f"{task.created:%Y-%m-%d}",
        notes="; ".join(notes),
    )
    return eval_result_entries_to_yaml([entry])
