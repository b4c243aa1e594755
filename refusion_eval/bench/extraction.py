"""How long the slowest answer extraction takes on text made to stall it: `python -m refusion_eval.bench.extraction`.

The texts repeat what the patterns themselves look for: every literal of every pattern, each alone, in pairs, and one
before endless repetitions of another. What backtracks does so on these.
"""

import re
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

from refusion_eval.evaluate import benchmarks, extract, extract_code, extract_math
from refusion_eval.evaluate.benchmarks import BENCHMARKS
from refusion_eval.evaluate.data import load_rows
from refusion_eval.evaluate.prompts import Row
from refusion_eval.evaluate.rescore_filters import FILTERS, OURS, Rule

FULL_LENGTH = 100_000
SCREENING_LENGTH = 20_000  # characters; what is slow here is measured at full length
NUM_MEASURED = 60
NUM_SHOWN = 10
REPEATS = 3

# Text that no literal of a pattern is, but that models write: code, nesting, numbers, white space, broken characters.
WRITTEN = (
    " ", "\n", "\t", "\r\n", "\r", "\x00", "\ud800", "\u2028", "\xe9", "a", "Z", "A ", "I ", "1", "-1", "1,", "111,",
    "1.1", "1 1/1", "1/1", "$1", "$$", "\\\\", "\\{", "{{", "}}", "{a", "((", "([{", "<<1", "**", "* ", "_ ", "__",
    "# ", "= 1", "a=", ".", ". ", "the answer is ", "Answer: ", "answer is (", "The answer is 1",
    "The answer is (A). ", "answer is **", "answers are: ", "\\boxed{", "\\boxed{1} ", "\\boxed 1", "\\frac{1}{",
    "\\frac12", "\\text{a", "\\sqrt 1", "\\left(", "\\circ", "^{\\circ}", "```", "```\n", "```python\n",
    "```python\nx = 1\n```\n", "def f():\n", "def f(x):\n    return x\n", "import a\n", "    x\n", "x = 1\n", "1+",
    "not ", "lambda:", "a.", "f(", '"""\n', "'", "x=1\n)\n", "@a\n", "class A:\n", "if 1:\n ", "[[", "-",
    "Final Answer: The final answer is ", ". I hope it is correct.", "#### ", "#### 1\n", "A. ", "(A) ", "a) b\n",
)  # fmt: skip


class Timed(NamedTuple):
    """The processor time of one rule on one text."""

    seconds: float
    rule: str
    text: str  # how it is made


def rules() -> dict[str, Callable[[str], object]]:
    """Everything that reads a model's text on the way to a verdict, by name: filters, and answers' normal forms."""
    rows = {name: load_rows(name, mini=True)[0] for name in BENCHMARKS}
    named: dict[str, Callable[[str], object]] = {}
    for name, bench in BENCHMARKS.items():
        for filter_name, extractor in bench.filters.items():
            named[f"{name}/{filter_name}"] = _on(rows[name], extractor)
    for filter_name, answer_filter in FILTERS.items():
        for name, rule in answer_filter.rules.items():
            if filter_name not in (OURS, *BENCHMARKS[name].filters):
                named[f"{name}/{filter_name}"] = _by_rule(rows[name], rule)
    named["number"] = extract.parse_number
    named["normal form"] = extract_math.normalise
    named["equal by form"] = lambda text: extract_math.equal_by_form(text, text + "1")
    return named


def _on(row: Row, extractor: Callable[[str, Row], object]) -> Callable[[str], object]:
    return lambda text: extractor(text, row)


def _by_rule(row: Row, rule: Rule) -> Callable[[str], object]:
    return lambda text: rule.find([(row, text)])


def pieces() -> list[str]:
    """What texts are made of: the literals of all patterns, and `WRITTEN`."""
    patterns = [
        value
        for module in (extract, extract_math, extract_code, benchmarks)
        for value in vars(module).values()
        if isinstance(value, re.Pattern)
    ]
    return list(dict.fromkeys([*(literal for pattern in patterns for literal in _literals(pattern)), *WRITTEN]))


def _literals(pattern: re.Pattern[str]) -> Iterator[str]:
    """The runs of fixed characters in a pattern."""
    parser: Any = re._parser  # type: ignore[attr-defined]
    yield from _runs(parser.parse(pattern.pattern, pattern.flags))


def _runs(items: Any) -> Iterator[str]:
    run = ""
    for operator, argument in items:
        if str(operator) == "LITERAL":
            run += chr(argument)
            continue
        if run:
            yield run
        run = ""
        yield from _inside(argument)
    if run:
        yield run


def _inside(argument: Any) -> Iterator[str]:
    """The runs in the parts of a group, a repetition or an alternative."""
    if hasattr(argument, "data"):
        yield from _runs(argument)
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from _inside(part)


def made_texts(length: int) -> Iterator[tuple[str, str]]:
    """(how it is made, text) of hostile texts, each of about that many characters."""
    parts = pieces()
    for piece in parts:
        yield repr(piece), piece * (length // len(piece))
    for first, second in product(parts, repeat=2):
        if first != second:
            yield f"{first!r}, then {second!r} repeated", first + second * (length // len(second))
            pair = first + second
            yield f"{pair!r} repeated", pair * (length // len(pair))


def seconds_of(rule: Callable[[str], object], text: str, repeats: int = 1) -> float:
    """Least processor time of a rule on a text."""
    extract_code.parse.cache_clear()
    least = float("inf")
    for _ in range(repeats):
        extract_code.parse.cache_clear()
        started = time.process_time()
        rule(text)
        least = min(least, time.process_time() - started)
    return least


def slowest(step: int = 1) -> list[Timed]:
    """The slowest pairs of rule and text, at full length, slowest first.

    Args:
        step: every so many-th of the texts is looked at.
    """
    named = rules()
    screened = [
        (seconds_of(rule, text), name, number)
        for number, (_, text) in enumerate(made_texts(SCREENING_LENGTH))
        if number % step == 0
        for name, rule in named.items()
    ]
    wanted: dict[int, list[str]] = {}
    for _, name, number in sorted(screened, reverse=True)[:NUM_MEASURED]:
        wanted.setdefault(number, []).append(name)
    timed = [
        Timed(seconds_of(named[name], text, REPEATS), name, made)
        for number, (made, text) in enumerate(made_texts(FULL_LENGTH))
        for name in wanted.get(number, ())
    ]
    return sorted(timed, reverse=True)


def main(step: int = 1) -> None:
    """Prints the slowest extractions."""
    print(f"{len(rules())} rules, {len(pieces())} pieces, texts of {FULL_LENGTH} characters; processor time")
    for seconds, rule, made in slowest(step)[:NUM_SHOWN]:
        print(f"{1000 * seconds:8.1f} ms  {rule:<28} {made}")


if __name__ == "__main__":
    main()
