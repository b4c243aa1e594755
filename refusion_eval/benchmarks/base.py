"""What a benchmark is: where its rows come from, what is asked, which answer is right, and how a text is judged.

Every benchmark is one file of this folder that ends with `BENCHMARK = Benchmark(...)`. Zero-shot, chat style; the
wording of the prompts is this project's own, and the embedded checkpoints were trained on the same words.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from refusion_eval.benchmarks.checks import check_rows
from refusion_eval.benchmarks.rows import DATA_VARIABLE, Row, Source, find_rows, read_rows
from refusion_eval.benchmarks.sealing import Sealing
from refusion_eval.errors import DataError
from refusion_eval.paths import tasks_path

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # labels of choices, by position


@dataclass(frozen=True)
class Extraction:
    """What an extraction rule found in one text.

    Attributes:
        answer: the answer in its normal form, None if there is none.
        how: the rule that found it ("statement", "last number", ...), or why nothing was found.
    """

    answer: str | None
    how: str


Extractor = Callable[[str, Row], Extraction]


@dataclass(frozen=True)
class CodeTest:
    """The test of one program.

    Attributes:
        test: trusted source that raises if the program is wrong.
        helpers: trusted source that the test needs.
        timeout_s: processor seconds that the program may take.
    """

    test: str
    helpers: str = ""
    timeout_s: float = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class Benchmark:
    """One benchmark. A benchmark equals only itself, and pickles as its name.

    Attributes:
        name: the name in task names, settings files and data folders.
        title: the name in printed tables and figures.
        order: position among the benchmarks in tables; the paper's seven are 1 to 7.
        kind: how an extracted answer is compared with the right one.
        source: where the rows are published, and their columns.
        prompt: a row -> the text of the single user turn.
        gold: a row -> the right answer in normal form (for code: the reference program).
        gold_text: a row -> the right answer as a model would write it when it follows the prompt.
        filters: extraction rules by name; scores are reported with the first. The others are for text of another kind
            (base models whose text runs on) and for comparison with published extraction rules.
        id_column: column that identifies an item; None where rows have no id and their number serves.
        test: for code, a row -> its test.
        stock_tasks: patterns of the names of lm-eval's own tasks on this benchmark.
        version: recorded with every sample; to be raised when a prompt or a judgement changes.
        normalise: turns a published row into the one that the other fields read; None if they read it as it is.
        sealed_columns: columns that must not be written anywhere, each with its name in markers.
    """

    name: str
    title: str
    order: int = 100
    kind: Literal["number", "choice", "mathematics", "code"]
    source: Source
    prompt: Callable[[Row], str]
    gold: Callable[[Row], str]
    gold_text: Callable[[Row], str]
    filters: Mapping[str, Extractor]
    id_column: str | None = None
    test: Callable[[Row], CodeTest] | None = None
    stock_tasks: Sequence[str] = ()
    version: str = "1.0"
    normalise: Callable[[Row], dict[str, Any]] | None = None
    sealed_columns: Mapping[str, str] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return _benchmark_named, (self.name,)

    @property
    def metric(self) -> Literal["acc", "pass@1"]:
        """The name of the share of right items."""
        return "pass@1" if self.kind == "code" else "acc"

    @property
    def sealed(self) -> bool:
        """Whether the authors ask that the questions are published nowhere."""
        return bool(self.sealed_columns)

    @property
    def has_strict_score(self) -> bool:
        """Whether answers in exactly the form that the prompt asks for are counted beside all right ones."""
        return self.kind in ("number", "choice")

    @property
    def default_filter(self) -> str:
        """The extraction rule that scores are reported with."""
        return next(iter(self.filters))

    def id_of(self, row: Row, row_number: int) -> str:
        """The item's id as text: its own id column, else its 0-based row number."""
        return str(row_number if self.id_column is None else row[self.id_column])

    def extract(self, text: str, row: Row, filter_name: str | None = None) -> Extraction:
        """Finds the answer in one text.

        Raises:
            DataError: there is no such filter.
        """
        name = filter_name or self.default_filter
        if name not in self.filters:
            raise DataError(f"{self.name} has no filter {name!r}; it has {', '.join(self.filters)}")
        return self.filters[name](text, row)

    def check_gold(self, rows: Sequence[Row]) -> None:
        """Reads every right answer once, so that a malformed one is known before any text is generated.

        Raises:
            DataError: an answer is malformed; the message names its row.
        """
        for number, row in enumerate(rows):
            try:
                self.gold(row)
            except DataError as problem:
                raise DataError(f"row {number} (from 0) of {problem}; correct the row") from problem


def _benchmark_named(name: str) -> Benchmark:
    from refusion_eval.benchmarks import BENCHMARKS  # the package imports this module

    return BENCHMARKS[name]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question of a task.

    Attributes:
        id: the benchmark's name for the item.
        number: 0-based number of its row.
        row: the row as it is hashed and judged; of a sealed benchmark it holds markers.
        prompt: the user turn; of a sealed benchmark it holds markers.
        sealing: turns markers into the texts that they stand for.
    """

    id: str
    number: int
    row: Row
    prompt: str
    sealing: Sealing


@dataclass(frozen=True)
class Task:
    """A benchmark, or the synthetic look-alike of it that ships with the project.

    Attributes:
        benchmark: what is asked and judged.
        mini: whether the rows are the look-alike's.
    """

    benchmark: Benchmark
    mini: bool = False

    @property
    def name(self) -> str:
        """The name of the task in lm-eval, in records and on the command line."""
        return f"{'mini_' if self.mini else 'refusion_'}{self.benchmark.name}"

    @property
    def title(self) -> str:
        """The name in printed tables and figures."""
        return f"{'mini ' if self.mini else ''}{self.benchmark.title}"

    @property
    def sealed(self) -> bool:
        """Whether the questions must not be written anywhere; those of the look-alikes may be."""
        return self.benchmark.sealed and not self.mini

    def rows(self, data_dir: str | Path | None = None, split: str | None = None) -> list[dict[str, Any]]:
        """Loads and checks the rows.

        Args:
            data_dir: holds `<benchmark>/<split>.jsonl` (or `.jsonl.gz`), or is itself the benchmark's folder; without
                it the environment variable REFUSION_EVAL_DATA is read. The look-alikes ship with the project.
            split: another split than the one that is evaluated.

        Returns:
            Rows in file order, in hub columns unless the benchmark normalises them.

        Raises:
            DataError: the rows are nowhere to be found (the message names every place tried), or malformed.
        """
        name, source = self.benchmark.name, self.benchmark.source
        if self.mini:
            path = tasks_path() / "mini" / name / f"{split or 'test'}.jsonl"
            if not path.is_file():
                raise DataError(f"{path} is missing; it is part of the project, reinstall it")
            rows, origin = read_rows(path), str(path)
        else:
            rows, origin = find_rows(name, source, data_dir or os.environ.get(DATA_VARIABLE), split or source.split)
        check_rows(rows, source, origin)
        return rows if self.benchmark.normalise is None else [self.benchmark.normalise(row) for row in rows]

    def items(self, data_dir: str | Path | None = None) -> list[Item]:
        """Loads the questions, with every right answer checked.

        Args:
            data_dir: as in `rows`.

        Raises:
            DataError: as in `rows`, or a right answer is malformed.
        """
        rows = self.rows(data_dir)
        self.benchmark.check_gold(rows)
        sealing = Sealing()
        if self.sealed:
            rows = [self._sealed(row, sealing) for row in rows]
        return [
            Item(
                id=self.benchmark.id_of(row, number),
                number=number,
                row=row,
                prompt=self.benchmark.prompt(row),
                sealing=sealing,
            )
            for number, row in enumerate(_as_table(rows))
        ]

    def _sealed(self, row: Row, sealing: Sealing) -> dict[str, Any]:
        name = f"{self.benchmark.name}/{row[self.benchmark.id_column or 'id']}"
        return {
            column: sealing.seal_value(f"{name}/{self.benchmark.sealed_columns[column]}", value)
            if column in self.benchmark.sealed_columns
            else value
            for column, value in row.items()
        }


def _as_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as lm-eval hands them over, which is what records hash: with the columns and types of one table.

    Raises:
        DataError: a column holds values of several types.
    """
    import pyarrow  # takes a fifth of a second

    columns: dict[str, list[Any]] = {column: [row.get(column) for row in rows] for column in rows[0]}
    table: dict[str, list[Any]] = {}
    for column, values in columns.items():
        try:
            table[column] = pyarrow.array(values).to_pylist()
        except pyarrow.ArrowException as problem:
            raise DataError(
                f"column {column!r} holds values of several types ({problem}); correct the rows"
            ) from problem
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
