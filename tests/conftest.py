"""Groups of tests, and fixtures that all tests share."""

import ctypes
import functools
import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from refusion_eval.paths import embedded_path
from refusion_eval.sandbox import probe
from tests.once import find_out_once


def has_gpu() -> bool:
    """Whether CUDA's driver has a device, which may be a file of any name, as torch will ask it."""
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


# Triton reads this when it is first imported: where there is no GPU, its kernels are interpreted.
if not has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Small tests gain nothing from more threads, and several test processes share the cores. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where GITHUB_ACTIONS or PY_COLORS is set, typer takes its output for a terminal, and a dumb terminal has 80 columns.
os.environ["_TYPER_FORCE_DISABLE_TERMINAL"] = "1"

# Where a machine writes no bytecode, every process of every test would compile the package's sources anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Hypothesis must not fail a test because the machine is busy, so no example has a deadline. A run of the unit tests
# alone tries a quarter of the examples of each property; `bash test.sh` and CI try all of them.
settings.register_profile("full", deadline=None, max_examples=100)
settings.register_profile("quick", deadline=None, max_examples=25)
settings.load_profile("full")

TESTS = Path(__file__).resolve().parent
# Group of tests -> the folders and files in it, and the fixtures whose users belong to it. All other tests are `unit`.
GROUPS = {
    "process": (
        "bench",
        "benchmarks/test_an_eighth_benchmark.py",
        "decoders/test_one_file.py",
        "evaluation/test_prompts_of_a_run.py",
        "evaluation/test_rerun.py",
        "evaluation/test_resume.py",
        "faults",
        "lm_eval_plugin",
        "miniature/test_train.py",
        "packaging/test_declared.py",
        "packaging/test_installation.py",
        "packaging/test_release.py",
        "paper/test_commands.py",
        "performance",
        "protocol/test_run.py",
        "scaleout",
        "scoring/test_killed.py",
        "server/test_real_servers.py",
        "server/test_server_runs.py",
        "sweep/test_run.py",
        "test_eval_sh.py",
        "test_examples.py",
        "test_train_sh.py",
        "training/test_run.py",
        "training/test_token_cache.py",
    ),
    "extraction": ("benchmarks/extract",),
    "figures": ("paper/test_figures.py", "paper/test_locality.py"),
    "golden": ("guard",),
    "miniature": ("miniature",),
    "rehearsal": ("engine/test_fake_cuda.py", "engine/test_recorded.py", "models/test_kernels.py"),
    "sandbox": ("sandbox",),
    "browser": ("report/test_browser.py",),
    "slow": ("scaleout/test_ray.py",),
    "training": ("training",),
}
GOLDEN_FIXTURES = {"shared", "reference_data"}


def pytest_configure(config: pytest.Config) -> None:
    """Selects the unit tests if neither tests nor markers are named; a named file or folder runs whole."""
    is_marked = bool(config.option.markexpr) or any(arg.startswith("-m") for arg in config.invocation_params.args)
    if not is_marked and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.option.markexpr = "unit"
    if config.option.markexpr == "unit":
        settings.load_profile("quick")


@functools.cache
def _groups_of(path: Path) -> list[str]:
    """The groups that `GROUPS` names for a file of tests."""
    inside = path.relative_to(TESTS)
    return [group for group, places in GROUPS.items() if any(inside.is_relative_to(place) for place in places)]


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks each test with its groups. Tests that download run where their group is named alone."""
    downloads = pytest.mark.skip(reason="downloads; -m network runs it")
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "network" in marks and "network" not in config.option.markexpr:
            item.add_marker(downloads)
        groups = {*_groups_of(item.path)}
        if GOLDEN_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            groups.add("golden")
        if not marks.union(groups).intersection(GROUPS):
            groups.add("unit")
        for group in sorted(groups - marks):
            item.add_marker(group)
    # What starts processes or is slow takes the longest. Files with such tests come first, so that workers which take
    # whole files, with --no-loadscope-reorder, end together.
    dear = {item.path for item in items if item.get_closest_marker("process") or item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in dear)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leaves all that is there out of garbage collections, once what all tests would find out alike is kept."""
    cache = getattr(session.config, "cache", None)  # None under `-p no:cacheprovider`
    find_out_once(cache and cache.mkdir("lm_eval"))
    gc.collect()
    gc.freeze()


DATA = TESTS / "data"
REFERENCE_DATA = TESTS.parents[1] / "shared"
REFERENCE_PARTS = ("benchmarks", "outputs", "published")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of the goldens and recorded verdicts that belong to the project; see its README."""
    return DATA


@pytest.fixture(scope="session")
def systems_2027() -> Path:
    """Folder of decodings by public code that are not in the project: its `parity/systems2027`."""
    if not (REFERENCE_DATA / "parity" / "systems2027").is_dir():
        pytest.skip(f"needs parity/systems2027 in {REFERENCE_DATA}, beside the checkout")
    return REFERENCE_DATA


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """Folder of whole benchmarks and published outputs, which are too large for the project or not free to copy."""
    missing = [part for part in REFERENCE_PARTS if not (REFERENCE_DATA / part).is_dir()]
    if missing:
        pytest.skip(
            f"needs {', '.join(missing)} in {REFERENCE_DATA}, beside the checkout; tests/data has a sample, which "
            "other tests use"
        )
    return REFERENCE_DATA


@pytest.fixture(scope="session")
def checkpoint() -> str:
    """Folder of a small checkpoint that reads both ways, for tests of everything around it."""
    return str(embedded_path("refusion"))


@pytest.fixture
def isolation() -> None:
    """Skips a test of programs where they cannot be isolated."""
    if probe().tier == "D":
        pytest.skip("programs cannot be isolated here")
