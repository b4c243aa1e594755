"""What a reader must know before the figures of a page: marks of single tasks, and warnings about all of them."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

_LIMIT_OPTIONS = ("--limit", "-L")


class Mark(NamedTuple):
    """What a reader must know about a task before its figures."""

    kind: str
    label: str
    sentence: str


def marks(
    *,
    num_asked: int,
    num_items: int | None,
    limit: int | None,
    num_unscored: int,
    num_errors: int,
    hardware: Set[str],
    unisolated: bool,
    batched: bool,
) -> list[Mark]:
    """The marks of a task of one run."""
    found: list[Mark] = []

    def mark(kind: str, sentence: str, count: int | str = "") -> None:
        found.append(Mark(kind, f"{kind} {count}" if count else kind, sentence))

    if unisolated:
        mark("sandbox off", "Programs ran without isolation, so their verdicts can be forged.")
    if len(hardware) > 1:
        mark("mixed hardware", f"Samples of this task come from several machines: {' | '.join(sorted(hardware))}.")
    if num_items is not None and num_asked < num_items:
        kind = "limited" if limit is not None and num_asked >= limit else "unfinished"
        reason = f" (--limit {limit})" if kind == "limited" else ": the run ended early or is still going"
        mark(kind, f"{num_asked} of {num_items} items{reason}.", f"{num_asked}/{num_items}")
    elif num_items is None and limit is not None:
        mark("limited", f"Run with --limit {limit}; the benchmark's rows are not at hand here.", num_asked)
    if num_unscored:
        mark("unscored", f"{num_unscored} samples have no verdict: the run has not ended.", num_unscored)
    if num_errors:
        mark("errors", f"{num_errors} samples failed and are in no figure.", num_errors)
    if batched:
        mark("batched", "Some samples were decoded together; their times are in no speed figure.")
    return found


def limit_of(command: Sequence[str]) -> int | None:
    """The limit on items that a command line asked for, None if it asked for none."""
    words = [part for word in command for part in word.split("=", 1)]
    for option, value in itertools.pairwise(words):
        if option in _LIMIT_OPTIONS and value.isdigit():
            return int(value)
    return None


def warnings(cells: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What must be said about the table as a whole: columns whose figures are not of the same kind."""
    found = []
    machines = sorted({label for run in runs for label in run["hardware"]})
    if len(machines) > 1:
        found.append(
            f"Speed was measured on {len(machines)} machines and must not be compared across them: "
            f"{' | '.join(machines)}."
        )
    versions: dict[str, set[str]] = defaultdict(set)
    for cell in cells:
        if not cell["mean"]:
            versions[cell["task"]].add(cell["version"])
    for task, names in sorted(versions.items()):
        if len(names) > 1:
            found.append(f"{task} is here in versions {', '.join(sorted(names))}, whose figures must not be compared.")
    if any(cell["mini"] for cell in cells):
        found.append("mini: synthetic look-alikes of this project, not the real benchmarks.")
    return found
