from pathlib import Path

import pytest

from refusion_eval.evaluate.paths import embedded_path

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of reference data beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the reference data in {SHARED}")
    return SHARED


@pytest.fixture(scope="session")
def checkpoint() -> str:
    """Folder of a small checkpoint that reads both ways, for tests of everything around it."""
    return str(embedded_path("refusion"))
