"""Sealed questions: out of everything written, in front of the model alone."""

import pytest

from refusion_eval.benchmarks.rows import WITHHELD, Sealing, redact, texts_of
from refusion_eval.errors import DataError

QUESTION = "Which invented particle decays into two invented bosons when the moon of Zorb is full?"


def test_a_marker_does_not_show_its_text_and_is_the_same_every_time() -> None:
    marker = Sealing().seal("gpqa/rec1/question", QUESTION)
    assert marker == Sealing().seal("gpqa/rec1/question", QUESTION)
    assert "gpqa/rec1/question" in marker
    assert not any(word in marker for word in QUESTION.split() if len(word) > 3)


def test_unsealing_gives_the_real_prompt_and_its_sealed_texts() -> None:
    sealing = Sealing()
    prompt = f"user: {sealing.seal('a', QUESTION)}\n(A) {sealing.seal('b', 'forty two')}\nassistant:"
    real, texts = sealing.unseal(prompt)
    assert real == f"user: {QUESTION}\n(A) forty two\nassistant:"
    assert texts == (QUESTION, "forty two")


def test_a_prompt_without_markers_is_left_alone() -> None:
    assert Sealing().unseal("What is [this]?") == ("What is [this]?", ())


def test_an_unknown_marker_is_refused() -> None:
    with pytest.raises(DataError, match="load its task here first"):
        Sealing().unseal(f"[sealed gpqa/rec9/question {'0' * 24}]")


def test_a_quoted_question_is_withheld_whatever_its_case_and_punctuation() -> None:
    response = f"The question: {QUESTION.upper().replace(' ', ', ')} So the answer is (B)."
    redacted = redact(response, (QUESTION,))
    assert redacted == f"The question: {WITHHELD}? So the answer is (B)."


def test_a_quoted_part_of_eight_words_is_withheld_and_seven_words_are_not() -> None:
    words = QUESTION.split()
    assert redact("x " + " ".join(words[2:10]) + " y", (QUESTION,)) == f"x {WITHHELD} y"
    seven = "x " + " ".join(words[2:9]) + " y"
    assert redact(seven, (QUESTION,)) == seven


def test_other_text_is_left_alone() -> None:
    assert redact("The answer is (B).", (QUESTION,)) == "The answer is (B)."


def test_the_texts_of_an_unsealed_item_are_its_fields_and_the_lines_of_its_prompt() -> None:
    doc = {"Question": QUESTION, "choices": ["one", "two"], "answer": "(B)", "score": 3}
    prompt = "Question: an example\n(A) its choice\n\nQuestion: " + QUESTION
    texts = texts_of(doc, prompt)
    assert texts == (QUESTION, "one", "two", "(B)", "Question: an example", "its choice", f"Question: {QUESTION}")


def test_the_letter_before_a_quoted_choice_is_kept() -> None:
    choice = "The invented boson decays into nine invented quarks at once"
    sealed_texts = texts_of({}, f"Which one?\n(B) {choice}")
    assert redact(f"The answer is (B) {choice}.", sealed_texts) == f"The answer is (B) {WITHHELD}."


def test_a_letter_inside_a_question_is_no_label() -> None:
    line = "Which invented deficit follows a lack of vitamin D. Which of vitamin E?"
    assert texts_of({}, line) == (line,)
