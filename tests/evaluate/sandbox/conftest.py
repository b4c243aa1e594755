import functools
import os

import pytest

from refusion_eval.evaluate.sandbox import Program, Verdict, probe
from refusion_eval.evaluate.sandbox.pool import check_all, check_on
from refusion_eval.evaluate.sandbox.probe import self_test
from refusion_eval.evaluate.sandbox.profiles import PROFILES

_PROFILES = ("namespaces", "user-namespaces", "root-landlock") if os.geteuid() == 0 else ("user-namespaces", "landlock")


@functools.cache
def _fault(profile: str) -> str:
    return self_test(profile)


class Judge:
    """Checks solve(20) == 6765 under one profile."""

    def __init__(self, profile: str) -> None:
        self.profile = profile

    def __call__(self, candidate: str, test: str = "assert solve(20) == 6765", **limits: float | str) -> Verdict:
        program = Program(candidate=candidate, test=test, **{"timeout_s": 5, "memory_mb": 256, **limits})
        return check_on(self.profile, PROFILES[self.profile].tier, program)

    def all(self, candidates: dict[str, str]) -> dict[str, Verdict]:
        """Verdicts on many programs, checked at once the first time they are asked for."""
        return _verdicts(self.profile, tuple(candidates.items()))


@functools.cache
def _verdicts(profile: str, candidates: tuple[tuple[str, str], ...]) -> dict[str, Verdict]:
    programs = [
        Program(candidate=candidate, test="assert solve(20) == 6765", timeout_s=5, memory_mb=256)
        for _, candidate in candidates
    ]
    verdicts = check_all(programs, profile, PROFILES[profile].tier, None, None)
    return dict(zip((name for name, _ in candidates), verdicts, strict=True))


@pytest.fixture(params=_PROFILES)
def every_judge(request: pytest.FixtureRequest) -> Judge:
    """A judge for each profile that holds on this machine."""
    if fault := _fault(request.param):
        pytest.skip(f"{request.param} does not hold here: {fault}")
    return Judge(request.param)


@pytest.fixture
def judge() -> Judge:
    """A judge for the best profile of this machine."""
    report = probe()
    if report.tier == "D":
        pytest.skip(f"programs cannot be isolated here: {report.missing}")
    return Judge(report.profile)
