"""Records small forwards once (CUDA graphs) and replays them: W padded rows, B words a row of their pattern.

At batch 1 a forward of a large model is a few hundred small kernels, and launching them one by one can take longer than
reading the weights from memory. So a forward is padded to the next of a few widths: one copy brings its numbers to the
device, one graph computes everything from the tokens to the answers of its reads, and one copy brings these back. The
graph reads on the device where each row belongs, so it serves every forward of its width, alone or in a batch.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from refusion_eval.engine.readout import ReadPlan, fetch, hidden_of, read_out
from refusion_eval.errors import ConfigError
from refusion_eval.models.attention import num_words, pattern_bits
from refusion_eval.models.cache import KVCache
from refusion_eval.models.choices import Choices, choices_for
from refusion_eval.models.fused import NUM_COUNTERS, fused_hidden, read_rows
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import Forward, Read, Readout, causal, groups

# Finer where a wide forward is bound by arithmetic, which padding costs too.
WIDTHS = (1, 2, 4, *range(8, 65, 8), 80, 96, 128, 160, 192, 224, *range(256, 513, 32))
CAPACITY_STEP = {"cpu": 512, "cuda": 4096}  # the KV buffer grows by multiples of so many rows
NUM_WARM_UPS = 2  # before a recording: libraries choose kernels and allocate workspaces in their first calls
CHECKED_CONTEXT = 70  # committed rows of the forwards that check a recording
CHECKED_SEQUENCES = 3  # of a batch
# A few widths are checked after so many rows too, where the buffer and the model have more than MANY of them: then each
# program that shares the keys of a row has several steps of them. The widths are of each size of a block of attention.
LONG_CONTEXT, MANY, LONG_CHECKED = 3000, 1024, (1, 8, 40, 512)
# The largest mean difference of log-probabilities between a recorded forward and the same forward unrecorded.
TOLERANCES = {torch.float32: 0.01, torch.bfloat16: 0.5, torch.float16: 0.2}
CLEAR_MARGIN = 0.5  # between the two largest probabilities: no rounding turns their order round
NUM_COLUMNS = 10
SIZE = 1 << 21  # 64-bit numbers on the device and in pinned memory, 16 MiB each

IntArray = npt.NDArray[np.int64]
Shape = tuple[int, int]  # the width to which forwards are padded, and the words of a row of their pattern
# Records a computation on buffers that stay where they are; returns a function that repeats it on their new contents.
Record = Callable[[Callable[[], None]], Callable[[], None]]


def recorder(device: torch.device) -> Record:
    if device.type != "cuda":
        return lambda compute: compute  # nothing is launched there, so there is nothing to record
    # Intermediate tensors of all graphs share one pool of memory.
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def record(compute: Callable[[], None]) -> Callable[[], None]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            compute()
        return graph.replay

    return record


class Staging:
    # A buffer on the host and one on the device, which bring the numbers of a forward to the device in one copy. One
    # after another: ten numbers a row (`columns`), the bits of the pattern (`bits`), and the rows of the KV buffer that
    # are moved before the forward, [3, N].

    def __init__(self, device: torch.device) -> None:
        self.device = torch.zeros(SIZE, dtype=torch.int64, device=device)
        self._host, self._numbers, self._is_copied = host_buffer(SIZE, device)

    def columns(self, width: int) -> Tensor:
        """The numbers of each row on the device, [10, W]."""
        # Token, position, four numbers that tell where the row belongs (`refusion_eval.models.fused`); then for the
        # rows that are read: the row, its given token, draw key and suppressed id.
        return self.device[: NUM_COLUMNS * width].view(NUM_COLUMNS, width)

    def bits(self, width: int, num_words: int) -> Tensor:
        """Which rows of its sequence in the forward each row sees, [W, B]."""
        start = NUM_COLUMNS * width
        return self.device[start : start + width * num_words].view(width, num_words)

    def holds(self, width: int, num_words: int, num_moves: int) -> bool:
        return width * (NUM_COLUMNS + num_words) + 3 * num_moves <= SIZE

    def send(
        self,
        forwards: Sequence[Forward],
        lengths: Sequence[int],
        plan: ReadPlan,
        shape: Shape,
        moves: Sequence[tuple[int, int, int]] = (),
    ) -> Tensor | None:
        """Copies the numbers of a forward to the device; returns where the rows to move are there, [3, N], if any."""
        if self._is_copied is not None:  # a forward that nothing is read of leaves its numbers waiting for their copy
            self._is_copied.synchronize()
        (width, words), num_reads = shape, plan.numbers.shape[1]
        columns = self._numbers[: NUM_COLUMNS * width].reshape(NUM_COLUMNS, width)
        columns[:] = 0
        columns[2] = -1  # padding belongs to no sequence
        columns[6:, :num_reads] = plan.numbers
        start = columns.size + width * words
        bits_WB = self._numbers[columns.size : start].reshape(width, words)
        row = 0
        for sequence, (forward, length) in enumerate(zip(forwards, lengths, strict=True)):
            num_rows = len(forward.tokens)
            here = columns[:, row : row + num_rows]
            here[:2] = forward.tokens, forward.positions
            here[2:5] = [[sequence], [length], [num_rows]]
            here[5] = np.arange(num_rows)
            bits_WB[row : row + num_rows] = pattern_bits(forward.attention, words)
            row += num_rows
        end = start + 3 * len(moves)
        if moves:
            self._numbers[start:end] = np.array(moves).T.ravel()
        self.device[:end].copy_(self._host[:end], non_blocking=True)
        if self._is_copied is not None:
            self._is_copied.record()
        return self.device[start:end].view(3, -1) if moves else None


def host_buffer(size: int, device: torch.device) -> tuple[Tensor, IntArray, torch.cuda.Event | None]:
    # Pinned, so that a copy to a CUDA device does not wait for it; the event says when the copy is done.
    is_cuda = device.type == "cuda"
    buffer = torch.zeros(size, dtype=torch.int64, pin_memory=is_cuda)
    return buffer, buffer.numpy(), torch.cuda.Event() if is_cuda else None


class RecordedForwards:
    def __init__(self, model: Transformer, cache: KVCache, record: Record, choices: Choices | None = None) -> None:
        self._model, self.cache, self._record = model, cache, record
        self.choices = choices_for(model.device, model.config, model.dtype) if choices is None else choices
        self._widths = tuple(width for width in WIDTHS if width not in self.choices.skipped)
        cache.defers_moves = True
        self._staging = Staging(model.device)
        self._tables = model.rotary.grow(model.config.max_positions)
        self._logits = torch.empty(WIDTHS[-1], len(model.weights.head), dtype=model.dtype, device=model.device)
        self._answers = torch.empty(3 * WIDTHS[-1], device=model.device)
        self._counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=model.device)
        self._replays: dict[int, Callable[[], None]] = {}
        # Computes the forward that `read` made last once more, if it was a recorded one.
        self.replay: Callable[[], None] = lambda: None
        self._keys: Tensor | None = None
        self._checked = False

    def reserve(self, num_rows: int) -> None:
        needed, step = max(num_rows, CHECKED_CONTEXT + WIDTHS[-1]), CAPACITY_STEP[self._model.device.type]
        if needed > self.cache.capacity or self.cache.capacity % step:
            capacity = -(-max(needed, self.cache.capacity) // step) * step
            self.cache.resize(self.cache.num_sequences, capacity)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Records the forwards of all widths, unless that is done for this buffer; checks them the first time."""
        if self._keys is self.cache.keys:
            return
        self._keys, self._replays = None, {}
        try:
            with _on(self._model.device):
                for width in reversed(self._widths):  # the largest first: the others fit in its memory
                    self._staging.send((), (), ReadPlan(()), (width, num_words(width)))
                    self._replays[width] = self._record(partial(self._compute, width))
                self._keys = self.cache.keys
                if not self._checked:
                    self._check()
        except Exception as error:  # Triton has errors of its own, for example where it finds no C compiler
            self._keys = None
            if isinstance(error, ConfigError):
                raise
            reason = f"{type(error).__name__}: {error}; run with --no-cuda-graphs (cuda_graphs=False)"
            raise ConfigError(f"forwards cannot be recorded on {self._model.device}: {reason}") from error
        self._checked = True

    def read(self, forwards: Sequence[Forward], plan: ReadPlan, lengths: Sequence[int]) -> list[Readout] | None:
        """Makes one model call and answers all reads; None, and nothing is done, for forwards that need another way."""
        # Forwards that score rows, reuse features or are guided do: their work differs each time.
        if self._keys is not self.cache.keys or plan.guides:
            return None
        for forward in forwards:
            if forward.approximation is not None:
                return None
        width, words = self._shape(forwards, plan)
        # So does a wide forward of one sequence: attention without a pattern suits a long causal text better.
        if width > WIDTHS[-1] and not (len(forwards) > 1 and self._staging.holds(width, words, 0)):
            return None
        model, moves = self._model, self.cache.moves
        with _on(model.device):
            if not self._staging.holds(width, words, len(moves)):  # then two copies instead of one
                self.cache.move_rows()
                moves = []
            self.cache.move_rows(self._staging.send(forwards, lengths, plan, (width, words), moves))
            if width > WIDTHS[-1]:
                # Launched one by one and without padding: from 512 rows of a large model on arithmetic takes longer
                # than launching, and padding would add to it.
                hidden_WC, _ = self._hidden(width, words)
                return self._read_out(plan, hidden_WC, model.logits, width)
            self.replay = self._replays[width]
            self.replay()
            if not plan.is_simple:
                return self._read_out(plan, self._logits[:, : model.config.vocab_size], Tensor.float, width)
            answers_3W = fetch(self._answers[: 3 * width]).reshape(3, width)
        return plan.readouts(answers_3W, model.dtype)

    def _shape(self, forwards: Sequence[Forward], plan: ReadPlan) -> Shape:
        sizes = [len(forward.tokens) for forward in forwards]
        num_rows = max(sum(sizes), plan.numbers.shape[1])
        if num_rows > WIDTHS[-1]:
            return num_rows, num_words(max(sizes))
        width = self._widths[bisect_left(self._widths, num_rows)]
        return width, num_words(width)

    def _read_out(self, plan: ReadPlan, x_WX: Tensor, head: Callable[[Tensor], Tensor], width: int) -> list[Readout]:
        numbers_4W = self._staging.columns(width)[6:]
        return read_out(plan, x_WX, head, self._model.config.vocab_size, self._model.dtype, numbers_4W)

    def _hidden(self, width: int, words: int) -> tuple[Tensor, Tensor]:
        # The residual stream of the rows in the staging buffer, [W, C], and its final norm, of at least as many rows.
        rows_6W, bits_WB = self._staging.columns(width)[:6], self._staging.bits(width, words)
        cached = self.cache.keys, self.cache.values
        return fused_hidden(self._model, self._tables, rows_6W, bits_WB, *cached, self.choices, self._counters)

    def _compute(self, width: int) -> None:
        _, normed_RC = self._hidden(width, num_words(width))
        logits_RV = torch.mm(normed_RC, self._model.weights.head.t(), out=self._logits[: len(normed_RC)])
        logits_WV = logits_RV[:width, : self._model.config.vocab_size]
        rows_W, given_W, _, suppressed_W = self._staging.columns(width)[6:]
        read_rows(logits_WV, rows_W, given_W, suppressed_W, self._answers[: 3 * width].view(3, width))

    def _check(self) -> None:
        """Compares a forward of every width, and a wider forward of a batch, with the same forwards unrecorded."""
        widest = self._widths[-1]
        self._check_after(CHECKED_CONTEXT, (*self._widths, *([widest + 1] if self.cache.num_sequences > 1 else [])))
        most = min(self.cache.capacity, self._model.config.max_positions) - widest
        if most > MANY:
            self._check_after(min(LONG_CONTEXT, most), LONG_CHECKED)

    def _check_after(self, context: int, widths: Sequence[int]) -> None:
        model, cache = self._model, self.cache
        num_sequences = min(cache.num_sequences, CHECKED_SEQUENCES)
        lengths = [context - sequence for sequence in range(num_sequences)]
        cache.lengths[:num_sequences] = [0] * num_sequences
        hidden_of(model, cache, [self._forward(0, length) for length in lengths], "sdpa")
        cache.lengths[:num_sequences] = lengths
        for width in widths:
            parts = np.array_split(range(width), min(width, num_sequences))
            sizes = [min(len(part), cache.capacity - length) for part, length in zip(parts, lengths, strict=False)]
            forwards = [self._forward(*pair) for pair in zip(lengths, sizes, strict=False)]
            answers = self.read(forwards, ReadPlan.of(forwards), lengths[: len(forwards)])
            assert answers is not None
            with_margin = [replace(forward, reads=(replace(forward.reads[0], margin=True),)) for forward in forwards]
            plan = ReadPlan.of(with_margin)
            expected = read_out(plan, hidden_of(model, cache, forwards, "sdpa"), model.logits, model.config.vocab_size)
            _compare(f"{width} rows after {context}", answers, expected, TOLERANCES[model.dtype])
        for sequence in range(num_sequences):
            cache.clear(sequence)

    def _forward(self, start: int, num_rows: int) -> Forward:
        # Causal or of two groups, so that both kinds of patterns are checked.
        positions = range(start, start + num_rows)
        tokens = [position * 7919 % self._model.config.vocab_size for position in positions]
        attention = causal(num_rows) if num_rows % 16 else groups([num_rows // 2] * 2)
        read = Read(rows=range(num_rows), given=tokens)
        return Forward(tokens, positions, attention, (read,))


def _compare(which: str, answers: Sequence[Any], expected: Sequence[Any], tolerance: float) -> None:
    difference, num_clear, num_wrong = 0.0, 0, 0
    for answer, right in zip(answers, expected, strict=True):
        clear = right.margin > CLEAR_MARGIN
        num_clear += int(clear.sum())
        num_wrong += int((answer.tokens != right.tokens)[clear].sum())
        log_probs = np.log(np.maximum([answer.given, right.given], np.finfo(np.float32).tiny))
        difference = max(difference, float(np.abs(log_probs[0] - log_probs[1]).mean()))
    if not difference <= tolerance or num_wrong:
        size = f"{difference:.3g} in log-probability on average, {num_wrong} of {num_clear} clear tokens"
        raise ConfigError(
            f"a recorded forward of {which} differs from the same forward that is not recorded: {size}; the "
            "kernels do not work on this device, so run with --no-cuda-graphs (cuda_graphs=False)"
        )


def _on(device: torch.device) -> AbstractContextManager[object]:
    # Graphs are recorded and kernels start on the current device.
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
