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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

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
    **dict.fromkeys(("run", "sweep", "rerun"), f"{LOADING}, or asking the server"),
    **dict.fromkeys(("replay", "bench", "flips", "locality", "gpu-check", "convert"), LOADING),
    **dict.fromkeys(("table", "compare", "speed", "leaderboard", "paper-table", "plot", "claims"), _READING),
    "export": f"{_READING}; for the prompts of lm-eval and every-eval-ever, loading their tokenizers",
    "report": f"{_READING}, and loading their tokenizers",
    "score": "judging the texts",
    "rescore": f"{_READING}, and loading what the filter needs",
    "train": "loading PyTorch",
    "doctor": "trying the sandbox, and loading PyTorch",
}
_SILENT_SECONDS = 2

# Exit statuses of a command that finished: with samples that failed or differ, and with figures that fail a condition.
EXIT_INCOMPLETE, EXIT_FAILED = 3, 4

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
        told = str(error) if isinstance(error, RefusionEvalError) else _out_of_memory(error)
        if LOGGER.isEnabledFor(logging.DEBUG) or not told:
            raise
        print(f"error: {told}", file=sys.stderr)
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
OUT_OF_GPU_MEMORY = (
    "there is not enough memory on the GPU; keep less of it for keys and values (`kv_budget_gib`), take a dtype of 16 "
    "bits, a smaller gen_length or fewer requests at a time, or end other programs on the GPU, and run the same "
    "command again: nothing recorded is lost"
)
# What torch and the libraries of CUDA say.
_OUT_OF_GPU_MEMORY = re.compile(r"(CUDA|HIP)( error:)? out of memory|CU(BLAS|DNN|SOLVER)_STATUS_ALLOC_FAILED")
# What libraries say when the system refuses them memory, a thread or the mapping of a file.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can(no|')t allocate memory|not enough memory|can't start new thread|failed to map segment|"
    r"unable to (mmap|allocate)|error return without exception set",
    re.IGNORECASE,
)


def _out_of_memory(error: BaseException | None) -> str:
    """What to do about an error that, or whose cause, is a lack of memory; "" for another error."""
    if error is None:
        return ""
    if _OUT_OF_GPU_MEMORY.search(str(error)):
        return OUT_OF_GPU_MEMORY
    is_one = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if is_one or _OUT_OF_MEMORY.search(str(error)):
        return OUT_OF_MEMORY
    return _out_of_memory(error.__cause__ or error.__context__)


Cells = tuple[Sequence[str], Iterable[Iterable[Any]]]  # columns and rows

WIDTH_WITHOUT_TERMINAL = 140


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


def refuse_unused(used_by: str, **options: Any) -> None:
    """Raises ConfigError if one of these options was given, because only what `used_by` names would use it."""
    for name, value in options.items():
        if value not in (None, "", False):
            raise ConfigError(
                f"--{name.replace('_', '-')} is for {used_by}, and would change nothing here; leave it out"
            )


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
    emit: Callable[[Any], None] = print_value,
) -> None:
    """Prints a table, or a list of them, or hands their cells to `emit` as JSON; writes the files that are asked for.

    Where conditions were given, their failed `results.gate.Verdict`s are told, and stand in the JSON beside the cells.
    """
    from refusion_eval.results.render import csv_text
    from refusion_eval.store.atomic_write import write_output

    tables = table if isinstance(table, list) else [table]
    if as_json:
        failed = {} if failures is None else {"failed": [failure._asdict() for failure in failures]}
        emit({"results": objects(*cells), **failed} if failed else objects(*cells))
    else:
        terminal = console()
        for one in tables:
            terminal.print(one.rich(terminal.width))
    for failure in failures or ():
        say(str(failure))
    if csv is not None:
        write_output(csv, csv_text(*cells))
    if markdown is not None:
        write_output(markdown, "\n".join(one.markdown() for one in tables))
    if latex is not None:
        table.write_latex(latex)


def show_load(places: Sequence[Path], **shown: Any) -> None:
    """Shows throughput and latency of runs by their number of requests at once; `places` as in `load_points`."""
    from refusion_eval.results.concurrency import load_cells, load_points, load_tables

    points = load_points(places)
    show(load_tables(points), load_cells(points), **shown)


def say_extents(run_dirs: Sequence[Path]) -> None:
    """Says which runs lack samples or were limited, where what is written has no place for it."""
    from refusion_eval.results.cautions import extent_sentences
    from refusion_eval.results.facts import extents_of
    from refusion_eval.store.run_store import RunReader

    extents = []
    for run_dir in run_dirs:
        with RunReader.open(run_dir) as reader:
            run, found = reader.run, extents_of(reader)
        extents += [extent.conditions(run, row[0]) for row, extent in found.items()]
    for note in extent_sentences(extents):
        say(f"note: {note}")


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
