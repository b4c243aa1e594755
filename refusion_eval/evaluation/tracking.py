"""Runs in an experiment tracker: the cost of each sample as it is recorded, and at the end the figures of the table.

Only numbers and the facts of the manifest are handed over, no text of a sample. Where a tracker keeps them, and how it
is told to stay offline, is its own business: WANDB_MODE=offline, TRACKIO_DIR, MLFLOW_TRACKING_URI.
"""

import contextlib
import importlib
import importlib.util
import logging
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from refusion_eval.errors import ConfigError
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.measurement import Measurement
from refusion_eval.store.records import Sample, flat
from refusion_eval.store.run_store import Run, RunReader

log = logging.getLogger(__name__)

PROJECT = "refusion_eval"
# Facts of the manifest that are handed over; the others are long lists that run.json has.
FACTS = (
    *("system", "backbone", "decoder", "checkpoint", "checkpoint_revision", "checkpoint_hash", "seed", "dtype"),
    *("device", "attention", "package_version", "git_commit", "batch_size", "warmup", "arguments"),
)


class Tracker(Protocol):
    def log(self, figures: Mapping[str, float], step: int) -> None: ...
    def end(self) -> None: ...


class _ByInit:
    """Weights & Biases, and Trackio, which has the same calls."""

    def __init__(self, module: str, name: str, identity: str, facts: Mapping[str, Any]) -> None:
        library = importlib.import_module(module)
        # W&B continues a run by its id, Trackio by its name. Both would watch the machine from threads of their own,
        # which take time from the measured ones.
        if module == "wandb":
            own = {"id": identity, "name": name, "settings": library.Settings(x_disable_stats=True)}
        else:
            own = {"name": f"{name}-{identity}", "auto_log_cpu": False, "auto_log_gpu": False}
        self._run = library.init(project=PROJECT, config=dict(facts), resume="allow", **own)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def end(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, name: str, identity: str, facts: Mapping[str, Any]) -> None:
        self._library = library = importlib.import_module("mlflow")
        library.set_experiment(PROJECT)
        found = library.search_runs(filter_string=f"tags.identity = '{identity}'", output_format="list")
        if found:
            library.start_run(run_id=found[0].info.run_id)
        else:
            library.start_run(run_name=name, tags={"identity": identity})
            library.log_params(facts)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        named = {re.sub(r"[^\w\-. /]", "_", name): value for name, value in figures.items()}  # others are refused
        self._library.log_metrics(named, step=step)

    def end(self) -> None:
        self._library.end_run()


TRACKERS: Mapping[str, Callable[[str, str, Mapping[str, Any]], Tracker]] = {
    "wandb": lambda *facts: _ByInit("wandb", *facts),
    "trackio": lambda *facts: _ByInit("trackio", *facts),
    "mlflow": _MLflow,
}


def check_tracker(name: str | None) -> None:
    """Raises ConfigError if the package of a tracker is not installed; nothing is imported."""
    if name is not None and importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"tracker={name} needs the package {name}: pip install 'refusion-eval[{name}]', or leave it out"
        )


class Tracking:
    """What a run tells its tracker. Of a tracker that fails the log says so once, and the run goes on without it."""

    def __init__(self, name: str, run_dir: str) -> None:
        self._name, self._run_dir = name, Path(run_dir)
        self._tracker: Tracker | None = None
        self._failed = False
        self._step = 0

    def on_sample(self, sample: Sample) -> None:
        """Hands over the cost of a sample that has just been recorded."""
        figures = {"seconds": sample.seconds}
        figures |= {} if sample.num_tokens is None else {"tokens": float(sample.num_tokens)}
        figures |= {"forwards": float(sample.num_forwards)} if sample.num_forwards else {}
        self._log({f"{sample.key.task}/sample_{name}": value for name, value in figures.items()}, 1)

    def on_end(self) -> None:
        """Hands over the figures of all records, and how many samples there are and were asked for."""
        measured = [entry for entry in run_measurements([self._run_dir]) if not math.isnan(entry.value)]
        figures: dict[str, float] = {}
        for entry in measured:
            figures |= _figures(entry)
        with RunReader.open(self._run_dir) as reader:
            for name, extent in (("samples_asked_for", reader.run.expected), ("samples_of_task", reader.run.whole)):
                figures |= {f"{task}/{name}": float(number) for task, number in extent.items()}
        self._log(figures, 0)
        self._try(lambda tracker: tracker.end())
        self._tracker = None

    def _log(self, figures: Mapping[str, float], steps: int) -> None:
        self._try(lambda tracker: tracker.log(figures, self._step))
        self._step += steps

    def _try(self, call: Callable[[Tracker], None]) -> None:
        if self._failed:
            return
        try:
            if self._tracker is None:
                self._tracker = self._open()
            call(self._tracker)
        except Exception as error:  # noqa: BLE001 - a server of others must not end a run whose records are on the disk
            log.warning("the tracker %s failed (%s); the run goes on without it", self._name, error)
            self._failed = True
            if self._tracker is not None:  # or the next run of this process could not open it
                with contextlib.suppress(Exception):
                    self._tracker.end()

    def _open(self) -> Tracker:
        with RunReader.open(self._run_dir) as reader:
            run, self._step = reader.run, reader.num_recorded()
        return TRACKERS[self._name](run.run_id, next(iter(run.processes)), _facts(run))


def _figures(entry: Measurement) -> dict[str, float]:
    name = f"{entry.task}/{entry.metric}"
    bounds = {f"{name}_ci_low": entry.ci_low, f"{name}_ci_high": entry.ci_high} if entry.has_interval else {}
    return {name: entry.value, f"{name}_n": float(entry.n), **bounds}


def _facts(run: Run) -> dict[str, Any]:
    facts = flat({name: getattr(run.manifest, name) for name in FACTS})
    return {name: value for name, value in facts.items() if value not in (None, "")} | {
        "hardware": run.manifest.hardware.label()
    }
