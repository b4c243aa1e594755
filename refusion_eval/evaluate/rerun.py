"""A recorded run made again from its own record, and held against it, sample by sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from refusion_eval.errors import ConfigError, StoreError
from refusion_eval.evaluate.loop import evaluate
from refusion_eval.evaluate.session import run_worker_or_return
from refusion_eval.runs.manifest import build_manifest
from refusion_eval.runs.model_args import ModelArgs, parse_model_args
from refusion_eval.runs.system import ModelCache, System
from refusion_eval.store.manifest import differences
from refusion_eval.store.records import PASSED, SampleKey
from refusion_eval.store.run_reader import Run, RunReader


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """What running a run again gave.

    Attributes:
        run_dir: of the second run.
        num_samples: samples of the first.
        other_requests: of these, requests that the second did not make, in words: prompt, item or settings differ.
        other_tokens: item ids of samples with other tokens.
        other_verdicts: item ids of samples with equal tokens and another verdict.
        other_conditions: versions and machine that differ, one line each.
        num_failed: samples of the second that could not be decoded or judged.
    """

    run_dir: Path
    num_samples: int
    other_requests: Sequence[str]
    other_tokens: Sequence[str]
    other_verdicts: Sequence[str]
    other_conditions: Sequence[str]
    num_failed: int

    @property
    def is_same(self) -> bool:
        """Whether every sample came out as it was recorded."""
        return not (self.other_requests or self.other_tokens or self.other_verdicts or self.num_failed)


def arguments_of(run: Run, **changes: str | None) -> ModelArgs:
    """The model arguments of a recorded run.

    Args:
        run: the record.
        changes: arguments in place of the recorded ones; None leaves one as it was.

    Raises:
        ConfigError: the record is of a version that did not keep them.
    """
    recorded = run.manifest.arguments
    if not recorded:
        raise ConfigError(f"{run.run_id} was recorded by a version that kept no arguments; run its command again")
    given = {name: value for name, value in changes.items() if value is not None}
    # What was measured or found then is asked for now: another backend or type would be another run.
    found = {"dtype": run.manifest.dtype, "revision": run.manifest.checkpoint_revision or None}
    return parse_model_args({**recorded, **{name: value for name, value in found.items() if value}, **given})


def rerun(run_dir: Path, again_dir: Path, *, data: Path | None = None, sandbox: str = "auto") -> Repetition:
    """Makes a run again and compares; interrupted, the same call goes on.

    Args:
        run_dir: the recorded run.
        again_dir: gets the second run.
        data: folder with benchmark rows, where it is another than then.
        sandbox: as `evaluate`.

    Raises:
        ConfigError: the record is too old, or holds other tasks than this project's.
        StoreError: a directory cannot be read, they are the same, or weights or settings are not what they were; then
            nothing is decoded.
    """
    if run_dir.resolve() == again_dir.resolve():
        raise StoreError(f"{again_dir} is the run itself; name another folder")
    with RunReader.open(run_dir) as reader:
        run = reader.run
    if not run.expected:
        raise ConfigError(
            f"{run.run_id} does not say how many items of each task it was to have; run its command again"
        )
    args = arguments_of(run, run_dir=str(again_dir), data_dir=None if data is None else str(data))
    run_worker_or_return(args)
    model_cache = ModelCache()
    now = build_manifest(System(args, model_cache), run.manifest.tasks)
    then, today = ({**one.fingerprint(), "package_version": ""} for one in (run.manifest, now))  # told, not refused
    if changed := differences(then, today):
        raise StoreError(f"{run.run_id} cannot be made again here: {'; '.join(changed)}")
    recorded = _samples(run_dir)  # first, as a damaged record would otherwise be known when all has been decoded
    num_failed = 0
    for count in sorted(set(run.expected.values())):
        tasks = [task for task, expected in run.expected.items() if expected == count]
        outcome = evaluate(args, tasks, limit=count, sandbox=sandbox, model_cache=model_cache)
        num_failed += len(outcome.failed) + outcome.unscored
    names = ("package_version", "versions", "git_commit", "hardware")
    before, after = ({name: one.to_json()[name] for name in names} for one in (run.manifest, now))
    conditions = differences(before, after)
    return _compared(recorded, again_dir, conditions, num_failed)


@dataclass(frozen=True)
class _Seen:
    item: str
    tokens: list[int] | None
    text: str
    verdict: float | None


def _compared(
    before: Mapping[SampleKey, _Seen], again_dir: Path, conditions: Sequence[str], num_failed: int
) -> Repetition:
    after = _samples(again_dir)
    common = {key: (one, after[key]) for key, one in before.items() if key in after}
    other_tokens = [a.item for a, b in common.values() if (a.tokens, a.text) != (b.tokens, b.text)]
    other_verdicts = [
        a.item for a, b in common.values() if (a.tokens, a.text) == (b.tokens, b.text) and a.verdict != b.verdict
    ]
    return Repetition(
        run_dir=again_dir,
        num_samples=len(before),
        other_requests=[one.item for key, one in before.items() if key not in after],
        other_tokens=other_tokens,
        other_verdicts=other_verdicts,
        other_conditions=conditions,
        num_failed=num_failed,
    )


def _samples(run_dir: Path) -> dict[SampleKey, _Seen]:
    """The good samples of a run."""
    with RunReader.open(run_dir) as reader:
        verdicts = {score.key: score.value for score in reader.scores() if score.metric == PASSED}
        return {
            sample.key: _Seen(
                f"{sample.key.task} {sample.item_id}", sample.tokens, sample.text, verdicts.get(sample.key)
            )
            for sample in reader.samples(traces=False)
            if sample.error is None
        }


def in_words(result: Repetition) -> str:
    """The comparison for a terminal: what is equal, then what is not, up to ten items of each kind."""
    verdict = "all as recorded" if result.is_same else "not all as recorded"
    lines = [f"{result.num_samples} samples made again in {result.run_dir}: {verdict}"]
    kinds = (
        ("other requests (prompt, item or settings)", result.other_requests),
        ("other tokens", result.other_tokens),
        ("equal tokens, other verdict", result.other_verdicts),
    )
    for kind, items in kinds:
        if items:
            more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
            lines.append(f"  {len(items)} {kind}: {', '.join(items[:_SHOWN])}{more}")
    if result.num_failed:
        lines.append(f"  {result.num_failed} could not be decoded or judged; run the same command again")
    lines += [f"  {condition}" for condition in result.other_conditions]
    return "\n".join(lines)


_SHOWN = 10
