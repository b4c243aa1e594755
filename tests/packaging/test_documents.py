"""README and documentation: every command that they show exists, every link leads somewhere, every table is fresh."""

import ast
import csv
import importlib
import json
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pandas
import pytest
import typer
from packaging.requirements import InvalidRequirement, Requirement
from typer.main import get_command

from miniature.equal_start import ANSWER_COLUMNS, ANSWERS, SETTING_COLUMNS, SETTINGS
from refusion_eval.bench.gpu_report import Check, Result, write_report
from refusion_eval.cli import COMMANDS, TAKES_ALL_ARGUMENTS, app
from refusion_eval.cli.evaluate import with_system
from refusion_eval.cli.parameters import names_of
from refusion_eval.config import field_types
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError, DataError
from refusion_eval.evaluation.tasks import find_tasks
from refusion_eval.runs.model_args import ModelArgs, parse_model_args
from refusion_eval.runs.systems import published_systems

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


def texts_with_commands() -> dict[str, list[str]]:
    """Every text that prints commands, by its file: pages by their lines, code by its strings."""
    pages = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "scripts" / "ray.sbatch"]
    texts = {str(page.relative_to(ROOT)): page.read_text().splitlines() for page in pages}
    for file in sorted((ROOT / "refusion_eval").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        for node in nodes:
            if isinstance(node, ast.JoinedStr):  # an inserted value may be a name
                parts = (part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
                strings.append("".join(map(str, parts)))
        texts[str(file.relative_to(ROOT))] = strings
    return texts


PIP = re.compile(r"pip install((?: +(?:'[^']*'|\"[^\"]*\"|(?!in a checkout)[^\s'\"`;,()#&|]+))+)")
WITH_A_VALUE = ("-c", "--constraint", "-r", "--index-url", "--target")


def problems_of(command: str, extras: set[str]) -> list[str]:
    """What a shell or pip would not understand of the words after `pip install`."""
    problems = []
    raw = shlex.split(command, posix=False)
    bare = [word for word in raw if "[" in word and word[0] not in "'\""]
    problems += [f"{word}: a shell reads brackets outside quotes" for word in bare]
    words = iter(shlex.split(command))
    for word in words:
        if word in WITH_A_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            name = "refusion-eval" if word == "." else re.sub(r"^\.\[", "refusion-eval[", word)
            try:
                requirement = Requirement(name)
            except InvalidRequirement as error:
                problems.append(f"{word}: {error}")
                continue
            if requirement.name == "refusion-eval" and requirement.extras - extras - {"x"}:
                problems.append(f"{word}: there is no such extra")
    return problems


def test_every_line_that_installs_something_works_as_it_is_printed():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    found = {
        (file, command)
        for file, texts in texts_with_commands().items()
        for text in texts
        for command in PIP.findall(text)
    }
    assert len(found) > 15
    assert [(*one, problems) for one in sorted(found) if (problems := problems_of(one[1], extras))] == []


@pytest.mark.parametrize("command", ["'lm-eval[ifeval] nltk'", "lm-eval[ifeval]", "'.[no-such-extra]'", "'a b'"])
def test_a_line_that_installs_nothing_is_noticed(command):
    assert problems_of(command, {"server"})


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
        named = {name.partition(":")[0] for name in names_of(given.get("system", ""))}
        assert named <= {"all", "server", *published_systems()}
        check_tasks(given.get("tasks", ""))


def check_run(given: dict) -> None:
    """Settings, systems, decoders and tasks are known."""
    arguments = {key: given[key] for key in ("decoder", "base_url") if key in given}
    arguments |= {} if "system" in given else {"pretrained": "embedded"}
    settings = dict(text.split("=", 1) for text in given.get("settings", []))
    parse_model_args({**with_system(given.get("system"), arguments), **settings})
    check_tasks(given.get("tasks", ""))


def check_tasks(text: str) -> None:
    """Tasks are known, or task files of lm-eval."""
    names = [name for name in text.split(",") if name and not name.endswith(".yaml")]
    find_tasks([name if name.startswith(("mini_", "refusion_")) else f"refusion_{name}" for name in names])


def check_lm_eval(words: list[str]) -> None:
    for option in ("--model_args", "--gen_kwargs"):
        if option in words[:-1]:
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


def test_readme_and_the_first_page_link_every_guide_and_readme_every_explanation() -> None:
    for page, folders in ((ROOT / "README.md", ("guides", "explanations")), (DOCS / "index.md", ("guides",))):
        linked = {(page.parent / link[1]).resolve() for link in LINK.finditer(page.read_text("utf-8")) if link[1]}
        assert {path for folder in folders for path in (DOCS / folder).glob("*.md")} <= linked


def test_the_site_has_the_page_of_every_benchmark() -> None:
    named = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    folders = {path.parent.name for path in (ROOT / "tasks").glob("*/README.md")} - {"settings"}
    assert [name for name in sorted(folders) if f"- reference/tasks/{name}.md\n" not in named] == []


@pytest.fixture(scope="module")
def site():
    """The module docs/write.py."""
    sys.path.insert(0, str(DOCS))
    yield importlib.import_module("write")
    sys.path.remove(str(DOCS))


@pytest.fixture
def tables(site):
    """The module docs/generated_tables.py."""
    return importlib.import_module("generated_tables")


@pytest.mark.process
def test_what_the_pages_take_from_code_and_results_is_up_to_date(site) -> None:
    assert [name_of(path) for path in site.stale()] == [], "python docs/write.py writes these files again"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    for found in LINK.finditer(page.read_text(encoding="utf-8")):
        target = found[1] or found[2]
        assert not target or "://" in target or (page.parent / target).exists(), target


def test_the_reference_holds_every_command_decoder_setting_and_argument() -> None:
    names = ("command-line", "settings", "model-arguments")
    line, settings, arguments = ((DOCS / f"reference/{name}.md").read_text(encoding="utf-8") for name in names)
    assert [name for name in COMMANDS if f"refusion-eval {name}" not in line] == []
    for name, decoder in DECODERS.items():
        section = settings.split(f"## {name}\n")[1].split("\n## ")[0]
        cells = [re.split(r" (?<!\\)\|", line) for line in section.splitlines() if line.startswith("| `")]
        rows = {line[0].strip("| `"): line[-2] for line in cells}
        assert rows.keys() == field_types(decoder.Settings).keys()
        assert [name for name, meaning in rows.items() if not meaning.strip()] == []
    assert [name for name in field_types(ModelArgs) if f"| `{name}` |" not in arguments] == []


def test_every_table_is_on_a_page_and_none_is_empty(tables) -> None:
    shown = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = list(tables.BLOCK.finditer(text))
        assert len(blocks) == text.count(":begin"), name_of(page)
        for block in blocks:
            made = block[0].removeprefix(block[1]).removesuffix(block[4])
            is_table = "| :-- |" in made or "| --: |" in made
            assert is_table or made == tables.NO_GPU or block[2] in ("clone", *tables.TEXTS), block[2]
            assert made.strip(), block[2]
        shown.update(block[2] for block in blocks)
    assert {name for name in tables.MAKERS if not name.startswith("table")} <= shown


def test_a_stale_table_of_a_page_is_replaced(tables) -> None:
    blocks = ("results:begin mini_gsm8k", "results:end", "table6:begin", "table6:end")
    stale = "a\n" + "".join(f"<!-- {name} -->\n{'old' if 'begin' in name else 'b'}\n" for name in blocks)
    fresh = tables.regenerated(stale)
    assert "old" not in fresh
    assert fresh.startswith("a\n<!-- results:begin mini_gsm8k -->\n| Task | System |")
    rows = [line for line in fresh.partition("results:end")[0].splitlines() if "| ReFusion" in line]
    assert {line.split(" | ")[0] for line in rows} == {
        "| mini_gsm8k",
        "| mean (mini)",
    }
    assert "| *MMLU-Pro* | *paper* |" in fresh
    assert tables.regenerated(fresh) == fresh


def test_the_addresses_are_those_of_the_site_and_a_placeholder_is_called_so(
    tables, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    for host in ("example.org", "forge.test"):
        settings = f"repo_url: https://{host}/project\nsite_url: https://{host}/pages/\n"
        (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
        made = tables.regenerated("<!-- clone:begin -->\n<!-- clone:end -->\n")
        assert f"git clone https://{host}/project refusion_eval" in made
        assert f"(https://{host}/pages/sample-report.html)" in made
        assert ("does not name yet" in made) == (host == "example.org") == ("badge.svg" not in made)


def store_type(folder: Path, dtype: str) -> None:
    """The record of a course that computed in this type."""
    folder.mkdir()
    record = {"identity": {"optimisation": {"compute_dtype": dtype}}}
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")


def cells_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_a_course_that_computed_in_another_type_than_most_is_named(site, tmp_path: Path, monkeypatch) -> None:
    courses = importlib.import_module("generated_courses")
    monkeypatch.setattr(courses, "COURSES", tmp_path)
    trained = [("A", "a", 1), ("B", "b", 1), ("C", "c", 1), ("C", "c", 2)]
    settings = pandas.DataFrame(trained, columns=["system", "model", "seed"])
    for _, model, seed in trained:
        store_type(tmp_path / f"{model}_{seed}", "float32" if (model, seed) == ("c", 2) else "bfloat16")
    assert courses.trained_in(settings) == " Trained in bfloat16, but C (seed 2) in float32."
    assert courses.trained_in(settings, by_system=False) == " The courses computed in bfloat16 or float32."
    assert courses.trained_in(settings[settings.seed == 1]) == ""


def store_courses(right: dict[tuple[str, str], int], folder: Path) -> None:
    """Answers to 40 items of two tasks, of which so many are right, by system and model, and the settings."""
    answers = [
        (system, model, 1, task, item, int(item < number), 10, 5, 60)
        for (system, model), number in right.items()
        for task in ("a", "b")
        for item in range(40)
    ]
    settings = [(*course, 1, task, "{}", 50, 2, 11_300_000) for course in right for task in ("a", "b")]
    pandas.DataFrame(answers, columns=list(ANSWER_COLUMNS)).to_csv(folder / ANSWERS, index=False)
    pandas.DataFrame(settings, columns=list(SETTING_COLUMNS)).to_csv(folder / SETTINGS, index=False)


def test_a_control_stands_beside_the_ordinary_course_and_says_what_the_gain_becomes(
    site, tmp_path: Path, monkeypatch
) -> None:
    courses = importlib.import_module("generated_courses")
    monkeypatch.setattr(courses, "COURSES", tmp_path)
    # The verifier gains 10 items after the ordinary course and 2 after the control.
    right = {
        ("ReFusion", "refusion"): 20,
        ("ReFusion, verifier", "refusion"): 30,
        ("ReFusion, half-filled slots", "refusion_half_filled"): 25,
        ("ReFusion, verifier, half-filled slots", "refusion_half_filled"): 27,
    }
    store_courses(right, tmp_path)
    rows = cells_of(courses.controls(["refusion_half_filled"]))
    assert rows[0][3] == "minus the ordinary course"
    assert [(row[0], row[3].split()[:1]) for row in rows[2:]] == [
        ("ReFusion", []),
        ("ReFusion, half-filled slots", ["12.5"]),
        ("ReFusion, verifier", []),
        ("ReFusion, verifier, half-filled slots", ["-7.5"]),
    ]
    for name in ("refusion_1", "refusion_half_filled_1"):
        store_type(tmp_path / name, "float32")
    sentence, _, by_task = courses.verifier_control([]).partition("\n\n")
    assert re.findall(r"(-?[\d.]+) \[", sentence) == ["25.0", "5.0", "-20.0"] * 2
    assert "Over all 2 tasks" in sentence
    assert "the interval of the change shows a smaller gain" in sentence
    assert "Holm's correction leaves a change on a and b; the intervals are not adjusted:" in sentence
    assert [[cell.split()[0] for cell in row] for row in cells_of(by_task)[2:]] == [
        ["a", "25.0", "5.0", "-20.0"],
        ["b", "25.0", "5.0", "-20.0"],
    ]
    assert "1 training seed for the ordinary course and 1 training seed for the control" in sentence


def test_courses_of_fewer_rows_stand_beside_those_of_as_many_rows(site, tmp_path: Path, monkeypatch) -> None:
    courses = importlib.import_module("generated_courses")
    monkeypatch.setattr(courses, "COURSES", tmp_path)
    right = {
        ("AR-SFT", "autoregressive_sft"): 40,
        ("ReFusion", "refusion"): 20,
        ("I-DLM", "idlm"): 36,
        ("I-DLM, rows of ReFusion", "idlm_equal_rows"): 32,
    }
    store_courses(right, tmp_path)
    sentence, _, table = courses.equal_rows(["idlm_equal_rows"]).partition("\n\n")
    assert re.search(r"in points, as follows: I-DLM, rows of ReFusion -10\.0 \[-\d+\.\d, -\d\.\d\]\.$", sentence)
    rows = cells_of(table)
    assert (rows[0][1], rows[0][3]) == ("million rows trained", "minus AR-SFT")
    assert [(row[0], row[3].split()[:1]) for row in rows[2:]] == [
        ("AR-SFT", []),
        ("ReFusion", ["-50.0"]),
        ("I-DLM, rows of ReFusion", ["-20.0"]),
    ]


def test_systems_that_are_not_told_from_ar_sft_stand_with_their_difference(site) -> None:
    courses = importlib.import_module("generated_courses")

    def answers(**wrong: int) -> pandas.DataFrame:
        rows = [
            (system.replace("_", "-"), "m", 1, task, item, int(item >= number))
            for system, number in {"AR_SFT": 0, **wrong}.items()
            for task in ("a", "b")
            for item in range(50)
        ]
        return pandas.DataFrame(rows, columns=["system", "model", "seed", "task", "item", "right"])

    both = courses._against_ar_sft(answers(X=20, Y=30), ["X", "Y"])
    assert both == "every other system is less accurate than AR-SFT after Holm's correction for 2 comparisons"
    one = courses._against_ar_sft(answers(X=20, Y=1), ["X", "Y"])
    assert one.startswith(
        "the systems that are less accurate than AR-SFT after Holm's correction for 2 comparisons are X"
    )
    assert re.search(r" X; the differences of the others, in points, are Y -2\.0 \[-\d\.\d, \d\.\d\]$", one)


def test_a_system_that_is_worse_is_named_where_the_backbone_is_as_good_as_ar_sft(site, monkeypatch) -> None:
    pairs = importlib.import_module("generated_pairs")
    wrong = {"AR": (0, 20), "AR-SFT": (0, 0), "I-DLM": (1, 0), "LLaDA": (20, 20)}  # of 50, by task
    rows = [
        (task, item, system, int(item >= numbers[place]))
        for system, numbers in wrong.items()
        for place, task in enumerate(("mbpp", "parts"))
        for item in range(50)
    ]
    monkeypatch.setattr(pairs, "verdicts", lambda: pandas.DataFrame(rows, columns=["task", "item", "system", "right"]))
    said = pairs.tasks_alike([])
    assert said.startswith("On MBPP the backbone")
    assert "tells LLaDA alone from AR-SFT" in said


def test_parts_with_commas_are_listed_with_semicolons(site) -> None:
    listed = importlib.import_module("generated_common").listed
    assert listed(["1,000", "b", "c"]) == "1,000, b and c"
    assert listed(["a", "b, merged", "c"]) == "a; b, merged; and c"
    assert (listed(["a, b"]), listed([])) == ("a, b", "none")


def test_a_marker_that_names_no_table_is_an_error(tables) -> None:
    with pytest.raises(KeyError, match="tabel1"):
        tables.regenerated("<!-- tabel1:begin -->\n<!-- tabel1:end -->\n")


def test_the_table_of_gpus_is_made_of_their_results(tables, tmp_path: Path, monkeypatch) -> None:
    facts = {"device": "NVIDIA H100", "shape": "8B", "torch": "2", "cuda": "13", "driver": "580", "started": "now"}
    (tmp_path / "h100").mkdir()
    write_report(tmp_path / "h100", facts, [Check("kernels", 1.0, Result(True, "9.0 kernels a layer", {}), {})])
    block = "<!-- gpu:begin -->\n<!-- gpu:end -->\n"
    monkeypatch.setattr(tables, "GPU_RESULTS", tmp_path)
    assert "| h100 | NVIDIA H100 | kernels | passed | 9.0 kernels a layer |" in tables.regenerated(block)
    monkeypatch.setattr(tables, "GPU_RESULTS", tmp_path / "none")
    assert tables.NO_GPU in tables.regenerated(block)


def test_every_column_of_a_results_file_and_no_field_of_a_record_is_without_a_meaning() -> None:
    text = (DOCS / "reference" / "records.md").read_text(encoding="utf-8")
    meanings = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", text, re.MULTILINE))
    assert [name for name, meaning in meanings.items() if not meaning.strip()] == []
    with (ROOT / "results/embedded/artefacts/results.csv").open(encoding="utf-8", newline="") as file:
        columns = next(csv.reader(file))
    assert {"note", "setting_slot_size"} <= set(columns)
    assert {re.sub("^setting_.*", "setting_NAME", name) for name in columns} - meanings.keys() == set()
    assert {"p_holm", "speed_ratio_ci_low"} <= meanings.keys()


def test_every_metric_of_a_results_file_is_defined() -> None:
    defined = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    with (ROOT / "results/embedded/artefacts/results.csv").open(encoding="utf-8", newline="") as file:
        metrics = {row["metric"] for row in csv.DictReader(file)}
    assert {name for name in metrics if f"`{name.removesuffix('_mean')}" not in defined} == set()


# Rows of the table of docs/verification.md, and the files whose records each of its numbers counts.
COUNTED = {
    "ReFusion": ["golden"],
    "autoregressive": ["golden_ar"],
    "LLaDA, Dream, Fast-dLLM, D2F, BD3-LM": [
        "golden_llada golden_dream golden_fast_dllm_llada golden_fast_dllm_dream golden_d2f_llada golden_d2f_dream "
        "golden_bd3lm"
    ],
    "WeDLM": ["golden_wedlm"],
    "I-DLM": ["golden_idlm", "golden_idlm_sampled", "golden_idlm_accept"],
    "d3LLM on LLaDA and Dream": ["golden_d3llm_llada golden_d3llm_dream"],
    "dParallel on LLaDA and Dream": ["golden_dparallel_llada golden_dparallel_dream"],
    "SDAR, FreeDave's drafts": ["golden_sdar", "golden_freedave_sdar"],
    "Fast-dLLM v2": ["golden_fast_dllm_v2"],
    "LLaDA2": ["golden_llada2"],
}


def test_every_recorded_decoding_is_counted_on_the_page_of_verification() -> None:
    files = (ROOT / "tests" / "data" / "parity").rglob("golden*.jsonl")
    num_records = {path.stem: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    named = [name for parts in COUNTED.values() for part in parts for name in part.split()]
    assert sorted(named) == sorted(num_records)
    text = (DOCS / "verification.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (.*?) \| (.*) \|$", text, re.MULTILINE))
    for system, parts in COUNTED.items():
        counts = [sum(num_records[name] for name in part.split()) for part in parts]
        assert [int(number) for number in re.findall(r"(?<![\w-])\d+\b", rows[system])] == counts, system


@pytest.mark.process
def test_the_example_of_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) <= 10
    exec(code, {})
    printed = capsys.readouterr().out
    assert "The answer is" in printed
    assert re.search(r"\d+ tokens in \d+ forwards", printed)


def test_no_page_judges_by_whether_intervals_overlap() -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))}
    sentences = [
        sentence
        for text in pages.values()
        for sentence in re.split(r"(?<=[.:;|])\s", " ".join(text.split()))
        if re.search(r"\binterval", sentence) and re.search(r"\boverlap(s|ping)?\b", sentence)
    ]
    assert len(sentences) == 1  # the guide that warns of it
    assert "do not prove" in sentences[0]
