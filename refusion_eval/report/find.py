"""Finds one sample of a run by its task, item and number."""

import os
from collections.abc import Sequence
from difflib import get_close_matches

from refusion_eval.benchmarks import is_sealed
from refusion_eval.errors import ConfigError, StoreError
from refusion_eval.report.pieces import Spell, Speller
from refusion_eval.report.replay import Replay, replay_of
from refusion_eval.store.records import Sample
from refusion_eval.store.run_reader import Run, RunReader
from refusion_eval.trace import Trace

WITHHELD = "▪"
_MOST_NAMED = 8


def find_sample(
    run_dir: str | os.PathLike[str], task: str | None = None, item: str | None = None, number: int | None = None
) -> tuple[Run, Sample]:
    """The first sample that fits, with its run.

    Args:
        run_dir: run directory.
        task: task or benchmark; None takes any.
        item: the benchmark's name for the item; None takes any.
        number: number among the samples of the item; None takes any.

    Raises:
        StoreError: the directory holds no readable run, or no fitting sample has a trace.
        ConfigError: no sample fits.
    """
    with RunReader.open(run_dir) as reader:
        run = reader.run
        samples = list(reader.samples(traces=False))
        if not samples:
            raise StoreError(f"{run_dir} has no samples yet; run its command again")
        of_task = [each for each in samples if task is None or task in (each.key.task, each.benchmark)]
        if not of_task:
            names = _some([each.key.task for each in samples], task)
            raise ConfigError(f"{run_dir} has no task {task!r}; it has {names}")
        of_item = [each for each in of_task if item is None or each.item_id == item]
        if not of_item:
            names = _some([each.item_id for each in of_task], item)
            raise ConfigError(f"{run_dir}: no item {item!r}; for example {names}")
        keys = {each.key for each in of_item if number is None or each.key.sample == number}
        if not keys:
            last = len(of_item) - 1
            raise ConfigError(f"{run_dir}: item {item!r} has no sample {number}; its samples are 0 to {last}")
        for sample in reader.samples():
            if sample.key in keys and sample.trace is not None:
                return run, sample
    raise StoreError(f"{run_dir}: no trace is recorded of what fits, so it cannot be replayed; name another sample")


def sample_replay(sample: Sample) -> Replay:
    """The replay of a sample that has a trace."""
    assert sample.trace is not None
    slot_size = sample.settings.get("slot_size")
    num_kept = sample.num_tokens if sample.tokens is not None else None
    trace = Trace.from_json(sample.trace)
    return replay_of(trace, slot_size=slot_size if isinstance(slot_size, int) else 1, num_kept=num_kept)


def is_withheld(sample: Sample) -> bool:
    """Whether a replay may show positions and times but no text: sealed questions, whose records have no tokens."""
    return sample.tokens is None or is_sealed(sample.key.task, sample.benchmark)


def speller_of(sample: Sample, spell: Spell | None) -> Speller:
    """Spells the tokens of a sample; all tokens of a sealed sample are the same sign."""
    return Speller((lambda tokens: WITHHELD * len(tokens)) if is_withheld(sample) else spell)


def _some(names: Sequence[str], wanted: str | None) -> str:
    """A few of the names, those that are most like the wanted one first."""
    different = list(dict.fromkeys(names))
    close = get_close_matches(wanted or "", different, n=3)
    listed = [*close, *[name for name in different if name not in close]]
    return ", ".join(listed[:_MOST_NAMED]) + (", ..." if len(listed) > _MOST_NAMED else "")
