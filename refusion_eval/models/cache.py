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
    """Staged rows of a sequence, and the score of each in each layer, [layers, rows]."""

    rows: Sequence[int]
    scores_LK: Tensor


class Features:
    """Features of each row of one text in each layer, kept between forwards (`refusion_eval.types.FeatureReuse`).

    They take memory in addition to the KV buffers: keys, values and two vectors of residual width a row and layer.

    Attributes:
        keys, values: rotated keys, and values, each [layers, key-value heads, rows, head width].
        attended, mlp: outputs of attention and MLP, added to the residual stream, each [layers, rows, residual width].

    Args:
        config: shapes of the model.
    """

    def __init__(self, config: ModelConfig, positions: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.positions = list(positions)
        per_head = (config.num_layers, config.num_kv_heads, len(positions), config.head_dim)
        wide = (config.num_layers, len(positions), config.hidden_size)
        self.keys, self.values = (torch.zeros(per_head, dtype=dtype, device=device) for _ in range(2))
        self.attended, self.mlp = (torch.zeros(wide, dtype=dtype, device=device) for _ in range(2))


class KVCache:
    """Keys and values, each [layers, sequences, key-value heads, capacity, head width], grown by doubling.

    Attributes:
        scores: scores of staged rows, valid until the next commit; None if the forward requested none.
        defers_moves: whether rows that a commit moves are moved by the next `move_rows` instead of at once. Then their
            numbers can be sent to the device together with those of the next forward.

    Args:
        config: shapes of the model.
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
        self.scores: list[ScoredRows | None] = [None] * num_sequences
        self.features: list[Features | None] = [None] * num_sequences
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
            self.resize(self.num_sequences, max(num_rows, 2 * self.capacity))

    @torch.inference_mode()
    def resize(self, num_sequences: int, capacity: int) -> None:
        """Gives the buffer another size, keeping the first sequences; the others are dropped."""
        more = (0, 0, 0, capacity - self.capacity)
        self.keys = torch.nn.functional.pad(self.keys[:, :num_sequences], more)
        self.values = torch.nn.functional.pad(self.values[:, :num_sequences], more)
        for per_sequence in (self.lengths, self.staged, self.scores, self.features):
            del per_sequence[num_sequences:]  # type: ignore[attr-defined]
        self.moves = [move for move in self.moves if move[0] < num_sequences]

    def clear(self, sequence: int) -> None:
        """Drops all rows and features of a sequence."""
        self.lengths[sequence] = self.staged[sequence] = 0
        self.scores[sequence] = self.features[sequence] = None
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
        self.features[target], self.features[source] = self.features[source], None

    def stage(self, sequence: int, num_rows: int) -> None:
        """Declares the rows of a sequence's next forward; whatever was staged before is dropped."""
        self.staged[sequence], self.scores[sequence] = num_rows, None

    @torch.inference_mode()
    def commit(
        self,
        sequence: int,
        rows: Sequence[int],
        replace: Sequence[int] | None = None,
        keep: int | None = None,
        best: int | None = None,
    ) -> None:
        """Keeps some rows of the sequence's last forward and drops the others.

        A leading run 0, 1, 2, ... is already in place; the rest is moved by one gather.

        Args:
            best: number of `rows` that are kept, in each layer those with the best scores; None keeps all.

        Raises:
            DecodeError: a row was not staged or not scored, or a row to replace or keep is not committed.
        """
        length, staged = self.lengths[sequence], self.staged[sequence]
        if keep is not None and (replace is not None or not 0 <= keep <= length):
            raise DecodeError(f"keep={keep} of {length} committed rows, replace={replace}")
        if any(not 0 <= row < staged for row in rows):
            raise DecodeError(f"commit of rows {list(rows)} after a forward of {staged} rows")
        if best is not None:
            start = length if keep is None else keep
            self._copy_best(sequence, rows, replace, start, best)
            self.lengths[sequence] = start + best
        elif replace is not None:
            if len(replace) != len(rows) or any(not 0 <= row < length for row in replace):
                raise DecodeError(f"{len(rows)} rows cannot replace cache rows {list(replace)} of {length} committed")
            self._copy(sequence, [length + row for row in rows], replace)
        else:
            start = length if keep is None else keep
            in_place = 0
            while in_place < len(rows) and start + in_place == length + rows[in_place]:
                in_place += 1
            sources = [length + row for row in rows[in_place:]]
            self._copy(sequence, sources, range(start + in_place, start + len(rows)))
            self.lengths[sequence] = start + len(rows)
        self.staged[sequence] = 0

    def _copy_best(
        self, sequence: int, rows: Sequence[int], replace: Sequence[int] | None, start: int, best: int
    ) -> None:
        """Moves the best of the rows of each layer to `start`, in their order."""
        scored = self.scores[sequence]
        if scored is None or replace is not None or list(scored.rows) != list(rows) or not 0 <= best <= len(rows):
            raise DecodeError(
                f"commit of the best {best} of {len(rows)} rows; they must be those that the forward before scored, at "
                "least as many, and replace nothing"
            )
        # A stable sort: among equals the first rows win, on every device.
        order_LN = scored.scores_LK.sort(dim=1, descending=True, stable=True).indices[:, :best].sort(dim=1).values
        rows_K = torch.tensor(list(rows), dtype=torch.int64, device=self.keys.device) + self.lengths[sequence]
        num_layers, _, num_kv_heads, _, head_dim = self.keys.shape
        index = rows_K[order_LN][:, None, :, None].expand(num_layers, num_kv_heads, best, head_dim)
        for buffer in (self.keys, self.values):
            buffer[:, sequence, :, start : start + best] = buffer[:, sequence].gather(2, index)

    def _copy(self, sequence: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        if not sources:
            return
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
        """Carries out the commits that are not yet."""
        if not self.moves:
            return
        if moved_3N is None:
            moved_3N = torch.from_numpy(self.moved_rows()).to(self.keys.device)
        self.moves = []
        sequences_N, sources_N, targets_N = moved_3N
        for buffer in (self.keys, self.values):
            # The gather is complete before the write begins, so overlapping rows are safe.
            buffer[:, sequences_N, :, targets_N] = buffer[:, sequences_N, :, sources_N]
