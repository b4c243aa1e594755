"""Signs of collapse in texts: those that have them, and those that look a little like it and have none."""

import pytest

from refusion_eval.results.collapse import EMPTY, REPEATING, SPECIAL, scripts_of, signs_of

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
COUNTING = " ".join(f"{first} {second}" for first in WORDS for second in WORDS)
PROGRAM = "def f(x):\n" + "".join(f"    if x == {number}:\n        return {number + 1}\n" for number in range(40))


@pytest.mark.parametrize(
    ("text", "signs"),
    [
        ("", {EMPTY}),
        (" \n ... ", {EMPTY}),
        ("<think>It is 4.</think>", {EMPTY}),
        ("4", set()),
        ("So it is 12 12 12 12 12 12 12 12 12 12 12 12 12 12 12 12 12 12 12 12 12", {REPEATING}),
        ("Let me think again. " * 4, {REPEATING}),
        ("Let me think again. " * 3, set()),
        ("It is 0.33333333333333333333", set()),
        ("No, no, no, no!", set()),
        ("| a | --- |\n" * 3 + "-" * 100, set()),
        ("It is 4" + "!" * 60, {REPEATING}),
        ("!" * 60, {EMPTY, REPEATING}),
        ("It is 4" + "!" * 20, set()),
        ("It is 4 " + "- " * 31, {REPEATING}),
        ("| a |\n" + "| " * 40, {REPEATING}),
        ("The end\n" + "-" * 120, set()),
        ("The end\n" + "-" * 121, {REPEATING}),
        ("Let me think again: " * 4 + "=" * 80, {REPEATING}),
        (f"{COUNTING}. The answer is 100.", set()),
        (f"{(COUNTING + ' ') * 3}. The answer is 300.", {REPEATING}),
        (PROGRAM, set()),
        ("The answer is [MASK].", {SPECIAL}),
        ("The answer is 4<|endoftext|>", {SPECIAL}),
        ("a <| b |> c", set()),
        ("if a<|b|: x", set()),
    ],
)
def test_a_text_has_the_signs_that_a_reader_sees(text, signs):
    assert signs_of(text, None, {}) == signs


def test_a_mask_that_is_left_among_the_tokens_is_a_sign_although_no_text_shows_it():
    assert signs_of("It is 4.", [5, 9, 6], {"mask_id": 9}) == {SPECIAL}
    assert signs_of("It is 4.", [5, 6], {"mask_id": 9}) == signs_of("It is 4.", [5, 6], {}) == set()


@pytest.mark.parametrize(
    ("text", "scripts"),
    [
        ("The angle α is π/3", set()),
        ("Naïve café", set()),
        ("The angle 𝛼 of 𝐴𝐵𝐶 is 𝑥", set()),
        ("Ｔｈｅ　ａｎｓｗｅｒ", set()),
        ("答案是 7", {"CJK"}),
        ("Ответ: 7", {"CYRILLIC"}),
        ("The word for water is 水, and so the answer is the second of the choices.", set()),
        ("√2 ≤ x² 😀", set()),
    ],
)
def test_the_scripts_of_a_text_leave_out_those_of_formulas_and_of_single_words(text, scripts):
    assert scripts_of(text) == scripts
