"""Isolation is found by trying; without any, code is refused."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from refusion_eval import sandbox
from refusion_eval.errors import SandboxError
from refusion_eval.sandbox import SandboxReport, check_program, linux, probe
from refusion_eval.sandbox.probe import self_test
from tests.sandbox.unit.conftest import skip_without

_UNPRIVILEGED_UID = 54321
_PYTHON = "/usr/bin/python3"  # one that every user may read


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


_WITHOUT = """
import struct
from refusion_eval.sandbox import check_program, linux, probe
# A filter that refuses some calls, as containers and older kernels do: load the number, compare, refuse.
steps = [(0x20, 0, 0, 0)]
for number in {numbers}:
    steps += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050001)]
steps.append((0x06, 0, 0, 0x7FFF0000))
if len(steps) > 2:
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.install_seccomp(b"".join(struct.pack("=HBBI", *step) for step in steps))
report = probe()
print(report.tier, report.profile)
try:
    print(check_program("def f():\\n    return 1", "assert f() == 1").reason)
except Exception as error:
    print(type(error).__name__)
"""
_UNSHARE = {"x86_64": 272, "aarch64": 97}
_LANDLOCK = 444


@pytest.mark.parametrize(
    ("uid", "missing", "expected"),
    [
        (0, (), "A namespaces passed"),
        (0, ("unshare",), "B root-landlock passed"),
        (0, ("unshare", "landlock"), "D SandboxError"),
        (_UNPRIVILEGED_UID, (), "A user-namespaces passed"),
        (_UNPRIVILEGED_UID, ("unshare",), "C landlock passed"),
        (_UNPRIVILEGED_UID, ("unshare", "landlock"), "D SandboxError"),
    ],
)
def test_the_next_tier_is_found_when_one_is_missing(uid, missing, expected):
    if os.geteuid() != 0 or os.uname().machine not in _UNSHARE:
        pytest.skip("needs root, to become another user, on a known machine")
    skip_without("namespaces")
    if linux.landlock_abi() < linux.LANDLOCK_ABI_SIGNALS or not Path(_PYTHON).exists():
        pytest.skip(f"needs Landlock and {_PYTHON}, to take isolation away step by step")
    numbers = [{"unshare": _UNSHARE[os.uname().machine], "landlock": _LANDLOCK}[name] for name in missing]
    done = subprocess.run(
        [_PYTHON, "-B", "-c", _WITHOUT.replace("{numbers}", str(numbers))],
        user=uid,
        group=uid,
        extra_groups=[],
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == expected.split(), done.stderr


@pytest.mark.parametrize(
    ("profile", "options"),
    [
        ("namespaces", ["--mount", "--pid", "--net", "--ipc", "--uts"]),
        ("user-namespaces", ["--user", "--mount", "--pid", "--net", "--ipc", "--uts"]),
    ],
)
def test_a_profile_that_the_machine_allows_holds(profile, options):
    """Or all tests of the profile would be left out, as if the machine did not allow it."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", *options, "--fork", "true"], check=False).returncode
    ):
        pytest.skip("this machine has no such namespaces")
    assert self_test(profile) == ""


@pytest.mark.parametrize("profile", ["namespaces", "user-namespaces"])
@pytest.mark.parametrize("folder", ["/", "/tmp"])
def test_a_folder_that_programs_have_for_themselves_is_no_leak(profile, folder, monkeypatch):
    skip_without(profile)
    monkeypatch.chdir(folder)
    assert self_test(profile) == ""
    monkeypatch.setenv("HOME", folder)
    assert self_test(profile) == ""


@pytest.mark.parametrize("profile", ["namespaces", "user-namespaces"])
def test_files_of_the_machine_below_a_folder_that_programs_have_are_a_leak(profile, monkeypatch, tmp_path):
    """The self-test would notice, because it looks for files of the machine's /tmp by their names."""
    skip_without(profile)
    asked = []
    monkeypatch.setattr(sys.modules[self_test.__module__], "_attack", lambda _, paths: asked.extend(paths) or "")
    monkeypatch.chdir("/tmp")
    self_test(profile)
    assert "/tmp" not in asked
    assert any(path.startswith(f"{tempfile.gettempdir()}/") and path != __file__ for path in asked)


@pytest.fixture(scope="module")
def home_with_python():
    """A home folder below /tmp with a Python of its own and a checkout, as pyenv and conda install them."""
    system = Path(_PYTHON).resolve()
    if not system.exists():
        pytest.skip(f"needs {_PYTHON}")
    stdlib = Path(
        subprocess.check_output([_PYTHON, "-c", "import os; print(os.path.dirname(os.__file__))"], text=True).strip()
    )
    home = Path(tempfile.mkdtemp(dir="/tmp"))
    home.chmod(0o755)
    python = home / ".pyenv" / "bin" / system.name
    python.parent.mkdir(parents=True)
    shutil.copy(system, python)
    ignored = shutil.ignore_patterns("test", "tests", "site-packages", "dist-packages", "__pycache__", "config-*")
    shutil.copytree(stdlib, home / ".pyenv" / "lib" / stdlib.name, ignore=ignored)
    package = Path(sandbox.__file__).parents[1]
    shutil.copytree(package / "sandbox", home / "checkout" / package.name / "sandbox")
    for name in ("__init__.py", "errors.py", "own_time.py", "untrusted.py", "version.py"):
        shutil.copy(package / name, home / "checkout" / package.name)
    yield home, python
    shutil.rmtree(home)


@pytest.mark.parametrize("profile", ["namespaces", "user-namespaces"])
def test_a_python_below_the_home_folder_keeps_the_stronger_isolation(profile, home_with_python):
    skip_without(profile)
    home, python = home_with_python
    done = subprocess.run(
        [python, "-B", "-c", f"from refusion_eval.sandbox.probe import self_test; print(repr(self_test({profile!r})))"],
        env={"HOME": str(home), "PYTHONPATH": str(home / "checkout")},
        cwd=home / "checkout",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "''\n", done.stderr


def test_the_package_can_be_imported_without_the_rest():
    code = "import refusion_eval.sandbox, sys; assert 'torch' not in sys.modules and 'lm_eval' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
