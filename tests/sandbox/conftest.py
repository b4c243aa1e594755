import functools
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.sandbox.corpus import cases
from tests.sandbox.storm import Storm

ROOT = Path(__file__).parents[2]
ORDINARY_UID = 54321
SYSTEM_PYTHON = "/usr/bin/python3"  # one that every user may read


class Caller(NamedTuple):
    """Who runs the checks, and under which profile."""

    uid: int
    profile: str

    @property
    def label(self) -> str:
        return f"{self.profile} of {'root' if self.uid == 0 else 'a user'}"


def _callers() -> list[Caller]:
    users = ORDINARY_UID if os.geteuid() == 0 else os.geteuid()
    as_root = ["namespaces", "user-namespaces", "root-landlock"] if os.geteuid() == 0 else []
    return [Caller(0, name) for name in as_root] + [Caller(users, name) for name in ("user-namespaces", "landlock")]


CALLERS = _callers()
_storms: dict[Caller, Storm] = {}


def run_as(uid: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run Python with the project, as root or as an ordinary user.

    It skips where that user has no interpreter or cannot enter the checkout, as that of root in its home.
    """
    other = uid != os.geteuid()
    if other and not Path(SYSTEM_PYTHON).exists():
        pytest.skip(f"needs {SYSTEM_PYTHON}, which every user may run")
    closed = [folder for folder in (ROOT, *ROOT.parents) if not folder.stat().st_mode & stat.S_IXOTH]
    if other and closed:
        pytest.skip(f"needs a checkout that every user may enter, and {closed[-1]} lets its owner in alone")
    return subprocess.run(
        [SYSTEM_PYTHON if other else sys.executable, "-B", *arguments],
        env={"PYTHONPATH": str(ROOT), "HOME": "/nonexistent" if other else os.path.expanduser("~")},
        capture_output=True,
        text=True,
        check=False,
        user=uid if other else None,
        group=uid if other else None,
        extra_groups=[] if other else None,
    )


@functools.cache
def _storm_of(caller: Caller) -> Storm:
    done = run_as(caller.uid, "-m", "tests.sandbox.storm", caller.profile)
    assert done.returncode == 0, done.stderr[-2000:]
    found = Storm(**json.loads(done.stdout))
    if not found.fault:
        _storms[caller] = found
    return found


# The profiles that root and an ordinary user get on most machines are always tried.
_ALWAYS = ("namespaces", "landlock")


@pytest.fixture(
    params=[pytest.param(c, marks=() if c.profile in _ALWAYS else pytest.mark.slow) for c in CALLERS],
    ids=lambda caller: caller.label.replace(" ", "-"),
)
def storm(request: pytest.FixtureRequest) -> Storm:
    """All programs against one profile, run the first time it is asked for."""
    found = _storm_of(request.param)
    if found.fault:
        pytest.skip(f"{request.param.label} does not hold here: {found.fault}")
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _storms:
        return
    known = cases()
    meant_to_pass = {name for name, case in known.items() if case.statuses == {"passed"}}
    terminalreporter.section("sandbox under attack")
    total = {"attacks": 0, "forged": 0, "effects": 0}
    worst_s = 0.0
    for caller, found in _storms.items():
        attacks = [name for name in found.verdicts if name not in meant_to_pass]
        forged = [name for name in attacks if found.verdicts[name]["status"] == "passed"]
        overrun_s = max(found.overruns_s.values())
        rightly = [name for name in found.verdicts if name in meant_to_pass]
        passed = [name for name in rightly if found.verdicts[name]["status"] == "passed"]
        terminalreporter.line(
            f"{caller.label} (tier {found.tier}): {len(attacks)} attacks, {len(forged)} false passes, "
            f"{len(found.effects)} effects outside, longest overrun {overrun_s:.2f} s; "
            f"honest programs passed {len(passed)}/{len(rightly)}; {found.seconds:.0f} s"
        )
        total["attacks"] += len(attacks)
        total["forged"] += len(forged)
        total["effects"] += len(found.effects) + len(found.told)
        worst_s = max(worst_s, overrun_s)
    terminalreporter.line(
        f"total: {total['attacks']} attacks tried, {total['forged']} false passes, {total['effects']} effects outside, "
        f"longest overrun past a time limit {worst_s:.2f} s"
    )
