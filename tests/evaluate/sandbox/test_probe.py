"""Isolation is found by trying; without any, code is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from refusion_eval.errors import SandboxError
from refusion_eval.evaluate import sandbox
from refusion_eval.evaluate.sandbox import SandboxReport, check_program, probe
from refusion_eval.evaluate.sandbox.probe import self_test

_UNPRIVILEGED_UID = 54321


@pytest.fixture
def nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    report = SandboxReport(tier="D", profile="", layers=(), missing={"x": "denied"}, advice=("do this",))
    monkeypatch.setattr(sandbox, "probe", lambda: report)


def test_without_isolation_code_is_refused_with_reason_and_advice(nothing_works):
    with pytest.raises(SandboxError, match=r"x: denied.*do this"):
        check_program("def f():\n    return 1", "f()")


def test_only_an_explicit_choice_runs_without_isolation(nothing_works):
    assert check_program("def f():\n    return 1", "f()", sandbox="none").tier == "none"


def test_a_profile_that_isolates_nothing_does_not_pass_its_self_test():
    assert "self-test" in self_test("none")


def test_the_report_names_tier_and_layers():
    report = probe()
    assert report.tier in "ABCD"
    assert bool(report.layers) == (report.tier != "D")


@pytest.mark.parametrize("profile", ["user-namespaces", "landlock"])
def test_an_unprivileged_user_is_isolated_too(profile):
    """Either the self-test holds, or it says what the machine lacks; it never claims what does not hold."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    python = "/usr/bin/python3"
    if not Path(python).exists():
        pytest.skip(f"needs an interpreter that every user may read; there is no {python}")
    imports = "import json; from refusion_eval.evaluate.sandbox.probe import self_test"
    code = f"{imports}; print(json.dumps(self_test({profile!r})))"
    done = subprocess.run(
        [python, "-B", "-c", code],
        user=_UNPRIVILEGED_UID,
        group=_UNPRIVILEGED_UID,
        extra_groups=[],
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"{python} cannot run the package as another user: {done.stderr.strip().splitlines()[-1:]}")
    fault = json.loads(done.stdout)
    if fault and "self-test" not in fault:
        pytest.skip(f"{profile} is not to be had here: {fault}")
    assert fault == ""


def test_the_package_can_be_imported_without_the_rest():
    code = (
        "import refusion_eval.evaluate.sandbox, sys; assert 'torch' not in sys.modules and 'lm_eval' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
