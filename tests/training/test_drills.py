"""Drills: correct by construction (`refusion_eval.training.mini.drills`)."""

import re

import pytest

from refusion_eval.training.mini.drills import DRILLS, drill_pairs


@pytest.mark.parametrize("drill", DRILLS)
def test_the_same_seed_gives_the_same_pairs(drill: str) -> None:
    assert drill_pairs(drill, seed=3, count=50) == drill_pairs(drill, seed=3, count=50)
    assert drill_pairs(drill, seed=3, count=50) != drill_pairs(drill, seed=4, count=50)


def test_the_kinds_walk_quotes_every_line_of_the_query_in_order() -> None:
    for query, response in drill_pairs("kinds", seed=0, count=200):
        assert re.findall(r"^([A-E]\. .+): [a-z ]+\.?$", response, re.MULTILINE) == query.split("\n\n")[1].split("\n")


def test_a_search_quotes_the_lines_up_to_the_option_asked_for() -> None:
    for query, response in drill_pairs("search", seed=0, count=200):
        wanted = query.split(".\n\n")[0].removeprefix("Find ")
        listed = query.split("\n\n")[1].split("\n")
        first, *walked, last = response.split("\n")
        assert first == f"It is {wanted}."
        assert walked[-1] == f"{listed[len(walked) - 1]}."
        assert walked[:-1] == listed[: len(walked) - 1]
        assert walked[-1].endswith(f" {wanted}.")
        assert last == f"The answer is ({walked[-1][0]})."


def test_sums_are_right() -> None:
    for query, response in drill_pairs("sums", seed=0, count=200):
        assert query.startswith("Calculate ")
        for term, value in re.findall(r"(\d+[-+*/]\d+)=(\d+)\.", response):
            left, operation, right = re.fullmatch(r"(\d+)([-+*/])(\d+)", term).groups()
            results = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
            assert int(value) == results.get(operation, int(left) // int(right))
            assert int(value) >= 0
