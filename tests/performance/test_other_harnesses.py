"""The table of what harnesses say of the same answers."""

import pytest

from performance.other_harnesses import Judged, rows_of, table

ROWS = [{"id": str(number), "prompt": "", "target": str(number)} for number in range(6)]


def judged(wrong, end=""):
    return {row["id"]: Judged(f"It is {row['id']}.{end}", row["target"], row["id"] not in wrong) for row in ROWS}


def test_accuracies_texts_and_verdicts_are_compared_with_those_of_the_first():
    lines = table({"a": judged({"0"}), "b": judged({"0", "5"}, end=" |")}, ROWS).splitlines()
    assert lines[2:4] == ["| a | 5 of 6 | 6 of 6 | 6 of 6 |", "| b | 4 of 6 | 0 of 6 | 5 of 6 |"]
    assert lines[7:] == ["| 5 | 5 | a | right | 5 | It is 5. |", "| 5 | 5 | b | wrong | 5 | It is 5. \\| |"]


def test_a_few_differences_of_a_harness_are_shown_and_the_others_counted():
    lines = table({"a": judged(set()), "b": judged({row["id"] for row in ROWS})}, ROWS).splitlines()
    assert len(lines[7:]) == 2 * 3 + 1
    assert lines[-1] == "| 3 more | | b | | | |"


def test_rows_have_the_prompts_that_are_sent_and_the_numbers_that_are_right():
    (row,) = rows_of("mini_gsm8k", None, ["3"])
    assert row["target"].isdecimal()
    assert row["prompt"].endswith("End with: The answer is <number>.")


def test_an_item_that_is_not_there_is_named():
    with pytest.raises(KeyError, match="none"):
        rows_of("mini_gsm8k", None, ["none"])
