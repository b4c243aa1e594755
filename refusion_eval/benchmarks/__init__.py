"""All benchmarks by name: the questions that a model is asked, and the answers that are right.

Every benchmark is one file of this folder that ends with `BENCHMARK = Benchmark(...)`. Zero-shot, chat style. The
prompts `ours` were written for this project, and the embedded checkpoints were trained on the same words; the prompts
`release` are those that the paper's figures were measured with.
"""

import fnmatch
import functools
import importlib
import math
import os
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from refusion_eval.benchmarks.rows import (
    DATA_VARIABLE,
    Gap,
    Row,
    Sealing,
    Source,
    Turns,
    check_rows,
    find_rows,
    read_rows,
    shown_answer,
)
from refusion_eval.errors import DataError
from refusion_eval.paths import tasks_path

__all__ = [
    "BENCHMARKS", "LETTERS", "OTHER", "OURS", "OWN", "PUBLISHED", "RELEASE", "RELEASED", "SUITES", "SUITE_TASKS",
    "Benchmark", "CodeTest", "Extraction", "Extractor", "Item", "Prompts", "Row", "Source", "Task", "Turns",
    "find_task", "get_task", "is_mini", "is_sealed", "main_variant", "shown_answer",
]  # fmt: skip

# Names of prompts: those that this project wrote, those of the public release of ReFusion, and all others, which are
# those of lm-eval's own tasks, and own ones that were changed (by examples or a system instruction).
OURS, RELEASE, OTHER = "ours", "release", "other"
OWN = "own"  # of a task that is on none of the benchmarks, and so has no prompts but its own


@dataclass(frozen=True)
class Extraction:
    """The answer in its normal form, None if there is none; and the rule that found it, or why nothing was found."""

    answer: str | None
    how: str


Extractor = Callable[[str, Row], Extraction]


@dataclass(frozen=True)
class CodeTest:
    """Trusted source that raises if a program is wrong, and how the program runs; see `sandbox.Program`."""

    test: str
    helpers: str = ""
    timeout_s: float = 10
    memory_mb: int = 1024
    runner: str = ""
    call_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """One way to ask the questions of a benchmark, and the rules that find the answers in the responses.

    Attributes:
        user: a row -> the text of the user turn.
        system: a row -> the text of the system turn before it; None for no such turn.
        opened: beginning of the response, which the prompt ends with and the model continues.
        stop_strings: the text of a response ends at the first occurrence of any of them.
        filters: extraction rules by name; scores are reported with the first. The others are for text of another kind
            (base models whose text runs on) and for comparison with published extraction rules.
        gold_text: a row -> the right answer as a model would write it when it follows the prompt.
        version: recorded with every sample; to be raised when a prompt or a judgement changes.
        clean: turns a text into the one that the rules read; None for the text outside thinking blocks,
            without control tokens at the ends of lines.
        normalise: turns a published row and its 0-based number into the row that everything else reads; None if
            published rows are read as they are. A row for which it gives None is not asked.
        arrange: turns the published rows into those that `normalise` gets, where a row needs others; None if none does.
        is_right: compares (right answer, extracted answer); None for the comparison of the benchmark's kind.
        reads_solution: for mathematics, whether the extracted text and the row's whole solution are handed to
            math-verify, which finds the answers in both by itself.
        test: for code, a row -> its test; None for that of the benchmark.
        gap: if the response is to fill a gap behind `user`, that gap.
    """

    user: Callable[[Row], str]
    system: Callable[[Row], str] | None = None
    opened: str = ""
    stop_strings: Sequence[str] = ()
    filters: Mapping[str, Extractor]
    gold_text: Callable[[Row], str]
    version: str = "1.0"
    clean: Callable[[str], str] | None = None
    normalise: Callable[[Row, int], dict[str, Any] | None] | None = None
    arrange: Callable[[Sequence[Row]], list[dict[str, Any]]] | None = None
    is_right: Callable[[str, str], bool] | None = None
    reads_solution: bool = False
    test: Callable[[Row], CodeTest] | None = None
    gap: Gap | None = None


# How the families of models mark their thoughts, in any case: names of tags, then other pairs of marks.
_THOUGHT = (
    r"(?:(?:[a-z]{1,12}[:_])?think(?:ing)?|thoughts?|reasoning|reflection|scratchpad)"
    r"(?:\s(?:[a-z]{1,12}=[^<>]{0,40})?)?"
)
_THOUGHT_START = (
    rf"<{_THOUGHT}>|\[THINK\]|<\|(?:start_thinking|begin_of_thought|think(?:ing)?)\|>|◁think▷|<unused94>"
    r"|<\|channel\|?>\s?(?:analysis|thought)\b(?:[^<\n]{0,80}<\|message\|>)?"
)
_THOUGHT_END = (
    rf"</{_THOUGHT}>|\[/THINK\]|<\|(?:end_thinking|end_of_thought|/think(?:ing)?)\|>|◁/think▷|<unused95>|<channel\|>"
    r"|<\|channel\|>\s?(?:final|commentary)\b[^<\n]{0,80}<\|message\|>"
)
_THINK_TAG = re.compile(f"(?i:({_THOUGHT_START})|{_THOUGHT_END})")
# Special tokens of which these marks consist.
THOUGHT_TOKEN = re.compile(rf"(?i:{_THOUGHT_START}|{_THOUGHT_END}|<\|?channel\|?>|<\|message\|>)")

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # labels of choices, by position


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends with the mark that opens a thought."""
    return re.search(rf"(?i:{_THOUGHT_START})\s*\Z", prompt) is not None


def closes_thought(text: str) -> bool:
    """Whether a text ends with the mark that closes a thought."""
    return re.search(rf"(?i:{_THOUGHT_END})\Z", text) is not None


def thinking_blocks(text: str, *, is_open: bool = False) -> list[tuple[int, int]]:
    """The (start, end) of every thinking block with its marks; the last may be cut off by the end of the text."""
    # The prompt may have opened the first block (`is_open`); a first mark that closes a block says so too.
    tags = list(_THINK_TAG.finditer(text))
    start = 0 if is_open or (tags and not tags[0][1]) else None
    blocks = []
    for tag in tags:
        if tag[1]:
            start = tag.start() if start is None else start
        elif start is not None:
            blocks.append((start, tag.end()))
            start = None
    return blocks if start is None else [*blocks, (start, len(text))]


# Tokens that end a turn or fill a batch, as the families of models spell them.
_CONTROL_TOKEN = re.compile(
    r"<[|｜][^\s<>|｜]{1,40}[|｜]>|</s>|<(?:eos|pad|eot|EOT|eod|end_of_turn|end_of_utterance)>|\[(?:EOS|PAD)\]"
)


def without_control_tokens(text: str) -> str:
    """The text with line feeds as its line ends, and without the control tokens that end a line."""
    lines = text.replace("\r\n", "\n").split("\n")
    for number, line in enumerate(lines):
        end = len(line)
        for token in reversed(list(_CONTROL_TOKEN.finditer(line))):
            if line[token.end() : end].strip():
                break
            end = token.start()
        lines[number] = line[:end]
    return "\n".join(lines)


def without_thoughts(text: str) -> str:
    ends = [0, *(offset for block in thinking_blocks(text) for offset in block), len(text)]
    return "".join(text[start:end] for start, end in zip(ends[::2], ends[1::2], strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class Benchmark:
    """One benchmark, asked with one of its prompts. It equals only itself, and pickles as its name and its prompts.

    Attributes:
        name: the name in task names, settings files and data folders.
        title: the name in printed tables and figures.
        order: position among the benchmarks in tables; the paper's seven are 1 to 7.
        kind: how an extracted answer is compared with the right one. Of `instructions` the whole text is the answer,
            and the filters are the strict and the loose rule of IFEval.
        source: where the rows are published, and their columns.
        gold: a row -> the right answer in normal form (for code: the reference program).
        ours: the prompts of this project.
        release: the prompts of the public release; None if it did not ask this benchmark.
        id_column: column that identifies an item; None where rows have no id and their number serves.
        test: for code, a row -> its test.
        other_tests: for code, the names of filters whose texts are judged by other tests, and these.
        rows_of: what its folder is called, if several benchmarks ask the same published rows.
        settings_of: the benchmark whose row of a settings table applies where the table has none for this one.
        gen_length: tokens that an answer may have at least where the row of another benchmark applies.
        stock_tasks: patterns of the names of lm-eval's own tasks on this benchmark; the longest that fits decides.
        sealed_columns: columns that must not be written anywhere, each with its name in markers.
        prompts_name: which of the prompts are asked, `OURS` or `RELEASE`.
        is_control: whether it is asked for comparison with another one, so that no mean over tasks has it.
    """

    name: str
    title: str
    order: int = 100
    kind: Literal["number", "choice", "text", "mathematics", "instructions", "code"]
    source: Source
    gold: Callable[[Row], str]
    ours: Prompts
    release: Prompts | None = None
    id_column: str | None = None
    test: Callable[[Row], CodeTest] | None = None
    other_tests: Mapping[str, Callable[[Row], CodeTest]] = field(default_factory=dict)
    rows_of: str = ""
    settings_of: str = ""
    gen_length: int = 0
    stock_tasks: Sequence[str] = ()
    sealed_columns: Mapping[str, str] = field(default_factory=dict)
    prompts_name: str = OURS
    is_control: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _benchmark_named, (self.name, self.prompts_name)

    @property
    def prompts(self) -> Prompts:
        return self.release if self.prompts_name == RELEASE and self.release else self.ours

    @property
    def folder(self) -> str:
        """The name of its folder of task files, and of the one with its rows."""
        return self.rows_of or self.name

    @property
    def in_paper(self) -> bool:
        """Whether it is one of the paper's seven, which its tables, averages and claims are about."""
        return self.order <= 7

    @property
    def has_mini(self) -> bool:
        """Whether the project has synthetic items in its place, for the tiny embedded models."""
        return (tasks_path() / "mini" / self.name).is_dir()

    @property
    def metric(self) -> Literal["acc", "pass@1"]:
        """The name of the share of right items."""
        return "pass@1" if self.kind == "code" else "acc"

    @property
    def sealed(self) -> bool:
        """Whether the authors ask that the questions are published nowhere."""
        return bool(self.sealed_columns)

    @property
    def second_filter(self) -> str | None:
        """The filter that every text is judged by beside the default one."""
        # `strict` counts answers in exactly the form that the prompt asks for.
        if self.kind in ("number", "choice") and "strict" in self.prompts.filters:
            return "strict"
        if self.kind == "instructions":
            return "loose"
        return next(iter(self.other_tests), None)

    @property
    def default_filter(self) -> str:
        """The extraction rule that scores are reported with."""
        return next(iter(self.prompts.filters))

    def id_of(self, row: Row, row_number: int) -> str:
        """The item's id as text: its own id column, else its 0-based row number."""
        return str(row_number if self.id_column is None else row[self.id_column])

    def turns(self, row: Row) -> Turns:
        """The prompt for a row, which has the form that `normalise` of the prompts gives."""
        prompts, gap = self.prompts, self.prompts.gap
        system = prompts.system(row) if prompts.system else ""
        opened = gap.opened(row) if gap and gap.opened else prompts.opened
        return Turns(prompts.user(row), system, opened, gap and gap.suffix(row), bool(gap and gap.opened))

    def extract(self, text: str, row: Row, filter_name: str | None = None) -> Extraction:
        """Finds the answer in one text. Raises DataError if there is no such filter."""
        name, filters = filter_name or self.default_filter, self.prompts.filters
        if name not in filters:
            raise DataError(f"{self.name} has no filter {name!r}; it has {', '.join(filters)}")
        # Texts from elsewhere hold control tokens.
        clean = self.prompts.clean or (lambda text: without_control_tokens(without_thoughts(text)))
        return filters[name](clean(text), row)

    def check_gold(self, rows: Sequence[Row]) -> None:
        """Reads every right answer once, so that a malformed one is a DataError before any text is generated."""
        for number, row in enumerate(rows):
            try:
                self.gold(row)
            except DataError as problem:
                raise DataError(f"row {number} (from 0) of {problem}; correct the row") from problem


def _benchmark_named(name: str, prompts_name: str) -> Benchmark:  # has a name of its own, to be pickled
    return (RELEASED if prompts_name == RELEASE else BENCHMARKS)[name]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question of a task.

    Attributes:
        id: the benchmark's name for the item.
        number: 0-based number of its row.
        row: the row as it is hashed and judged; of a sealed benchmark it holds markers, and so do the turns.
        turns: what a model reads.
        sealing: turns markers into the texts that they stand for.
    """

    id: str
    number: int
    row: Row
    turns: Turns
    sealing: Sealing


@dataclass(frozen=True)
class Task:
    """A benchmark, or (`mini`) the synthetic look-alike of it that ships with the project."""

    benchmark: Benchmark
    mini: bool = False

    @property
    def name(self) -> str:
        """The name of the task in lm-eval, in records and on the command line."""
        prompts = "" if self.benchmark.prompts_name == OURS else f"_{self.benchmark.prompts_name}"
        return f"{'mini_' if self.mini else 'refusion_'}{self.benchmark.name}{prompts}"

    @property
    def sealed(self) -> bool:
        """Whether the questions must not be written anywhere; those of the look-alikes may be."""
        return self.benchmark.sealed and not self.mini

    def rows(self, data_dir: str | Path | None = None, split: str | None = None) -> list[dict[str, Any]]:
        """Loads and checks the rows, in file order, in hub columns unless the benchmark normalises them.

        Args:
            data_dir: holds `<benchmark>/<split>.jsonl` (or `.jsonl.gz`), or is itself the benchmark's folder; without
                it the environment variable REFUSION_EVAL_DATA is read. The look-alikes ship with the project.
            split: another split than the one that is evaluated.

        Raises:
            MissingRowsError: the rows are nowhere to be found; the message names every place tried.
            DataError: they are malformed.
        """
        name, folder, source = self.benchmark.name, self.benchmark.folder, self.benchmark.source
        if self.mini:
            path = tasks_path() / "mini" / folder / f"{split or 'test'}.jsonl"
            if not path.is_file():
                raise DataError(f"{path} is missing; it is part of the project, reinstall it")
            rows, origin = read_rows(path), str(path)
        else:
            directory = data_dir or os.environ.get(DATA_VARIABLE)
            rows, origin = find_rows(name, source, directory, split or source.split, folder=folder)
        check_rows(rows, source, origin)
        normalise, arrange = self.benchmark.prompts.normalise, self.benchmark.prompts.arrange
        rows = rows if arrange is None else arrange(rows)
        if normalise is None:
            return rows
        asked = [row for row in map(normalise, rows, range(len(rows))) if row is not None]
        if not asked:
            raise DataError(f"{origin} has no row that {name} asks; name a file with other rows, or another task")
        return asked

    def items(self, data_dir: str | Path | None = None) -> list[Item]:
        """Loads the questions, with every right answer checked; argument and errors as in `rows`."""
        rows = self.rows(data_dir)
        self.benchmark.check_gold(rows)
        sealing = Sealing()
        if self.sealed:
            rows = [self._sealed(row, sealing) for row in rows]
        id_of, turns = self.benchmark.id_of, self.benchmark.turns
        return [
            Item(id=id_of(row, number), number=number, row=row, turns=turns(row), sealing=sealing)
            for number, row in enumerate(as_table(rows))
        ]

    def _sealed(self, row: Row, sealing: Sealing) -> dict[str, Any]:
        name = f"{self.benchmark.name}/{row[self.benchmark.id_column or 'id']}"
        marks = self.benchmark.sealed_columns.items()
        return {**row, **{column: sealing.seal(f"{name}/{mark}", row[column]) for column, mark in marks}}


def as_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as lm-eval hands them over, which is what records hash: with the columns and types of one table."""
    import pyarrow  # takes a fifth of a second

    table: dict[str, list[Any]] = {}
    for column in rows[0] if rows else ():
        try:
            table[column] = pyarrow.array([row.get(column) for row in rows]).to_pylist()
        except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError) as problem:
            reasons = {OverflowError: "a whole number of more than 64 bits", UnicodeEncodeError: "half of a character"}
            found = reasons.get(type(problem), "several types")
            raise DataError(f"column {column!r} holds {found} ({problem}); correct the rows") from problem
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


_modules = [importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
_benchmarks: list[Benchmark] = [module.BENCHMARK for module in _modules if hasattr(module, "BENCHMARK")]
_variants = [variant for module in _modules for variant in getattr(module, "VARIANTS", ())]
_benchmarks = sorted([*_benchmarks, *_variants], key=lambda benchmark: (benchmark.order, benchmark.name))
_named: list[Callable[[str], Benchmark | None]] = [module.named for module in _modules if hasattr(module, "named")]


class _Benchmarks(dict[str, Benchmark]):
    """Benchmarks by name. It lists some, and finds also those that are made from their names, such as any window."""

    def __init__(self, fits: Callable[[Benchmark], bool]) -> None:
        super().__init__({one.name: one for one in _benchmarks if fits(one)})
        self._fits = fits

    def _made(self, name: str) -> Benchmark | None:
        return next((one for make in _named if (one := make(name)) is not None and self._fits(one)), None)

    def __missing__(self, name: str) -> Benchmark:
        if (found := self._made(name)) is None:
            raise KeyError(name)
        return found

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or self._made(str(name)) is not None


BENCHMARKS = _Benchmarks(lambda _: True)  # in the order of the paper's tables
PUBLISHED = _Benchmarks(lambda benchmark: benchmark.source.hub is not None)  # whose items are not all synthetic

# Name of a suite -> its benchmarks: those of the paper; and all others, each in its main variant.
SUITES = {
    "paper": [benchmark for benchmark in PUBLISHED.values() if benchmark.in_paper],
    "2026": [benchmark for benchmark in PUBLISHED.values() if not benchmark.in_paper and benchmark not in _variants],
}
SUITE_TASKS = {"paper": "refusion_suite", "2026": "refusion_suite_2026"}  # their names as tasks

# Folder of several benchmarks -> the name of its main one, which the name of the folder stands for.
_FAMILIES = {one.folder: one.name for one in SUITES["2026"] if one.folder not in BENCHMARKS}

# Those that the public release asks, with its prompts.
RELEASED = {
    name: replace(benchmark, prompts_name=RELEASE) for name, benchmark in BENCHMARKS.items() if benchmark.release
}


def main_variant(name: str) -> str:
    """The name of a benchmark that a user's name means: that of several variants, `mmlu_redux`, means the main one."""
    return _FAMILIES.get(name, name)


@functools.cache
def find_task(name: str) -> Task | None:
    """Recognises a task by the name that lm-eval and the records have for it; None if it is on none of the benchmarks.

    Names are `refusion_<benchmark>` and `mini_<benchmark>`, `refusion_<benchmark>_release` for the prompts of the
    release, all also with `_<anything>` after them, and those of lm-eval's own tasks on a benchmark.
    """
    prefix, _, benchmark = name.partition("_")
    if prefix == "refusion" and benchmark in PUBLISHED:
        return Task(PUBLISHED[benchmark])
    if prefix == "mini" and benchmark in BENCHMARKS and BENCHMARKS[benchmark].source.hub is None:
        return Task(BENCHMARKS[benchmark], mini=True)
    mini = [Task(benchmark, mini=True) for benchmark in BENCHMARKS.values()]
    tasks = [*map(Task, [*BENCHMARKS.values(), *RELEASED.values()]), *mini]
    if named := [task for task in tasks if f"{name}_".startswith(f"{task.name}_")]:
        return max(named, key=lambda task: len(task.name))
    stock = {pattern: benchmark for benchmark in BENCHMARKS.values() for pattern in benchmark.stock_tasks}
    fitting = max((pattern for pattern in stock if fnmatch.fnmatchcase(name, pattern)), key=len, default=None)
    return None if fitting is None else Task(stock[fitting])


def get_task(name: str) -> Task:
    """The task that a user means: a benchmark's plain name, or one that `find_task` recognises; else a ConfigError."""
    name = main_variant(name)
    if name in BENCHMARKS:
        return Task(BENCHMARKS[name], mini=name not in PUBLISHED)
    if (task := find_task(name)) is None:
        from refusion_eval.config import unknown_key  # it needs libraries, which eval.sh lacks before its set-up

        names = [*BENCHMARKS, *(Task(benchmark, mini=True).name for benchmark in BENCHMARKS.values())]
        raise unknown_key(name, names, what="task")
    return task


def is_mini(task: str) -> bool:
    """Whether a task is one of the synthetic look-alikes, which must never be taken for the real benchmark."""
    return (named := find_task(task)) is not None and named.mini


def is_sealed(task: str, benchmark: str = "") -> bool:
    """Whether a task asks questions that must not be written anywhere; `benchmark` is what its records name."""
    # A name that holds that of a sealed benchmark counts too: a user's own variant may be none of the known tasks.
    names = f"{task} {benchmark}".lower()
    return not is_mini(task) and any(bench.sealed and bench.name in names for bench in BENCHMARKS.values())
