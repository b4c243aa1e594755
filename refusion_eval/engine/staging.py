"""The numbers of a forward, brought to the device in one copy.

Shapes: W rows of a forward, padding included, B 64-bit words a row of the visibility pattern, N rows that are moved.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from refusion_eval.engine.masks import visible
from refusion_eval.engine.readout import ReadPlan
from refusion_eval.models.fused import pack_pattern
from refusion_eval.types import Attention, Forward

IntArray = npt.NDArray[np.int64]

NUM_COLUMNS = 10
SIZE = 1 << 21  # 64-bit numbers on the device and in pinned memory, 16 MiB each


class Staging:
    """A buffer on the host and one on the device, for the numbers of one forward of one or more sequences."""

    # One after another: ten numbers a row (`columns`), the bits of the pattern (`bits`), and the rows of the KV buffer
    # that are moved before the forward, [3, N].

    def __init__(self, device: torch.device) -> None:
        self.device = torch.zeros(SIZE, dtype=torch.int64, device=device)
        self._host, self._numbers = host_buffer(SIZE, device)

    def columns(self, width: int) -> Tensor:
        """The numbers of each row on the device, [10, W].

        Token, position, four numbers that tell where the row belongs (`refusion_eval.models.fused`); then for the rows
        that are read: the row, its given token, draw key and suppressed id.
        """
        return self.device[: NUM_COLUMNS * width].view(NUM_COLUMNS, width)

    def bits(self, width: int, num_words: int) -> Tensor:
        """Which rows of its sequence in the forward each row sees, [W, B]."""
        start = NUM_COLUMNS * width
        return self.device[start : start + width * num_words].view(width, num_words)

    def holds(self, width: int, num_words: int, num_moves: int) -> bool:
        """Whether the numbers of a forward fit."""
        return width * (NUM_COLUMNS + num_words) + 3 * num_moves <= SIZE

    def send(
        self,
        forwards: Sequence[Forward],
        lengths: Sequence[int],
        plan: ReadPlan,
        width: int,
        num_words: int,
        moved_3N: IntArray,
    ) -> Tensor:
        """Copies the numbers of a forward to the device; returns where the rows to move are there, [3, N]."""
        num_reads = len(plan.suppressed)
        columns = self._numbers[: NUM_COLUMNS * width].reshape(NUM_COLUMNS, width)
        columns[:] = 0
        columns[2] = -1  # padding belongs to no sequence
        columns[6:9, :num_reads] = plan.numbers
        columns[9, :num_reads] = plan.suppressed
        start = columns.size + width * num_words
        bits_WB = self._numbers[columns.size : start].reshape(width, num_words)
        row = 0
        for sequence, (forward, length) in enumerate(zip(forwards, lengths, strict=True)):
            num_rows = len(forward.tokens)
            here = columns[:, row : row + num_rows]
            here[:2] = forward.tokens, forward.positions
            here[2:5] = [[sequence], [length], [num_rows]]
            here[5] = range(num_rows)
            bits_WB[row : row + num_rows] = _bits(forward.attention, num_words)
            row += num_rows
        end = start + moved_3N.size
        self._numbers[start:end] = moved_3N.ravel()
        self.device[:end].copy_(self._host[:end], non_blocking=True)
        return self.device[start:end].view(3, -1)


def host_buffer(size: int, device: torch.device) -> tuple[Tensor, IntArray]:
    """Integers on the host, also as an array; pinned, so that a copy to a CUDA device does not wait for it."""
    buffer = torch.zeros(size, dtype=torch.int64)
    buffer = buffer.pin_memory() if device.type == "cuda" else buffer
    return buffer, buffer.numpy()


@lru_cache(maxsize=256)
def _bits(attention: Attention, num_words: int) -> IntArray:
    # Patterns recur from forward to forward.
    return pack_pattern(visible(attention), num_words)
