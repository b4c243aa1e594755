import pytest

from tests.faults.front_end import FrontEnd, copy_checkpoint
from tests.faults.runs import command, shared_server


@pytest.fixture
def front_end(monkeypatch, capsys):
    """The command line in this process; how fast its memory is takes a second and is nobody's question here."""
    monkeypatch.setattr("refusion_eval.runs.own_engine.copy_bandwidth", lambda device: 1e9)
    return FrontEnd(monkeypatch, capsys)


@pytest.fixture
def own_checkpoint(tmp_path):
    """A copy of a small checkpoint, to be damaged."""
    return copy_checkpoint(tmp_path / "checkpoint")


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Starts runs of the command line in processes of their own, without the seconds that its libraries need."""
    server = shared_server(tmp_path_factory.getbasetemp())
    yield server
    server.close()


@pytest.fixture(scope="session")
def calm(server, tmp_path_factory):
    """The directory of an undisturbed run, with which those under faults are compared; nothing may write there."""
    run_dir = tmp_path_factory.mktemp("calm") / "run"
    status, output = server.run(command(run_dir))
    assert status == 0, output
    return run_dir


@pytest.fixture
def report(capsys):
    """Prints a figure where it is seen, whether the test passes or not."""

    def show(text):
        with capsys.disabled():
            print(f"\n{text}")

    return show
