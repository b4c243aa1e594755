import pytest
from torch.distributed import HashStore

from tests.scaleout.crew import Crew


@pytest.fixture
def store():
    return HashStore()


@pytest.fixture
def crew(store):
    crew = Crew(store)
    yield crew
    crew.driver.channel.finish(num_workers=0, most_seconds=0)
    crew.pool.shutdown()
