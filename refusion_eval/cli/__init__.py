"""The command line: one file a command, named like it, which is imported when the command is called.

`refusion-eval run --help` loads `run.py` alone; `refusion-eval --help` loads all of them, and none of them loads torch.
"""

import importlib
import sys
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from refusion_eval.cli import moved
from refusion_eval.errors import RefusionEvalError

# In the order of `refusion-eval --help`. The command `tasks-path` is the function `tasks_path` in `tasks_path.py`.
COMMANDS = (
    "suite",
    "run",
    "rerun",
    "sweep",
    "table",
    "score",
    "rescore",
    "compare",
    "speed",
    "cost",
    "claims",
    "paper-table",
    "plot",
    "report",
    "replay",
    "locality",
    "train",
    "convert",
    "check",
    "systems",
    "tasks-path",
    "lm-eval",
    "doctor",
    "bench",
    "version",
)

HELP_NAMES = {"help_option_names": ["-h", "--help"]}
# For a command that hands all its arguments on, --help included.
HANDED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
TAKE_ALL_ARGUMENTS = ("lm-eval", "suite", "train")


class _Commands(TyperGroup):
    """Imports the file of a command when the command is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in (*COMMANDS, *moved.SCRIPTS):
            return None
        name = "moved" if cmd_name in moved.SCRIPTS else cmd_name.replace("-", "_")
        function = getattr(importlib.import_module(f"refusion_eval.cli.{name}"), name)
        handed_on = cmd_name in TAKE_ALL_ARGUMENTS or name == "moved"
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        context = HANDED_ON if handed_on else HELP_NAMES
        single.command(cmd_name, context_settings=context, add_help_option=not handed_on)(function)
        return get_command(single)


app = typer.Typer(
    name="refusion-eval",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=HELP_NAMES,
)


@app.callback()
def _root() -> None:
    """Measure accuracy and batch-1 speed of ReFusion and of the systems that it is compared with."""


def main() -> None:
    """Runs the command line. An error that this project raises on purpose is one line on stderr and exit status 1."""
    try:
        app()
    except RefusionEvalError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
