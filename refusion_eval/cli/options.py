"""Options that several commands share, and options that are made from the fields of a settings class."""

import inspect
import re
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from refusion_eval.errors import ConfigError

Sandbox = Annotated[
    Literal["auto", "none"],
    typer.Option(help="Isolation of model-written programs: auto takes the best that works here, none runs them bare."),
]


def _folder(path: Path | None) -> Path | None:
    """Refuses a folder that does not exist, even if the tasks at hand would not have read it."""
    if path is not None and not path.is_dir():
        raise ConfigError(f"--data: there is no directory {path}; name the folder of the rows, or leave the option out")
    return path


Data = Annotated[
    Path | None,
    typer.Option(help="Folder with benchmark rows: <benchmark>/<split>.jsonl[.gz].", callback=_folder),
]
Baseline = Annotated[
    str | None,
    typer.Option(help="Folder name of the run that speed-ups are relative to. By default it is found by its backbone."),
]
Csv = Annotated[Path | None, typer.Option(help="Also write every figure as CSV.")]
Markdown = Annotated[Path | None, typer.Option(help="Also write the table as Markdown.")]
Out = Annotated[Path, typer.Option(help="Folder for the files.")]
JsonOut = Annotated[Path | None, typer.Option(help="Also write all figures to this JSON file.")]
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


def options_from(
    cls: type, *names: str, without_default: Sequence[str] = (), helps: dict[str, str] | None = None
) -> Callable[[Callable], Callable]:
    """Gives a command one option for each of some fields of a settings class.

    The option takes its name, type, default and help from the field: the help is the field's entry in the docstring of
    the class. Values stay text: the settings class converts and checks them. The decorated function has a parameter
    `given`, which receives the mapping from field to value; its place among the parameters is the place of the options
    in --help.

    Args:
        cls: the settings class.
        names: the fields; "field:option" where the option has another name than the field.
        without_default: fields that are not in `given` unless the user names the option.
        helps: field -> help, where it differs from the docstring.
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
        # typer reads the signature; an order that Python forbids (a default before none) is none to it.
        keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in signature]
        with_options.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
        return with_options

    return decorate


def descriptions(cls: type) -> dict[str, str]:
    """Returns field -> description, from the section "Attributes" of a class's docstring (Google form)."""
    section = re.search(r"^Attributes:\n((?:    .*\n?|\n)+)", inspect.getdoc(cls) or "", re.MULTILINE)
    entries = re.findall(r"^    (\w+): ((?:.*\n?)(?:^     .*\n?)*)", section[1] if section else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _parameter(cls: type, entry: Any, option: str, text: str, *, has_default: bool) -> inspect.Parameter:
    wanted = typing.get_type_hints(cls)[entry.name]
    default = entry.default if has_default and entry.default is not MISSING else None
    if bool in (wanted, *typing.get_args(wanted)):
        # A flag that is on by default needs a way to switch it off.
        flag = f"--{option.replace('_', '-')}"
        flags = [f"{flag}/--no-{option.replace('_', '-')}"] if entry.default is True else [flag]
        return _keyword(option, default, Annotated[bool | None, typer.Option(*flags, help=text, show_default=False)])
    default = None if default is None else str(default)
    return _keyword(option, default, Annotated[str | None, typer.Option(help=text, metavar=_type_name(wanted))])


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _type_name(wanted: Any) -> str:
    """How --help names a type: int, text, or the choices."""
    if typing.get_origin(wanted) is Literal:
        return f"<{'|'.join(map(str, typing.get_args(wanted)))}>"
    inner = [argument for argument in typing.get_args(wanted) if argument is not type(None)]
    return _type_name(inner[0]) if inner else f"<{wanted.__name__}>"
