"""The KV cache: the committed rows of each sequence, followed by the staged rows of its last forward.

Keys are stored rotated, so rows may be in any order. The next forward says which of the staged rows stay.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from refusion_eval.errors import DecodeError
from refusion_eval.models.checkpoint import ModelConfig


class ScoredRows(NamedTuple):
    """Staged rows of a sequence, the number of them that a commit keeps, and their scores in each layer, [L, rows]."""

    rows: Sequence[int]
    best: int
    scores_LK: Tensor


class Features:
    """Features of each row of one text in each layer, kept between forwards (`refusion_eval.types.FeatureReuse`)."""

    def __init__(self, config: ModelConfig, positions: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.positions = list(positions)
        # In addition to the KV buffers: dLLM-Cache has no committed rows, and also stores what rows add.
        per_head = (config.num_layers, config.num_kv_heads, len(positions), config.head_dim)
        wide = (config.num_layers, len(positions), config.hidden_size)
        self.keys, self.values = (torch.zeros(per_head, dtype=dtype, device=device) for _ in range(2))
        self.attended, self.mlp = (torch.zeros(wide, dtype=dtype, device=device) for _ in range(2))


class KVCache:
    """Keys and values, each [layers, sequences, key-value heads, capacity, head width], grown by doubling."""

    only_counts = False  # whether the buffers are empty, of a subclass that keeps rows in another way

    def __init__(
        self, config: ModelConfig, num_sequences: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_sequences, self.capacity = num_sequences, capacity
        sizes = (0, 1, 1) if self.only_counts else (config.num_layers, config.num_kv_heads, config.head_dim)
        shape = (sizes[0], num_sequences, sizes[1], capacity, sizes[2])
        # Zeros, not empty: a masked key still enters a product with weight 0, and 0 * NaN is NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * num_sequences
        self.staged = [0] * num_sequences
        self._written = [0] * num_sequences  # rows from the first one on that may differ from zero
        # Of each sequence `ScoredRows`, valid until the next commit, `Features`, or what another engine keeps of it.
        self.states: list[object] = [None] * num_sequences
        # Whether the next `move_rows` moves the rows of a commit, so that their numbers are sent with the next forward.
        self.defers_moves = False
        self.moves: list[tuple[int, int, int]] = []  # sequence, source row and target row

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def reserve(self, num_rows: int) -> None:
        if num_rows > self.capacity:
            # Doubling, so that a text that grows row by row is copied a constant number of times on average.
            self.resize(self.num_sequences, max(num_rows, 2 * self.capacity))

    @torch.inference_mode()
    def resize(self, num_sequences: int, capacity: int) -> None:
        """Gives the buffer another size, which must hold the rows of the first sequences; it keeps only these."""
        num_more = num_sequences - self.num_sequences
        more = (0, 0, 0, capacity - self.capacity, 0, 0, 0, num_more)
        self.num_sequences, self.capacity = num_sequences, capacity
        # One after the other, so that only one former buffer stands beside its successor.
        self.keys = torch.nn.functional.pad(self.keys, more)
        self.values = torch.nn.functional.pad(self.values, more)
        kept = slice(num_sequences)
        self.lengths = self.lengths[kept] + [0] * num_more
        self.staged = self.staged[kept] + [0] * num_more
        self._written = self._written[kept] + [0] * num_more
        self.states = self.states[kept] + [None] * num_more
        self.moves = [move for move in self.moves if move[0] < num_sequences]

    def clear(self, sequence: int) -> None:
        self.lengths[sequence] = self.staged[sequence] = 0
        self.states[sequence] = None
        self.moves = [move for move in self.moves if move[0] != sequence]

    @torch.inference_mode()
    def wipe(self, sequence: int) -> None:
        """As `clear`, and zeroes the rows in use: in a batch, padded keys reach beyond the rows of a sequence."""
        self.clear(sequence)
        if num_rows := self._written[sequence]:
            for buffer in (self.keys, self.values):
                buffer[:, sequence, :, :num_rows].zero_()
        self._written[sequence] = 0

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        self.move_rows()
        length = self.lengths[source]
        self.wipe(target)
        for buffer in (self.keys, self.values):
            buffer[:, target, :, :length] = buffer[:, source, :, :length]
        self.lengths[target], self.staged[target] = self.lengths[source], self.staged[source]
        self._written[target] = length + self.staged[target]
        self.states[target], self.states[source] = self.states[source], None

    def stage(self, sequence: int, num_rows: int) -> None:
        """Declares the rows of a sequence's next forward; whatever was staged before is dropped."""
        self.staged[sequence] = num_rows
        self.touch(sequence, self.lengths[sequence] + num_rows)
        if isinstance(self.states[sequence], ScoredRows):
            self.states[sequence] = None

    def touch(self, sequence: int, num_rows: int) -> None:
        """Says that rows of a sequence up to this number are written."""
        self._written[sequence] = max(self._written[sequence], num_rows)

    def commit(self, sequence: int, rows: Sequence[int], keep: int | None = None) -> None:
        """Keeps some rows of the last forward and drops the others; arguments as `Commit`, errors are DecodeError."""
        length, staged = self.lengths[sequence], self.staged[sequence]
        start = length if keep is None else keep
        if not 0 <= start <= length:
            raise DecodeError(f"keep={keep} of {length} committed rows")
        if rows and not 0 <= min(rows) <= max(rows) < staged:
            raise DecodeError(f"commit of rows {list(rows)} after a forward of {staged} rows")
        scored, num_kept = self.states[sequence], len(rows)
        if rows and isinstance(scored, ScoredRows):
            if list(scored.rows) != list(rows):
                raise DecodeError(
                    f"commit of rows {list(rows)}; they must be those that the forward before scored "
                    f"({list(scored.rows)})"
                )
            self._copy_best(sequence, scored, start)
            num_kept = scored.best
        else:
            # Rows that stand where they belong, as a leading run 0, 1, 2, ... does, are not moved.
            pairs = zip(rows, range(start - length, start - length + num_kept), strict=True)
            self.moves += [(sequence, length + row, length + place) for row, place in pairs if row != place]
            if not self.defers_moves:
                self.move_rows()
        self.lengths[sequence], self.staged[sequence] = start + num_kept, 0

    @torch.inference_mode()
    def _copy_best(self, sequence: int, scored: ScoredRows, start: int) -> None:
        # A stable sort: among equals the first rows win, on every device.
        order_LN = scored.scores_LK.sort(dim=1, descending=True, stable=True).indices[:, : scored.best]
        rows_K = torch.tensor(list(scored.rows), dtype=torch.int64, device=self.keys.device) + self.lengths[sequence]
        num_layers, _, num_kv_heads, _, head_dim = self.keys.shape
        shape = (num_layers, num_kv_heads, scored.best, head_dim)
        index = rows_K[order_LN.sort(dim=1).values][:, None, :, None].expand(shape)
        for buffer in (self.keys, self.values):
            buffer[:, sequence, :, start : start + scored.best] = buffer[:, sequence].gather(2, index)

    def move_rows(self, moved_3N: Tensor | None = None) -> None:
        """Carries out the commits that are deferred; `moved_3N` is `moves` on the device, a line for each number."""
        if self.moves:
            self._move_rows(torch.tensor(self.moves, device=self.keys.device).T if moved_3N is None else moved_3N)
            self.moves = []

    @torch.inference_mode()
    def _move_rows(self, moved_3N: Tensor) -> None:
        sequences_N, sources_N, targets_N = moved_3N
        for buffer in (self.keys, self.values):
            # The gather is complete before the write begins, so overlapping rows are safe.
            buffer[:, sequences_N, :, targets_N] = buffer[:, sequences_N, :, sources_N]
