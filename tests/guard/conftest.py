"""One thread for everything that is compared with stored records, and weights as they are stored and nudged."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from refusion_eval.models.weights import CheckpointFiles
from tests.guard.stored import WRITE

# Relative change of each weight, some roundings of float32: more than other kernels change a forward.
NUDGE = 3e-7


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # so that sums have one order on all machines
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["stored", "nudged"])
def weights(request: pytest.FixtureRequest) -> Iterator[str]:
    """Weights that tests load: those of the checkpoint, or nudged ones, which decode to the same records.

    A record that they do not reproduce holds a choice of which rounding decides, and another processor decides it
    otherwise. Such a record must not be stored.
    """
    if request.param == "stored":
        yield request.param
        return
    read = CheckpointFiles.read

    def nudged(self: CheckpointFiles, name: str, shape: Sequence[int]) -> Any:
        noise = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(0))
        return read(self, name, shape).float() * (1 + NUDGE * noise)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFiles, "read", nudged)
        patch.delenv(WRITE, raising=False)  # they are compared with what the weights of the checkpoint wrote
        yield request.param
