import functools

import pytest

from refusion_eval.sandbox import CheckResult, Program, probe
from refusion_eval.sandbox.pool import check_on
from refusion_eval.sandbox.probe import self_test

_fault_of = functools.cache(self_test)


def skip_without(profile: str) -> None:
    """Leaves a test out where the machine does not allow the profile."""
    if fault := _fault_of(profile):
        pytest.skip(f"the machine does not allow {profile}: {fault}")


class Judge:
    """Checks programs under one profile."""

    def __init__(self, profile: str) -> None:
        self.profile = profile

    def __call__(self, candidate: str, test: str, timeout_s: float = 5) -> CheckResult:
        program = Program(candidate=candidate, test=test, timeout_s=timeout_s, memory_mb=256)
        return check_on(self.profile, program)


@pytest.fixture
def judge() -> Judge:
    """A judge for the best profile of this machine."""
    report = probe()
    if report.tier == "D":
        pytest.skip(f"programs cannot be isolated here: {report.missing}")
    return Judge(report.profile)
