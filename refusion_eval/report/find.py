"""One sample of a run, by the names that a user knows it by."""

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
        run_dir: the run.
        task: its task, or the benchmark; None takes any.
        item: the benchmark's name for the item; None takes any.
        number: its number among the samples of the item; None takes any.

    Raises:
        StoreError: the directory holds no readable run, or none of what fits has a trace.
        ConfigError: nothing fits.
    """
    with RunReader.open(run_dir) as reader:
        run = reader.run
        known = list(reader.samples(traces=False))
        if not known:
            raise StoreError(f"{run_dir} has no samples yet; run its command again")
        fitting = [one for one in known if task is None or task in (one.key.task, one.benchmark)]
        if not fitting:
            raise ConfigError(f"{run_dir} has no task {task!r}; it has {_some([one.key.task for one in known], task)}")
        here = [one for one in fitting if item is None or one.item_id == item]
        if not here:
            raise ConfigError(
                f"{run_dir}: no item {item!r}; for example {_some([one.item_id for one in fitting], item)}"
            )
        wanted = {one.key for one in here if number is None or one.key.sample == number}
        if not wanted:
            raise ConfigError(f"{run_dir}: item {item!r} has no sample {number}; its samples are 0 to {len(here) - 1}")
        for sample in reader.samples():
            if sample.key in wanted and sample.trace is not None:
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
    """Whether a replay may say where and when, but not what: sealed questions, whose records have no tokens either."""
    return sample.tokens is None or is_sealed(sample.key.task, sample.benchmark)


def speller_of(sample: Sample, spell: Spell | None) -> Speller:
    """Spells a sample's tokens; of a sealed one, each by the same sign."""
    return Speller((lambda tokens: WITHHELD * len(tokens)) if is_withheld(sample) else spell)


def _some(names: Sequence[str], meant: str | None) -> str:
    """A few of the names, the ones that a user may have meant first."""
    different = list(dict.fromkeys(names))
    close = get_close_matches(meant or "", different, n=3)
    listed = [*close, *[name for name in different if name not in close]]
    return ", ".join(listed[:_MOST_NAMED]) + (", ..." if len(listed) > _MOST_NAMED else "")
