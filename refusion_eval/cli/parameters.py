"""The options that several commands share, and those that are made from the fields of a settings class."""

import inspect
import re
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from refusion_eval.errors import ConfigError

Number = TypeVar("Number", int, float)

# Systems take turns in so many rounds: enough for an interval, and checkpoints are not loaded too often.
DEFAULT_ROUNDS = 3
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
    Path | None, typer.Option(help="Folder with benchmark rows: <benchmark>/<split>.jsonl[.gz].", callback=_folder)
]
Tasks = Annotated[
    str,
    typer.Option(
        help="Benchmarks, tasks of this project or of lm-eval (lm_eval:NAME where a benchmark has the same name), and "
        "YAML files of tasks, separated by commas. The default is all benchmarks."
    ),
]
IncludePath = Annotated[
    Path | None, typer.Option(help="Folder with lm-eval task files, whose tasks --tasks may name.", callback=_folder)
]
Prompts = Annotated[
    Literal["ours", "release"] | None,
    typer.Option(
        help="What the name of a benchmark in --tasks means: release, the prompts of ReFusion's release, as for real "
        "checkpoints by default, or ours, this project's, as the embedded models were trained on."
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Evaluate only so many items of every task: the first ones, or a spread over all rows where rows of one "
        "subject or time stand together (BBH, LiveCodeBench, MATH, MMLU-Pro, MMLU-Redux).",
    ),
]
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
        help="Run code that the file names: a decoder FILE.py:NAME or MODULE:NAME, a task file, a Ray cluster; and "
        "that of a checkpoint, for the release's own loop. Without this both are refused.",
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
Junit = Annotated[
    Path | None, typer.Option("--junit", help="Also write the conditions of --fail-if as JUnit XML, which CI shows.")
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


def option_names(names: str) -> dict[str, str]:
    """Field -> name of its option in Python, of a list FIELD or FIELD:OPTION."""
    return {name.partition(":")[0]: name.rpartition(":")[2] for name in names.split()}


def options_from(
    cls: type, names: str, *, without_default: Sequence[str] = (), helps: dict[str, str] | None = None
) -> Callable[[Callable], Callable]:
    """Gives a command one option for each of some fields of a settings class, FIELD or FIELD:OPTION.

    Name, type, default and help are those of the field. Values stay text: the settings class converts and checks them.
    The parameter `given` of the decorated function receives the mapping from field to value, and its place among the
    parameters is the place of the options in --help.
    """
    options = option_names(names)
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
