"""Drills: correct by construction (`refusion_eval.training.mini.drills`)."""

import re

import pytest

from refusion_eval.training.mini.drills import DRILLS, drill_pairs


@pytest.mark.parametrize("drill", DRILLS)
def test_the_same_seed_gives_the_same_pairs(drill: str) -> None:
    assert drill_pairs(drill, seed=3, count=50) == drill_pairs(drill, seed=3, count=50)
    assert drill_pairs(drill, seed=3, count=50) != drill_pairs(drill, seed=4, count=50)


@pytest.mark.parametrize("drill", ["letters", "kinds"])
def test_the_named_letter_stands_before_the_text_in_the_query(drill: str) -> None:
    for query, response in drill_pairs(drill, seed=0, count=200):
        named = re.findall(r"(?:^|\. )(?:[A-Z][a-z ]+: [^.]+\. )?([^.:]+) is option ([A-J])\.", response)
        assert named
        for text, letter in named:
            assert f"\n{letter}. {text}\n" in query + "\n"


def test_sums_are_right() -> None:
    for query, response in drill_pairs("sums", seed=0, count=200):
        assert query.startswith("Calculate ")
        for term, value in re.findall(r"(\d+[-+*/]\d+)=(\d+)\.", response):
            left, operation, right = re.fullmatch(r"(\d+)([-+*/])(\d+)", term).groups()
            results = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
            assert int(value) == results.get(operation, int(left) // int(right))
            assert int(value) >= 0
