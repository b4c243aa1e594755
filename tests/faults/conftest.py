import pytest

from tests.faults.front_end import FrontEnd, copy_checkpoint


@pytest.fixture
def front_end(monkeypatch, capsys):
    """The command line in this process."""
    return FrontEnd(monkeypatch, capsys)


@pytest.fixture
def own_checkpoint(tmp_path):
    """A copy of a small checkpoint, to be damaged."""
    return copy_checkpoint(tmp_path / "checkpoint")
