"""Repeats a recorded run from its own record, and compares the two sample by sample."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from refusion_eval.benchmarks import find_task
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError, StoreError
from refusion_eval.evaluation.loop import evaluate, run_worker_or_return
from refusion_eval.runs.model_args import LAUNCH_ARGUMENTS, ModelArgs, parse_model_args
from refusion_eval.runs.plan import Plan, PlannedRun
from refusion_eval.runs.system import ModelCache, System, build_manifest
from refusion_eval.store.manifest import differences, restricted_to_tasks
from refusion_eval.store.records import PASSED, SampleKey
from refusion_eval.store.run_store import Run, RunReader

_SHOWN = 10  # items of each kind of difference that are named


class Repetition(NamedTuple):
    run_dir: Path  # of the second run
    num_samples: int
    # Kind of difference -> samples of the first run. A sample whose request the second run did not make (its prompt,
    # item or settings differ) has no tokens to be compared, and a sample with other tokens no verdict.
    differing: Mapping[str, Sequence[str]]
    other_conditions: Sequence[str]
    num_failed: int  # samples of the second run that could not be decoded or judged

    @property
    def is_same(self) -> bool:
        return not (any(self.differing.values()) or self.num_failed)

    def in_words(self) -> str:
        verdict = "all as recorded" if self.is_same else "not all as recorded"
        lines = [f"{self.num_samples} samples made again in {self.run_dir}: {verdict}"]
        for kind, items in self.differing.items():
            if items:
                more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
                lines.append(f"  {len(items)} {kind}: {', '.join(items[:_SHOWN])}{more}")
        if self.num_failed:
            lines.append(f"  {self.num_failed} could not be decoded or judged; run the same command again")
        lines += [f"  {condition}" for condition in self.other_conditions]
        return "\n".join(lines)


def arguments_of(run: Run, **changes: str | None) -> ModelArgs:
    """The model arguments of a recorded run, with changes that are not None in their place."""
    recorded = run.manifest.arguments
    if not recorded:
        raise ConfigError(f"{run.run_id} kept no arguments; run its command again")
    # A record from elsewhere would have this machine's key sent to its own address.
    foreign = [name for name in (*LAUNCH_ARGUMENTS, "base_url", "api_key_env") if name in recorded]
    foreign += [] if recorded.get("decoder", "refusion") in DECODERS else ["decoder"]
    if foreign:
        shown = ", ".join(f"{name}={recorded[name]}" for name in foreign)
        raise ConfigError(f"{run.run_id} names {shown}, which a record must not choose; give its command yourself")
    given = {name: value for name, value in changes.items() if value is not None}
    # The dtype and revision of then are fixed now: with others it would be another run.
    fixed = {"dtype": run.manifest.dtype, "revision": run.manifest.checkpoint_revision or None}
    # An option of versions before 1.0, which 1.0.0 recorded with its default.
    if recorded.get("fuse_by_default"):
        raise ConfigError(f"{run.run_id} fused forwards by default; run its command again with --set fuse=true")
    kept = {name: value for name, value in recorded.items() if name != "fuse_by_default"}
    return parse_model_args({**kept, **{name: value for name, value in fixed.items() if value}, **given})


def plan_of_rerun(
    run: Run, recorded: Iterable[SampleKey], again_dir: Path, *, data: Path | None = None, sandbox: str = "auto"
) -> Plan:
    """The runs that repeat a recorded one: one for all tasks with equally many items, and samples of each.

    Raises ConfigError for a record that does not say what was asked for, StoreError for one that lacks samples.
    """
    if not run.expected:
        raise ConfigError(f"{run.run_id} does not say how many items of each task it has; run its command again")
    if (run.manifest.settings.get("release_loop") or {}).get("code"):
        told = f"{run.run_id} was decoded by code of its checkpoint, which a record must not choose"
        raise ConfigError(f"{told}; run its command again with another --run-dir, and compare the two")
    places = {"run_dir": str(again_dir), "data_dir": None if data is None else str(data)}
    args = arguments_of(run, **places, prompt_time=run.measured.get("prompt_time"))
    numbers: dict[str, list[int]] = {task: [] for task in run.expected}
    for key in recorded:
        numbers.get(key.task, []).append(key.sample)
    extents: dict[tuple[int, int], list[str]] = {}
    for task, of_task in numbers.items():
        highest = max(of_task, default=0)
        if highest >= max(1, len(of_task)):
            told = f"{task} has a sample with the number {highest}, and {len(of_task)} samples"
            raise StoreError(f"{run.run_id}: {told}; complete the run by its own command")
        extents.setdefault((run.expected[task], 1 + highest), []).append(task)
    runs = (
        PlannedRun(args=replace(args, samples=each), tasks=tuple(tasks), limit=count // each, sandbox=sandbox)
        for (count, each), tasks in sorted(extents.items())
    )
    return Plan(runs=tuple(runs))


def rerun(run_dir: Path, again_dir: Path, *, data: Path | None = None, sandbox: str = "auto") -> Repetition:
    """Repeats a run in another directory and compares the two. After an interruption the same call continues."""
    if run_dir.resolve() == again_dir.resolve():
        raise StoreError(f"{again_dir} is the run itself; name another folder")
    with RunReader.open(run_dir) as reader:
        run = reader.run
    recorded = _samples(run_dir)  # before decoding, because a damaged record must not be found after hours
    plan = plan_of_rerun(run, recorded, again_dir, data=data, sandbox=sandbox)
    args = plan.runs[0].args
    run_worker_or_return(args)
    model_cache = ModelCache()
    now = build_manifest(System(args, model_cache), run.manifest.tasks)
    # Another version of the package is reported, not refused.
    tasks_by_name = {name: find_task(name) for name in run.expected}
    with_benchmarks = [(name, task.benchmark.name if task else name) for name, task in tasks_by_name.items()]
    facts = (restricted_to_tasks(manifest.fingerprint(), with_benchmarks) for manifest in (run.manifest, now))
    then, today = ({**fingerprint, "package_version": ""} for fingerprint in facts)
    if changed := differences(then, today):
        raise StoreError(f"{run.run_id} cannot be made again here: {'; '.join(changed)}")
    num_failed = 0
    for again in plan.runs:
        outcome = evaluate(again.args, again.tasks, limit=again.limit, sandbox=again.sandbox, model_cache=model_cache)
        if outcome.missing:  # among tasks that have rows; without any, `evaluate` raises
            missing = ", ".join(outcome.missing)
            raise ConfigError(f"{missing}: there are no rows to ask again; name their folder with --data")
        num_failed += len(outcome.failed) + outcome.unscored
    names = ("package_version", "versions", "git_commit", "hardware")
    before, after = ({name: manifest.to_json()[name] for name in names} for manifest in (run.manifest, now))
    return Repetition(
        again_dir, len(recorded), _differing(recorded, _samples(again_dir)), differences(before, after), num_failed
    )


class _Result(NamedTuple):
    item: str
    content: tuple[list[int] | None, str]  # tokens and text
    verdict: float | None


def _differing(before: Mapping[SampleKey, _Result], after: Mapping[SampleKey, _Result]) -> dict[str, list[str]]:
    pairs = [(result, after[key]) for key, result in before.items() if key in after]
    return {
        "other requests (prompt, item or settings)": [r.item for key, r in before.items() if key not in after],
        "other tokens": [old.item for old, new in pairs if old.content != new.content],
        "equal tokens, other verdict": [
            old.item for old, new in pairs if old.content == new.content and old.verdict != new.verdict
        ],
    }


def _samples(run_dir: Path) -> dict[SampleKey, _Result]:
    with RunReader.open(run_dir) as reader:
        verdicts = {score.key: score.value for score in reader.scores() if score.metric == PASSED}
        return {
            sample.key: _Result(
                f"{sample.key.task} {sample.item_id}", (sample.tokens, sample.text), verdicts.get(sample.key)
            )
            for sample in reader.samples(traces=False)
            if sample.error is None
        }
