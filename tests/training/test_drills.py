"""Drills: correct by construction (`refusion_eval.training.mini.drills`)."""

import re

import pytest

from refusion_eval.training.mini.drills import DRILLS, drill_pairs


@pytest.mark.parametrize("drill", DRILLS)
def test_the_same_seed_gives_the_same_pairs(drill: str) -> None:
    assert drill_pairs(drill, seed=3, count=50) == drill_pairs(drill, seed=3, count=50)
    assert drill_pairs(drill, seed=3, count=50) != drill_pairs(drill, seed=4, count=50)


@pytest.mark.parametrize("drill", ["letters", "kinds"])
def test_every_option_is_found_once_with_its_letter(drill: str) -> None:
    for query, response in drill_pairs(drill, seed=0, count=200):
        listed = query.split("\n\n")[1].split("\n")
        found = re.findall(r"(\w[\w ]*): ([A-F])\.", response.removeprefix("Found "))
        assert sorted(f"{letter}. {option}" for option, letter in found) == listed


def test_sums_are_right() -> None:
    for query, response in drill_pairs("sums", seed=0, count=200):
        assert query.startswith("Calculate ")
        for term, value in re.findall(r"(\d+[-+*/]\d+)=(\d+)\.", response):
            left, operation, right = re.fullmatch(r"(\d+)([-+*/])(\d+)", term).groups()
            results = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
            assert int(value) == results.get(operation, int(left) // int(right))
            assert int(value) >= 0
