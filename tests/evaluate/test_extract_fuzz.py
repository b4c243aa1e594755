"""No text, however broken or hostile, makes an answer extraction fail or stall."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_eval.bench import extraction
from refusion_eval.evaluate.extract import Extraction
from refusion_eval.evaluate.rescore_filters import FILTERS
from refusion_eval.evaluate.stock_filters import minerva_statement

RULES = extraction.rules()
PIECES = extraction.pieces()
# lm-eval prepares this one anew at each call, for a third of a second; it is called for many texts at a time.
PREPARED = "gpqa/flexible-extract"
# Far above what any rule needs on any machine, far below what backtracking would take.
STALLED_SECONDS = 2.0

TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(st.characters(exclude_categories=()), max_size=6)))


@settings(max_examples=40, deadline=None)
@given(parts=TEXTS)
def test_no_text_makes_a_rule_fail(parts):
    text = "".join(parts)
    for name, rule in RULES.items():
        if name != PREPARED:
            rule(text)


@settings(max_examples=60, deadline=None)
@given(parts=TEXTS)
def test_what_is_extracted_does_not_depend_on_what_was_extracted_before(parts):
    text = "".join(parts)
    for name in ("gsm8k/last", "math/last", "mmlu_pro/last", "humaneval/first", "mbpp/first"):
        found = RULES[name](text)
        assert isinstance(found, Extraction)
        assert found.answer is None or isinstance(found.answer, str)
        RULES[name]("The answer is 1.")
        assert RULES[name](text) == found


def test_the_prepared_rule_takes_any_text():
    draw = random.Random(0)
    texts = ["".join(draw.choices(PIECES, k=draw.randrange(30))) for _ in range(500)]
    found = (
        FILTERS["flexible-extract"].rules["gpqa"].find([({"choices": ["a", "b", "c", "d"]}, text) for text in texts])
    )
    assert len(found) == len(texts)


def test_the_texts_hold_what_the_patterns_look_for():
    assert {"answer", "####", "\\boxed", "The answer is ", "frac", "\\sqrt", "A:"} <= set(PIECES)


HOSTILE = (
    "@a\n",
    "```python\n" + "@a\n" * 300 + "```\n",
    "Final Answer: The final answer is {",
    "\\boxed{",
    "}{",
    "1,111",
)


@pytest.mark.parametrize("piece", HOSTILE)
def test_100_kilobytes_that_once_took_long_stall_no_rule(piece):
    text = piece * (extraction.FULL_LENGTH // len(piece))
    slow = {
        name: seconds
        for name, rule in RULES.items()
        if (seconds := extraction.seconds_of(rule, text)) > STALLED_SECONDS
    }
    assert not slow


def test_no_hostile_text_of_100_kilobytes_stalls_a_rule():
    """A sample of the texts that the benchmark goes through; pairs drawn anew from the same seed."""
    draw = random.Random(7)
    for _ in range(12):
        first, second = draw.choice(PIECES), draw.choice(PIECES)
        text = first + second * (extraction.FULL_LENGTH // len(second))
        for name, rule in RULES.items():
            if name != PREPARED:
                seconds = extraction.seconds_of(rule, text)
                assert seconds < STALLED_SECONDS, f"{name} on {first!r} and {second!r} repeated: {seconds:.2f} s"


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
    assert minerva_statement(text).answer == answer
