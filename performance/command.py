"""What the scripts of this folder share: options by typer, JSON output, and errors in one line."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from refusion_eval.errors import RefusionEvalError
from refusion_eval.store.atomic_write import prepare_output, write_output

Out = Annotated[Path | None, typer.Option(help="Also write the whole report to this JSON file.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Model = Annotated[str, typer.Option(help="Checkpoint folder, hub id, or embedded.")]


def run_script(command: Callable[..., None]) -> None:
    """Runs a script's command with the options of the command line.

    A `RefusionEvalError` is printed as one line on stderr, and the process exits with status 1.

    Args:
        command: a function whose parameters are annotated with `typer.Option`.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app()
    except RefusionEvalError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def show_progress(text: str) -> None:
    """Prints a line of progress on stderr, so that stdout holds the report alone."""
    print(text, file=sys.stderr)


def prepare(out: Path | None) -> None:
    """Fails before anything is measured if the output file cannot be written.

    Raises:
        ConfigError: the file cannot be written.
    """
    if out is not None:
        prepare_output(out)


def write_json(out: Path | None, report: Any) -> None:
    """Writes a report as indented JSON; does nothing if no output file was asked for."""
    if out is not None:
        write_output(out, json.dumps(report, indent=2) + "\n")
