"""The command line: its commands, and what they share: options and how they print.

A command is one file, named like it, which is imported when the command is called: `refusion-eval run --help` loads
`run.py` alone; `refusion-eval --help` loads all of them, and none of them loads torch.
"""

import errno
import importlib
import inspect
import json
import logging
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from typer.core import TyperGroup
from typer.main import get_command

import refusion_eval
from refusion_eval.errors import ConfigError, RefusionEvalError
from refusion_eval.untrusted import visible

LOGGER = logging.getLogger("refusion_eval")

# The groups of `refusion-eval --help`. The command `tasks-path` is the function `tasks_path` in `tasks_path.py`.
GROUPS = {
    "Evaluate": ("suite", "run", "sweep", "rerun", "check", "lm-eval"),
    "Look at results": ("table", "compare", "speed", "report", "replay", "export", "plot", "paper-table", "claims"),
    "Judge texts": ("score", "rescore"),
    "Measure": ("bench", "locality", "gpu-check"),
    "Train": ("train", "convert"),
    "Machine": ("doctor", "systems", "tasks", "tasks-path", "version"),
}
COMMANDS = tuple(name for names in GROUPS.values() for name in names)

# Former commands that are now scripts beside the package.
MOVED = {
    "bench-sandbox": "performance/sandbox.py",
    "bench-scaleout": "performance/scaleout.py",
    "bench-train": "performance/train.py",
    "soak": "performance/soak.py",
}

# Commands that hand all their arguments on, --help included.
TAKE_ALL_ARGUMENTS = ("lm-eval", "suite", "train", *MOVED)
HANDED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
HELP_NAMES = {"help_option_names": ["-h", "--help"]}


class _Commands(TyperGroup):
    """Imports the file of a command when the command is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_params(self, ctx: Any) -> list:
        parameters: list[Any] = super().get_params(ctx)
        for parameter in parameters:  # typer's own options for completion; the last line of --help names one of them
            parameter.hidden |= parameter.name in ("install_completion", "show_completion")
        return parameters

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in MOVED:
            function = _moved
        elif cmd_name in COMMANDS:
            name = cmd_name.replace("-", "_")
            function = getattr(importlib.import_module(f"refusion_eval.cli.{name}"), name)
        else:
            return None
        takes_all = cmd_name in TAKE_ALL_ARGUMENTS
        group = next((group for group, names in GROUPS.items() if cmd_name in names), None)
        context = HANDED_ON if takes_all else HELP_NAMES
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(
            cmd_name,
            context_settings=context,
            add_help_option=not takes_all,
            rich_help_panel=group,
            short_help=re.split(r"(?<=\.)\s", inspect.getdoc(function) or "", maxsplit=1)[0],
        )(function)
        return get_command(single)


def _moved(context: typer.Context) -> None:
    """Print the script that replaces the command, and exit with status 2."""
    name = str(context.info_name)
    message = f"error: `refusion-eval {name}` is now a script with the same options"
    typer.echo(f"{message}: run `python {MOVED[name]}` in a checkout of the project", err=True)
    raise typer.Exit(2)


app = typer.Typer(
    name="refusion-eval",
    cls=_Commands,
    no_args_is_help=True,
    epilog="refusion-eval --install-completion sets up the completion of your shell.",
    pretty_exceptions_enable=False,
    context_settings=HELP_NAMES,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"refusion-eval {refusion_eval.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the logs of libraries, and tracebacks.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show warnings and results, and no progress.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Measure accuracy and batch-1 speed of ReFusion and of the systems that it is compared with."""
    if verbose and quiet:
        raise typer.BadParameter("--verbose and --quiet exclude each other; give one of them")
    if sys.platform == "win32":
        raise ConfigError("records are locked by calls of Unix, which Windows lacks; run refusion-eval in WSL there")
    LOGGER.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)


def main() -> None:
    """Runs the command line. An error that this project raises on purpose is one line on stderr and exit status 1."""
    try:
        app()
    except RefusionEvalError as error:
        if LOGGER.isEnabledFor(logging.DEBUG):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if LOGGER.isEnabledFor(logging.DEBUG) or not _is_out_of_memory(error):
            raise
        say(f"error: {OUT_OF_MEMORY}")
        sys.exit(1)


OUT_OF_MEMORY = (
    "there is not enough memory for this process; raise the limit (`ulimit -v`), end other programs or decode fewer "
    "requests at a time, and run the same command again: nothing recorded is lost"
)
# What libraries say when the system refuses them memory, a thread or the mapping of a file.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can(no|')t allocate memory|not enough memory|can't start new thread|failed to map segment|"
    r"unable to (mmap|allocate)|error return without exception set",
    re.IGNORECASE,
)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised for, says that memory has ended."""
    if error is None:
        return False
    is_one = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return is_one or bool(_OUT_OF_MEMORY.search(str(error))) or _is_out_of_memory(error.__cause__ or error.__context__)


Number = TypeVar("Number", int, float)

WIDTH_WITHOUT_TERMINAL = 140


def _folder(option: str, content: str) -> Callable[[Path | None], Path | None]:
    """Returns what refuses a folder that does not exist, even if the tasks at hand would not have read it."""

    def check(path: Path | None) -> Path | None:
        if path is not None and not path.is_dir():
            raise ConfigError(f"{option}: there is no directory {path}; name the folder of {content}, or leave it out")
        return path

    return check


Sandbox = Annotated[
    Literal["auto", "none"],
    typer.Option(
        help="Isolation of model-written programs: auto takes the best that works here, none runs them without any."
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Folder with benchmark rows: <benchmark>/<split>.jsonl[.gz].", callback=_folder("--data", "the rows")
    ),
]
Tasks = Annotated[
    str,
    typer.Option(
        help="Benchmarks, tasks of this project or of lm-eval (lm_eval:NAME where a benchmark has the same name), and "
        "YAML files of tasks, separated by commas. The default is all benchmarks."
    ),
]
IncludePath = Annotated[
    Path | None,
    typer.Option(
        help="Folder with lm-eval task files, whose tasks --tasks may name.",
        callback=_folder("--include-path", "the task files"),
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(help="Folder name of the run that speed-ups are relative to. By default it is found by its backbone."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs, instead of text.")]
Csv = Annotated[Path | None, typer.Option(help="Also write every figure as CSV.")]
Markdown = Annotated[Path | None, typer.Option(help="Also write the table as Markdown.")]
Out = Annotated[Path, typer.Option(help="Folder for the files.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A decoder setting, KEY=VALUE. It outranks the settings table. May be repeated."),
]
Results = Annotated[
    list[Path] | None,
    typer.Argument(help="Run directories and results CSV files. Without any, only the paper's figures are shown."),
]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes that judge programs and formulas.")]
System = Annotated[
    str | None,
    typer.Option(help="A published system by name: its decoder, checkpoint and adapter. `systems` lists them."),
]


def names_of(text: str) -> list[str]:
    """Splits a list of names at its commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers_of(text: str, option: str, kind: type[Number]) -> tuple[Number, ...]:
    """Reads the numbers of an option, which commas separate.

    Raises:
        ConfigError: a part is no number of this kind.
    """
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: write numbers separated by commas, such as 1,2,4") from error


def options_from(
    cls: type, *names: str, without_default: Sequence[str] = (), helps: dict[str, str] | None = None
) -> Callable[[Callable], Callable]:
    """Gives a command one option for each of some fields of a settings class.

    The option takes its name, type, default and help from the field: the help is the field's entry in the docstring of
    the class. Values stay text: the settings class converts and checks them. The decorated function has a parameter
    `given`, which receives the mapping from field to value; its place among the parameters is the place of the options
    in --help.
    """
    options = {name.partition(":")[0]: name.rpartition(":")[2] for name in names}
    entries = {entry.name: entry for entry in fields(cls)}
    described = descriptions(cls) | (helps or {})
    parameters = [
        _parameter(cls, entries[name], option, described[name], has_default=name not in without_default)
        for name, option in options.items()
    ]

    def decorate(command: Callable) -> Callable:
        own = list(inspect.signature(command).parameters.values())
        place = [parameter.name for parameter in own].index("given")
        signature = [*own[:place], *parameters, *own[place + 1 :]]

        def with_options(**values: Any) -> Any:
            given = {name: values.pop(option) for name, option in options.items()}
            return command(given={name: value for name, value in given.items() if value is not None}, **values)

        with_options.__doc__ = command.__doc__
        with_options.__name__ = command.__name__
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
        # typer reads the signature. Only among keyword-only parameters may one without a default follow one with it.
        keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in signature]
        with_options.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
        return with_options

    return decorate


def descriptions(cls: type) -> dict[str, str]:
    """Returns field -> description, from the sections "Attributes" of a class and its bases (Google form)."""
    described: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        section = re.search(r"^Attributes:\n((?:    .*\n?|\n)+)", inspect.getdoc(base) or "", re.MULTILINE)
        entries = re.findall(r"^    (\w+): ((?:.*\n?)(?:^     .*\n?)*)", section[1] if section else "", re.MULTILINE)
        described |= {name: " ".join(text.split()) for name, text in entries}
    return described


def _parameter(cls: type, entry: Field, option: str, text: str, *, has_default: bool) -> inspect.Parameter:
    wanted = typing.get_type_hints(cls)[entry.name]
    default = entry.default if has_default and entry.default is not MISSING else None
    annotation: Any
    if bool in (wanted, *typing.get_args(wanted)):
        name = option.replace("_", "-")
        # A flag that is on by default, or on some machines, needs a way to switch it off.
        flag = f"--{name}" if entry.default is False else f"--{name}/--no-{name}"
        annotation = Annotated[bool | None, typer.Option(flag, help=text, show_default=False)]
    else:
        default = None if default is None else str(default)
        annotation = Annotated[str | None, typer.Option(help=text, metavar=_type_name(wanted))]
    return inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _type_name(wanted: Any) -> str:
    """Returns what --help shows of a type: <int>, <str>, or the choices."""
    if typing.get_origin(wanted) is Literal:
        return f"<{'|'.join(map(str, typing.get_args(wanted)))}>"
    inner = [argument for argument in typing.get_args(wanted) if argument is not type(None)]
    return _type_name(inner[0]) if inner else f"<{wanted.__name__}>"


def console() -> Any:
    """Returns the console that tables are printed on: as wide as the terminal, or as COLUMNS says."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH_WITHOUT_TERMINAL)


def say(text: str) -> None:
    """Prints lines on stderr."""
    print(visible(text, keep="\n"), file=sys.stderr)


def tell(text: str) -> None:
    """Prints lines on stdout."""
    print(visible(text, keep="\n"))


def print_json(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Prints a list of objects, one for each row, with null for NaN."""
    table = [[None if value != value else value for value in row] for row in rows]
    print(json.dumps([dict(zip(columns, row, strict=True)) for row in table], indent=2, default=str))


def read_pairs(texts: list[str] | None) -> dict[str, str]:
    """Reads the values of --set.

    Raises:
        ConfigError: a text is not of the form KEY=VALUE, or a key is set twice.
    """
    values: dict[str, str] = {}
    for text in texts or []:
        key, separator, value = (part.strip() for part in text.partition("="))
        if not separator:
            raise ConfigError(f"--set {text}: write it as KEY=VALUE, for example --set tau_slot=0.8")
        if key in values:
            raise ConfigError(f"--set {key} is given twice ({values[key]}, {value}); several values go in one: A+B")
        values[key] = value
    return values


def prepare(*paths: Path | None) -> None:
    """Refuses files that cannot be written, before any work is done for them; see `prepare_output`."""
    from refusion_eval.store.atomic_write import prepare_output

    for path in paths:
        if path is not None:
            prepare_output(path)


def show(table: Any, markdown: Path | None = None, cells: tuple | None = None) -> None:
    """Prints a table, and writes it as Markdown if there is a file for it.

    Args:
        table: the table.
        cells: columns and rows to print as JSON instead of the table.
    """
    from refusion_eval.store.atomic_write import write_output

    if cells is None:
        terminal = console()
        terminal.print(table.rich(terminal.width))
    else:
        print_json(*cells)
    if markdown is not None:
        write_output(markdown, table.markdown())


class _StderrHandler(logging.Handler):
    """Looks up `sys.stderr` for each line, because the live progress display replaces it while it runs."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def log_to_stderr() -> None:
    """Shows the log of this project on stderr; of lm-eval only errors, and none of its many progress bars."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    LOGGER.addHandler(handler)
    logging.getLogger("lm_eval").setLevel(logging.INFO if LOGGER.isEnabledFor(logging.DEBUG) else logging.ERROR)
