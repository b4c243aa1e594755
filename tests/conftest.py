from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of reference data beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the reference data in {SHARED}")
    return SHARED
