"""Texts with gaps that their suffixes settle (`miniature.gaps`)."""

import random
from itertools import pairwise

import pytest

from miniature.family import EMBEDDED, EQUAL_START
from miniature.gaps import GAPS, NUM_CALCULATIONS, Gapped, draw_gapped
from miniature.steps import GRADES
from refusion_eval.benchmarks.infill import chain_holds


def drawn(kind: str, grade: int, count: int = 40, *, test: bool = True) -> list[Gapped]:
    rng = random.Random(f"{kind} {grade}")
    return [draw_gapped(rng, kind, grade, test=test) for _ in range(count)]


@pytest.mark.parametrize("grade", GRADES)
def test_a_chain_holds_with_the_middle_of_no_other_one(grade: int) -> None:
    found = drawn("math", grade)
    assert all(chain_holds(item.response) for item in found)
    others = [
        (one, other) for one, other in pairwise(found) if one.middle.split("=")[-1] != other.middle.split("=")[-1]
    ]
    assert len(others) > 30
    assert not any(chain_holds(one.prefix + other.middle + one.suffix) for one, other in others)
    assert {item.middle.count("=") for item in found} == {2 if grade == 3 else 1}
    assert all(item.response.count("=") == NUM_CALCULATIONS for item in found)


def test_chains_with_a_wrong_result_or_another_text_do_not_hold() -> None:
    chain = "64/2=32. 32+38=70. 70+36=106. 106+39=145. 145+32=177. The answer is 177."
    assert chain_holds(chain)
    for old, new in (
        ("70.", "71."),
        ("64/2", "65/2"),
        ("70+36=106", "72+34=106"),
        (" 70+36=106.", ""),
        (". 32", ". so 32"),
    ):
        assert not chain_holds(chain.replace(old, new, 1))


@pytest.mark.parametrize("grade", GRADES)
def test_the_calls_of_a_function_decide_its_line(grade: int) -> None:
    found = drawn("program", grade)
    for item in found:
        exec(item.response.removeprefix("```python").removesuffix("```"), {})
        assert item.middle.startswith("\ndef " if grade == 1 else "\n    return ")
    for one, other in pairwise(found):
        if one.middle.split("(")[0] != other.middle.split("(")[0]:
            with pytest.raises((AssertionError, NameError)):
                exec((one.prefix + other.middle + one.suffix).removeprefix("```python").removesuffix("```"), {})


@pytest.mark.parametrize("grade", GRADES)
def test_what_a_description_says_is_listed_behind_it(grade: int) -> None:
    for item in drawn("text", grade):
        assert item.middle.count(".") == grade
        for sentence in item.middle.strip().removesuffix(".").split(". "):
            assert any(value in item.suffix for value in sentence.split()[-3:])


@pytest.mark.parametrize("kind", ["math", "program", "text"])
def test_splits_share_no_text_and_queries_say_nothing_of_it(kind: str) -> None:
    trained, tested = ({item.response for item in drawn(kind, 2, 200, test=test)} for test in (False, True))
    assert trained.isdisjoint(tested)
    if kind != "text":
        assert len({item.query for item in drawn(kind, 2)}) == 1


def test_only_the_course_of_the_equal_start_has_gaps() -> None:
    assert EQUAL_START.courses[0].num_drills.keys() >= set(GAPS)
    assert not EMBEDDED.drills.keys() & set(GAPS)
