"""The command line's root, and what its commands share."""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from refusion_eval.errors import ConfigError

WIDTH_WITHOUT_TERMINAL = 140

app = typer.Typer(
    name="refusion-eval",
    help="Accuracy and batch-1 speed of ReFusion and of the systems it competes with.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Sandbox = Annotated[
    Literal["auto", "none"],
    typer.Option(help="How model-written code is run: isolated, or none for no isolation at all."),
]


def _folder(path: Path | None) -> Path | None:
    """A folder that was named is there, even where the tasks at hand would not have looked into it."""
    if path is not None and not path.is_dir():
        raise ConfigError(f"--data: there is no directory {path}; name the folder of the rows, or leave the option out")
    return path


Data = Annotated[
    Path | None,
    typer.Option(help="Folder with benchmark rows: <benchmark>/<split>.jsonl[.gz].", callback=_folder),
]

Baseline = Annotated[
    str | None, typer.Option(help="Folder name of the run that speed-ups are relative to; found if not given.")
]


def names_of(text: str) -> list[str]:
    """The names in a list separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def console() -> Any:
    """Where tables are printed."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)


class _StderrHandler(logging.Handler):
    """Writes to whatever stderr is at that moment: the live display puts itself in between."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def log_to_stderr() -> None:
    """Our own lines; of lm-eval only errors, and none of its many small progress bars."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("refusion_eval")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
