"""Answers in frames that nobody listed: an own grammar of sentences, markup, corrections and thoughts, both directions.

A right answer in any frame is read as right, a wrong one is not right, and a hedge states no answer. Nothing here comes
from the rules under test.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.benchmarks.extract.formulas import equal_answers
from tests.examples import examples


@dataclass(frozen=True)
class Kind:
    """Values of one kind: how each may be written, what other values there are, and how answers are compared."""

    benchmark: str
    row: dict[str, object]
    values: dict[str, list[str]]  # value -> ways to write it
    marks: list[str] = field(default_factory=list)  # further marks that values of this kind may stand in
    column: str = "target"

    def is_right(self, value: str, text: str) -> bool:
        benchmark = BENCHMARKS[self.benchmark]
        row = {**self.row, self.column: value}
        answer = benchmark.extract(text, row).answer
        if answer is None:
            return False
        if self.benchmark == "math":
            return equal_answers(value, answer, lambda *_: False)
        if self.benchmark == "gsm8k":
            return float(answer) == float(value) if "/" not in answer else False
        compare: Callable[[str, str], bool] = benchmark.prompts.is_right or (lambda right, other: right == other)
        return compare(value, answer)


def words(*values: str) -> dict[str, list[str]]:
    return {value: [value, value.lower(), value.upper()] for value in values}


BBH = {"input": "What holds?\nOptions:\n(A) one\n(B) two\n(C) three\n(D) four"}
KINDS = {
    "number": Kind(
        "gsm8k",
        {"question": "How much does it cost?"},
        {"18": ["18", "18.0", "$18", "eighteen", "18 dollars"],
         "-7": ["-7", "−7", "minus 7"], "2500": ["2,500", "2500"],
         "0.5": ["0.5", "1/2", "\\frac{1}{2}", "½"], "64": ["64", "64 dollars", "sixty-four"]},
        column="answer",
    ),
    "formula": Kind(
        "math",
        {"problem": "Find it."},
        {"42": ["42"], "\\frac{3}{4}": ["\\frac{3}{4}", "\\frac34", "\\dfrac{3}{4}"], "x+1": ["x+1", "x + 1"],
         "(2,-3)": ["(2,-3)", "(2, -3)"], "2\\sqrt{5}": ["2\\sqrt{5}"], "-6\\pi": ["-6\\pi"]},
        column="solution",
    ),
    "letter": Kind(
        "mmlu_pro",
        {"question": "Which?", "options": ["x"] * 10},
        {letter: [letter, f"({letter})", f"{letter})"] for letter in "BCDEFH"},
        ["[{}]", "option {}"],
        column="answer",
    ),
    "choice": Kind("bbh", BBH, {f"({letter})": [letter, f"({letter})"] for letter in "BCD"}, ["<{}>", "option {}"]),
    "truth": Kind("bbh", BBH, words("True", "False"), ["({})", "<{}>", "[{}]", "\\text{{{}}}"]),
    "yes": Kind("bbh", BBH, words("Yes", "No"), ["({})", "<{}>", "[{}]", "\\text{{{}}}", "definitely {}"]),
    "validity": Kind(
        "bbh",
        BBH,
        {"valid": ["valid", "deductively valid"], "invalid": ["invalid", "not valid", "deductively invalid"]},
        ["({})", "<{}>", "\\text{{{}}}"],
    ),
    "list": Kind(
        "bbh",
        BBH,
        {value: [value, value.replace(" ", ", "), ", ".join(f'"{word}"' for word in value.split()),
                 " < ".join(value.split()), f"{value.replace(' ', ', ', 2)}"[::1]]
         for value in ("ash birch cedar elm", "elm cedar birch ash", "birch ash elm cedar")},
        ["[{}]", "<{}>", "({})"],
    ),
    "brackets": Kind("bbh", BBH, {"] ) }": ["] ) }", "])}"], "> ) ]": ["> ) ]", ">)]"], "} ]": ["} ]", "}]"]}),
}  # fmt: skip

MARKS = ["{}", "**{}**", "`{}`", "*{}*", "__{}__"]
# Statements, in the languages of markup that models write.
STATEMENTS = [
    "The answer is {}.", "So my final answer would be {}.", "Hence, the correct answer is: {}", "ANSWER: {}",
    "Answer = {}", "Final Answer: {}.", "the answer must be {}.", "The answer turns out to be {}.",
    "Putting this together, the answer is therefore {}.", "We conclude that the right answer is {}.",
    "### Final answer\n{}", "**Answer:**\n\n{}", "__Answer__\n{}", "# Answer:\n\n{}", "> The answer is {}.",
    "- Answer: {}", "1. The answer is {}.", "#### {}",
    "\\boxed{{{}}}", "$\\boxed{{{}}}$",
    "\\[\n\\boxed{{{}}}\n\\]", "The answer is \\fbox{{{}}}.", "\\textbf{{Answer:}} {}",
    "The answer is $\\boxed{{{}}}$.",
    "<answer>{}</answer>", "<answer>\n{}\n</answer>", "<p>The answer is {}.</p>", "<b>Answer:</b> {}",
    "The answer is <b>{}</b>.",
    "'''Answer:''' {}", "*Answer:* {}", "The answer is\n\n{}", "The answer is:\n{}",
    "The answer is, therefore, {}.", "The answer is obviously {}.", "The answer is that it is {}.", "Answer -> {}",
    "The answer is {}, I think.", "The answer is {} — as shown.", "The answer is {} \U0001f60a", "Answer：{}",
    "答案是 {}。", "The final answer is therefore: **{}**", "[ANSWER]{}[/ANSWER]", "The answer is:\n\n> {}",
]  # fmt: skip
CORRECTIONS = [
    "The answer is {1}. Wait, that is wrong. It should be {0}.", "The answer is {1}. Actually, it is {0}.",
    "The answer is {1}. Hold on, I made a mistake. The answer is {0}.", "Answer: {1}\n\nCorrection: {0}.",
    "First I thought that the answer is {1}. But the answer is {0}.", "The answer is not {1} but {0}.",
    "\\boxed{{{1}}} was my first try. Now it is \\boxed{{{0}}}.", "The answer is {1}.\n\nSorry, I meant {0}.",
]  # fmt: skip
HEDGES = [
    "The answer is either {0} or {1}.", "The answer is {0} or {1}.", "Answer: {0} or {1}",
    "The answer is {0} or maybe {1}.",
    "I do not know the answer.", "The answer cannot be told.",
]  # fmt: skip
RANGES = [
    "The answer is between {0} and {1}.", "The answer is {0} to {1}.", "The answer is at least {0}.",
    "The answer is less than {0}.", "The answer is more than {0}.", "The answer is {0} or more.",
    "Answer: from {0} to {1}",
]  # fmt: skip
BEFORE = ["", "Let us think.\n\n", "We look at it step by step. This takes a while.\n", "Sure!\n\n"]
THOUGHTS = [
    "<think>{}</think>", "<thinking>\n{}\n</thinking>\n", "[THINK]{}[/THINK]", "<thought>{}</thought>",
    "<THINK>{}</THINK>\n", "<longcat_think>{}</longcat_think>", '<thinking time="3">{}</thinking>\n',
    "<think >{}</think >",
    "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>", "{}\n</think>\n\n",
]  # fmt: skip
UNFINISHED = [
    "<longcat_think>{}",
    "<think>{}",
    "<thinking>\n{}\n",
    "[THINK]{}",
    "<Thought>{}",
    "<|channel|>analysis<|message|>{}",
]
BEHIND = ["", "\n", "\n\nLet me know if you need anything else.", "<|im_end|>", "\n\nI hope this helps!", "</s>"]


def drawn(data: st.DataObject, kind: Kind) -> tuple[str, str, str, str]:
    """Two different values and how each is written."""
    value, other = data.draw(st.permutations(list(kind.values)))[:2]
    mark = data.draw(st.sampled_from([*MARKS, *kind.marks]))
    return (
        value,
        mark.format(data.draw(st.sampled_from(kind.values[value]))),
        other,
        mark.format(data.draw(st.sampled_from(kind.values[other]))),
    )


def fits(kind: str, frame: str, written: str) -> bool:
    """Whether a writer would put the value into the frame: no text in a formula, no loose brace or angle in others."""
    in_braces = "boxed{" in frame or "fbox{" in frame
    if kind == "brackets" and "\n> " in frame:
        return False
    return not (in_braces and (kind == "brackets" or "<" in written or any(sign in written for sign in '*_`$"')))


@pytest.mark.parametrize("name", KINDS)
@examples(150)
@given(data=st.data())
def test_a_value_in_any_frame_is_read_and_no_other_value_is(name, data):
    kind = KINDS[name]
    value, written, other, _ = drawn(data, kind)
    statement = data.draw(st.sampled_from(STATEMENTS))
    assume(fits(name, statement, written))
    text = data.draw(st.sampled_from(BEFORE)) + statement.format(written) + data.draw(st.sampled_from(BEHIND))
    assert kind.is_right(value, text), text
    assert not kind.is_right(other, text), text


@pytest.mark.parametrize("name", KINDS)
@examples(80)
@given(data=st.data())
def test_the_last_value_counts_where_a_text_corrects_itself(name, data):
    kind = KINDS[name]
    value, written, other, other_written = drawn(data, kind)
    correction = data.draw(st.sampled_from(CORRECTIONS))
    assume(fits(name, correction, written + other_written) and not (" not " in correction and "not " in other_written))
    text = correction.format(written, other_written) + data.draw(st.sampled_from(BEHIND))
    assert kind.is_right(value, text), text
    assert not kind.is_right(other, text), text


@pytest.mark.parametrize("name", KINDS)
@examples(60)
@given(data=st.data())
def test_a_thought_is_never_read(name, data):
    kind = KINDS[name]
    value, written, other, other_written = drawn(data, kind)
    thought = f"Perhaps the answer is {other_written}."
    closed = data.draw(st.sampled_from(THOUGHTS)).format(thought) + f"The answer is {written}."
    assert kind.is_right(value, closed), closed
    assert not kind.is_right(other, closed), closed
    unfinished = data.draw(st.sampled_from(UNFINISHED)).format(thought)
    assert not kind.is_right(other, unfinished), unfinished


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("brackets", "formula")])
@examples(60)
@given(data=st.data())
def test_a_hedge_states_no_answer(name, data):
    kind = KINDS[name]
    value, written, other, other_written = drawn(data, kind)
    hedges = [*HEDGES, *(RANGES if name == "number" else [])]
    text = data.draw(st.sampled_from(hedges)).format(written, other_written)
    assert not kind.is_right(value, text), text
    assert not kind.is_right(other, text), text
