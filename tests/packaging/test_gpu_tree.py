"""What travels to a machine with a GPU: the files of `scripts/gpu-tree`, and the wheels of the guide."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 60 * 2**20
GUIDE = ROOT / "docs" / "guides" / "new-gpu.md"


def git(folder: Path, *words: str, **options) -> str:
    done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=True, **options)
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no clone of git")
    folder = tmp_path_factory.mktemp("tree") / "clone"
    subprocess.run(["git", "clone", "-q", "--shared", "--no-checkout", ROOT, folder], check=True)
    patterns = (ROOT / "scripts" / "gpu-tree").read_text()
    git(folder, "sparse-checkout", "set", "--no-cone", "--stdin", input=patterns)
    git(folder, "checkout", "-q")
    return folder


def test_the_files_for_a_gpu_are_few_enough(tree) -> None:
    kept = [path for path in tree.rglob("*") if path.is_file() and ".git" not in path.relative_to(tree).parts]
    assert sum(path.stat().st_size for path in kept) < MOST_BYTES


def test_the_models_the_checks_and_the_tests_of_a_gpu_are_among_them(tree) -> None:
    for name in ("refusion_eval", "tasks", "results/gpu", "tests/data/parity"):
        assert {path.relative_to(tree).as_posix() for path in (tree / name).rglob("*") if path.is_file()} == set(
            git(tree, "ls-files", name).splitlines()
        )
    tests = [ROOT / name for name in git(ROOT, "ls-files", "tests").splitlines() if name.endswith(".py")]
    of_a_gpu = [path for path in tests if path.parent.name == "decoders" or re.search(r"mark\.gpu\b", path.read_text())]
    assert of_a_gpu
    assert [path.name for path in of_a_gpu if not (tree / path.relative_to(ROOT)).exists()] == []


def test_whatever_the_tests_among_them_import_is_there_too(tree) -> None:
    """`pytest -m gpu` imports every test, and a single one that fails to import ends it."""
    missing = []
    for path in tree.rglob("test_*.py"):
        for module in re.findall(r"^(?:from|import) ((?:tests|miniature)[.\w]*)", path.read_text(), re.MULTILINE):
            place = tree.joinpath(*module.split("."))
            if not place.is_dir() and not place.with_suffix(".py").exists():
                missing.append(f"{path.relative_to(tree)}: {module}")
    assert missing == []


def test_the_wheels_of_the_guide_have_one_version_each() -> None:
    guide = GUIDE.read_text()
    (names,), (installed,) = (
        re.findall(rf"pip {way} .* (?:-d wheels|--target site) (.*)", guide)
        for way in ("download", "install --no-index")
    )
    pinned = {line.partition("==")[0].replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert set(names.split()) == set(installed.split()) <= pinned
