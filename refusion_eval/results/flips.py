"""How far the same items move between configurations of one system: flips of tokens, and of verdicts, item by item."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from refusion_eval.metrics import Interval, accuracy
from refusion_eval.results.cautions import MINI_SENTENCE
from refusion_eval.results.compare import Comparison, TaskComparison, compare_runs
from refusion_eval.results.measured import seed_of
from refusion_eval.results.render import Table, interval_cells, interval_text
from refusion_eval.store.records import Sample
from refusion_eval.store.run_store import RunReader

_Answers = Mapping[tuple[str, str, int], Sample]  # by task, hash of the item and number of the sample


@dataclass(frozen=True, kw_only=True)
class Flips:
    """One task under a configuration (all tasks: `MEAN_TASK`) against the same items under the reference."""

    system: str
    configuration: str
    reference: str
    comparison: TaskComparison
    num_samples: int
    first_positions: Sequence[int]  # of the samples whose tokens differ, 0 for the first token of the response
    num_differing: int  # also counts texts whose tokens are withheld
    num_other_forwards: int  # samples that took another number of forwards

    @property
    def tokens(self) -> Interval:
        """Percent of the samples whose tokens differ."""
        shares = [1.0] * self.num_differing + [0.0] * (self.num_samples - self.num_differing)
        return accuracy(shares, seed=seed_of(self.comparison.task)).scaled(100).interval()


def flips_between(system: str, reference: tuple[str, Path], other: tuple[str, Path]) -> list[Flips]:
    """The flips of every task, and of all where there are several, on the items that both have scored.

    Raises StoreError if the runs cannot be compared.
    """
    comparison: Comparison = compare_runs(reference[1], other[1], common_items=True)
    before, after = _answers(reference[1]), _answers(other[1])
    pairs = {key: (sample, after[key]) for key, sample in before.items() if key in after}
    return [
        _flips(system, reference[0], other[0], line, [pairs[key] for key in pairs if line.parts or key[0] == line.task])
        for line in comparison.lines
    ]


def _flips(
    system: str, reference: str, configuration: str, line: TaskComparison, pairs: Sequence[tuple[Sample, Sample]]
) -> Flips:
    differing = [(one, other) for one, other in pairs if (one.tokens, one.text) != (other.tokens, other.text)]
    return Flips(
        system=system,
        configuration=configuration,
        reference=reference,
        comparison=line,
        num_samples=len(pairs),
        first_positions=[
            _first_difference(one.tokens, other.tokens)
            for one, other in differing
            if one.tokens is not None and other.tokens is not None
        ],
        num_differing=len(differing),
        num_other_forwards=sum(one.num_forwards != other.num_forwards for one, other in pairs),
    )


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    equal = (a == b for a, b in zip(one, other, strict=False))
    return next((at for at, is_equal in enumerate(equal) if not is_equal), min(len(one), len(other)))


def _answers(run_dir: Path) -> _Answers:
    with RunReader.open(run_dir) as reader:
        good = (sample for sample in reader.samples(traces=False) if sample.error is None)
        return {(sample.key.task, sample.key.doc_hash, sample.key.sample): sample for sample in good}


def flips_table(flips: Sequence[Flips], machine: str, missing: str = "") -> Table:
    """One line for each system and configuration, over all tasks together; `missing` says what was not compared."""
    lines = [entry for entry in flips if entry.comparison.parts or _has_one_task(entry, flips)]
    rows = [
        (
            entry.system,
            entry.configuration,
            str(entry.num_samples),
            interval_text(entry.tokens, 1),
            _positions_text(entry.first_positions),
            str(entry.num_other_forwards),
            *(str(len(entry.comparison.flips[name])) for name in ("lost", "gained")),
            f"{entry.comparison.accuracies[0]:.1f}",
            interval_text(entry.comparison.difference, 1),
        )
        for entry in lines
    ]
    references = sorted({entry.reference for entry in flips})
    tasks = list(dict.fromkeys(entry.comparison.task for entry in flips if not entry.comparison.parts))
    notes = (
        f"Against {', '.join(references)} on the same items of {', '.join(tasks)}, in brackets 95% intervals. Tokens: "
        "samples whose tokens differ at all. First: position of the first token that differs, median and range. Other "
        "forwards: samples that took more or fewer, which moves TPF. Net: points of the mean over tasks, paired.",
        f"Measured on {machine}.",
        missing,
        MINI_SENTENCE if any(entry.comparison.mini for entry in flips) else "",
    )
    measured = ("n", "Tokens %", "First", "Other forwards", "Right to wrong", "Wrong to right", "Reference %", "Net")
    columns = ("System", "Configuration", *measured)
    return Table(title="Flips of tokens and verdicts", columns=columns, rows=rows, num_left=2, notes=notes)


def _has_one_task(entry: Flips, flips: Sequence[Flips]) -> bool:
    same = [one for one in flips if (one.system, one.configuration) == (entry.system, entry.configuration)]
    return len(same) == 1


def _positions_text(positions: Sequence[int]) -> str:
    return f"{median(positions):g} [{min(positions)}, {max(positions)}]" if positions else "-"


def flips_cells(flips: Sequence[Flips]) -> tuple[list[str], list[list[Any]]]:
    """Column names, and the values of every task of every configuration."""
    rows = list(map(_cells, flips))
    return list(rows[0]), [list(row.values()) for row in rows]


def _cells(entry: Flips) -> dict[str, Any]:
    line, first = entry.comparison, entry.first_positions
    row: dict[str, Any] = {"system": entry.system, "configuration": entry.configuration, "reference": entry.reference}
    row |= {"task": line.task, "mini": line.mini, "n": entry.num_samples, "num_differing": entry.num_differing}
    row |= interval_cells("tokens_percent", entry.tokens)
    row |= {"first_position_median": median(first) if first else None, "num_other_forwards": entry.num_other_forwards}
    row |= {"right_to_wrong": len(line.flips["lost"]), "wrong_to_right": len(line.flips["gained"])}
    row |= dict(zip(("score_reference", "score"), line.accuracies, strict=True))
    return row | interval_cells("net", line.difference) | {"p_value": line.p_value}
