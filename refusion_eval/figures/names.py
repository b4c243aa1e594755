"""Names and sentences that tables and plots have in common."""

from collections.abc import Iterable, Mapping

from refusion_eval.benchmarks import BENCHMARKS, find_task
from refusion_eval.figures.rows import Point
from refusion_eval.results.figure import TASKS, Figure
from refusion_eval.results.published import read_published

TASK_NAMES: Mapping[str, str] = {task: BENCHMARKS[task].title for task in TASKS}
MINI_SENTENCE = "Mini tasks are synthetic look-alikes, not the real benchmarks, and compare with no published figure."
FUSED_SENTENCE = (
    "ReFusion here with fused forwards: this engine's gain, fewer forwards for the same tokens than the "
    "paper's algorithm makes."
)


def task_title(task: str, mini: bool) -> str:
    """Title of a benchmark or task; the title of a mini look-alike says that it is one."""
    known = find_task(task)
    name = known.benchmark.name if known is not None and known.name == task else task
    return f"{'mini ' if mini else ''}{BENCHMARKS[name].title if name in BENCHMARKS else name}"


def mini_sentence(any_mini: bool) -> str:
    """The sentence that every table or plot with mini tasks comes with."""
    return MINI_SENTENCE if any_mini else ""


def fused_sentence(figures: Iterable[Figure | Point]) -> str:
    """The sentence that every table or plot with fused forwards comes with."""
    return FUSED_SENTENCE if any(figure.fused for figure in figures) else ""


def system_label(figure: Figure) -> str:
    """Label of a system: the paper's for a published system and for its variants, else the one its run gave it.

    On mini tasks a system that is no variant keeps the label of its run, because a tiny checkpoint is not the published
    one.
    """
    if figure.origin == "published" or (figure.mini and not figure.variants):
        return figure.label
    labels = {row["system"]: row["label"] for row in read_published("published.csv")}
    return labels.get(figure.system, figure.label)
