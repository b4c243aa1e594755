"""Drills: correct by construction (`miniature.drills`)."""

import re

import pytest

from miniature.data import drill_pairs
from miniature.drills import DRILLS
from miniature.knowledge import KINDS


@pytest.mark.parametrize("drill", DRILLS)
def test_the_same_seed_gives_the_same_pairs(drill: str) -> None:
    assert drill_pairs(drill, seed=3, count=50) == drill_pairs(drill, seed=3, count=50)
    assert drill_pairs(drill, seed=3, count=50) != drill_pairs(drill, seed=4, count=50)


def _letter_of(query: str) -> dict[str, str]:
    """Option -> letter, from the lettered lines of a query."""
    return {option: letter for letter, option in re.findall(r"^([A-F])\. (.+)$", query, re.MULTILINE)}


def test_the_letters_drill_names_every_option_once_with_its_letter() -> None:
    for query, response in drill_pairs("letters", seed=0, count=200):
        found = re.findall(r"(\w[\w ]*) \(([A-F])\)", response.removeprefix("Found "))
        assert len(found) == len(_letter_of(query))
        assert dict(found) == _letter_of(query)


def test_the_kinds_drill_finds_a_member_of_every_kind_asked_for() -> None:
    members = {kind.name: kind.members for kind in KINDS}
    for query, response in drill_pairs("kinds", seed=0, count=200):
        found = re.findall(r"^([a-z ]+): (\w+) \(([A-E])\)$", response, re.MULTILINE)
        assert [name for name, _, _ in found] == query.split("\n\n")[0].removeprefix("Find ").rstrip(".").split(", ")
        assert all(option in members[name] for name, option, _ in found)
        assert {option: letter for _, option, letter in found} == _letter_of(query)


def test_sums_are_right() -> None:
    for query, response in drill_pairs("sums", seed=0, count=200):
        assert query.startswith("Calculate ")
        for term, value in re.findall(r"(\d+[-+*/]\d+)=(\d+)\.", response):
            parts = re.fullmatch(r"(\d+)([-+*/])(\d+)", term)
            assert parts is not None
            left, operation, right = parts.groups()
            results = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
            assert int(value) == results.get(operation, int(left) // int(right))
            assert int(value) >= 0
