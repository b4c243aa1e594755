"""Commands to look at runs: report, replay."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli.root import Data, app, console, log_to_stderr
from refusion_eval.errors import ConfigError


@app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories, finished or not.")],
    out: Annotated[Path, typer.Option(help="The page; it needs no other file and no network.")] = Path("report.html"),
    baseline: Annotated[
        str | None, typer.Option(help="Folder name of the run that speed-ups are relative to; found if not given.")
    ] = None,
    data: Data = None,
) -> None:
    """Write one HTML page of runs: figures, frontier plots, every sample, and how each was decoded, step by step."""
    from refusion_eval.cli.sources import FoundSources
    from refusion_eval.report.assemble import page
    from refusion_eval.report.collect import collect
    from refusion_eval.store.atomic_write import prepare_output, write_output

    log_to_stderr()
    prepare_output(out)
    found = collect(run_dirs, FoundSources(data), baseline=baseline)
    for warning in found.index["warnings"]:
        print(f"note: {warning}", file=sys.stderr)
    write_output(out, page(found.index, found.chunks))
    print(f"{out} ({out.stat().st_size / 2**20:.1f} MiB)")
