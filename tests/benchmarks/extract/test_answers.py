"""Numbers and letters found in model text."""

import time

import pytest

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.benchmarks.extract.answers import (
    first_number_stated,
    last_number_stated,
    parse_number,
    show_number,
    strict_number,
)
from refusion_eval.benchmarks.extract.letters import first_letter_stated, last_letter_stated, strict_letter


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", "42"),
        ("The answer is: **$42.00**", "42"),
        ("the ANSWER is 1,234,567 dollars.", "1234567"),
        ("The answer is -$5.", "-5"),
        ("The answer is $−5", "-5"),
        ("**Answer:** 12%", "12"),
        ("The answer is:\n\n$$\\boxed{72}$$", "72"),
        ("So it is \\boxed{1{,}000}.", "1000"),
        ("The final answer is \\(\\frac{1}{2}\\).", "0.5"),
        ("The answer is 3 1/2 hours.", "3.5"),
        ("The answer is 10/2.", "5"),
        ("The answer is 16 - 3 = 13.", "13"),
        ("Answer: x = 7", "7"),
        ("She has 5.\n#### 6", "6"),
        ("2 + 2 = 4\nA: 4", "4"),
        ("The answer is .5", "0.5"),
        ("The answer is not 5 but 6.", "6"),
        ("The answer is not 5 + 6 apples, but $7 in all.", "7"),
    ],
)
def test_a_stated_number_is_read_as_people_write_it(text: str, number: str) -> None:
    assert last_number_stated(text).answer == number
    assert first_number_stated(text).answer == number


@pytest.mark.parametrize(
    ("statement", "number"),
    [
        ("The answer is 16 - 3.", "13"),
        ("\\boxed{5 \\times 4 + $2}", "22"),
        ("The answer is 12 ÷ 4 eggs.", "3"),
        ("The answer is 2 x 3.5 x 2", "14"),
        ("The answer is 5-6 hours.", None),
        ("The answer is 5.1 x 10^3", "5100"),
        ("The answer is 5 - a good number.", "5"),
        ("The answer is 3 for each - 4 of them.", "3"),
        ("The answer is 1 * 0 ÷ 0.", None),
        ("\\boxed{50x - 200}", None),
        ("Answer: y = 3n + 7", None),
        ("\\boxed{230 miles and 300 miles}", None),
        ("\\boxed{230\\text{ miles and }300\\text{ miles}}", None),
        ("The answer is 3 apples, 4 pears and 1,000 plums.", None),
        ("The answer is $5 or $6.", None),
        ("The answer is 7 apples and 7 pears.", "7"),
        ("The answer is 18 dollars for 3 dozen eggs.", "18"),
    ],
)
def test_of_an_expression_the_value_counts_and_several_counts_are_no_number(statement: str, number: str | None) -> None:
    for text in (statement, f"He has 9. {statement}", f"{statement}\n"):
        assert last_number_stated(text).answer == number
        assert first_number_stated(text).answer == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 12 500.", "12500"),
        ("The answer is 2\u202f500\u202f000 dollars.", "2500000"),
        ("The answer is 3 200-page books.", "3"),
        ("The answer is –9.", "-9"),
        ("It took 5–6 hours. The answer is negative 9 degrees.", "-9"),
        ("The answer is 10 minus 1.", "9"),
        ("The answer is not 5 but minus 6.", "-6"),
        ("x = - 5, so the answer is $- 5$", "-5"),
        ("The answer is:\n- 42 pens", "42"),
        ("Total - 42", "42"),
        ("Total: -42", "-42"),
        ("The answer is:\n1. 3 + 4 = 7\n2. 7 * 6 = 42", "42"),
        ("The answer is:\n42. That is all.", "42"),
        ("The answer is 1.2 million.", "1200000"),
        ("The answer is 3-thousand-dollar bills.", "3000"),
        ("The answer is 20K.", "20000"),
        ("\\boxed{3 \\times 10^{6}}", "3000000"),
        ("The answer is 3 × 10⁻¹.", "0.3"),
        ("The answer is 1.5e3.", "1500"),
        ("The answer is 6**2.", "36"),
        ("The area is 6 m^2.", "2"),
        ("The answer is 9^999.", "9"),
        ("The answer is 2½ hours.", "2.5"),
        ("The answer is $2\\frac{1}{2}$.", "2.5"),
        ("The answer is ¾.", "0.75"),
        ("<answer>42</answer> as 7 of 6 (= 7 * 6) shows", "42"),
        ("The answer is 41.67 ≈ 42.", "42"),
    ],
)
def test_numbers_are_read_in_all_ways_of_writing(text: str, number: str) -> None:
    assert last_number_stated(text).answer == number


@pytest.mark.parametrize(
    ("question", "number"),
    [
        ("How many eggs?", "84"),
        ("How many dozens of eggs will she eat in 4 weeks?", "7"),
        ("How many dozen?", "7"),
        ("She buys 3 dozen. How many?", "84"),
    ],
)
def test_a_size_that_the_question_asks_for_is_a_unit(question: str, number: str) -> None:
    assert BENCHMARKS["gsm8k"].extract("The answer is 7 dozens.", {"question": question}).answer == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is that after 3 days he has 12 apples.", "12"),
        ("The answer is that he has 12 apples after 3 days.", "12"),
        ("The answer is in 3 days.", "3"),
        ("The answer is 5 more than 10, so 15.", "15"),
        ("The answer is 3 times 14, which is 42.", "42"),
        ("The answer is 42, which is 3 more than 39.", "42"),
        ("The answer is 90 minutes, which is 1.5 hours.", "90"),
        ("The answer is 1 hour and 30 minutes, or 90 minutes.", "90"),
        ("The answer is 20 dollars (= 2000 cents).", "20"),
        ("The answer is 41.67, which rounds to 42.", "42"),
        ("The answer is 41.67 (rounded to 42).", "42"),
        ("The answer is 41.67, rounded to 2 decimal places.", "41.67"),
        ("The answer is not 5, it is 6.", "6"),
        ("The answer is not 5. It is 6.", "6"),
        ("The answer is not 5.", None),
        ("The answer is 300 in total, 100 a day.", "300"),
        ("The answer is 3 groups of 100, for a total of 300.", "300"),
        ("The answer is 10 plus 5, which is 15.", "15"),
        ("10 + 5 = 15 apples. (That is 3 more than 12.)", "15"),
        ("The answer is twelve.", "12"),
        ("#### three apples", "3"),
        ("The answer is one hundred and five.", "105"),
        ("The answer is two thirds.", "2/3"),
        ("The answer is one of these. It costs 7.", "7"),
        ("The answer is either 12 or 14.", None),
        ("The answer is 5 to 6 apples.", None),
        ("The answer is between 10 and twenty.", None),
        ("The answer is less than 20.", None),
        ("The answer is 20 or more.", None),
        ("The answer is > 20.", None),
        ("The answer is <20>.", "20"),
        ("The answer is 20 at most.", None),
        ("The answer is 20 minimum.", None),
        ("The answer is <twelve apples>.", "12"),
        ("Total: 60 dollars (3 hours).", "60"),
        ("He earns 3 x 20 = 60 dollars, 10 more than Tom.", "60"),
        ("The answer is not more than 20.", None),
        ("The answer is anywhere from 12 to 14.", None),
        ("The answer is maybe 12, maybe 14.", None),
        ("He adds them up.\n12 — 14", None),
        ("It is 12 to 14 apples.", None),
        ("12 or 14", None),
        ("He goes from 12 to 14.", "14"),
        ("The answer is 12, but it might be 14.", None),
        ("The answer is 3 books at $5 each, or $15.", "15"),
        ("Die Antwort ist 12.", "12"),
        ("答案是12。", "12"),
        ("So 10 + 5 = 15 apples are left after 2 days.", "15"),
        ("The answer is 5. Wait, that is wrong. It should be 6.", "6"),
        ("The answer is 5, no, 6. Actually, it's -7.", "-7"),
        ("The answer is 5. Let me recheck: 3 + 3 = 6. So it is 6.", "6"),
        ("\\boxed{12 \\text{ to } 14}", None),
        ("\\boxed{\\geq 12}", None),
        ("The answer is 12~14.", None),
        ("The answer is 12~500.", "12500"),
        ("The answer is:\n\n> 12", "12"),
        ("The answer is a total of twelve.", "12"),
        ("The answer is six plus six, so twelve.", "12"),
        ("She counts them.\n\nTwelve", "12"),
        ("The answer is 100 each, 300 total.", "300"),
        ("The answer is 3 days at 100 each, giving 300.", "300"),
        ("The answer is 42. He has to wait until it is 7.", "42"),
        ("The answer is 42. No other number fits. There are actually 6 bags.", "42"),
    ],
)
def test_of_several_numbers_the_one_that_is_said_to_be_the_answer_counts(text: str, number: str | None) -> None:
    assert last_number_stated(text).answer == number


def test_a_correction_counts_for_the_last_statement_only() -> None:
    text = "The answer is 5. Wait, it is 6."
    assert (first_number_stated(text).answer, last_number_stated(text).answer) == ("5", "6")


def test_the_last_statement_counts_and_the_first_where_text_runs_on() -> None:
    text = "The answer is 5. No, that is wrong. The answer is 6.\nIt costs 7."
    assert last_number_stated(text).answer == "6"
    assert first_number_stated(text).answer == "5"


def test_without_a_statement_the_last_number_counts_and_says_so() -> None:
    found = last_number_stated("He buys 3 boxes and has 12...")
    assert (found.answer, found.how) == ("12", "last number")
    assert first_number_stated("He has 12").answer is None


@pytest.mark.parametrize("text", ["", "no number", "The answer is unknown.", "1/0"])
def test_text_without_a_number_gives_nothing(text: str) -> None:
    assert last_number_stated(text).answer is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", "42"),
        ("The answer is 1,000", "1000"),
        ("The answer is 1.\nThe answer is 2.", "2"),
        ("The answer is **42**.", None),
        ("the answer is 42.", None),
        ("The answer is 42 apples.", None),
        ("#### 42", None),
    ],
)
def test_strict_numbers_need_exactly_the_asked_for_line(text: str, number: str | None) -> None:
    assert strict_number(text).answer == number


def test_numbers_are_compared_by_value() -> None:
    assert parse_number("42") == parse_number("42.00") == parse_number("$42.") == parse_number("84/2")
    assert parse_number("1,000") == 1000
    assert parse_number("12 apples") is None
    assert parse_number("1/0") is None
    assert parse_number("9" * 200) is None


@pytest.mark.parametrize("text", ["0", "-10", "0.125", "1/3", "1000000", "0.1", "-7/6", "100"])
def test_a_shown_number_is_in_normal_form(text: str) -> None:
    value = parse_number(text)
    assert value is not None
    assert show_number(value) == text


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B).", "B"),
        ("the answer is: b", "B"),
        ("The answer is **B**", "B"),
        ("\\boxed{\\text{(c)}}", "C"),
        ("The answer is B) because it is.", "B"),
        ("**Answer: C**", "C"),
        ("Final answer: $\\boxed{D}$", "D"),
        ("The correct option is A because of gravity", "A"),
        ("Answer:\nB", "B"),
        ("The answer is option (D)", "D"),
        ("I think (A), no: the answer is (B). Wait, the answer is (C).", "C"),
        ("Some reasoning.\n(b)", "B"),
        ("B) the second one", "B"),
        ("**D**", "D"),
        ("The correct statement is B.", "B"),
        ("Therefore, the closest option is (C).", "C"),
        ("Hence option D is the correct answer.", "D"),
        ("So **C** is the correct answer, not A.", "C"),
        ("option (b) is correct", "B"),
        ("The answer would be (B)", "B"),
        ("The energy of the photon is:\n\nC. 3 eV", "C"),
        ("$\\text{The answer is } B$", "B"),
        ("The answer is B - the second one", "B"),
        ("The answer is B - 5 m/s", "B"),
        ("The answer is (A). (B) is wrong.", "A"),
        ("The answer is (C), and (A) is incorrect", "C"),
        ("The answer is (a), because (b) is wrong.", "A"),
        ("Answer: B => it is lighter", "B"),
        ("The answer is therefore C.", "C"),
        ("The answer seems to be (C).", "C"),
        ("The closest value among the options is C.", "C"),
        ("The answer is vitamin D, which is (C).", "C"),
        ("The answer is B cells (C).", "C"),
        ("The answer is E. coli, option C.", "C"),
        ("The answer is Blue (C) because B is red.", "C"),
        ("The answer is 【C】", "C"),
        ("The answer is __C__", "C"),
        ("<answer><b>C</b></answer>", "C"),
        ("The answer is not A but C.", "C"),
        ("The answer is not (A). It is (C).", "C"),
        ("The answer is (A). Actually, it is (C).", "C"),
        ("The answer is A... wait, it should be C.", "C"),
        ("The answer is (A). Wait, B is also possible. But A holds.", "A"),
        ("The answer is C. The answer is A only if x > 2.", "C"),
        ("Therefore, (C) is correct.", "C"),
        ("The answer is (A). D is correct about heat.", "A"),
        ("So C is the answer.", "C"),
        ("I'd go with option C.", "C"),
        ("I would pick C — a safe choice.", "C"),
        ("This corresponds to choice (C).", "C"),
        ("Final answer (C)", "C"),
        ("Option C", "C"),
        ("## Final Answer\n\n**C. Mitochondria**", "C"),
        ("C - Blue", "C"),
        ("✅ **C. Blue**", "C"),
        ("c. 4", "C"),
        ("C\n\nExplanation: because A is too hot.", "C"),
        ("Explanation.\n\n**C. Blue**", "C"),
        ("Answer: I think it is C", "C"),
        ("Answer: we can rule out A and B, so C", "C"),
        ("Answer: rules out C, leaving D", "D"),
        ("Answer: after eliminating the others, B.", "B"),
        ("Answer: A and B are wrong, which leaves C.", "C"),
        ("Answer: Not B but D", "D"),
        ("Option D: option 3", "D"),
        ("Of these, D. option 3 is the right one.", "D"),
        ("Letter: C", "C"),
        ("Ans: C", "C"),
        ("Answer → C", "C"),
        ("**Option C** - option 2", "C"),
        ("Answer: none of A, B, or D, which means C.", "C"),
        ("Answer: after removing A, B, D: C", "C"),
        ("Answer: after ruling out A and B, C.", "C"),
        ("The correct one is C. option 2", "C"),
        ("Of these, C. option 2 is correct.", "C"),
        ("答案：C", "C"),
        ("La respuesta correcta es C.", "C"),
        ("La réponse est (C).", "C"),
        ("The answer is <C>.", "C"),
        ("The answer is «C».", "C"),
        ("I would say C.", "C"),
        ("My pick: C", "C"),
        ("The rest is too large.\n\nSo it must be C.", "C"),
        ("Thus, C.", "C"),
        ("The answer is C.\nIf the answer is D, all is lost.", "C"),
    ],
)
def test_a_stated_letter_is_found_in_any_dress(text: str, letter: str) -> None:
    assert last_letter_stated(text, 4).answer == letter


@pytest.mark.parametrize(
    "text",
    [
        "The answer is Apples.",
        "The answer is a matter of taste.",
        "The answer is not known",
        "the (R)-enantiomer and the (S)-enantiomer",
        "The answer is (E).",
        "A. one\nB. two\nC. three\nD. four",
        "A. one\nB. two\nC. three\nD",
        "(b)\nThe speed is 3 m/s.",
        "C\nis the speed of light.",
        "Answer: (A) is incorrect because it is.",
        "The answer (B) is not right",
        "Therefore option C is not the correct answer.",
        "If option C is correct, then so is B.",
        "The answer is A - B = 3",
        "The answer is $C(6, 3)$",
        "\\boxed{A \\cap B}",
        "\\boxed{A_1}",
        "Answer: D = 5",
        "The answer is A, B and D.",
        "The answer is (A) and (C).",
        "The answers are A/B",
        "Answer: (a) 5 m/s (b) 6 m/s",
        "The answer is A car.",
        "The answer is vitamin C.",
        "The answer is anything but C.",
        "So it is A",
        "Thus I",
        "The answer is Blue (C) or Red (A).",
        "Answer: either A or (C)",
        "Answer: `B` or maybe `C`",
        "The answer is B, but it might be C.",
        "Option A: one\nOption B: two",
        "Answer: hepatitis B",
        "The answer is not Blue (C).",
        "The answer is A if x > 2",
        "Statement A is correct.",
        "Let us choose a card, and choose A and B.",
        "They match\nB is here",
        "(a) What is the speed of the first stone, and (b) what is that of the second?",
        "",
    ],
)
def test_words_labels_and_listed_choices_are_no_answer(text: str) -> None:
    assert last_letter_stated(text, 4).answer is None


def test_the_pronoun_i_is_no_letter() -> None:
    assert last_letter_stated("The answer is I think hard to say", 10).answer is None
    assert last_letter_stated("The answer is I", 10).answer == "I"


@pytest.mark.parametrize(
    "text",
    [
        "(i) The speed is 3 m/s.",
        "I. The trace is zero.\nII. The determinant is not.",
        "I. The trace is zero.",
        "Answer: (i) the speed (ii) the time",
        "\n".join(f"{letter}. choice" for letter in "ABCDEF") + "\nG",
    ],
)
def test_numerals_and_a_list_that_was_cut_off_are_no_answer(text: str) -> None:
    assert last_letter_stated(text, 10).answer is None


def test_the_first_rule_is_the_benchmark_authors_pattern() -> None:
    text = "The answer is (A).\n\nQuestion: ...\nThe answer is (B)."
    assert first_letter_stated(text, 4).answer == "A"
    assert first_letter_stated("The answer is: A", 4).answer is None


def test_strict_letters_need_exactly_the_asked_for_form() -> None:
    assert strict_letter("The answer is (A). The answer is (B).", 4).answer == "B"
    assert strict_letter("the answer is B", 4).answer is None


HOSTILE = (
    "answer ", "the answer is ", "answer is *** ", "1", "111,", "1,111", "1/", "-", "$", "\\boxed{", "\\boxed{1} ",
    "\\frac{", "####", "The answer is (", "1 1/", "A:\n", "**", "\n", " ", "\\text{a", "<<1",
    "`", "```\n", "(", "\ud800", "\0",
)  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("benchmark", ["gsm8k", "math", "mmlu_pro"])
def test_no_text_of_100_kilobytes_stalls_an_extraction(piece: str, benchmark: str) -> None:
    bench = BENCHMARKS[benchmark]
    text = piece * (100_000 // len(piece))
    start = time.process_time()
    for name in bench.prompts.filters:
        bench.extract(text, {"options": ["x"] * 10}, name)
    # A pattern that backtracks takes minutes for such a text, and one that does not takes less than a second.
    assert time.process_time() - start < 10
