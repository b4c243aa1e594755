"""No text, however broken or hostile, makes an answer extraction fail or stall."""

import ast
import random
import re
import sys
from unittest import mock

import pytest
import stalling
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.benchmarks import Extraction
from refusion_eval.benchmarks.extract import programs as extract_code
from refusion_eval.lm_eval_plugin.filters import FILTERS, minerva_statement
from tests.examples import examples

RULES = stalling.rules()
PIECES = stalling.pieces()
# Far above what any rule needs on any machine, far below what backtracking would take.
STALLED_SECONDS = 2.0


@pytest.fixture(scope="module", autouse=True)
def without_table():
    """lm-eval prepares one filter anew at each call, for a third of a second; it is called for many texts at a time."""
    with stalling.without_table():
        yield


TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(st.characters(exclude_categories=()), max_size=6)))


@examples(40)
@given(parts=TEXTS)
def test_no_text_makes_a_rule_fail(parts):
    text = "".join(parts)
    for rule in RULES.values():
        rule(text)


@examples(60)
@given(parts=TEXTS)
def test_what_is_extracted_does_not_depend_on_what_was_extracted_before(parts):
    text = "".join(parts)
    for name in ("gsm8k/last", "math/last", "mmlu_pro/last", "humaneval/first", "mbpp/first"):
        found = RULES[name](text)
        assert isinstance(found, Extraction)
        assert found.answer is None or isinstance(found.answer, str)
        RULES[name]("The answer is 1.")
        assert RULES[name](text) == found


def test_without_its_table_the_rule_finds_the_same_in_texts_of_the_first_characters():
    """The table is about punctuation; of ASCII all of it is there."""
    draw = random.Random(0)
    plain = [piece for piece in PIECES if piece.isascii()]
    row = {"choices": ["an (apple).", "a - b", "c", "d!"]}
    texts = ["".join(draw.choices([*plain, *row["choices"], "an apple"], k=draw.randrange(30))) for _ in range(500)]
    rule = FILTERS["flexible-extract"].rules["gpqa"]
    found = rule.find([(row, text) for text in texts])
    assert len(found) == len(texts)
    with mock.patch("lm_eval.filters.extraction.sys", sys):
        assert rule.find([(row, text) for text in texts]) == found


def test_the_texts_hold_what_the_patterns_look_for():
    assert {"answer", "####", "\\boxed", "The answer is ", "frac", "\\langle"} <= set(PIECES)


HOSTILE = (
    "@a\n",
    "```python\n" + "@a\n" * 300 + "```\n",
    "Final Answer: The final answer is {",
    "\\boxed{",
    "}{",
    "1,111",
    "1",
    "Q\n",
    "{}",
    "a\na,",
    "\\\\",
)


@pytest.mark.parametrize("piece", HOSTILE)
def test_100_kilobytes_that_once_took_long_stall_no_rule(piece):
    text = piece * (stalling.FULL_LENGTH // len(piece))
    slow = {
        name: seconds for name, rule in RULES.items() if (seconds := stalling.seconds_of(rule, text)) > STALLED_SECONDS
    }
    assert not slow


def test_no_hostile_text_of_100_kilobytes_stalls_a_rule():
    """A sample of the texts that the benchmark goes through, of each kind."""
    recipes = list(stalling.recipes(num_drawn=200))
    for recipe in [*random.Random(7).sample(recipes, 6), *recipes[-8:]]:
        text = recipe.text(stalling.FULL_LENGTH)
        for name, rule in RULES.items():
            seconds = stalling.seconds_of(rule, text)
            assert seconds < STALLED_SECONDS, f"{name} on {recipe}: {seconds:.2f} s"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Final Answer: The final answer is $5$. I hope it is correct.", "$5$"),
        ("Final Answer: The final answer is 5. ", "5"),
        ("Final Answer: The final answer is 5\n. I hope it is correct.", None),
        ("Final Answer: The final answer is 1\nFinal Answer: The final answer is 2. I hope it is correct.", "2"),
    ],
)
def test_the_statement_of_lm_eval_is_read_line_by_line_as_its_pattern_does(text, answer):
    assert minerva_statement(text, {}).answer == answer


@pytest.mark.parametrize("rule", ["humaneval/first", "mbpp/first"])
@pytest.mark.parametrize(
    "piece",
    ["@a\n", "a\na,", "x = 1\n", "```python\n@a\nx = (\n```\n", "```\na\n```\n", "def f(\n", "[", "é\n", "if 1:\n "],
)
def test_what_is_parsed_for_one_text_is_bounded(rule, piece, monkeypatch):
    """In words and signs, which is what parsing takes time for; and in parses."""
    # Blocks without the name of the function asked for are not parsed.
    name = {"humaneval/first": "apply_number", "mbpp/first": "apply_point"}[rule]
    parse, sizes = ast.parse, []

    def noting(code):
        sizes.append(len(re.findall(r"\w+|[^\w\s]|\n", code)))
        return parse(code)

    extract_code.parse.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(ast, "parse", noting)
        RULES[rule](piece.replace("a", name) * (stalling.FULL_LENGTH // len(piece)))
    assert max(sizes, default=0) <= 3_000
    assert sum(sizes) <= 20_000  # most of what lies behind errors, which costs nothing
    assert len(sizes) <= 200


def test_a_text_is_what_its_recipe_says():
    assert stalling.Recipe(("ab", "c"), before="<", after=">").text(7) == "<abcabc>"
    mixed = stalling.Recipe(("ab", "c"), seed=3)
    assert mixed.text(50) == mixed.text(50)
    assert set(mixed.text(50)) == set("abc")
    assert all(len(recipe.text(1000)) > 900 for recipe in stalling.recipes(num_drawn=50))


@pytest.mark.parametrize("text", ["1" * 100_000, "#### " + "1," * 50_000, "The answer is " + "7" * 99_000 + "."])
@pytest.mark.parametrize("name", ["gsm8k/flexible-extract", "gsm8k/strict-match", "gsm8k/cot-strict-match"])
def test_lm_evals_comparison_reads_no_endless_number(name, text):
    """The patterns that it removes first take quadratic time."""
    assert stalling.seconds_of(RULES[name], text) < STALLED_SECONDS
