"""The KV cache: the committed rows of each sequence, followed by the staged rows of its last forward.

Keys are stored rotated, so rows may be in any order. A forward stages its rows; the next one says which of them stay.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from refusion_eval.errors import DecodeError
from refusion_eval.models.config import ModelConfig


class ScoredRows(NamedTuple):
    """Staged rows of a sequence, the number of them that a commit keeps, and their scores in each layer, [L, rows]."""

    rows: Sequence[int]
    best: int
    scores_LK: Tensor


class Features:
    """Features of each row of one text in each layer, kept between forwards (`refusion_eval.types.FeatureReuse`).

    Attributes:
        keys, values: rotated keys, and values, each [layers, key-value heads, rows, head width].
        attended, mlp: outputs of attention and MLP, added to the residual stream, each [layers, rows, residual width].
    """

    def __init__(self, config: ModelConfig, positions: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.positions = list(positions)
        # In addition to the KV buffers: dLLM-Cache has no committed rows, and also stores what rows add.
        per_head = (config.num_layers, config.num_kv_heads, len(positions), config.head_dim)
        wide = (config.num_layers, len(positions), config.hidden_size)
        self.keys, self.values = (torch.zeros(per_head, dtype=dtype, device=device) for _ in range(2))
        self.attended, self.mlp = (torch.zeros(wide, dtype=dtype, device=device) for _ in range(2))


class KVCache:
    """Keys and values, each [layers, sequences, key-value heads, capacity, head width], grown by doubling.

    Attributes:
        approximations: what an approximate cache knows of each sequence: scores of staged rows, valid until the next
            commit, or the features of a text.
        defers_moves: whether rows that a commit moves are moved by the next `move_rows` instead of at once. Then their
            numbers can be sent to the device together with those of the next forward.
    """

    def __init__(
        self, config: ModelConfig, num_sequences: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_layers, num_sequences, config.num_kv_heads, capacity, config.head_dim)
        # Zeros, not empty: a masked key still enters a product with weight 0, and 0 * NaN is NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * num_sequences
        self.staged = [0] * num_sequences
        self.approximations: list[ScoredRows | Features | None] = [None] * num_sequences
        self.defers_moves = False
        self.moves: list[tuple[int, Sequence[int], Sequence[int]]] = []

    @property
    def capacity(self) -> int:
        """Rows that fit for each sequence, committed and staged ones together."""
        return self.keys.shape[3]

    @property
    def num_sequences(self) -> int:
        """Number of sequences that fit."""
        return self.keys.shape[1]

    def reserve(self, num_rows: int) -> None:
        """Makes room for at least `num_rows` rows of each sequence, keeping what is stored."""
        if num_rows > self.capacity:
            # Doubling, so that a text that grows row by row is copied a constant number of times on average.
            self.resize(self.num_sequences, max(num_rows, 2 * self.capacity))

    @torch.inference_mode()
    def resize(self, num_sequences: int, capacity: int) -> None:
        """Gives the buffer another size, which must hold the rows of the first sequences; it keeps only these."""
        num_more = num_sequences - self.num_sequences
        more = (0, 0, 0, capacity - self.capacity, 0, 0, 0, num_more)
        # One after the other, so that only one former buffer stands beside its successor.
        self.keys = torch.nn.functional.pad(self.keys, more)
        self.values = torch.nn.functional.pad(self.values, more)
        kept = slice(num_sequences)
        self.lengths = self.lengths[kept] + [0] * num_more
        self.staged = self.staged[kept] + [0] * num_more
        self.approximations = self.approximations[kept] + [None] * num_more
        self.moves = [move for move in self.moves if move[0] < num_sequences]

    def clear(self, sequence: int) -> None:
        """Drops all rows and features of a sequence."""
        self.lengths[sequence] = self.staged[sequence] = 0
        self.approximations[sequence] = None
        self.moves = [move for move in self.moves if move[0] != sequence]

    @torch.inference_mode()
    def wipe(self, sequence: int) -> None:
        """As `clear`, and zeroes the rows: in a batch, padded keys reach beyond the rows of a sequence."""
        self.clear(sequence)
        self.keys[:, sequence].zero_()
        self.values[:, sequence].zero_()

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Moves the committed rows and features of a sequence to the index of another one."""
        self.move_rows()
        length = self.lengths[source]
        self.wipe(target)
        for buffer in (self.keys, self.values):
            buffer[:, target, :, :length] = buffer[:, source, :, :length]
        self.lengths[target], self.staged[target] = self.lengths[source], self.staged[source]
        self.approximations[target], self.approximations[source] = self.approximations[source], None

    def stage(self, sequence: int, num_rows: int) -> None:
        """Declares the rows of a sequence's next forward; whatever was staged before is dropped."""
        self.staged[sequence] = num_rows
        if isinstance(self.approximations[sequence], ScoredRows):
            self.approximations[sequence] = None

    @torch.inference_mode()
    def commit(
        self, sequence: int, rows: Sequence[int], replace: Sequence[int] | None = None, keep: int | None = None
    ) -> None:
        """Keeps some rows of the sequence's last forward and drops the others; arguments as `Commit`.

        Raises:
            DecodeError: a row was not staged or not scored, or a row to replace or keep is not committed.
        """
        length, staged = self.lengths[sequence], self.staged[sequence]
        if keep is not None and (replace is not None or not 0 <= keep <= length):
            raise DecodeError(f"keep={keep} of {length} committed rows, replace={replace}")
        if any(not 0 <= row < staged for row in rows):
            raise DecodeError(f"commit of rows {list(rows)} after a forward of {staged} rows")
        start = length if keep is None else keep
        scored = self.approximations[sequence]
        if rows and isinstance(scored, ScoredRows):
            if replace is not None or list(scored.rows) != list(rows):
                raise DecodeError(
                    f"commit of rows {list(rows)}, replace={replace}; they must be those that the forward before "
                    f"scored ({list(scored.rows)}), and replace nothing"
                )
            self._copy_best(sequence, scored, start)
            self.lengths[sequence] = start + scored.best
        elif replace is not None:
            if len(replace) != len(rows) or any(not 0 <= row < length for row in replace):
                raise DecodeError(f"{len(rows)} rows cannot replace cache rows {list(replace)} of {length} committed")
            self._copy(sequence, [length + row for row in rows], replace)
        else:
            # A leading run 0, 1, 2, ... stands where it belongs; only what follows is moved.
            in_place = 0
            while in_place < len(rows) and start + in_place == length + rows[in_place]:
                in_place += 1
            sources = [length + row for row in rows[in_place:]]
            self._copy(sequence, sources, range(start + in_place, start + len(rows)))
            self.lengths[sequence] = start + len(rows)
        self.staged[sequence] = 0

    def _copy_best(self, sequence: int, scored: ScoredRows, start: int) -> None:
        """Moves the best of the scored rows of each layer to `start`, in their order."""
        # A stable sort: among equals the first rows win, on every device.
        order_LN = scored.scores_LK.sort(dim=1, descending=True, stable=True).indices[:, : scored.best]
        rows_K = torch.tensor(list(scored.rows), dtype=torch.int64, device=self.keys.device) + self.lengths[sequence]
        num_layers, _, num_kv_heads, _, head_dim = self.keys.shape
        shape = (num_layers, num_kv_heads, scored.best, head_dim)
        index = rows_K[order_LN.sort(dim=1).values][:, None, :, None].expand(shape)
        for buffer in (self.keys, self.values):
            buffer[:, sequence, :, start : start + scored.best] = buffer[:, sequence].gather(2, index)

    def _copy(self, sequence: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        if sources:
            self.moves.append((sequence, sources, targets))
            if not self.defers_moves:
                self.move_rows()

    def moved_rows(self) -> npt.NDArray[np.int64]:
        """Sequence, source row and target row of every row that is to be moved, [3, rows]."""
        sequences = [sequence for sequence, sources, _ in self.moves for _ in sources]
        sources = [row for _, sources, _ in self.moves for row in sources]
        targets = [row for _, _, targets in self.moves for row in targets]
        return np.array([sequences, sources, targets], dtype=np.int64)

    @torch.inference_mode()
    def move_rows(self, moved_3N: Tensor | None = None) -> None:
        """Carries out the commits that are deferred; `moved_3N` is `moved_rows` on the device."""
        if not self.moves:
            return
        if moved_3N is None:
            moved_3N = torch.from_numpy(self.moved_rows()).to(self.keys.device)
        self.moves = []
        sequences_N, sources_N, targets_N = moved_3N
        for buffer in (self.keys, self.values):
            # The gather is complete before the write begins, so overlapping rows are safe.
            buffer[:, sequences_N, :, targets_N] = buffer[:, sequences_N, :, sources_N]
