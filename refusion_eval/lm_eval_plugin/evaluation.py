"""Evaluations by lm-eval: rows from `data_dir`, and copies of verdicts and speed in the run directory and the results.

The texts of this project's own tasks are judged as they come, as in `refusion-eval run`. Every other task is judged by
lm-eval, for each of its filters, when all texts are there.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import numpy as np
from lm_eval.api.task import ConfigurableTask

from refusion_eval.benchmarks import OTHER, PUBLISHED, Row, Task, as_table, find_task, is_sealed
from refusion_eval.benchmarks.rows import check_rows, find_rows
from refusion_eval.errors import ConfigError, DataError
from refusion_eval.evaluation.loop import Session
from refusion_eval.lm_eval_plugin.filters import INVALID
from refusion_eval.metrics import Bootstrap, Timing, mean, measured, rate
from refusion_eval.results.facts import costs
from refusion_eval.runs.job import doc_hash, sample_key
from refusion_eval.scoring.judge import CORRECT, NO_ANSWER, WRONG, ScoreWriter
from refusion_eval.store.records import PASSED, Sample, SampleKey, ScoreRow
from refusion_eval.store.run_store import RunStore

Logged = Mapping[str, Any]  # a document under one filter, as lm-eval logs it

SCORED = "scored"  # why "decoding" ended where a text was scored and nothing was decoded

# Metrics of speed, named as in results.csv -> whether more is better.
SPEED = {"tps": True, "latency_mean": False, "tpf": True, "forwards_mean": False}
SPEED |= {"server_tps": True, "server_latency_mean": False}

# Arguments of `datasets.load_dataset` that name files of the user.
_NAMES_FILES = {"data_files", "data_dir"}


def read_local_rows() -> None:
    """Has lm-eval's own tasks read the rows of `data_dir`, as this project's do; further calls do nothing."""
    # lm-eval passes model arguments to tasks as metadata, and loads a task's rows from the hub whatever they say.
    original = ConfigurableTask.download
    if hasattr(original, "reads_local_rows"):
        return

    @functools.wraps(original)
    def download(task: ConfigurableTask, dataset_kwargs: dict[str, Any] | None = None, **others: Any) -> None:
        data_dir = (task.config.metadata or {}).get("data_dir")
        is_local = _NAMES_FILES & (dataset_kwargs or {}).keys() or Path(str(task.DATASET_PATH)).exists()
        if data_dir is None or is_local or callable(task.config.custom_dataset):
            original(task, dataset_kwargs, **others)
        else:
            task.dataset = LocalSplits(str(task.config.task), task.DATASET_PATH, task.DATASET_NAME, str(data_dir))

    download.reads_local_rows = True  # type: ignore[attr-defined] # says that there is nothing left to wrap
    ConfigurableTask.download = download  # type: ignore[method-assign]


class LocalSplits(dict[str, datasets.Dataset]):
    """The splits of a dataset of the hub that is one of the benchmarks, each read when it is first asked for."""

    def __init__(self, task: str, path: str | None, config: str | None, data_dir: str) -> None:
        super().__init__()
        sources = {name: benchmark.source for name, benchmark in PUBLISHED.items()}
        served = (name for name, source in sources.items() if source.hub == path and config in (*source.configs, None))
        name = next(served, None)
        if name is None:
            dataset = path if config is None else f"{path} ({config})"
            raise DataError(
                f"data_dir={data_dir} serves {', '.join(sources)}; {task} reads {dataset}, which is none of them: "
                "leave data_dir out, and its rows come from the hub"
            )
        self._benchmark, self._config, self._data_dir = PUBLISHED[name], config, data_dir

    def __missing__(self, split: str) -> datasets.Dataset:
        benchmark = self._benchmark
        rows, origin = find_rows(benchmark.name, benchmark.source, self._data_dir, split, folder=benchmark.folder)
        check_rows(rows, benchmark.source, origin)
        if self._config is not None and len(benchmark.source.configs) > 1:
            # Each configuration is a subject, which the column `config` names, or `type` in another spelling.
            names = [str(row.get("config") or row.get("type") or "") for row in rows]
            if not all(names):
                told = f"{origin}: a row does not say which part of {benchmark.source.hub} it is of"
                raise DataError(f"{told}; give each the column config, such as {self._config}, or leave data_dir out")
            spelled = (name.lower().replace("&", "and").replace(" ", "_") for name in names)
            rows = [row for row, name in zip(rows, spelled, strict=True) if name == self._config]
        self[split] = datasets.Dataset.from_list(as_table(rows))
        return self[split]


def leave_question_out(task: ConfigurableTask) -> None:
    """Has lm-eval leave the document that is asked out of its own few-shot examples."""
    # lm-eval does so only where the examples come from `test_split`; a task may ask the documents of another split, or
    # name the split of its examples in another way.
    config = task.config
    if not config.num_fewshot or task.fewshot_cfg.split == config.test_split:
        return
    asked = set(map(doc_hash, task.eval_docs))
    if any(doc_hash(example) in asked for example in task.sampler.df):
        task.fewshot_cfg.split = config.test_split


def ask_for_samples(task: ConfigurableTask, samples: int) -> None:
    """Has lm-eval ask each document of a task so many times; ConfigError for a task whose rules judge one text only."""
    if samples == 1:
        return
    name = str(task.config.task)
    if own_task(name) is None:
        raise ConfigError(
            f"{name}: samples={samples}, but lm-eval's filters of a task decide which of several texts are judged; set "
            "`repeats` in its task file, with filters that read them all, and leave samples out"
        )
    task.config.repeats = samples


class Evaluation:
    """The records of one evaluation after another."""

    def __init__(self, session: Session, sandbox: str) -> None:
        self._session = session
        self._sandbox = sandbox
        self._versions: dict[str, str] = {}
        self.samples: dict[str, list[Sample]] = {}  # task -> those of this evaluation

    def begin(self, versions: Mapping[str, str]) -> None:
        self._versions = {
            name: task.benchmark.prompts.version if (task := own_task(name)) else version
            for name, version in versions.items()
        }
        self.samples = {}
        self._session.task_versions.update(self._versions)

    def key(self, task: str, doc: Row, args: Sequence[Any], sample: int = 0) -> SampleKey:
        """The identity of a request, from the arguments that lm-eval asks it with."""
        prompt, *others = args
        generation_kwargs = next((other for other in others if isinstance(other, Mapping)), {})
        resolved = self._session.system.resolve(task, generation_kwargs)
        version = self._session.version_of(task, self._versions.get(task, ""))
        return sample_key(task, version, doc, prompt, resolved, sample)

    def add(self, sample: Sample) -> None:
        self.samples.setdefault(sample.key.task, []).append(sample)

    @contextmanager
    def judging(self) -> Iterator[Callable[[Row, Sample], None]]:
        """Yields the judge of samples and their documents; it leaves out tasks of others, and runs without records."""
        store = self._session.store
        if store is None:
            yield lambda doc, sample: None
            return
        with ScoreWriter(store, sandbox=self._sandbox, waits=self._session.decodes_on_cpu) as scores:

            def judge(doc: Row, sample: Sample) -> None:
                task = own_task(sample.key.task)
                if task is not None:
                    scores.judge(task, doc, sample)

            yield judge

    def end(self, results: dict[str, Any]) -> None:
        store = self._session.store
        if store:  # lm-eval counts documents, however many of them this evaluation has asked
            configs = results["configs"]
            counts = results["n-samples"].items()
            store.expect({}, {task: count["original"] * configs[task].get("repeats", 1) for task, count in counts})
        for task, logged in results["samples"].items():
            if store and own_task(task) is None:
                self._record(store, task, logged)
        for task, samples in self.samples.items():
            results["results"][task] |= speed(_timings(samples, store), apart=self._session.args.is_apart)
            results["higher_is_better"].setdefault(task, {}).update(SPEED)

    def _record(self, store: RunStore, task: str, logged: Sequence[Logged]) -> None:
        """Appends the scores of a task that lm-eval judged, and the documents that it only scored."""
        decides = deciding_metric(logged)
        rows: list[ScoreRow] = []
        for doc in logged:
            key = self.key(task, doc["doc"], doc["arguments"][0])
            sample = store.get(key)
            if sample is None and not any(isinstance(arg, Mapping) for arg in doc["arguments"][0]):
                sample = self._scored(key, task, doc)
                store.append(sample)
            if sample is not None and sample.error is None:  # a text from lm-eval's cache has no record
                rows += score_rows(doc, sample, decides)
        store.expect({task: len({doc["doc_id"] for doc in logged})})
        store.append_scores(rows)

    def _scored(self, key: SampleKey, task: str, doc: Logged) -> Sample:
        """The record of a document whose continuations were scored; its text is the most likely of them."""
        resolved = self._session.system.resolve(task, {})
        likelihoods = [responses[0][0] if isinstance(responses[0], Sequence) else 0.0 for responses in doc["resps"]]
        best = doc["arguments"][int(np.argmax(likelihoods))]
        return Sample(
            key=key,
            benchmark=resolved.task.benchmark.name if resolved.task else task,
            item_id=str(doc["doc_id"]),
            text="" if is_sealed(task) else "".join(best[1:2]),
            stop=SCORED,
            settings=resolved.values,
            settings_source=dict(resolved.sources),
            prompts=OTHER,
            warm=False,
        )


def own_task(name: str) -> Task | None:
    """The task of this project that has exactly this name."""
    task = find_task(name)
    return task if task is not None and task.name == name else None


def deciding_metric(logged: Sequence[Logged]) -> tuple[str, str] | None:
    """Metric and filter whose value says whether a document is right: the first pair that is only ever 0 or 1."""
    candidates = dict.fromkeys((metric, doc["filter"]) for doc in logged for metric in doc["metrics"])
    for metric, filter_name in candidates:
        if {_number(doc.get(metric)) for doc in logged if doc["filter"] == filter_name} <= {0.0, 1.0}:
            return metric, filter_name
    return None


def score_rows(doc: Logged, sample: Sample, decides: tuple[str, str] | None) -> Iterator[ScoreRow]:
    """The metrics of a document under one filter, named as lm-eval names them; only numbers are recorded."""
    row = functools.partial(ScoreRow, key=sample.key, item_id=sample.item_id, scorer=f"lm_eval {lm_eval.__version__}")
    for metric in doc["metrics"]:
        value = _number(doc[metric])
        if value is None:
            continue
        yield row(metric=f"{metric},{doc['filter']}", value=value)
        if (metric, doc["filter"]) == decides:
            answer = doc["filtered_resps"][0] if sample.stop != SCORED else sample.text
            extracted = str(answer) if isinstance(answer, str) and answer not in INVALID else None
            verdict = CORRECT if value else WRONG if extracted is not None else NO_ANSWER
            reason = f"{metric} of lm_eval's {sample.key.task}, filter {doc['filter']}"
            yield row(metric=PASSED, value=value, extracted=extracted, verdict=verdict, reason=reason)


def _number(value: Any) -> float | None:
    """A finite number as lm-eval's metrics give it for one document; None for all else, such as pairs to be summed."""
    is_number = isinstance(value, bool | int | float | np.number)
    return float(value) if is_number and math.isfinite(value) else None


def _timings(samples: Sequence[Sample], store: RunStore | None) -> list[Timing]:
    if store is None:  # all samples are of this machine
        return [Timing(**costs(sample)) for sample in samples]
    machine_of = store.read_run().hardware
    machines = [machine_of(sample.process_id or store.process_id).fingerprint() for sample in samples]
    return [Timing(**costs(sample), hardware=machine) for sample, machine in zip(samples, machines, strict=True)]


def speed(timings: Sequence[Timing], *, apart: bool = False) -> dict[str, Any]:
    """Speed as lm-eval's results hold metrics, with standard errors over items; time only where it may be compared.

    The speed of a server on a machine that is not known stands apart: its names begin with `server_`.
    """
    figures = {}
    if all(timing.forwards is not None for timing in timings):
        figures = {"tpf": rate(timings, "tokens", "forwards"), "forwards_mean": mean(timings, "forwards")}
    try:
        alone = measured(timings)
    except DataError:  # of several machines
        alone = []
    if alone:
        prefix = "server_" if apart else ""
        timed = {"tps": rate(alone, "tokens", "seconds"), "latency_mean": mean(alone, "seconds")}
        figures |= {f"{prefix}{name}": figure for name, figure in timed.items()}
    return {
        f"{name}{suffix},none": value
        for name, figure in figures.items()
        for suffix, value in (("", figure.value), ("_stderr", _standard_error(figure)))
    }


def _standard_error(figure: Bootstrap) -> float | str:
    defined = figure.replicates[np.isfinite(figure.replicates)]
    return float(defined.std()) if len(defined) > 1 and figure.n > 1 else "N/A"
