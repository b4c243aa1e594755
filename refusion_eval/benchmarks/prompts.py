"""The types of what a `Benchmark` holds: prompts, extraction rules and tests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from refusion_eval.benchmarks.rows import Row

# Names of prompts: those that this project wrote, those of the public release of ReFusion, and all others, which are
# those of lm-eval's own tasks, and own ones that were changed (by examples or a system instruction).
OURS, RELEASE, OTHER = "ours", "release", "other"


@dataclass(frozen=True)
class Extraction:
    """The answer in its normal form, None if there is none; and the rule that found it, or why nothing was found."""

    answer: str | None
    how: str


Extractor = Callable[[str, Row], Extraction]


@dataclass(frozen=True)
class CodeTest:
    """Trusted source that raises if a program is wrong, trusted source that it needs, and seconds for the program."""

    test: str
    helpers: str = ""
    timeout_s: float = 10


class Turns(NamedTuple):
    """The prompt of one item: the user turn, the system turn before it, and the beginning of the response."""

    user: str
    system: str = ""
    opened: str = ""


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
            published rows are read as they are.
        is_right: compares (right answer, extracted answer); None for the comparison of the benchmark's kind.
        reads_solution: for mathematics, whether the extracted text and the row's whole solution are handed to
            math-verify, which finds the answers in both by itself.
        test: for code, a row -> its test; None for that of the benchmark.
    """

    user: Callable[[Row], str]
    system: Callable[[Row], str] | None = None
    opened: str = ""
    stop_strings: Sequence[str] = ()
    filters: Mapping[str, Extractor]
    gold_text: Callable[[Row], str]
    version: str = "1.0"
    clean: Callable[[str], str] | None = None
    normalise: Callable[[Row, int], dict[str, Any]] | None = None
    is_right: Callable[[str, str], bool] | None = None
    reads_solution: bool = False
    test: Callable[[Row], CodeTest] | None = None
