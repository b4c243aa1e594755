from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli import Csv, Markdown, numbers_of, prepare, show
from refusion_eval.errors import ConfigError


def cost(
    run_dirs: Annotated[
        list[Path] | None,
        typer.Argument(help="Pilot runs at batch size 1. Without any, the published systems are shown."),
    ] = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers, each with one GPU or process.")] = "1,8,64",
    csv: Csv = None,
    markdown: Markdown = None,
) -> None:
    """Project the cost of whole benchmarks on many machines. A shared queue and static shards are compared."""
    from refusion_eval.results.cost import cost_csv, cost_table, projected, published_table
    from refusion_eval.store.atomic_write import write_output

    counts = numbers_of(workers, "--workers", int)
    if min(counts) < 1:
        raise ConfigError(f"--workers {workers}: a number of workers is at least 1")
    if csv is not None and not run_dirs:
        raise ConfigError("--csv holds measured figures: name pilot runs, or leave it out")
    prepare(csv, markdown)
    costs = projected(run_dirs or [], counts)
    show(cost_table(costs) if costs else published_table(counts), markdown)
    if csv is not None:
        write_output(csv, cost_csv(costs))
