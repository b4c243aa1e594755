from pathlib import Path

import pytest
from hypothesis import settings

from refusion_eval.paths import embedded_path

# A machine that does other work as well is no failure of what is tested.
settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")

SHARED = Path(__file__).resolve().parents[2] / "shared"
PARTS = ("benchmarks", "outputs", "parity", "published")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of reference data beside the checkout."""
    missing = [part for part in PARTS if not (SHARED / part).is_dir()]
    if missing:
        pytest.skip(f"needs the reference data in {SHARED}, where {', '.join(missing)} is absent")
    return SHARED


@pytest.fixture(scope="session")
def checkpoint() -> str:
    """Folder of a small checkpoint that reads both ways, for tests of everything around it."""
    return str(embedded_path("refusion"))
