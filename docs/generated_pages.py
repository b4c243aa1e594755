"""Pages of the documentation that are made from the code, by their path below docs/."""

import ast
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml
from generated_tables import table_of
from typer.main import get_command

from refusion_eval import api, benchmarks, decoders, errors, loading, sandbox, types
from refusion_eval.benchmarks.rows import Source
from refusion_eval.cli import COMMANDS, app
from refusion_eval.cli.parameters import descriptions
from refusion_eval.config import CheckpointOptions
from refusion_eval.data_frame import evaluate
from refusion_eval.decoders import DECODERS
from refusion_eval.results import data_frames
from refusion_eval.results.compare import COMPARISON_COLUMNS
from refusion_eval.results.data_frames import FIGURE_FACTS, SAMPLE_COLUMNS
from refusion_eval.results.results_file import column_meanings
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.release import ReleaseSettings
from refusion_eval.runs.systems import published_systems
from refusion_eval.sandbox.result import CheckResult, Program
from refusion_eval.store import manifest, records

ROOT = Path(__file__).resolve().parents[1]


def pages() -> dict[str, str]:
    """All of these pages: path below docs/ -> Markdown."""
    made = {
        "command-line": command_line,
        "settings": decoder_settings,
        "settings-tables": settings_tables,
        "model-arguments": model_arguments,
        "records": record_fields,
        "python": python,
    }
    return {f"reference/{name}.md": "\n".join(lines()) for name, lines in made.items()}


# --- Command line ---


def command_line() -> Iterator[str]:
    """Every command with its arguments and options, from the commands themselves."""
    group = get_command(app)
    yield "# Command line\n"
    yield "This page is made from the commands, so it shows every option that there is.\n"
    for name in (*SCRIPTS, *(name for name in COMMANDS if name not in SCRIPTS)):
        command = group.get_command(typer.Context(group), name)
        context = typer.Context(command)
        if name in SCRIPTS:
            yield f"## bash {SCRIPTS[name]}\n"
            yield f"`refusion-eval {name}` takes the same options in an environment of your own.\n"
        else:
            yield f"## refusion-eval {name}\n"
        yield f"{_plain(command.help)}\n"
        if name == "lm-eval":
            yield "All arguments go to lm-eval.\n"
        described = [*SCRIPT_OPTIONS.get(name, ()), *(each.get_help_record(context) for each in command.params)]
        if rows := [(_code(given), _plain(meaning)) for given, meaning in filter(None, described)]:
            yield table_of(("Argument or option", "Meaning"), rows, 2)
    yield "## Exit status\n"
    yield (
        "Every command ends with 0, 1, 2 or the status of a signal; the table says where 1 has a second meaning, and "
        "which commands give 3. `refusion-eval lm-eval` ends as lm-eval does.\n"
    )
    yield table_of(("Status", "Command", "Meaning"), [(str(status), *row) for status, *row in EXIT_STATUSES], 3)


# Exit status, the commands that give it, and what it means there.
EXIT_STATUSES = (
    (0, "all", "The command has done what was asked."),
    (1, "all", "An error ended it; the last line on stderr begins with `error:` and says what to do."),
    (1, "`suite`, `protocol run`", "A run or a figure failed. The others were made, and the table has them."),
    (1, "`protocol diff`", "At least one field differs."),
    (1, "`rescore`", "Verdicts by the task's own rule are not the recorded ones."),
    (
        2,
        "all",
        "The command line is wrong: there is no such command, option or value; in `suite` and `train` also: options do "
        "not fit each other. Nothing was done.",
    ),
    (
        3,
        "`run`, `suite`, `protocol run`, `sweep`, `flips`",
        "Samples could not be decoded or judged. In `run`, `suite` and `protocol run` also: a task has no rows. "
        "The tables and files are written all the same, and the same command tries again.",
    ),
    (3, "`rerun`", "At least one sample is not as recorded, or could not be made again."),
    (3, "`gpu-check`, `suite --gpu-check`", "At least one check failed."),
    (
        4,
        "`run`, `compare`",
        "A condition of `--fail-if` holds, or its figure is absent, for example because one of two runs lacks a task; "
        "3 goes before 4.",
    ),
    (4, "`check`", "With `--against-release`: tokens or forwards differ from those of the release."),
    ("130, 143", "all", "SIGINT or SIGTERM stopped it. The same command continues what records its samples."),
)

# Commands that a script of the repository starts, and what else these scripts take.
SCRIPTS = {"suite": "eval.sh", "train": "train.sh"}
_SET_UP = (
    ("--setup", "Make the environment and stop (the script only)."),
    ("--extra NAME", "Also install an extra of pyproject.toml, such as server (the script only). May be repeated."),
)
SCRIPT_OPTIONS = {
    "suite": [*_SET_UP],
    "train": [*_SET_UP, ("--deepspeed", "Install DeepSpeed too, which parallelism=zero2 needs (the script only).")],
}


# --- Settings classes ---


def decoder_settings() -> Iterator[str]:
    """The settings of every decoder, and where the values for each benchmark come from."""
    yield "# Settings of the decoders\n"
    yield (
        "Give a setting with `--set NAME=VALUE` (`refusion-eval run`), among the `--model_args` of `lm_eval`, or as "
        "an argument of `generate`. This page is made from the settings classes. The "
        "[settings tables](settings-tables.md) have the values for each benchmark with their source.\n"
    )
    for name, decoder in DECODERS.items():
        yield f"## {name}\n"
        yield f"{decoder.label}. Attention: {decoder.reads.attention.replace('_', '-')}.\n"
        yield settings_table(decoder.Settings)
    yield "## The release's own loop\n"
    yield "With `loop=release`, instead of those of a decoder: the arguments of the loop, by its own names.\n"
    yield settings_table(ReleaseSettings)


def model_arguments() -> Iterator[str]:
    """The arguments of `--model_args`, and the published systems."""
    yield "# Model arguments\n"
    yield (
        "These are the `--model_args` of `lm_eval --model refusion`; most are options of `refusion-eval run` too "
        "([command line](command-line.md#refusion-eval-run)). The [settings of the decoder](settings.md) are given "
        "beside them.\n"
    )
    yield settings_table(ModelArgs)
    yield "## Published systems\n"
    yield "`--system NAME` stands for a decoder, a checkpoint and an adapter (`tasks/settings/systems.toml`).\n"
    rows = [
        (f"`{name}`", each.label, f"`{each.decoder}`", _code(each.pretrained), _code(each.adapter), _code(each.serve))
        for name, each in published_systems().items()
    ]
    yield table_of(("Name", "System", "Decoder", "Checkpoint", "Adapter", "Server's command"), rows, 6)


def settings_table(cls: type) -> str:
    """Name, type, range, default and meaning of every field of a settings class."""
    hints = typing.get_type_hints(cls, include_extras=True)
    meanings = descriptions(cls)
    rows = [
        (f"`{each.name}`", *_type_and_range(hints[each.name]), _default(each), _plain(meanings.get(each.name, "")))
        for each in fields(cls)
        if each.compare or each.name == "settings"
    ]
    return table_of(("Name", "Type", "Range", "Default", "Meaning"), rows, 5)


def _type_and_range(annotation: Any) -> tuple[str, str]:
    """A type as people write it, and the bounds of its values."""
    if typing.get_origin(annotation) is Annotated:
        inner, *metadata = typing.get_args(annotation)
        name, bounds = _type_and_range(inner)
        own = [
            f"{sign} {getattr(each, key)}"
            for each in metadata
            for key, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
            if getattr(each, key, None) is not None
        ]
        return name, ", ".join(filter(None, (bounds, *own)))
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return "choice", ", ".join(f"`{choice}`" for choice in parts)
    if type(None) in parts:
        name, bounds = _type_and_range(next(each for each in parts if each is not type(None)))
        return f"{name} or none", bounds
    if typing.get_origin(annotation) in (tuple, Sequence):
        name, bounds = _type_and_range(parts[0])
        return f"list of {name}", bounds
    return getattr(annotation, "__name__", str(annotation)).lower(), ""


def _default(entry: Field) -> str:
    if entry.name in ("mask_id", "eos_ids"):
        return "of the checkpoint"
    if entry.default is MISSING:
        return "" if entry.default_factory is not MISSING else "needed"
    is_word = entry.default is None or isinstance(entry.default, bool)
    return f"`{str(entry.default).lower() if is_word else entry.default}`"


def settings_tables() -> Iterator[str]:
    """The format of the settings files, and all of them."""
    yield (ROOT / "tasks/settings/README.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "tasks/settings").glob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        yield f"## {path.stem}\n"
        for preset, table in content.get("presets", {"": content}).items():
            name = f"Table `{preset}`. " if preset else ""
            yield f"{name}Source: {_plain(table.get('source', ''))}.\n"
            yield table_of(("Benchmark", "Settings", "Other source"), list(_preset_rows(table)), 3)


def _preset_rows(table: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for benchmark, values in table["benchmarks"].items():
        settings = {**table.get("common", {}), **values}
        source = settings.pop("source", "")
        yield benchmark, ", ".join(f"`{key}={value}`" for key, value in settings.items()), _plain(source)


# --- Records ---


def record_fields() -> Iterator[str]:
    """What a run directory holds, and the columns of the CSV files."""
    yield "# Records and CSV columns\n"
    yield (
        "A run directory holds `run.json` (what was run, for people and programs), `records.sqlite` (every sample and "
        "every verdict), `results.csv` and `table.md`. Open it with `refusion_eval.results.load` "
        "([Python](python.md#results)) or write its samples as JSON lines with `refusion-eval export`, "
        "rather than by its tables, which may change.\n"
    )
    for title, cls in (
        ("A run (`run.json`)", manifest.Manifest),
        ("A machine", manifest.Hardware),
        ("A sample", records.Sample),
        ("A verdict", records.ScoreRow),
    ):
        yield f"## {title}\n"
        yield _fields_table(cls)
    yield "## Columns of the CSV of figures\n"
    yield (
        "`refusion-eval table RUN --csv FILE`, `table RUN --json` and `results.figures` have one row for each figure. "
        "Columns from `prompts` on are there only where a figure of the file has another value than the usual one. In "
        "CSV files yes and no stand for true and false.\n"
    )
    yield _meanings_table(column_meanings())
    names = ", ".join(f"`{name}`" for name in FIGURE_FACTS)
    yield f"`results.figures` adds {names} ([Python](python.md#figures)).\n"
    yield "## Columns of the CSV of two runs\n"
    yield "`refusion-eval compare A B --csv FILE` and `compare A B --json` have a row for each task and their mean.\n"
    yield _meanings_table(COMPARISON_COLUMNS)
    yield "## Columns of `results.load`, and keys of `refusion-eval export`\n"
    yield ", ".join(f"`{name}`" for name in SAMPLE_COLUMNS) + "\n"


def _fields_table(cls: type) -> str:
    meanings = descriptions(cls)
    return _meanings_table({each.name: meanings.get(each.name, "") for each in fields(cls)}, "Field")


def _meanings_table(meanings: Mapping[str, str], what: str = "Column") -> str:
    return table_of((what, "Meaning"), [(f"`{name}`", _plain(meaning)) for name, meaning in meanings.items()], 2)


# --- Python ---

# Title -> what is documented there: objects, or all public classes and functions of a module.
INTERFACE: Mapping[str, Sequence[Any]] = {
    "Decoding": (
        *(loading.load_model, CheckpointOptions, loading.LoadedModel, api.generate, api.generate_many),
        *(api.generate_stream, api.decoder_settings, api.score_tokens, api.score_tokens_many),
    ),
    "Evaluating": (evaluate,),
    "Results": (data_frames.load, data_frames.figures),
    "Types": (types,),
    "Decoders": (decoders.Decoder, decoders.Reads, decoders.Style),
    "Benchmarks": (
        *(benchmarks.Benchmark, benchmarks.Item, benchmarks.Task, benchmarks.Prompts, benchmarks.Extraction),
        *(benchmarks.CodeTest, Source),
    ),
    "Sandbox": (sandbox.check_program, sandbox.check_programs, Program, CheckResult),
    "Errors": (errors,),
}


def python() -> Iterator[str]:
    """Signatures and docstrings of the Python interface."""
    yield "# Python\n"
    yield "This page is made from the signatures and docstrings of the Python interface.\n"
    for title, objects in INTERFACE.items():
        yield f"## {title}\n"
        for each in objects:
            source = textwrap.dedent(inspect.getsource(each))
            nodes = ast.parse(source).body
            for node in nodes if not inspect.ismodule(each) else filter(_is_public, nodes):
                yield f"### {node.name}\n"
                yield _signature(node, source)
                yield _docstring(node)
                for method in filter(_is_public, node.body if isinstance(node, ast.ClassDef) else ()):
                    yield _signature(method, source)
                    yield _docstring(method)


def _is_public(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is not None
    )


def _signature(node: Any, source: str) -> str:
    """The head of a function or class, and the fields of a class, as they stand in the source."""
    first = min(each.lineno for each in (node, *node.decorator_list))
    head = source.splitlines()[first - 1 : node.body[0].lineno - 1]
    if isinstance(node, ast.ClassDef):
        head += [f"    {ast.get_source_segment(source, each)}" for each in node.body if isinstance(each, ast.AnnAssign)]
    return f"```python\n{textwrap.dedent(chr(10).join(head))}\n```\n"


def _docstring(node: Any) -> str:
    """A docstring of Google form as Markdown: its sections are lists."""
    text, section = "", ""
    for line in (ast.get_docstring(node) or "").splitlines():
        if found := re.fullmatch(r"(Args|Attributes|Returns|Yields|Raises):", line):
            section = found[1]
            text += f"**{section}**\n\n"
        elif section in ("Args", "Attributes", "Raises"):
            text += re.sub(r"^([*\w][\w, *]*): ", r"- `\1`: ", re.sub("^ {4}(?:  )?", "", line)) + "\n"
        else:
            text += (line.removeprefix(" " * 4) if section else line) + "\n"
    return text


def _plain(text: str | None) -> str:
    """Text in one line without literal blocks of reStructuredText, safe inside a table."""
    return " ".join((text or "").replace("<", "&lt;").split())


def _code(text: str | None) -> str:
    return f"`{text.strip()}`" if text else ""
