import pytest
from torch.distributed import HashStore

from tests.scaleout.two_processes import TwoProcesses


@pytest.fixture
def store():
    return HashStore()


@pytest.fixture
def processes(store):
    processes = TwoProcesses(store)
    yield processes
    processes.driver.finish(max_seconds=0)
    processes.pool.shutdown()
