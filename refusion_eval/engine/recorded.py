"""Forwards of one sequence that are recorded once and replayed: on CUDA as graphs.

At batch 1 a forward of a large model is a few hundred small kernels, and launching them one by one can take longer than
reading the weights from memory. A forward is padded to the next of a few widths. Its numbers go to the device in one
copy, one graph computes everything from the tokens to the answers of its reads, and one copy brings these back:

    tokens, positions, pattern, reads -> staging buffer -> graph: layers, logits, readout -> table of answers

The graph reads the number of committed rows on the device, so it serves every forward of its width.

Shapes: W padded rows, V vocabulary, B 64-bit words a row of the visibility pattern, N rows that are moved.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from refusion_eval.engine.masks import visible
from refusion_eval.engine.readout import (
    STATISTICS_OF_SIMPLE,
    PackedRead,
    ReadPlan,
    fetch,
    hidden_of,
    read_out,
    statistics_of,
)
from refusion_eval.errors import ConfigError
from refusion_eval.models.cache import KVCache
from refusion_eval.models.fused import fused_logits, num_words, pack_pattern, read_rows
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import Attention, Forward, Read, Readout, causal, groups

# Finer where a wide forward is bound by arithmetic, which padding costs too.
WIDTHS = (1, 2, 4, *range(8, 65, 8), 80, 96, 128, 160, 192, 224, *range(256, 513, 32))
CAPACITY_STEP = {"cpu": 512, "cuda": 4096}  # the KV buffer grows by multiples of so many rows
NUM_WARM_UPS = 2  # before a recording: libraries choose kernels and allocate workspaces in their first calls
CHECKED_CONTEXT = 70  # committed rows of the forwards that check a recording
# The largest mean difference of log-probabilities between a recorded forward and one that is not.
TOLERANCES = {torch.float32: 0.01, torch.bfloat16: 0.5, torch.float16: 0.2}
CLEAR_MARGIN = 0.5  # between the two largest probabilities: no rounding turns their order round


class Record(Protocol):
    """Records a computation on buffers that stay where they are."""

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Returns what repeats the computation, on the buffers as they then are."""
        ...


class CudaGraphs:
    """Records computations as CUDA graphs, whose intermediate tensors share one pool of memory.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Computes a few times, then records."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            compute()
        return graph.replay


def recorder(device: torch.device) -> Record:
    """What records on a device: CUDA graphs; on a CPU nothing, a recording is the computation itself."""
    return CudaGraphs(device) if device.type == "cuda" else lambda compute: compute


class Staging:
    """The numbers of one forward, in one buffer on the host and one on the device, which one copy fills.

    Attributes:
        device: one row of W numbers each for tokens, positions, rows that are read, their given tokens, draw keys and
            suppressed ids; then the number of committed rows; then the bits of the pattern, W x B; then rows to move.

    Args:
        device: where forwards are computed.
    """

    NUM_COLUMNS = 6

    def __init__(self, device: torch.device) -> None:
        size = WIDTHS[-1] * (self.NUM_COLUMNS + num_words(WIDTHS[-1]) + 2) + 1
        self.device = torch.zeros(size, dtype=torch.int64, device=device)
        self._host, self._numbers = host_buffer(size, device)

    def columns(self, width: int) -> Tensor:
        """Tokens, positions, rows, given tokens, draw keys and suppressed ids on the device, [6, W]."""
        return self.device[: self.NUM_COLUMNS * width].view(self.NUM_COLUMNS, width)

    def length(self, width: int) -> Tensor:
        """Number of committed rows on the device, [1]."""
        return self.device[self.NUM_COLUMNS * width :][:1]

    def bits(self, width: int) -> Tensor:
        """Which rows of the forward each row sees, [W, B]."""
        start = self.NUM_COLUMNS * width + 1
        return self.device[start : start + width * num_words(width)].view(width, -1)

    def send(
        self, forward: Forward, plan: ReadPlan, width: int, length: int, moves: tuple[Sequence[int], Sequence[int]]
    ) -> Tensor:
        """Copies the numbers of a forward to the device; returns where the rows to move are there, [2, N]."""
        num_rows, num_reads, num_moves = len(forward.tokens), len(plan.suppressed), len(moves[0])
        columns = self._numbers[: self.NUM_COLUMNS * width].reshape(self.NUM_COLUMNS, width)
        columns[:] = 0
        columns[:2, :num_rows] = forward.tokens, forward.positions
        columns[2:5, :num_reads] = plan.numbers
        columns[5, :num_reads] = plan.suppressed
        bits = _bits(forward.attention, width)
        start = columns.size + 1 + bits.size
        end = start + 2 * num_moves
        self._numbers[columns.size] = length
        self._numbers[columns.size + 1 : start] = bits
        self._numbers[start:end].reshape(2, num_moves)[:] = moves
        self.device[:end].copy_(self._host[:end], non_blocking=True)
        return self.device[start:end].view(2, num_moves)


def host_buffer(size: int, device: torch.device) -> tuple[Tensor, npt.NDArray[np.int64]]:
    """Integers on the host, also as an array; pinned, so that a copy to a CUDA device does not wait for it."""
    buffer = torch.zeros(size, dtype=torch.int64)
    buffer = buffer.pin_memory() if device.type == "cuda" else buffer
    return buffer, buffer.numpy()


class RecordedForwards:
    """The recorded forwards of one sequence's buffer.

    Args:
        model: the transformer.
        cache: buffer for one sequence.
        record: records a computation.
    """

    def __init__(self, model: Transformer, cache: KVCache, record: Record) -> None:
        self._model, self._cache, self._record = model, cache, record
        cache.defers_moves = True
        self._staging = Staging(model.device)
        self._tables = model.rotary_tables(model.config.max_positions)
        self._logits = torch.empty(WIDTHS[-1], model.config.vocab_size, dtype=model.dtype, device=model.device)
        self._answers = torch.empty(3 * WIDTHS[-1], device=model.device)
        self._replays: dict[int, Callable[[], None]] = {}
        self._keys: Tensor | None = None

    @torch.inference_mode()
    def prepare(self, num_rows: int) -> None:
        """Makes room for texts of so many rows and records the forwards of all widths, unless that is done.

        Raises:
            ConfigError: forwards cannot be recorded here, or compute something else than without a recording.
        """
        needed, step = num_rows + WIDTHS[-1], CAPACITY_STEP[self._model.device.type]
        if needed > self._cache.capacity or self._cache.capacity % step:
            self._cache.resize(1, -(-max(needed, self._cache.capacity) // step) * step)
        if self._keys is self._cache.keys:
            return
        self._keys, self._replays = None, {}
        self._cache.clear(0)
        try:
            with _on(self._model.device):
                for width in reversed(WIDTHS):  # the largest first: the others fit in its memory
                    forward = self._forward(0, width)
                    self._staging.send(forward, self._plan(forward), width, 0, ((), ()))
                    self._replays[width] = self._record(partial(self._compute, width))
                self._check()
        except ConfigError:
            raise
        except Exception as error:  # Triton has errors of its own, for example where it finds no C compiler
            raise ConfigError(
                f"forwards cannot be recorded on {self._model.device}: {type(error).__name__}: {error}; run with "
                "--no-cuda-graphs (cuda_graphs=False)"
            ) from error
        self._cache.clear(0)
        self._keys = self._cache.keys

    def serves(self, forward: Forward, plan: ReadPlan, length: int) -> bool:
        """Whether a forward fits one of the widths, padding included.

        Forwards that score rows or reuse features are not served, because their work differs each time.

        Args:
            forward: the forward.
            plan: its reads.
            length: number of committed rows.
        """
        if forward.scores is not None or forward.reuse is not None or plan.guides or self._keys is not self._cache.keys:
            return False
        num_rows = max(len(forward.tokens), len(plan.suppressed))
        return num_rows <= WIDTHS[-1] and length + _padded(num_rows) <= self._cache.capacity

    @torch.inference_mode()
    def read(self, forward: Forward, plan: ReadPlan, length: int) -> list[Readout]:
        """Computes a forward that is served and answers its reads; the arguments are those of `serves`."""
        width = _padded(max(len(forward.tokens), len(plan.suppressed)))
        num_reads = len(plan.suppressed)
        with _on(self._model.device):
            _, *moves = self._cache.moves or (0, (), ())
            moved_2N = self._staging.send(forward, plan, width, length, (moves[0], moves[1]))
            self._cache.move_rows(moved_2N)
            self._replays[width]()
            if not plan.is_simple:
                return plan.readouts(fetch(statistics_of(plan, self._logits, self._staging.columns(width)[2:5])))
            answers_3W = fetch(self._answers[: 3 * width]).reshape(3, width)
        return plan.readouts(answers_3W[STATISTICS_OF_SIMPLE, :num_reads])

    def _compute(self, width: int) -> None:
        """One forward of a width from the staging buffer to the table of answers."""
        tokens_W, positions_W, rows_W, given_W, _, suppressed_W = self._staging.columns(width)
        logits_WV = fused_logits(
            self._model,
            self._tables,
            tokens_W,
            positions_W,
            self._staging.length(width),
            self._staging.bits(width),
            self._cache.keys[:, 0],
            self._cache.values[:, 0],
            out=self._logits[:width],
        )
        read_rows(logits_WV, rows_W, given_W, suppressed_W, self._answers[: 3 * width].view(3, width))

    def _check(self) -> None:
        """Compares a forward of every width with the same forward unrecorded.

        Raises:
            ConfigError: they differ by more than rounding.
        """
        model, cache = self._model, self._cache
        context = self._forward(0, CHECKED_CONTEXT)
        hidden_of(model, cache, [context], "sdpa")
        for width in WIDTHS:
            cache.lengths[0] = CHECKED_CONTEXT
            forward = self._forward(CHECKED_CONTEXT, width)
            (found,) = self.read(forward, self._plan(forward), CHECKED_CONTEXT)
            hidden_TC = hidden_of(model, cache, [forward], "sdpa")
            with_margin = ReadPlan([PackedRead(replace(read, margin=True), 0) for read in forward.reads])
            (expected,) = read_out(with_margin, hidden_TC, model.logits, model.config.vocab_size)
            difference = _difference(found, expected)
            assert expected.margin is not None
            clear = expected.margin > CLEAR_MARGIN
            num_wrong = int((found.tokens != expected.tokens)[clear].sum())
            if not difference <= TOLERANCES[model.dtype] or num_wrong:
                raise ConfigError(
                    f"a recorded forward of {width} rows differs from the same forward that is not recorded: "
                    f"{difference:.3g} in log-probability on average, {num_wrong} of {clear.sum()} clear tokens; the "
                    "kernels do not work on this device, so run with --no-cuda-graphs (cuda_graphs=False)"
                )

    def _forward(self, start: int, num_rows: int) -> Forward:
        """A forward of some tokens, causal or of two groups, so that both kinds of patterns are checked."""
        positions = range(start, start + num_rows)
        tokens = [position * 7919 % self._model.config.vocab_size for position in positions]
        attention = causal(num_rows) if num_rows % 16 else groups([num_rows // 2] * 2)
        read = Read(rows=range(num_rows), given=tokens)
        return Forward(tokens, positions, attention, (read,))

    def _plan(self, forward: Forward) -> ReadPlan:
        return ReadPlan([PackedRead(read, 0) for read in forward.reads])


def _difference(found: Readout, expected: Readout) -> float:
    """Mean difference of the log-probabilities of given tokens."""
    assert found.given is not None
    assert expected.given is not None
    smallest = np.finfo(np.float32).tiny
    logs = [np.log(np.maximum(readout, smallest)) for readout in (found.given, expected.given)]
    return float(np.abs(logs[0] - logs[1]).mean())


@lru_cache(maxsize=256)
def _bits(attention: Attention, width: int) -> npt.NDArray[np.int64]:
    """The packed pattern of a forward, one word after another; patterns recur from forward to forward."""
    return pack_pattern(visible(attention), width).ravel()


def _padded(num_rows: int) -> int:
    return next(width for width in WIDTHS if width >= num_rows)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one, on which graphs are recorded and kernels start; no effect for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
