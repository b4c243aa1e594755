"""Every Eval Ever 0.3.0: a file of figures for each task of a run, and beside it one of its samples.

The schemas and their validator are the Python package every-eval-ever.
"""

import hashlib
import json
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from refusion_eval.exports.source import ExportedTask, JudgedSample, plain, safe_name
from refusion_eval.metrics import RESAMPLES
from refusion_eval.results.measurement import Measurement
from refusion_eval.results.metric_list import is_cost
from refusion_eval.results.results_file import measurement_texts
from refusion_eval.store.atomic_write import write_output
from refusion_eval.store.records import SERVER

SCHEMA_VERSION = "0.3.0"


def write(tasks: Iterable[ExportedTask], out: Path) -> list[Path]:
    """Writes OUT/data/TASK/OWNER/MODEL/UUID.json and UUID_samples.jsonl; equal records give equal files."""
    paths = []
    for task in tasks:
        # The format asks for a random UUID; one made of the records gives a second export the same names.
        content = "\0".join((task.run.run_id, *task.facts.row.names, task.facts.records))
        name = uuid.UUID(bytes=hashlib.sha256(content.encode("utf-8", "replace")).digest()[:16], version=4)
        folder = Path("data", safe_name(task.facts.task), *task.model_id.split("/"))
        figures = _figures(task)
        if task.samples:
            lines = "".join(json.dumps(_sample(task, figures, one)) + "\n" for one in task.samples)
            place = folder / f"{name}_samples.jsonl"
            figures["detailed_evaluation_results"] = {
                "format": "jsonl",
                "file_path": place.as_posix(),
                "hash_algorithm": "sha256",
                "checksum": hashlib.sha256(lines.encode()).hexdigest(),
                "total_rows": len(task.samples),
            }
            write_output(out / place, lines)
            paths.append(out / place)
        place = out / folder / f"{name}.json"
        write_output(place, json.dumps(figures, indent=2) + "\n")
        paths.append(place)
    return paths


def _figures(task: ExportedTask) -> dict[str, Any]:
    manifest = task.run.manifest
    stamp = str(int(task.created.timestamp()))
    served = manifest.decoder == SERVER
    model = {
        "deployment_type": "unknown" if served else "self_deployed",
        "model_availability": "unknown" if task.model_id.startswith("local/") or served else "open_weights",
        **{name: getattr(manifest, name) for name in ("system", "decoder", "backbone", "dtype", "device", "attention")},
        "revision": manifest.checkpoint_revision or manifest.checkpoint_hash,
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": f"{task.facts.task}/{task.model_id}/{stamp}",
        "evaluation_timestamp": task.created.isoformat(),
        "retrieved_timestamp": stamp,
        "source_metadata": {
            "source_name": "refusion_eval",
            "source_type": "evaluation_run",
            # Records do not say who made them, so whoever hands a file on writes the name.
            "source_organization_name": "unknown",
            "evaluator_relationship": "other",
            "additional_details": _texts(task.origin),
        },
        "eval_library": {
            "name": "refusion_eval",
            "version": manifest.package_version,
            "additional_details": _texts(manifest.versions),
        },
        "model_info": {
            "name": plain(manifest.system),
            "id": task.model_id,
            "inference_engine": dict(zip(("name", "version"), map(plain, task.engine), strict=True)),
            "additional_details": _texts({name: text for name, text in model.items() if text}),
        },
        "evaluation_results": [_figure(task, entry) for entry in task.measurements],
    }


def _figure(task: ExportedTask, entry: Measurement) -> dict[str, Any]:
    uncertainty: dict[str, Any] = {"num_samples": entry.n}
    if entry.has_interval:
        bounds = {"lower": entry.ci_low, "upper": entry.ci_high, "confidence_level": 0.95}
        uncertainty |= {"confidence_interval": bounds, "num_bootstrap_samples": RESAMPLES}
    is_share = entry.unit == "percent"
    command = task.run.command_for(task.facts.task)
    arguments: dict[str, Any] = {"execution_command": plain(command)} if command else {}
    # The format has fixed names for these; the other settings stand beside them.
    for name, setting in {"temperature": "temperature", "max_tokens": "gen_length"}.items():
        if isinstance(value := task.facts.settings.get(setting), int | float):
            arguments[name] = value
    return {
        "evaluation_result_id": entry.metric,
        "evaluation_name": plain(entry.task),
        "evaluation_timestamp": task.created.isoformat(),
        "source_data": _source(task),
        "metric_config": {
            "metric_id": entry.metric,
            "metric_name": entry.metric,
            "metric_unit": entry.unit or "none",
            "lower_is_better": is_cost(entry.metric),
            "score_type": "continuous",
            "min_score": 0 if is_share or entry.unit else "-Infinity",
            "max_score": 100 if is_share else "Infinity",
        },
        "score_details": {
            "score": entry.value,
            "details": _texts(measurement_texts(entry)),
            "uncertainty": uncertainty,
        },
        "generation_config": {"generation_args": arguments, "additional_details": _texts(task.settings)},
    }


def _source(task: ExportedTask) -> dict[str, Any]:
    known = task.known
    if known is None or known.mini or known.benchmark.source.hub is None:
        kind = {"additional_details": {"synthetic": "a look-alike, not the real benchmark"}} if task.facts.mini else {}
        return {"dataset_name": plain(task.facts.task), "source_type": "other", **kind}
    source = known.benchmark.source
    if source.is_address:
        return {"dataset_name": known.benchmark.title, "source_type": "url", "url": [source.hub]}
    return {
        "dataset_name": known.benchmark.title,
        "source_type": "hf_dataset",
        "hf_repo": source.hub,
        "hf_split": source.split,
        "samples_number": source.num_rows,
    }


def _sample(task: ExportedTask, figures: dict[str, Any], judged: JudgedSample) -> dict[str, Any]:
    sample, verdict, prompt, gold = judged
    answer = {
        "turn_idx": 0,
        "source": "output.raw",
        "extracted_value": plain(verdict.extracted or ""),
        "extraction_method": plain(verdict.reason) or verdict.scorer,
        "is_terminal": True,
    }
    times = {"latency_ms": 1000 * sample.seconds} if sample.seconds else {}
    times |= {} if sample.prefill_seconds is None else {"time_to_first_token_ms": 1000 * sample.prefill_seconds}
    read = sample.prompt_num_tokens or (sample.server or {}).get("prompt_tokens")
    usage: dict[str, int] = {}
    if read and sample.num_tokens is not None:  # the format has no place for one of them alone
        usage = {"input_tokens": read, "output_tokens": sample.num_tokens, "total_tokens": read + sample.num_tokens}
        usage |= {} if sample.num_thought_tokens is None else {"reasoning_tokens": sample.num_thought_tokens}
    performance = {"batch_size": sample.batch_size, "warm": sample.warm}
    performance |= {"forwards": sample.num_forwards} if sample.num_forwards else {}
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": figures["evaluation_id"],
        "model_id": task.model_id,
        "evaluation_name": plain(task.facts.task),
        "evaluation_result_id": task.facts.score_name,
        "sample_id": plain(f"{sample.item_id}" + (f"/{sample.key.sample}" if sample.key.sample else "")),
        "sample_hash": hashlib.sha256((prompt + gold).encode()).hexdigest(),
        "interaction_type": "single_turn",
        "input": {"raw": prompt, "reference": [gold]},
        "output": {"raw": [plain(sample.text)]},
        "answer_attribution": [] if verdict.extracted is None else [answer],
        "evaluation": {"score": verdict.value, "is_correct": verdict.value > 0},
        **({"token_usage": usage} if usage else {}),
        "performance": {**times, "additional_details": _texts(performance)},
        "metadata": _texts({"verdict": verdict.verdict, "stop": sample.stop}),
    }


def _texts(values: Any) -> dict[str, str]:
    return {plain(str(name)): plain(str(value)) for name, value in values.items()}
