"""The seven benchmarks as data: how an item is named, asked, answered and judged.

A benchmark's first filter is the one its scores are reported with; the others are for text of another kind (base models
that run on) and for comparison with published extraction rules.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from refusion_eval.benchmarks import prompts as prompt_module
from refusion_eval.benchmarks.extract import answers as extract
from refusion_eval.benchmarks.extract import formulas as extract_math
from refusion_eval.benchmarks.extract import programs as extract_code
from refusion_eval.benchmarks.extract.answers import Extraction
from refusion_eval.benchmarks.prompts import LETTERS, Row
from refusion_eval.errors import DataError

Extractor = Callable[[str, Row], Extraction]

_ANNOTATION = re.compile(r"<<[^<>\n]{0,200}>>")


@dataclass(frozen=True)
class CodeTest:
    """What decides about one program.

    Attributes:
        test: trusted source that raises if the program is wrong.
        helpers: trusted source the test needs.
        timeout_s: processor seconds the program may take.
    """

    test: str
    helpers: str = ""
    timeout_s: float = 10


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name: as in task names and data folders.
        kind: how an extracted answer is judged.
        metric: what the share of right items is called.
        id_column: column that names an item; None where rows have no id and their number serves.
        filters: extraction rules by name; the first is the default.
        gold: a row's right answer in normal form (for code: the reference program).
        gold_text: the right answer as a model would write it when it follows the prompt.
        test: for code, the test of a row.
    """

    name: str
    kind: Literal["number", "choice", "mathematics", "code"]
    metric: Literal["acc", "pass@1"]
    id_column: str | None
    filters: Mapping[str, Extractor]
    gold: Callable[[Row], str]
    gold_text: Callable[[Row], str]
    test: Callable[[Row], CodeTest] | None = None

    @property
    def default_filter(self) -> str:
        """The extraction rule that scores are reported with."""
        return next(iter(self.filters))

    def id_of(self, row: Row, row_number: int) -> str:
        """The item's id as text: its own id column, else its 0-based row number."""
        return str(row_number if self.id_column is None else row[self.id_column])

    def prompt(self, row: Row) -> str:
        """The text of the user turn."""
        return prompt_module.prompt(self.name, row)

    def extract(self, text: str, row: Row, filter_name: str | None = None) -> Extraction:
        """Finds the answer in one text.

        Raises:
            DataError: no such filter.
        """
        chosen = filter_name or self.default_filter
        if chosen not in self.filters:
            raise DataError(f"{self.name} has no filter {chosen!r}; it has {', '.join(self.filters)}")
        return self.filters[chosen](text, row)


def _by_text(rule: Callable[[str], Extraction]) -> Extractor:
    return lambda text, _: rule(text)


def _letters(rule: Callable[[str, int], Extraction], num_choices: Callable[[Row], int]) -> Extractor:
    return lambda text, row: rule(text, num_choices(row))


def _choice_filters(num_choices: Callable[[Row], int]) -> dict[str, Extractor]:
    return {
        "last": _letters(extract.last_letter_stated, num_choices),
        "first": _letters(extract.first_letter_stated, num_choices),
        "strict": _letters(extract.strict_letter, num_choices),
    }


def _letter_text(gold: Callable[[Row], str]) -> Callable[[Row], str]:
    return lambda row: f"The answer is ({gold(row)})."


def check_gold(bench: Benchmark, rows: Sequence[Row]) -> None:
    """Reads every right answer once: one that cannot be read would otherwise be known when texts have been generated.

    Raises:
        DataError: a row's answer is malformed; says which.
    """
    for number, row in enumerate(rows):
        try:
            bench.gold(row)
        except DataError as problem:
            raise DataError(f"row {number} (from 0) of {problem}; correct the row") from problem


def _arc_gold(row: Row) -> str:
    """Letter by position: 22 items label their choices 1 2 3 4."""
    return LETTERS[list(row["choices"]["label"]).index(row["answerKey"])]


def _letter_gold(row: Row) -> str:
    """The `answer` column; where MMLU-Pro's `answer_index` disagrees (question 3983), the letter is the right one."""
    return str(row["answer"])


def _gsm8k_gold(row: Row) -> str:
    _, marker, number = str(row["answer"]).rpartition("####")
    value = extract.parse_number(number.strip()) if marker else None
    if value is None:
        raise DataError(f"gsm8k: an answer must end in '#### <number>', found {str(row['answer'])[-60:]!r}")
    return extract.show_number(value)


def _gsm8k_text(row: Row) -> str:
    reasoning, _, number = str(row["answer"]).rpartition("####")
    return f"{_ANNOTATION.sub('', reasoning).strip()}\nThe answer is {number.strip()}."


def _math_gold(row: Row) -> str:
    found = extract_math.last_box(str(row["solution"])).answer
    if found is None:
        raise DataError(f"math: a solution must hold a box with the answer, found {str(row['solution'])[-60:]!r}")
    return found


def _humaneval_gold(row: Row) -> str:
    return f"{row['prompt']}{row['canonical_solution']}"


def _humaneval_test(row: Row) -> CodeTest:
    """The prompt serves as helper: the tests of 32, 38 and 50 call functions that stand in it."""
    return CodeTest(test=f"{row['test']}\ncheck({row['entry_point']})\n", helpers=str(row["prompt"]))


def _mbpp_gold(row: Row) -> str:
    return str(row["code"]).replace("\r\n", "\n")


def _mbpp_test(row: Row) -> CodeTest:
    """Setup runs after the program (that of 367 uses a class of it); task 123's reference takes 6 to 10 s."""
    parts = [str(row.get("test_setup_code") or ""), *(str(test).strip() for test in row["test_list"])]
    return CodeTest(test="\n".join(parts).replace("\r\n", "\n") + "\n", timeout_s=20)


def _fenced(gold: Callable[[Row], str]) -> Callable[[Row], str]:
    return lambda row: f"```python\n{gold(row).strip()}\n```"


_TABLE = (
    Benchmark(
        name="mmlu_pro",
        kind="choice",
        metric="acc",
        id_column="question_id",
        filters=_choice_filters(lambda row: len(row["options"])),
        gold=_letter_gold,
        gold_text=_letter_text(_letter_gold),
    ),
    Benchmark(
        name="arc_challenge",
        kind="choice",
        metric="acc",
        id_column="id",
        filters=_choice_filters(lambda row: len(row["choices"]["text"])),
        gold=_arc_gold,
        gold_text=_letter_text(_arc_gold),
    ),
    Benchmark(
        name="gsm8k",
        kind="number",
        metric="acc",
        id_column=None,
        filters={
            "last": _by_text(extract.last_number_stated),
            "first": _by_text(extract.first_number_stated),
            "strict": _by_text(extract.strict_number),
        },
        gold=_gsm8k_gold,
        gold_text=_gsm8k_text,
    ),
    Benchmark(
        name="math",
        kind="mathematics",
        metric="acc",
        id_column=None,
        filters={
            "last": _by_text(extract_math.last_box_or_statement),
            "first": _by_text(extract_math.first_box),
            "strict": _by_text(extract_math.last_box),
        },
        gold=_math_gold,
        gold_text=lambda row: str(row["solution"]),
    ),
    Benchmark(
        name="gpqa",
        kind="choice",
        metric="acc",
        id_column="id",
        filters=_choice_filters(lambda row: len(row["choices"])),
        gold=_letter_gold,
        gold_text=_letter_text(_letter_gold),
    ),
    Benchmark(
        name="humaneval",
        kind="code",
        metric="pass@1",
        id_column="task_id",
        filters={"first": extract_code.function_code},
        gold=_humaneval_gold,
        gold_text=_fenced(_humaneval_gold),
        test=_humaneval_test,
    ),
    Benchmark(
        name="mbpp",
        kind="code",
        metric="pass@1",
        id_column="task_id",
        filters={"first": _by_text(extract_code.module_code)},
        gold=_mbpp_gold,
        gold_text=_fenced(_mbpp_gold),
        test=_mbpp_test,
    ),
)

BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in _TABLE}
