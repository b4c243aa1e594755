"""Every program of the corpus, under every profile, by root and by an ordinary user."""

import pytest

from tests.sandbox.corpus import cases

_CASES = cases()
_CATEGORIES = sorted({name.partition("/")[0] for name in _CASES})
_OVERRUN_S = 1.0
_LATENESS = 4  # a check ends in a chain of this many wake-ups, each late on a busy machine


@pytest.mark.parametrize("category", _CATEGORIES)
def test_every_program_gets_a_verdict_it_deserves(storm, category):
    verdicts = {name: verdict for name, verdict in storm.verdicts.items() if name.startswith(f"{category}/")}
    assert verdicts
    wrong = {name: verdict for name, verdict in verdicts.items() if verdict["status"] not in _CASES[name].statuses}
    assert wrong == {}


def test_nothing_outside_has_changed(storm):
    assert storm.effects == []


def test_no_verdict_tells_a_secret(storm):
    assert storm.told == []


def test_no_program_runs_a_second_longer_than_it_may(storm):
    allowed_s = _OVERRUN_S + _LATENESS * storm.late_s
    assert {name: overrun_s for name, overrun_s in storm.overruns_s.items() if overrun_s > allowed_s} == {}


def test_the_corpus_is_large_and_every_attack_is_one():
    attacks = {name: case for name, case in _CASES.items() if "passed" not in case.statuses}
    assert len(attacks) >= 300
    assert len(_CASES) - len(attacks) >= 50
    assert not any("error" in case.statuses for case in _CASES.values())
