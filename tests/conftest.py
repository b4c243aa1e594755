from pathlib import Path

import pytest
from hypothesis import settings

from refusion_eval.paths import embedded_path

# A machine that does other work as well is no failure of what is tested.
settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")

DATA = Path(__file__).resolve().parent / "data"
REFERENCE_DATA = Path(__file__).resolve().parents[2] / "shared"
REFERENCE_PARTS = ("benchmarks", "outputs", "published")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of the goldens and recorded verdicts that belong to the project; see its README."""
    return DATA


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
