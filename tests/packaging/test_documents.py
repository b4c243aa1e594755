"""README and documentation: every command that they show exists, every link leads somewhere, every table is fresh."""

import ast
import csv
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from refusion_eval.cli import COMMANDS, TAKES_ALL_ARGUMENTS, app, names_of
from refusion_eval.cli.evaluate import with_system
from refusion_eval.config import field_types
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError, DataError
from refusion_eval.evaluation.loop import find_tasks
from refusion_eval.runs.model_args import ModelArgs, parse_model_args, published_systems

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "performance/README.md")),
    *sorted(DOCS.rglob("*.md")),
]
MOST_LINES_OF_README = 150
CODE = re.compile(r"^```(?:bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)#\s]+)?(?:#[^)]*)?\)|!\[[^\]]*\]\(([^)\s]+)\)")
# What a reader puts in place of these words.
PLACEHOLDERS = {"...", "RUN...", "OPTION..."}
LAUNCHERS = ("torchrun", "accelerate")
UsageError = typer.BadParameter.__base__  # of typer or of click, as the version of typer has it
REFUSED = (AssertionError, ConfigError, DataError, SystemExit, UsageError)


def commands_of(text: str) -> list[str]:
    """Every command of the code blocks, and every one that stands in a sentence."""
    found = []
    for block in CODE.findall(text):
        joined = re.sub(r"\\\n\s*", " ", block)
        for command in split_outside_quotes(joined):
            found += [part.strip() for part in command.split(" && ")]
    inline = (code for code in INLINE.findall(CODE.sub("", text)) if is_ours(code.split()))
    return [command for command in [*found, *inline] if is_ours(command.split())]


def split_outside_quotes(block: str) -> list[str]:
    """The lines of a block; a quoted text may go over several of them."""
    lines, open_line = [], ""
    for line in block.splitlines():
        open_line = f"{open_line}\n{line}" if open_line else line
        if open_line.count('"') % 2 == 0:
            lines.append(open_line)
            open_line = ""
    return lines


def is_ours(words: list[str]) -> bool:
    """Whether a command line starts something of this project."""
    return bool(words) and (
        words[0] in ("refusion-eval", "lm_eval", "sbatch", *LAUNCHERS)
        or (words[0] in ("bash", "python") and len(words) > 1 and not words[1].startswith("-S"))
    )


def check(command: str) -> None:
    """Raises one of `REFUSED` unless the command line can be read."""
    words = [word for word in shlex.split(command, comments=True) if word not in (*PLACEHOLDERS, "--help")]
    if words[0] in LAUNCHERS:
        words = words[words.index("-m") :]
    if words[0] == "python":
        words = words[1:]
    if words[:2] == ["-m", "refusion_eval"]:
        check_command(words[2:])
    elif words[:2] == ["-m", "lm_eval"] or words[0] == "lm_eval":
        check_lm_eval(words)
    elif words[0] == "-m":
        check_module(words[1], words[2:])
    elif words[0] == "refusion-eval":
        check_command(words[1:])
    elif words[0] == "sbatch":
        script = next(word for word in words if word.endswith(".sbatch"))
        assert (ROOT / script).is_file()
        check_command(["run", *words[words.index(script) + 1 :]])
    elif words[:2] == ["bash", "eval.sh"]:
        check_command(["suite", *(word for word in words[2:] if word != "--setup")])
    elif words[:2] == ["bash", "train.sh"]:
        check_command(["train", *(word for word in words[2:] if word not in ("--setup", "--deepspeed"))])
    elif words[0] == "bash":
        assert (ROOT / words[1]).is_file()
    else:
        check_source(ROOT / words[0], words[1:])


def check_command(words: list[str]) -> None:
    name, *words = words
    assert name in COMMANDS, name
    if name == TAKES_ALL_ARGUMENTS:
        return
    group = get_command(app)
    command = group.get_command(typer.Context(group), name)
    given, rest, _ = command.make_parser(typer.Context(command)).parse_args(
        [re.sub("^N$", "1", word) for word in words]
    )
    assert not rest, rest
    missing = [each.name for each in command.params if each.required and each.name not in given]
    assert not missing or len(words) == 0, missing
    if name == "run":
        check_run(given)
    if name == "suite":
        assert {*names_of(given.get("system", ""))} <= {"all", *published_systems()}
        check_tasks(given.get("tasks", ""))


def check_run(given: dict) -> None:
    """Settings, systems, decoders and tasks are known."""
    arguments = {"pretrained": "embedded"} | {key: given[key] for key in ("decoder",) if key in given}
    settings = dict(text.split("=", 1) for text in given.get("settings", []))
    parse_model_args({**with_system(given.get("system"), arguments if "system" not in given else {}), **settings})
    check_tasks(given.get("tasks", ""))


def check_tasks(text: str) -> None:
    """Tasks are known, or task files of lm-eval."""
    names = [name for name in text.split(",") if name and not name.endswith(".yaml")]
    find_tasks([name if name.startswith(("mini_", "refusion_")) else f"refusion_{name}" for name in names])


def check_lm_eval(words: list[str]) -> None:
    for option in ("--model_args", "--gen_kwargs"):
        if option in words:
            pairs = dict(pair.split("=", 1) for pair in words[words.index(option) + 1].split(","))
            parse_model_args({"pretrained": "embedded"} | pairs)
    if "--model" in words:
        assert words[words.index("--model") + 1] == "refusion"


def check_module(name: str, words: list[str]) -> None:
    if name == "pytest":
        return
    check_source(ROOT / f"{name.replace('.', '/')}.py", words)


def check_source(script: Path, words: list[str]) -> None:
    """The options of a script occur in its source, or in that of its neighbours, from which some take them."""
    assert script.is_file(), script
    sources = [script, *script.parent.glob("*.py")]
    nodes = [node for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    known = {node.value for node in nodes if isinstance(node, ast.Constant) and str(node.value).startswith("--")}
    # typer makes options of the parameters of a command.
    known |= {f"--{node.arg.replace('_', '-')}" for node in nodes if isinstance(node, ast.arg)}
    assert {word for word in words if word.startswith("--")} <= known


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_commands_are_found_in_blocks_and_in_sentences() -> None:
    block = "```bash\nrefusion-eval run --limit 2 \\\n   --tasks gsm8k  # why\npip install x\n```\n"
    text = f"{block}and `bash eval.sh --limit 1`."
    assert commands_of(text) == ["refusion-eval run --limit 2  --tasks gsm8k  # why", "bash eval.sh --limit 1"]


@pytest.mark.parametrize(
    "command",
    [
        "refusion-eval rum --limit 2",
        "refusion-eval run --limits 2",
        "refusion-eval run --set tau_slut=1",
        "refusion-eval run --system refusal",
        "refusion-eval run --tasks gsm9k",
        "bash eval.sh --limits 2",
        "bash train.sh --confg tiny",
        "bash test2.sh",
        "python performance/soak.py --max-gem 1",
        "python performance/soap.py",
        "lm_eval --model refusion --model_args pretrained=embedded,slot_sise=1",
        "torchrun --nproc-per-node 8 -m refusion_eval run --sistem refusion",
    ],
)
def test_a_command_that_does_not_exist_is_noticed(command: str) -> None:
    with pytest.raises(REFUSED):
        check(command)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_of_a_page_can_be_read(page: Path) -> None:
    for command in commands_of(page.read_text(encoding="utf-8")):
        try:
            check(command)
        except REFUSED as error:
            pytest.fail(f"{command}: {error}")


def test_the_pages_show_many_commands() -> None:
    assert sum(len(commands_of(page.read_text(encoding="utf-8"))) for page in PAGES) > 120


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_README


@pytest.fixture(scope="module")
def site():
    """The module docs/generated_pages.py, beside which docs/generated_tables.py and plots/readme_table.py are found."""
    sys.path[:0] = [str(ROOT / "plots"), str(DOCS)]
    yield importlib.import_module("generated_pages")
    del sys.path[:2]


@pytest.fixture(scope="module")
def generated(site) -> dict[str, str]:
    """The pages that are made when the documentation is built."""
    return site.pages()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_to_a_page_or_a_file(page: Path, generated: dict[str, str]) -> None:
    made = {DOCS / name for name in generated}
    for found in LINK.finditer(page.read_text(encoding="utf-8")):
        target = found[1] or found[2]
        if target and "://" not in target:
            path = (page.parent / target).resolve()
            assert path.exists() or path in made, target


def test_the_generated_pages_hold_every_command_decoder_setting_and_argument(generated: dict[str, str]) -> None:
    line, settings = generated["reference/command-line.md"], generated["reference/settings.md"]
    assert [name for name in COMMANDS if f"refusion-eval {name}" not in line] == []
    for name, decoder in DECODERS.items():
        section = settings.split(f"## {name} ")[1].split("\n## ")[0]
        cells = [re.split(r" (?<!\\)\|", line) for line in section.splitlines() if line.startswith("| `")]
        rows = {line[0].strip("| `"): line[-2] for line in cells}
        assert rows.keys() == field_types(decoder.Settings).keys()
        assert [name for name, meaning in rows.items() if not meaning.strip()] == []
    arguments = generated["reference/model-arguments.md"]
    assert [name for name in field_types(ModelArgs) if f"| `{name}` |" not in arguments] == []


@pytest.mark.process
def test_every_table_of_a_page_is_made_of_the_files_of_results(site) -> None:
    tool, makers = importlib.import_module("readme_table"), importlib.import_module("generated_tables").MAKERS
    shown = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        markers = [(found[2], found[3]) for found in tool.BLOCK.finditer(text)]
        assert len(markers) == text.count(":begin"), name_of(page)
        shown.update(name for name, _ in markers)
        for found in tool.BLOCK.finditer(tool.regenerated(text, more=makers)):
            made = found[0].removeprefix(found[1]).removesuffix(found[4])
            assert "| :-- |" in made or "| --: |" in made or made == tool.NO_GPU, found[2]
    assert makers.keys() <= shown


def test_every_metric_of_a_results_file_is_defined() -> None:
    defined = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    with (ROOT / "results/embedded/artefacts/results.csv").open(encoding="utf-8", newline="") as file:
        metrics = {row["metric"] for row in csv.DictReader(file)}
    assert {name for name in metrics if f"`{name.removesuffix('_mean')}" not in defined} == set()


@pytest.mark.process
def test_the_example_of_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) <= 10
    exec(code, {})
    printed = capsys.readouterr().out
    assert "The answer is" in printed
    assert re.search(r"\d+ tokens in \d+ forwards", printed)
