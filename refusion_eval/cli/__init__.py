"""The command line. The commands of a group are the functions of a file, which is imported when one is called.

None of the files loads torch before a command runs.
"""

import contextlib
import copy
import errno
import importlib
import inspect
import json
import logging
import os
import re
import sys
import threading
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
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

# The groups of `refusion-eval --help`. The last word of a group is the name of its file, and in a function's name, each
# hyphen of a command is an underscore.
GROUPS = {
    "Evaluate": ("suite", "run", "sweep", "protocol", "rerun", "check", "lm-eval"),
    "Look at results": (
        "table",
        "compare",
        "speed",
        "report",
        "leaderboard",
        "replay",
        "export",
        "plot",
        "paper-table",
        "claims",
    ),
    "Judge texts": ("score", "rescore"),
    "Measure": ("bench", "flips", "locality", "gpu-check"),
    "Train": ("train", "convert"),
    "Machine": ("doctor", "systems", "tasks", "tasks-path", "version"),
}
COMMANDS = tuple(name for names in GROUPS.values() for name in names)

# What a command does before its first line, which is said if it takes long.
LOADING, _READING = "loading PyTorch and the checkpoint", "reading the records of the runs"
_BEFORE_FIRST_LINE = {
    **dict.fromkeys(("run", "sweep", "rerun", "replay", "bench", "flips", "locality", "gpu-check", "convert"), LOADING),
    **dict.fromkeys(("table", "compare", "speed", "leaderboard", "export", "paper-table", "plot", "claims"), _READING),
    "report": f"{_READING}, and loading the tokenizers of their checkpoints",
    "score": "judging the texts",
    "rescore": f"{_READING}, and loading lm-eval's filters",
    "train": "loading PyTorch",
    "doctor": "trying the sandbox, and loading PyTorch",
}
_SILENT_SECONDS = 2

# Exit statuses of a command that finished: with samples that failed or differ, and with figures that fail a condition.
EXIT_INCOMPLETE, EXIT_FAILED = 3, 4

# Systems take turns in so many rounds: enough for an interval, and checkpoints are not loaded too often.
DEFAULT_ROUNDS = 3

TAKES_ALL_ARGUMENTS = "lm-eval"  # hands all its arguments on, --help included
HANDED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
HELP_NAMES = {"help_option_names": ["-h", "--help"]}


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_params(self, ctx: Any) -> list:
        parameters: list[Any] = super().get_params(ctx)
        for parameter in parameters:  # typer's own options for completion; the last line of --help names one of them
            parameter.hidden |= parameter.name in ("install_completion", "show_completion")
        return parameters

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        group = next((group for group, names in GROUPS.items() if cmd_name in names), None)
        if group is None:
            return None
        takes_all = cmd_name == TAKES_ALL_ARGUMENTS
        if not takes_all:  # progress bars of libraries; tqdm reads this when the module below imports it
            os.environ.setdefault("TQDM_DISABLE", "1")
        module = importlib.import_module(f"refusion_eval.cli.{group.split()[-1].lower()}")
        function = getattr(module, cmd_name.replace("-", "_"))
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(
            cmd_name,
            context_settings=HANDED_ON if takes_all else HELP_NAMES,
            add_help_option=not takes_all,
            rich_help_panel=group,
            short_help=re.split(r"(?<=\.)\s", inspect.getdoc(function) or "", maxsplit=1)[0],
        )(function)
        command = get_command(single)
        if not takes_all:  # options of loudness work on both sides of the name
            loudness: list[Any] = [copy.copy(option) for option in self.params if option.name in ("verbose", "quiet")]
            for option in loudness:
                option.hidden, option.expose_value, option.callback = True, False, _after_the_name
            command.params += loudness
        return command


app = typer.Typer(
    name="refusion-eval",
    cls=_Commands,
    no_args_is_help=True,
    epilog="refusion-eval --install-completion sets up the completion of your shell.",
    pretty_exceptions_enable=False,
    context_settings=HELP_NAMES,
)


def _after_the_name(context: Any, option: Any, wanted: bool) -> None:
    if wanted:
        of_root = context.find_root().params
        of_root[option.name] = True
        _set_loudness(verbose=of_root.get("verbose", False), quiet=of_root.get("quiet", False))


def _set_loudness(*, verbose: bool, quiet: bool) -> None:
    if verbose and quiet:
        raise typer.BadParameter("--verbose and --quiet exclude each other; give one of them")
    LOGGER.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"refusion-eval {refusion_eval.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the logs of libraries, and tracebacks.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show warnings and results, and no progress.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Measure accuracy and batch-1 speed of ReFusion and of its competitors."""
    _set_loudness(verbose=verbose, quiet=quiet)
    if sys.platform == "win32":
        raise ConfigError("records are locked by calls of Unix, which Windows lacks; run refusion-eval in WSL there")
    if doing := _BEFORE_FIRST_LINE.get(context.invoked_subcommand or ""):
        context.with_resource(told_if_silent(doing))


@contextlib.contextmanager
def told_if_silent(doing: str) -> Iterator[None]:
    """Says what a command does if two seconds pass before its first line of progress."""

    def tell() -> None:
        handlers = [handler for handler in LOGGER.handlers if isinstance(handler, _StderrHandler)]
        if LOGGER.isEnabledFor(logging.INFO) and not any(handler.has_spoken for handler in handlers):
            say(f"{doing} ...")

    timer = threading.Timer(_SILENT_SECONDS, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. An error that this project raises on purpose is one line on stderr and exit status 1."""
    _in_one_line(lambda: app(arguments))


def _in_one_line(call: Callable[[], int | None]) -> int | None:
    try:
        return call()
    except Exception as error:
        is_expected = isinstance(error, RefusionEvalError)
        if LOGGER.isEnabledFor(logging.DEBUG) or not (is_expected or _is_out_of_memory(error)):
            raise
        print(f"error: {error if is_expected else OUT_OF_MEMORY}", file=sys.stderr)
        sys.exit(1)


def run_command(*words: str) -> int:
    """Runs a command in this process and returns the exit status that it would have in a process of its own."""
    loudness = {logging.DEBUG: ["--verbose"], logging.WARNING: ["--quiet"]}.get(LOGGER.level, [])
    return status_of(words[0], lambda: main([*loudness, *words]))


def status_of(command: str, call: Callable[[], int | None]) -> int:
    """The exit status of what a command does, in this process; an error of it is one line, as in its own process."""
    from refusion_eval.evaluation.turns import free_memory

    try:
        return _in_one_line(call) or 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:  # a defect of one command must not cost the results of the commands after it
        LOGGER.exception("refusion-eval %s ended unexpectedly", command)
        return 1
    finally:
        free_memory()


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
    if error is None:
        return False
    is_one = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return is_one or bool(_OUT_OF_MEMORY.search(str(error))) or _is_out_of_memory(error.__cause__ or error.__context__)


Number = TypeVar("Number", int, float)
Cells = tuple[Sequence[str], Iterable[Iterable[Any]]]  # columns and rows

WIDTH_WITHOUT_TERMINAL = 140


# Options of several commands.
Sandbox = Annotated[
    Literal["auto", "none"],
    typer.Option(
        help="Isolation of model-written programs: auto takes the best that works here, none runs them without any."
    ),
]


def _folder(option: typer.CallbackParam, path: Path | None) -> Path | None:
    # A folder that does not exist is refused even if the tasks at hand would not have read it.
    if path is not None and not path.is_dir():
        raise ConfigError(f"{option.opts[0]}: there is no directory {path}; name one, or leave the option out")
    return path


Data = Annotated[
    Path | None,
    typer.Option(help="Folder with benchmark rows: <benchmark>/<split>.jsonl[.gz].", callback=_folder),
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
    typer.Option(help="Folder with lm-eval task files, whose tasks --tasks may name.", callback=_folder),
]
Prompts = Annotated[
    Literal["ours", "release"] | None,
    typer.Option(
        help="What the name of a benchmark in --tasks means: release, the prompts of ReFusion's release, as for real "
        "checkpoints by default, or ours, this project's, as the embedded models were trained on."
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Evaluate only the first items of every task.")]
Samples = Annotated[
    int | None,
    typer.Option(
        min=1, help="Texts of every item, each drawn with a seed of its own. More than one need --set temperature=T."
    ),
]
Rounds = Annotated[
    int, typer.Option(min=1, help="Systems take turns in so many rounds over the items, so that speeds compare.")
]
OtherRounds = Annotated[
    int | None,
    typer.Option(min=1, help="Rounds over the items, in which systems take turns, so that speeds compare. Default: 3."),
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Run code that the file names: a decoder FILE.py:NAME or MODULE:NAME, a task file, a Ray cluster. Without "
        "this such a file is refused.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and stop.")]
Baseline = Annotated[
    str | None,
    typer.Option(help="Folder name of the run that speed-ups are relative to. By default it is found by its backbone."),
]
FailIf = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-if",
        metavar="CONDITION",
        help="End with exit status 4 if a figure meets this, or is absent: [TASK:] METRIC < NUMBER. Again for more.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs, instead of text.")]
Csv = Annotated[Path | None, typer.Option(help="Also write every figure as CSV.")]
Markdown = Annotated[Path | None, typer.Option(help="Also write the table as Markdown.")]
Latex = Annotated[
    Path | None, typer.Option(help="Also write the table as LaTeX (booktabs), and its notes beside it as .txt.")
]
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
    typer.Option(
        help="A published system by name: its decoder, checkpoint and adapter. `systems` lists them. Or server, with "
        "--base-url, or server:URL: the model of a server, whose tokenizer --model has."
    ),
]


def names_of(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers_of(text: str, option: str, kind: type[Number]) -> tuple[Number, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: write numbers separated by commas, such as 1,2,4") from error


def options_from(
    cls: type, names: str, *, without_default: Sequence[str] = (), helps: dict[str, str] | None = None
) -> Callable[[Callable], Callable]:
    """Gives a command one option for each of some fields of a settings class, FIELD or FIELD:OPTION.

    Name, type, default and help are those of the field. Values stay text: the settings class converts and checks them.
    The parameter `given` of the decorated function receives the mapping from field to value, and its place among the
    parameters is the place of the options in --help.
    """
    options = {name.partition(":")[0]: name.rpartition(":")[2] for name in names.split()}
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
        entry = re.compile(r"^    (\w[\w, ]*): ((?:.*\n?)(?:^     .*\n?)*)", re.MULTILINE)
        for names, text in entry.findall(section[1] if section else ""):
            described |= dict.fromkeys(names.split(", "), " ".join(text.split()))
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
    if typing.get_origin(wanted) is Literal:
        return f"<{'|'.join(map(str, typing.get_args(wanted)))}>"
    inner = [argument for argument in typing.get_args(wanted) if argument is not type(None)]
    return _type_name(inner[0]) if inner else f"<{wanted.__name__}>"


def console() -> Any:
    from rich.console import Console

    columns = os.environ.get("COLUMNS", "")
    default = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    return Console(width=int(columns) if columns.isdecimal() and int(columns) else default)


def say(text: str) -> None:
    print(visible(text, keep="\n"), file=sys.stderr)


def wrong_options(command: str, problem: object) -> typer.Exit:
    """Says what is wrong with the options of a command; the exit status is that of an unknown option."""
    say(f"error: {problem}; refusion-eval {command} --help lists the options")
    return typer.Exit(2)


def tell(text: str) -> None:
    print(visible(text, keep="\n"))


def objects(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> list[dict[str, Any]]:
    """An object for JSON for each row, with None for NaN."""
    return [{name: None if value != value else value for name, value in zip(columns, row, strict=True)} for row in rows]


def print_json(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    print_value(objects(columns, rows))


def print_value(value: Any) -> None:
    """Prints a value as JSON."""
    print(json.dumps(value, indent=2, default=str))


def read_pairs(texts: list[str] | None) -> dict[str, str]:
    """Reads the values of --set."""
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

    for path in filter(None, paths):
        prepare_output(path)


def show(
    table: Any,
    cells: Cells = ((), ()),
    *,
    as_json: bool = False,
    csv: Path | None = None,
    markdown: Path | None = None,
    latex: Path | None = None,
    failures: Sequence[Any] | None = None,
) -> None:
    """Prints a table, or its cells as JSON, and writes the files that are asked for.

    Where conditions were given, their `results.gate.Failure`s are told, and stand in the JSON beside the cells.
    """
    from refusion_eval.results.render import csv_text
    from refusion_eval.store.atomic_write import write_output

    if as_json and failures is not None:
        print_value({"results": objects(*cells), "failed": [failure._asdict() for failure in failures]})
    elif as_json:
        print_json(*cells)
    else:
        terminal = console()
        terminal.print(table.rich(terminal.width))
    for failure in failures or ():
        say(str(failure))
    if csv is not None:
        write_output(csv, csv_text(*cells))
    if markdown is not None:
        write_output(markdown, table.markdown())
    if latex is not None:
        table.write_latex(latex)


def show_load(places: Sequence[Path], *, as_json: bool = False) -> None:
    """Prints throughput and latency of runs by their number of requests at once; `places` as in `load_points`."""
    from refusion_eval.results.concurrency import load_cells, load_points, load_tables

    points = load_points(places)
    if as_json:
        print_json(*load_cells(points))
        return
    for table in load_tables(points):
        terminal = console()
        terminal.print(table.rich(terminal.width))


class _StderrHandler(logging.Handler):
    has_spoken = False

    def emit(self, record: logging.LogRecord) -> None:
        self.has_spoken = True
        say(self.format(record))  # to the present sys.stderr: the live progress display replaces it while it runs


def log_to_stderr() -> None:
    """Shows the log of this project on stderr, and of lm-eval only errors."""
    if not any(isinstance(handler, _StderrHandler) for handler in LOGGER.handlers):  # of a command before this one
        LOGGER.addHandler(_StderrHandler())  # without a formatter, a line is the message
    logging.getLogger("lm_eval").setLevel(logging.INFO if LOGGER.isEnabledFor(logging.DEBUG) else logging.ERROR)
