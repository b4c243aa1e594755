"""Drills: correct by construction (`refusion_eval.training.mini.drills`)."""

import re

import pytest

from refusion_eval.training.mini.drills import DRILLS, drill_pairs


@pytest.mark.parametrize("drill", DRILLS)
def test_the_same_seed_gives_the_same_pairs(drill: str) -> None:
    assert drill_pairs(drill, seed=3, count=50) == drill_pairs(drill, seed=3, count=50)
    assert drill_pairs(drill, seed=3, count=50) != drill_pairs(drill, seed=4, count=50)


@pytest.mark.parametrize("drill", ["search", "kinds"])
def test_a_walk_quotes_the_lines_of_the_query_in_order(drill: str) -> None:
    for query, response in drill_pairs(drill, seed=0, count=200):
        lines = query.split("\n\n")[1].split("\n")
        quoted = re.findall(r"^([A-J]\. .+): [a-z ]+$", response, re.MULTILINE)
        assert quoted
        assert quoted == lines[: len(quoted)]


def test_a_search_stops_at_the_option_asked_for() -> None:
    for query, response in drill_pairs("search", seed=0, count=200):
        wanted = query.split(".\n\n")[0].removeprefix("Find ")
        letter = re.search(r"The answer is \(([A-J])\)\.$", response).group(1)
        assert f"\n{letter}. {wanted}\n" in query + "\n"


def test_sums_are_right() -> None:
    for query, response in drill_pairs("sums", seed=0, count=200):
        assert query.startswith("Calculate ")
        for term, value in re.findall(r"(\d+[-+*/]\d+)=(\d+)\.", response):
            left, operation, right = re.fullmatch(r"(\d+)([-+*/])(\d+)", term).groups()
            results = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
            assert int(value) == results.get(operation, int(left) // int(right))
            assert int(value) >= 0
