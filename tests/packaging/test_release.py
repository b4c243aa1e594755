"""`bash scripts/release` in a small repository, with a program in place of Python that notes its calls."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEW = "## 1.2.3 (2026-01-02)\n\n- Everything is new.\n"
CHANGELOG = f"# Changes\n\n## Unreleased\n\n{NEW}\n## 1.2.2 (2025-01-01)\n\n- Old.\n"
UNRELEASED = CHANGELOG.replace("Unreleased\n", "Unreleased\n\n- A change.\n")
CITATION = "cff-version: 1.2.0\nversion: 1.2.3\ndate-released: 2026-01-02\n"
# Makes the files that the calls of pip, venv and build would make, and fails at a call that has the words of $BREAKS.
PYTHON = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
if [ -n "$BREAKS" ]; then case "$*" in *"$BREAKS"*) echo "it broke" && exit 1 ;; esac; fi
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/refusion-eval" ;;
    "-m build --outdir "*) mkdir "$4" && cp -r "$5" "$BUILT" && touch "$4/refusion_eval-1.2.3-py3-none-any.whl" ;;
    --version) echo "refusion-eval 1.2.3" ;;
esac
"""

if shutil.which("bash") is None or shutil.which("git") is None:
    pytest.skip("needs bash and git", allow_module_level=True)


class Repository:
    def __init__(self, folder):
        self.folder, self.built, self._calls = folder / "repository", folder / "built", folder / "calls"
        self.write("refusion_eval/version.py", '__version__ = "1.2.3"\n')
        self.write("CHANGELOG.md", CHANGELOG)
        self.write("CITATION.cff", CITATION)
        for name in ("scripts/release", "environment.sh", "constraints.txt"):
            self.write(name, (ROOT / name).read_text(encoding="utf-8"))
        self._python = folder / "python"
        self._python.write_text(PYTHON)
        self._python.chmod(0o755)
        self.git("init", "--quiet")
        self.commit()

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def git(self, *arguments):
        command = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *arguments]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=True).stdout

    def commit(self):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "A change")

    def release(self, *arguments, breaks=""):
        self._calls.write_text("")
        environment = {
            **os.environ,
            "PYTHON": str(self._python),
            "CALLS": str(self._calls),
            "BUILT": str(self.built),
            "BREAKS": breaks,
            "REFUSION_EVAL_TORCH_INDEX": "https://example.org/torch",
            "PATH": f"/usr/bin:/bin:{Path(shutil.which('git')).parent}",  # without uv
            **{f"GIT_{who}_{what}": "a@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        }
        command = ["bash", "scripts/release", *arguments]
        # The output ends with the script: no process that it started holds it open.
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, env=environment, timeout=300)
        return done.returncode, done.stdout + done.stderr

    @property
    def calls(self):
        return self._calls.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)


def test_a_dry_run_builds_checks_installs_and_runs_and_makes_no_tag(repository):
    code, output = repository.release()
    assert (code, "FAILED" in output) == (0, False), output
    assert "dry run" in output
    steps = [
        "-m pip install build twine",
        "-m build",
        "-m twine check --strict",
        "pip install torch==",
        "refusion_eval-1.2.3-py3-none-any.whl -c constraints.txt",
        "refusion-eval --version",
        "refusion-eval doctor",
        "refusion-eval run --model embedded --tasks mini_gsm8k",
    ]
    numbers = [next(number for number, call in enumerate(repository.calls) if step in call) for step in steps]
    assert numbers == sorted(numbers)
    assert repository.git("tag") == ""
    assert repository.git("status", "--porcelain") == ""


def test_the_tag_has_the_section_of_the_changelog_and_the_push_is_left_to_the_user(repository):
    code, output = repository.release("--tag")
    assert code == 0, output
    assert "git push origin v1.2.3" in output
    notes = repository.git("tag", "--list", "--format=%(contents)", "v1.2.3")
    assert notes.split() == ["1.2.3", "(2026-01-02)", "-", "Everything", "is", "new."]
    code, output = repository.release("--tag")
    assert code == 1
    assert "FAILED   the tag v1.2.3 is free" in output


@pytest.mark.parametrize(
    ("name", "text", "failed"),
    [
        ("refusion_eval/version.py", '__version__ = "1.2.4"\n', "the newest version of CHANGELOG.md is 1.2.4"),
        ("CHANGELOG.md", CHANGELOG.replace("- Everything is new.\n", ""), "CHANGELOG.md says what is new"),
        ("CHANGELOG.md", UNRELEASED, "no change is left under Unreleased"),
        ("CITATION.cff", CITATION.replace("1.2.3", "1.2.2"), "CITATION.cff has this version"),
        ("CITATION.cff", CITATION.replace("-02", "-03"), "CITATION.cff has its date"),
    ],
)
def test_files_that_disagree_are_named_and_prevent_the_tag(repository, name, text, failed):
    repository.write(name, text)
    repository.commit()
    code, output = repository.release("--tag")
    assert code == 1
    assert f"FAILED   {failed}" in output
    assert repository.git("tag") == ""


def test_what_is_not_committed_is_named_and_not_built(repository):
    repository.write("left_over.py", "")
    code, output = repository.release("--tag")
    assert code == 1
    assert "FAILED   everything is committed\n         ?? left_over.py" in output
    assert "FAILED" not in output.partition("left_over.py")[2]
    assert (repository.built / "CHANGELOG.md").is_file()
    assert not (repository.built / "left_over.py").exists()


@pytest.mark.parametrize(
    ("breaks", "failed", "last_call"),
    [
        ("-m build", "source distribution and wheel are built", "-m build"),
        ("twine check", "twine accepts them", "refusion-eval run"),
        ("any.whl -c", "the wheel is installed", "any.whl -c"),
        ("doctor", "refusion-eval doctor", "refusion-eval run"),
        ("--tasks mini", "refusion-eval run", "refusion-eval run"),
    ],
)
def test_a_step_that_breaks_is_shown_with_its_output_and_prevents_the_tag(repository, breaks, failed, last_call):
    code, output = repository.release("--tag", breaks=breaks)
    assert code == 1
    assert f"FAILED   {failed}" in output
    assert "         it broke" in output
    assert last_call in repository.calls[-1]
    assert repository.git("tag") == ""


def test_another_option_is_refused(repository):
    assert repository.release("--publish") == (2, "release: unknown option: --publish; the only one is --tag\n")
    assert repository.calls == []
