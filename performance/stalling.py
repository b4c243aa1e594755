"""The slowest answer extractions on text that is made to stall them: `python performance/stalling.py`.

Each text repeats pieces: the literals of all patterns, and text that models often write. A piece is repeated alone,
before and after a well-formed answer, and in random pairs, triples and mixes. A pattern that backtracks too much shows
on such texts. All texts are timed at a fifth of the full length, and the slowest again at full length.
"""

import argparse
import random
import re
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from refusion_eval.benchmarks import BENCHMARKS, Row, Task, gsm8k
from refusion_eval.benchmarks.extract import answers, frames, letters, words
from refusion_eval.benchmarks.extract import formulas as extract_math
from refusion_eval.benchmarks.extract import programs as extract_code
from refusion_eval.lm_eval_plugin.filters import FILTERS
from refusion_eval.scoring.filters import OURS, Rule

FULL_LENGTH = 100_000
SCREENING_LENGTH = 20_000  # characters of the first pass
NUM_DRAWN = 1_200  # random texts of each kind
NUM_MEASURED = 60
NUM_SHOWN = 10
REPEATS = 3

# Pieces that are not literals of a pattern but that models write: code, nesting, numbers, white space, odd characters.
WRITTEN = (
    " ", "\n", "\t", "\r\n", "\r", "\x0b", "\x00", "\ud800", "\u2028", "\xe9", "a", "Z", "A ", "I ", "1", "-1", "1,",
    "111,", "1.1", "1 1/1", "1/1", "1/2 ", "1/", ".5", "$1", "$$", "\\\\", "\\{", "{{", "}}", "{}", "{a", "((", "([{",
    "<<1", "**", "* ", "_ ", "__", "# ", "= 1", "=1", "a=", ".", ". ", "the answer is ", "Answer: ", "answer is (",
    "The answer is 1", "The answer is (A). ", "answer is **", "answers are: ", "\\boxed{", "\\boxed{1} ", "\\boxed 1",
    "\\frac{1}{", "\\frac12", "\\frac{", "\\text{a", "\\sqrt 1", "\\left(", "\\circ", "^{\\circ}", "```", "```\n",
    "````", "```python\n", "```python\nx = 1\n```\n", "def ", "def f():\n", "def f(x):\n    return x\n", "import a\n",
    "    x\n", "x = 1\n", "1+", "not ", "lambda:", "a.", "f(", "f(a,", '"""\n', "'''", "'", "x=1\n)\n", "@a\n",
    "@(a)\n", "a;", "a\n", "a\na,", "[a]", "a<b\n", "f'{a}'", "class A:\n", "if 1:\n ", "[[", "-", "−", "1234567890",
    "1,234,567,", "\u0661", "\uff11", "\U0001f600", "Final Answer: The final answer is ", ". I hope it is correct.",
    "#### ", "#### 1\n", "A. ", "(A) ", "a) b\n", "Q\n", "   \n", "\n\n", "x\x0b", "\x85", "The correct option is ",
    "\\boxed ",
)  # fmt: skip

# Well-formed answers; repeated pieces stand before or after them.
ANSWERS = (
    "The answer is 42.",
    "The answer is (B).",
    "#### 42",
    "\\boxed{\\frac{1}{2}}",
    "Final Answer: The final answer is $5$. I hope it is correct.",
    "\n```python\ndef f(x):\n    return x\n```\n",
)


class Recipe(NamedTuple):
    """How a text is made.

    Attributes:
        pieces: texts that are repeated.
        before, after: texts before and after the repetition.
        seed: seed of a random order of the pieces; None repeats them in the given order.
    """

    pieces: tuple[str, ...]
    before: str = ""
    after: str = ""
    seed: int | None = None

    def text(self, length: int) -> str:
        """The text, about `length` characters long."""
        unit = "".join(self.pieces)
        if self.seed is None:
            return self.before + unit * (length // len(unit)) + self.after
        drawn = random.Random(self.seed).choices(self.pieces, k=2 * len(self.pieces) * (1 + length // len(unit)))
        return "".join(drawn)[:length]

    def __str__(self) -> str:
        parts = [repr(self.before)] if self.before else []
        order = "repeated" if self.seed is None else f"mixed (seed {self.seed})"
        parts.append(f"{' '.join(map(repr, self.pieces))} {order}")
        return ", then ".join(parts + ([repr(self.after)] if self.after else []))


class Timed(NamedTuple):
    """The processor time of one rule on one text.

    Attributes:
        seconds: processor time.
        rule: name of the rule.
        recipe: description of the text.
    """

    seconds: float
    rule: str
    recipe: str


def rules() -> dict[str, Callable[[str], object]]:
    """All functions that read a model's text on the way to a verdict, by name: filters and normal forms of answers."""
    rows = {name: Task(one, mini=True).rows()[0] for name, one in BENCHMARKS.items() if one.has_mini}
    named: dict[str, Callable[[str], object]] = {}
    for name, row in rows.items():
        for filter_name, extractor in BENCHMARKS[name].prompts.filters.items():
            named[f"{name}/{filter_name}"] = _on(row, extractor)
    for filter_name, answer_filter in FILTERS.items():
        for name, rule in answer_filter.rules.items():
            if name in rows and filter_name not in (OURS, *BENCHMARKS[name].prompts.filters):
                named[f"{name}/{filter_name}"] = _by_rule(rows[name], name, rule)
    named["number"] = answers.parse_number
    named["normal form"] = extract_math.normalise
    named["equal answers"] = lambda text: extract_math.equal_answers(text, text + "1", lambda *forms: False)
    return named


def _on(row: Row, extractor: Callable[[str, Row], object]) -> Callable[[str], object]:
    return lambda text: extractor(text, row)


def _by_rule(row: Row, benchmark: str, rule: Rule) -> Callable[[str], object]:
    """A function that extracts an answer and, if the rule defines its own comparison, compares it."""
    gold = BENCHMARKS[benchmark].gold(row)

    def judged(text: str) -> object:
        (extraction,) = rule.find([(row, text)])
        if extraction.answer is None or rule.is_right is None:
            return extraction
        return rule.is_right(gold, extraction.answer)

    return judged


def pieces() -> list[str]:
    """The pieces of all texts: the literals of all patterns, and `WRITTEN`."""
    modules = (frames, answers, letters, words, extract_math, extract_code, gsm8k)
    values = [value for module in modules for value in vars(module).values()]
    values += [pattern for pattern, _ in extract_math.SPELLINGS]
    patterns = [value for value in values if isinstance(value, re.Pattern)]
    return list(dict.fromkeys([*(literal for pattern in patterns for literal in _literals(pattern)), *WRITTEN]))


def _literals(pattern: re.Pattern[str]) -> Iterator[str]:
    """The runs of fixed characters in a pattern, read from its parse tree."""
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
    """The runs of fixed characters in the parts of a group, a repetition or an alternative."""
    if hasattr(argument, "data"):
        yield from _runs(argument)
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from _inside(part)


def recipes(num_drawn: int = NUM_DRAWN, seed: int = 0) -> Iterator[Recipe]:
    """Recipes of hostile texts: each piece alone and beside each answer, then random combinations.

    Args:
        num_drawn: number of random recipes of each of four kinds.
        seed: seed of the random recipes.
    """
    parts = pieces()
    for piece in parts:
        yield Recipe((piece,))
        for answer in ANSWERS:
            yield Recipe((piece,), before=answer)
            yield Recipe((piece,), after=answer)
    draw = random.Random(seed)
    for number in range(num_drawn):
        first, *others = draw.sample(parts, 3)
        yield Recipe((first,), before=others[0])
        yield Recipe((first, others[0]))
        yield Recipe((first, *others))
        yield Recipe(tuple(draw.sample(parts, draw.randint(2, 8))), seed=number)


def without_table() -> Any:
    """A context in which lm-eval's `multi_choice_regex` builds no table of all Unicode characters.

    It builds this table in every call, for a third of a second, which would be counted as the time of one text.
    """
    return mock.patch("lm_eval.filters.extraction.sys", SimpleNamespace(maxunicode=128))


def seconds_of(rule: Callable[[str], object], text: str, repeats: int = 1) -> float:
    """Smallest processor time of a rule on a text over several repetitions."""
    least = float("inf")
    for _ in range(repeats):
        extract_code.parse.cache_clear()
        started = time.process_time()
        rule(text)
        least = min(least, time.process_time() - started)
    return least


def slowest(num_drawn: int = NUM_DRAWN, seed: int = 0) -> list[Timed]:
    """The slowest pairs of rule and text at full length, slowest first; the arguments are those of `recipes`."""
    named = rules()
    texts = list(recipes(num_drawn, seed))
    with without_table():
        screened = [
            (seconds_of(rule, text), name, number)
            for number, text in enumerate(recipe.text(SCREENING_LENGTH) for recipe in texts)
            for name, rule in named.items()
        ]
        timed = [
            Timed(seconds_of(named[name], texts[number].text(FULL_LENGTH), REPEATS), name, str(texts[number]))
            for _, name, number in sorted(screened, reverse=True)[:NUM_MEASURED]
        ]
    return sorted(timed, reverse=True)


def main() -> None:
    """Prints the slowest extractions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drawn", type=int, default=NUM_DRAWN, help="number of random texts of each kind")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random texts")
    arguments = parser.parse_args()
    num_texts = sum(1 for _ in recipes(arguments.drawn, arguments.seed))
    print(f"{len(rules())} rules, {num_texts} texts of {FULL_LENGTH} characters; processor time")
    for timed in slowest(arguments.drawn, arguments.seed)[:NUM_SHOWN]:
        print(f"{1000 * timed.seconds:8.1f} ms  {timed.rule:<28} {timed.recipe}")


if __name__ == "__main__":
    main()
