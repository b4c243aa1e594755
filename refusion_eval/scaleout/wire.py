"""Jobs and records as plain JSON, for messages between processes; unlike pickle, JSON cannot execute code."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from refusion_eval.benchmarks import find_task
from refusion_eval.config import build
from refusion_eval.errors import ScaleOutError
from refusion_eval.runs.job import Job
from refusion_eval.runs.settings import Resolved
from refusion_eval.store.records import Sample, SampleKey, pack


def job_to_json(job: Job) -> dict[str, Any]:
    """A job as plain JSON types; `job_from_json` is the inverse."""
    resolved = job.resolved
    return {
        "key": asdict(job.key),
        "benchmark": job.benchmark,
        "item_id": job.item_id,
        "prompt_ids": [int(token) for token in job.prompt_ids],
        "sealed": list(job.sealed),
        "alone": job.alone,
        "settings": dict(resolved.values),
        "sources": dict(resolved.sources),
        "until": list(resolved.until),
        "task": None if resolved.task is None else resolved.task.name,
        "digest": resolved.digest,
    }


def job_from_json(fields: Mapping[str, Any], settings_type: type) -> Job:
    """Inverse of `job_to_json`.

    Args:
        fields: result of `job_to_json`, after it was written and read as JSON.
        settings_type: settings class of the decoder.

    Raises:
        ScaleOutError: the settings differ from those of the sender, as with another version of this package.
    """
    where = f"{fields['key']['task']} item {fields['item_id']}"
    try:
        settings: Any = build(settings_type, fields["settings"], where)
    except (ValueError, TypeError) as error:
        raise ScaleOutError(f"{where}: its settings are refused here ({error}); {SAME_VERSION}") from error
    resolved = Resolved(
        settings=settings,
        sources=fields["sources"],
        until=tuple(fields["until"]),
        task=None if fields["task"] is None else find_task(fields["task"]),
    )
    if resolved.digest != fields["digest"]:
        raise ScaleOutError(
            f"{where}: its settings have the digest {resolved.digest} here and {fields['digest']} at the sender; "
            f"{SAME_VERSION}"
        )
    return Job(
        key=SampleKey(**fields["key"]),
        benchmark=fields["benchmark"],
        item_id=fields["item_id"],
        prompt_ids=fields["prompt_ids"],
        resolved=resolved,
        sealed=tuple(fields["sealed"]),
        alone=fields["alone"],
    )


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """A record as plain JSON types, as the run store writes it; `sample_from_json` is the inverse."""
    return {"body": sample.body(), "trace": sample.trace}


def sample_from_json(fields: Mapping[str, Any]) -> Sample:
    """Inverse of `sample_to_json`, except that tuples become lists."""
    trace = fields["trace"]
    return Sample.from_stored(fields["body"], None if trace is None else pack(trace))


SAME_VERSION = "all processes of a run need one version of refusion_eval"
