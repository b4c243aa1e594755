"""An answer is read alike in every frame that models put around it, whether it is right or wrong."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.benchmarks.extract.answers import parse_number
from refusion_eval.benchmarks.extract.formulas import normalise
from tests.examples import examples

NUMBER_LEADS = [
    "The answer is {}", "So the final answer is {}", "**Answer:** {}", "Answer: {}", "ANSWER: {}", "#### {}",
    "The answer is: {}", "The answer is:\n{}", "The answer is:\n\n- {}", "**Final answer:**\n\n* {}", "Answer: 1) {}",
    "The final answer is:\n1. {}", "<answer>{}</answer>", "It costs 7.\nA: {}", "\\boxed{{{}}}", "$$\\boxed{{{}}}$$",
    "The answer is not 77777, it is {}", "The answer is not 77777 but {}", "The answer is 77777. Wait, no. It is {}",
    "The answer is 77777. Actually, it should be {}", "The answer is 77777, I mean {}",
    "The answer is that after 77777 days he has {}", "The answer is 77777 more than another number, so {}",
    "He has 77777. <think>The answer is 77776.</think>The answer is {}",
]  # fmt: skip
NUMBER_WRAPPERS = ["{}", "**{}**", "${}$", "\\({}\\)", "`{}`", "__{}__", "{} apples", "**{} apples**"]
CLOSINGS = [
    "", ".", "\n", ".\n", "<|im_end|>", ".<|endoftext|><|endoftext|>", ".</s>", "\n<|eot_id|>", ".\r\n",
    "<end_of_turn>\n",
    ".\n\nI hope that this helps!", ".\n\nLet me know if you have 3 more questions.", " (= 77777 in other units).",
]  # fmt: skip
LETTER_LEADS = [
    "The answer is {}", "The correct answer is {}", "The answer is therefore {}", "The answer is, thus, {}",
    "The answer is clearly {}", "The answer seems to be {}", "The answer turns out to be {}", "The answer must be {}",
    "The answer is the letter {}", "The correct letter is {}", "The answer is option {}", "The right choice is {}",
    "The closest value among the options is {}", "**Answer:** {}", "Final answer: {}", "Final answer {}", "ANSWER: {}",
    "## Final Answer\n\n{}", "<answer>{}</answer>", "\\boxed{{{}}}", "The answer is not J but {}",
    "The answer is not (J), it is {}", "The answer is (J). Actually, it is {}",
    "The answer is J... wait, it should be {}",
    "I'd go with option {}", "I would pick {}", "This corresponds to choice {}", "So {} is the answer",
    "Therefore, {} is correct", "{} is correct", "{} is the correct answer", "{}",
    "Result: {}", "**Solution:** {}", "Conclusion: {}", "So the result is {}", "The letter is {}",
    "| Answer | {}", "Result = {}", "The solution is {}", "=> {}", "∴ {}",
]  # fmt: skip
LETTER_WRAPPERS = ["{}", "({})", "**{}**", "**({})**", "[{}]", "“{}”", "‘{}’", "'{}'", "（{}）", "【{}】", "__{}__"]
LETTER_CLOSINGS = ["", ".", "\n", ".\n", "<|im_end|>", ".<|endoftext|>", ".</s>", "\n<|eot_id|>", ".\r\n"]
# The text of a choice before its label; the letters in it are not the answer.
CHOICES = [
    "Blue {}", "12 m/s {}", "vitamin D {}", "B cells {}", "A car {}", "F# {}", "E = mc^2, {}", "25 °C {}", "C++ {}",
    "the B programming language {}", "D-glucose {}", "vitamin D, which is {}", "E. coli {}",
]  # fmt: skip
LABELS = ["({})", "(option {})", "[{}]", ", option {}", "（{}）"]

NUMBERS = st.integers(-999_999, 999_999).filter(lambda number: abs(number) not in (77_776, 77_777))


def written(number: int) -> list[str]:
    """A number in the forms that models write."""
    digits, sign = f"{abs(number):,}", "-" if number < 0 else ""
    separated = [digits.replace(",", mark) for mark in (",", "", " ", "\u202f", "'", "_", "{,}", "\\,", "~", "\\ ")]
    forms = [sign + form for form in separated]
    if number < 0:
        forms += [mark + digits for mark in ("−", "–", "\u2011", "negative ", "minus ")]
    if number % 1000 == 0 and number > 0:
        forms += [f"{number // 1000} thousand", f"{number // 1000}K", f"{number // 1000} \\times 10^3"]
    return forms


@examples(300)
@given(
    number=st.one_of(NUMBERS, st.integers(1, 999).map(lambda thousands: 1000 * thousands)),
    lead=st.sampled_from(NUMBER_LEADS),
    wrapper=st.sampled_from(NUMBER_WRAPPERS),
    closing=st.sampled_from(CLOSINGS),
    data=st.data(),
)
def test_the_number_in_a_frame_is_the_answer(number, lead, wrapper, closing, data):
    form = data.draw(st.sampled_from(written(number)))
    text = lead.format(wrapper.format(form)) + closing
    answer = BENCHMARKS["gsm8k"].extract(text, {"question": "How many?"}).answer
    assert answer is not None, text
    assert parse_number(answer) == number, text


@examples(300)
@given(
    letter=st.sampled_from("ABCDEFGH"),
    lead=st.sampled_from(LETTER_LEADS),
    wrapper=st.sampled_from(LETTER_WRAPPERS),
    closing=st.sampled_from(LETTER_CLOSINGS),
)
def test_the_letter_in_a_frame_is_the_answer(letter, lead, wrapper, closing):
    text = lead.format(wrapper.format(letter)) + closing
    assert BENCHMARKS["mmlu_pro"].extract(text, {"options": ["x"] * 10}).answer == letter, text


@pytest.mark.parametrize("formula", ["$\\frac{3}{4}$", "\\frac{3}{4}", "3/4"])
@pytest.mark.parametrize(
    "frame",
    ["Hence {}.", "So, {}", "→ {}", "=> {}", "`{}`", "[[{}]]", "It must be {}.", "We get {}.", "| Answer | {} |"],
)
def test_a_formula_that_is_the_last_paragraph_is_the_answer(frame, formula):
    row = {"problem": "Find it.", "level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed{\\frac{3}{4}}$."}
    benchmark = BENCHMARKS["math"]
    found = benchmark.extract("We add them.\n\n" + frame.format(formula), row).answer
    assert normalise(found) in ("\\frac{3}{4}", "3/4")
    assert benchmark.extract("So we know $x > 1$, and\n\nHence $x$ is small.", row).answer is None


@examples(150)
@given(
    letter=st.sampled_from("ABCDEFGH"),
    lead=st.sampled_from(["The answer is {}", "Answer: {}", "The correct answer is therefore {}"]),
    choice=st.sampled_from(CHOICES),
    label=st.sampled_from(LABELS),
    closing=st.sampled_from(LETTER_CLOSINGS),
)
def test_the_label_behind_a_choice_is_the_answer_and_no_letter_inside_it_is(letter, lead, choice, label, closing):
    text = lead.format(choice.format(label.format(letter))) + closing
    assert BENCHMARKS["mmlu_pro"].extract(text, {"options": ["x"] * 10}).answer == letter, text


@pytest.mark.parametrize("choice", ["Blue", "vitamin D", "hepatitis B", "B cells", "A car", "F#", "D-glucose", "C++"])
def test_a_choice_without_its_label_is_no_answer(choice):
    text = f"The answer is {choice}."
    assert BENCHMARKS["mmlu_pro"].extract(text, {"options": ["x"] * 10}).answer in (
        None,
        "E" if "coli" in text else None,
    )


PROMPT = 'def twice_plus(x: int, y: int) -> int:\n    """Return twice x, plus y."""\n'
HUMANEVAL = {"prompt": PROMPT, "entry_point": "twice_plus"}
MBPP = {"test_list": ["assert twice_plus(2, 3) == 7"], "test_setup_code": ""}
TOKENS = ["", "<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<｜end▁of▁sentence｜>"]
CODE_CLOSINGS = [
    "", "\n", "\n```", "\n```\n\nThis function doubles `x`.",
    "\n```\n\nExample:\n```python\ntwice_plus(1, 2)  # 4\n```", "\n```\n\n1. It doubles x.\n2. It returns 2 * x + y.",
]  # fmt: skip
FUNCTIONS = ["{}", "```python\n{}", "```\n{}", "Sure!\n\n```py\n{}", "<think>\nHm.\n</think>\n\n```python\n{}"]


@examples(150)
@given(
    value=st.sampled_from(["2 * x + y", "x + y", "y + 2 * x"]),
    statements=st.sampled_from(["", "    z = 0\n", "    if x > 99:\n        return x - y\n"]),
    frame=st.sampled_from(FUNCTIONS),
    is_body=st.booleans(),
    token=st.sampled_from(TOKENS),
    closing=st.sampled_from(CODE_CLOSINGS),
    line_end=st.sampled_from(["\n", "\r\n"]),
    benchmark=st.sampled_from(["humaneval", "mbpp"]),
)
def test_the_program_in_a_frame_is_the_answer(value, statements, frame, is_body, token, closing, line_end, benchmark):
    body = f"{statements}    return {value}"
    is_body = is_body and benchmark == "humaneval"
    code = body if is_body else f"def twice_plus(x, y):\n{body}"
    text = ((code if is_body else frame.format(code)) + token + closing).replace("\n", line_end)
    answer = BENCHMARKS[benchmark].extract(text, HUMANEVAL if benchmark == "humaneval" else MBPP).answer or ""
    functions = [node for node in ast.walk(ast.parse(answer)) if isinstance(node, ast.FunctionDef)]
    expected = ast.parse(f"def f(x, y):\n{body}").body[0].body
    assert ast.dump(functions[-1].body[-1]) == ast.dump(expected[-1]), text
    assert len(functions[-1].body) >= len(expected), text
