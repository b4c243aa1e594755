"""Names and sentences that tables and plots have in common."""

import math
from collections.abc import Iterable, Sequence

from refusion_eval.benchmarks import BENCHMARKS, find_task
from refusion_eval.paper.rows import Point
from refusion_eval.results.cautions import MINI_SENTENCE, sentences
from refusion_eval.results.measurement import BESIDE, Measurement
from refusion_eval.results.published import read_published

NO_PUBLISHED = "The paper's values are not public."


def benchmark_of(task: str) -> str:
    entry = find_task(task)
    return task if entry is None else entry.benchmark.name


def task_title(task: str, mini: bool) -> str:
    """Title of a benchmark or task; the title of a mini look-alike says that it is one."""
    entry = find_task(task)
    name = entry.benchmark.name if entry is not None and entry.name == task else task
    return f"{'mini ' if mini else ''}{BENCHMARKS[name].title if name in BENCHMARKS else name}"


def system_label(measurement: Measurement) -> str:
    """Label of a system: the paper's for a published system and for its variants, else the one its run gave it."""
    if measurement.origin == "published" or (measurement.mini and not measurement.variants):
        return measurement.label
    labels = {row["system"]: row["label"] for row in read_published("published.csv")}
    own = (name.replace("_", " ") for name in measurement.variants if name in BESIDE or name.startswith("slots_"))
    return labels.get(measurement.system, ", ".join((measurement.label, *own)))


def mini_sentence(measurements: Iterable[Measurement | Point]) -> str:
    return MINI_SENTENCE if any(entry.mini for entry in measurements) else ""


def benchmark_title(points: Sequence[Point]) -> str:
    return task_title(points[0].task, points[0].mini)


def count(counts: Iterable[int], unit: str = "items a point") -> str:
    """The numbers of items (0 where none is stated) as a caption says them: `n = 40 to 100 items a point`."""
    stated = sorted({number for number in counts if number})
    if not stated:
        return f"n ({unit}) is not stated"
    return f"n = {' to '.join(dict.fromkeys((str(stated[0]), str(stated[-1]))))} {unit}"


def _by_system(points: Sequence[Point], name: str) -> list[str]:
    """The texts that points have under a name; where these differ, with the systems that have each."""
    systems: dict[str, dict[str, None]] = {}
    for point in points:
        systems.setdefault(getattr(point, name), {})[point.label] = None
    systems.pop("", None)
    return [f"{text} ({', '.join(systems[text])})" if len(systems) > 1 else text for text in sorted(systems)]


def caption(points: Sequence[Point]) -> list[str]:
    """Sentences about intervals, pairing, hardware, and what is incomplete, of measured points."""
    if not points:
        return []
    with_bars = any(not math.isnan(point.y_low) for point in points)
    machines = sorted({point.hardware for point in points if point.hardware})
    notes = sorted({point.note for point in points if point.note})
    limited, pairings = _by_system(points, "limited"), _by_system(points, "pairing")
    return [
        "Bars: 95% intervals." if with_bars else "",
        f"Differences are {'; '.join(pairings)}." if pairings else "",
        f"Hardware: {', '.join(machines)}." if machines else "",
        *sentences(point.conditions for point in points),
        f"Limited: {', '.join(limited)} samples were asked for." if limited else "",
        f"\u2020 {'; '.join(notes)}." if notes else "",
    ]
