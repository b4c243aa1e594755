"""How tables and figures write what the records call otherwise."""

from collections.abc import Mapping

from refusion_eval.benchmarks import BENCHMARKS, find_task
from refusion_eval.results.figure import Figure
from refusion_eval.results.published import read_published

TASK_NAMES: Mapping[str, str] = {name: benchmark.title for name, benchmark in BENCHMARKS.items()}
MINI_SENTENCE = "Mini tasks are synthetic look-alikes, not the real benchmarks, and compare with no published figure."

FUSED_SENTENCE = (
    "ReFusion here with fused forwards: this engine's gain, fewer forwards for the same tokens than the "
    "paper's algorithm makes."
)


def task_name(task: str, mini: bool) -> str:
    """A benchmark as papers write it; its look-alike says so."""
    known = find_task(task)
    title = known.benchmark.title if known and task == known.name else TASK_NAMES.get(task, task)
    return f"{'mini ' if mini else ''}{title}"


def system_label(cell: Figure) -> str:
    """A system's name in the paper, so that variants are told apart, or the one its run gave it.

    On mini tasks a system keeps its run's name: the tiny checkpoint is not the published one.
    """
    if cell.origin == "published" or (cell.mini and "+" not in cell.system):
        return cell.label
    known = {row["system"]: row["label"] for row in read_published("published.csv")}
    return known.get(cell.system, cell.label)
