"""Pictures with one panel for each task and one legend for all of them."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from matplotlib.axes import Axes

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.paper.style import paper_style


@contextmanager
def panels(tasks: Sequence[str], x_label: str, target: Path) -> Iterator[dict[str, Axes]]:
    """Gives the empty panel of each task; what the caller drew into them is written to `target` afterwards."""
    import matplotlib.pyplot as plt

    with paper_style():
        figure, grid = plt.subplots(
            2, -(-len(tasks) // 2), figsize=(11, 5.6), layout="constrained", squeeze=False, sharey=True
        )
        drawn: dict[str, Axes] = {}
        for axes, task in itertools.zip_longest(grid.flat, tasks):
            if task is None:
                axes.set_visible(False)
                continue
            axes.set_title(f"mini {BENCHMARKS[task].title}")
            drawn[task] = axes
        yield drawn
        figure.supxlabel(x_label)
        figure.supylabel("Accuracy on held-out draws (%)")
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        figure.savefig(target, dpi=150, metadata={"Software": None})
        plt.close(figure)
