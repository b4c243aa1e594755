from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli import Baseline, Data, log_to_stderr, prepare, say


def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories, finished or not.")],
    out: Annotated[Path, typer.Option(help="File of the page, which needs no other file and no network.")] = Path(
        "report.html"
    ),
    baseline: Baseline = None,
    data: Data = None,
) -> None:
    """Write one HTML page about runs. It has figures, frontiers, and every sample with each step of its decoding."""
    from refusion_eval.cli.sources import FoundSources
    from refusion_eval.decoders import DECODERS
    from refusion_eval.report.assemble import page
    from refusion_eval.report.collect import collect
    from refusion_eval.store.atomic_write import write_output

    log_to_stderr()
    prepare(out)
    colours = {name: decoder.style.colour for name, decoder in DECODERS.items()}
    collected = collect(run_dirs, FoundSources(data), baseline=baseline, colours=colours)
    for warning in collected.index["warnings"]:
        say(f"note: {warning}")
    write_output(out, page(collected.index, collected.chunks))
    print(f"{out} ({out.stat().st_size / 2**20:.1f} MiB)")
