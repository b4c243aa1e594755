"""Words, lists of words and brackets of BBH stand in every frame in which letters and numbers stand."""

import pytest

from refusion_eval.benchmarks import BENCHMARKS


def is_right(right: str, text: str) -> bool:
    bench = BENCHMARKS["bbh"]
    answer = bench.extract(text, {"input": "Which?\nOptions:\n(A) one\n(B) two", "target": right}).answer
    return answer is not None and bench.prompts.is_right is not None and bench.prompts.is_right(right, answer)


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{False}", "The answer is $\\boxed{\\text{False}}$.", "<answer>False</answer>", "#### False", "[False]",
        "**Final Answer**\n\nFalse", "The answer is (False).", "The answer is <False>.", "## Answer\n\nFalse.",
        "The answer is not True, it is False.", "The answer is: not ( True ) and ( False ) = False.",
        "The answer is that the expression is False.", "So False is the final answer.", "We look.\n\n**False**.",
        "The answer is True. Wait, it should be False.", "The answer is False, because True and False is False.",
        "False\n\nBecause nothing else fits.", "I'd go with False.", "The answer is False (not True).",
        "The answer is True and False, so False.", "The answer is True AND False → False.", "So it is False.",
        "The answer is (True and False) which is False.", "False is correct.", "False, as both are wrong.",
        "The answer is that the given expression is False.",
        "We look.\n\nTherefore, false.", "We look.\nThus: **False**", "We look.\n\n- False",
    ],
)  # fmt: skip
def test_the_word_that_a_sentence_asserts_is_the_answer(text: str) -> None:
    assert is_right("False", text)
    assert not is_right("True", text)


@pytest.mark.parametrize(
    "text",
    [
        "The answer is Yes or No.", "Yes/No", "The answer is <Yes or No>.", "The answer is either **Yes** or **No**.",
        "Answer: No idea.", "The answer is Yes only if he ran.", "The answer is No, provided that he ran.",
        "The answer is that there is no way to tell.",
        "The answer is Yes if he ran, otherwise no.", "The answer is possibly yes, possibly no.",
        "The answer is neither yes nor no.", "The answer is unclear: it may be Yes, it may be No.",
        "The answer might be Yes; it might be No.",
        "The answer is Yes, but it could also be No.", "Yes or no, that is the question.", "No, wait, yes.",
        "No one knows.",
    ],
)  # fmt: skip
def test_both_words_a_condition_and_no_idea_are_no_answer(text: str) -> None:
    assert not is_right("Yes", text)
    assert not is_right("No", text)


@pytest.mark.parametrize(
    "text", ["not valid", "deductively invalid", "that the argument isn't valid", "a form, invalid"]
)
def test_a_denied_word_is_the_other_one(text: str) -> None:
    assert is_right("invalid", f"The answer is {text}.")
    assert not is_right("valid", f"The answer is {text}.")


@pytest.mark.parametrize(
    "text",
    [
        "The answer is:\n1. apple\n2. banana\n3. cherry",
        "The answer is:\n- **apple**\n- **banana**\n- **cherry**\n\nDone.",
        "The answer is:\napple\nbanana\ncherry",
        "The answer is:\n\napple\n\nbanana\n\ncherry", 'The answer is ["apple", "banana", "cherry"].',
        "The answer is apple, banana, and cherry.", "The answer is apple < banana < cherry.",
        "The answer is <apple banana cherry>.", "\\boxed{apple\\ banana\\ cherry}",
        "<answer>\napple\nbanana\ncherry\n</answer>",
        "1. apple\n2. banana\n3. cherry", "The answer is: apple,\nbanana,\ncherry.",
        "The answer is the sorted list: apple banana cherry.", "The answer is apple banana cherry\nI sorted them.",
        "The answer is:\na) apple\nb) banana\nc) cherry", "<answer>apple\nbanana\ncherry</answer>",
        "The answer is:\n\n| apple |\n| banana |\n| cherry |", "The answer is apple & banana & cherry.",
        "We sort them.\nBy their letters:\napple banana cherry", "Sorted:\n- apple\n- banana\n- cherry",
        "So, apple banana cherry.", "So apple, banana, cherry is the answer.",
        "The answer is banana apple cherry. Wait, it should be apple banana cherry.", "We sort.\n\napple banana cherry",
    ],
)  # fmt: skip
def test_the_items_of_a_list_are_the_answer_however_they_are_parted(text: str) -> None:
    assert is_right("apple banana cherry", text)
    assert not is_right("apple cherry banana", text)
    assert not is_right("apple banana", text)


@pytest.mark.parametrize(
    "text", ["The answer is >}].", "\\boxed{> \\} ]}", "<answer>> } ]</answer>", "So `> } ]`\n\n> } ]"]
)
def test_brackets_are_read_in_frames_of_brackets(text: str) -> None:
    assert is_right("> } ]", text)
    assert not is_right("> ] }", text)
