"""Records small forwards once (CUDA graphs) and replays them: W padded rows, B words a row of their pattern.

At batch 1 a forward of a large model is a few hundred small kernels, and launching them one by one can take longer than
reading the weights from memory. So a forward is padded to the next of a few widths: one copy brings its numbers to the
device, one graph computes everything from the tokens to the answers of its reads, and one copy brings these back. The
graph reads on the device where each row belongs, so it serves every forward of its width, alone or in a batch.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from refusion_eval.engine.readout import Collect, ReadPlan, fetch, hidden_of, host_buffer, launch_reads, read_out
from refusion_eval.errors import ConfigError
from refusion_eval.models.attention import num_words, pattern_bits
from refusion_eval.models.cache import KVCache
from refusion_eval.models.choices import Choices, choices_for
from refusion_eval.models.fused import LONG, NUM_COUNTERS, fused_hidden, read_rows
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import Forward, Read, Readout, causal, groups

# Finer where a wide forward is bound by arithmetic, which padding costs too.
WIDTHS = (1, 2, 4, *range(8, 65, 8), 80, 96, 128, 160, 192, 224, *range(256, 513, 32))
# With overlap, where the host has other work than to launch operations one by one.
OVERLAPPED_WIDTHS = (*WIDTHS, 576, 640, 704, 768, 896, 1024)
MOST_READ = WIDTHS[-1]  # rows of a recorded forward that are read, if it is wider
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
NOTHING_FED: Mapping[int, int] = MappingProxyType({})
SIZE = 1 << 21  # 64-bit numbers on the device and in pinned memory, 16 MiB each

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
        self._host, self._numbers, self._is_copied = host_buffer((SIZE,), torch.int64, device)

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
        return width * (NUM_COLUMNS + num_words + 2) + 3 * num_moves <= SIZE

    def send(
        self,
        forwards: Sequence[Forward],
        lengths: Sequence[int],
        plan: ReadPlan,
        shape: Shape,
        moves: Sequence[tuple[int, int, int]] = (),
        sequences: Sequence[int] | None = None,
        fed: Sequence[tuple[int, int]] = (),
    ) -> tuple[Tensor | None, Tensor | None]:
        """Copies the numbers of a forward to the device; returns where `moves` [3, N] and `fed` [2, F] are, if any."""
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
        places = range(len(forwards)) if sequences is None else sequences
        for sequence, forward, length in zip(places, forwards, lengths, strict=True):
            num_rows = len(forward.tokens)
            here = columns[:, row : row + num_rows]
            here[:2] = forward.tokens, forward.positions
            here[2:5] = [[sequence], [length], [num_rows]]
            here[5] = np.arange(num_rows)
            bits_WB[row : row + num_rows] = pattern_bits(forward.attention, words)
            row += num_rows
        middle = start + 3 * len(moves)
        end = middle + 2 * len(fed)
        for pairs, first, last in ((moves, start, middle), (fed, middle, end)):
            if pairs:
                self._numbers[first:last] = np.array(pairs).T.ravel()
        self.device[:end].copy_(self._host[:end], non_blocking=True)
        if self._is_copied is not None:
            self._is_copied.record()
        moves_3N = self.device[start:middle].view(3, -1) if moves else None
        return moves_3N, self.device[middle:end].view(2, -1) if fed else None


class RecordedForwards:
    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        record: Record,
        widths: Sequence[int] | None = None,
        choices: Choices | None = None,  # None is the table of the device, if there is one
    ) -> None:
        self._model, self.cache, self._record = model, cache, record
        self.choices = choices_for(model.device, model.config, model.dtype) if choices is None else choices
        all_widths = WIDTHS if widths is None else widths
        skipped = set(self.choices.skipped) - {all_widths[-1]}  # nothing wider could take its place
        self._widths = tuple(width for width in all_widths if width not in skipped)
        self._widest_alone = max(width for width in self._widths if width <= MOST_READ)  # not of a batch
        self._plan: ReadPlan | None = None  # of the last call, if its answers are in their buffer
        cache.defers_moves = True
        self._staging = Staging(model.device)
        self._tables = model.rotary.grow(model.config.max_positions)
        self._logits = torch.empty(MOST_READ, len(model.weights.head), dtype=model.dtype, device=model.device)
        self._answers = torch.empty(3 * MOST_READ, device=model.device)
        self._counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=model.device)
        self._all_rows = torch.arange(MOST_READ, device=model.device)
        self._replays: dict[int, Callable[[], None]] = {}
        # Computes the forward that `read` made last once more, if it was a recorded one.
        self.replay: Callable[[], None] = _nothing
        self._keys: Tensor | None = None
        self._checked: set[bool] = set()  # whether the buffers were long whose recordings were checked

    def reserve(self, num_rows: int) -> None:
        needed, step = max(num_rows, CHECKED_CONTEXT + self._widths[-1]), CAPACITY_STEP[self._model.device.type]
        if needed > self.cache.capacity or self.cache.capacity % step:
            capacity = -(-max(needed, self.cache.capacity) // step) * step
            self.cache.resize(self.cache.num_sequences, capacity)

    @property
    def is_outgrown(self) -> bool:
        """Whether the buffer is another than that for which forwards are recorded."""
        return self._keys is not self.cache.keys

    @torch.inference_mode()
    def prepare(self, *, lazily: bool = False) -> None:
        """Records the forwards of all widths, unless that is done for this buffer.

        Checks them the first time, and the first time in a long buffer, whose attention has kernels of its own.

        Args:
            lazily: whether, after the first time, a width is recorded when a forward has it: a batch whose buffer
                changes while time is taken needs few of them. Nothing is checked then, because a check writes over the
                rows of the batch.
        """
        lazily, is_long = lazily and bool(self._checked), self.cache.capacity > LONG
        is_checked = lazily or is_long in self._checked
        if is_checked and not self.is_outgrown:
            return
        self._keys, self._replays, self.replay = None, {}, _nothing
        try:
            with _on(self._model.device):
                for width in () if lazily else reversed(self._widths):
                    self._record_width(width)  # the largest first: the others fit in its memory
                self._keys = self.cache.keys
                if not is_checked:
                    self._check()
                    self._checked.add(is_long)
        except Exception as error:  # Triton has errors of its own, for example where it finds no C compiler
            self._keys = None
            # A recording that memory ended may raise another error while it is closed.
            if isinstance(error, ConfigError) or any(
                isinstance(one, torch.OutOfMemoryError) for one in (error, error.__context__)
            ):
                raise
            reason = f"{type(error).__name__}: {error}; run with --no-cuda-graphs (cuda_graphs=False)"
            raise ConfigError(f"forwards cannot be recorded on {self._model.device}: {reason}") from error

    def _record_width(self, width: int) -> None:
        self._staging.send((), (), ReadPlan(()), (width, num_words(width)))
        self._replays[width] = self._record(partial(self._compute, width))

    def read(self, forwards: Sequence[Forward], plan: ReadPlan, lengths: Sequence[int]) -> list[Readout] | None:
        """Makes one model call and answers all reads, as `launch` does, and waits for the answers."""
        collect = self.launch(forwards, plan, lengths)
        return None if collect is None else collect()

    def launch(
        self,
        forwards: Sequence[Forward],
        plan: ReadPlan,
        lengths: Sequence[int],
        sequences: Sequence[int] | None = None,
        fed: Mapping[int, int] = NOTHING_FED,
    ) -> Collect | None:
        """Starts one model call; None, and nothing is done, for forwards that need another way.

        Args:
            sequences: places of the forwards in the buffer, ascending; by default 0, 1, ...
            fed: see `Engine._launch`.
        """
        before, self._plan = self._plan, None
        # Forwards that score rows, reuse features or are guided do: their work differs each time.
        if self._keys is not self.cache.keys or plan.guides or (fed and before is None):
            return None
        for forward in forwards:
            if forward.approximation is not None:
                return None
        (width, words), is_replayed = self._shape(forwards, plan)
        # So does a wide forward of one sequence: attention without a pattern suits a long causal text better.
        if not is_replayed and not (len(forwards) > 1 and self._staging.holds(width, words, 0)):
            return None
        if fed and width not in self._replays:  # a recording would write over the answers that are fed
            return None
        model, moves, pairs = self._model, self.cache.moves, []
        if fed and before is not None and sequences is not None:
            first_rows = accumulate([len(forward.tokens) for forward in forwards], initial=0)
            rows = zip(first_rows, sequences, strict=False)
            pairs = [(row, before.answer_of(fed[place])) for row, place in rows if place in fed]
        with _on(model.device):
            if is_replayed and width not in self._replays:
                self._record_width(width)
            if not self._staging.holds(width, words, len(moves)):  # then two copies instead of one
                self.cache.move_rows()
                moves = []
            moves_3N, fed_2F = self._staging.send(forwards, lengths, plan, (width, words), moves, sequences, pairs)
            self.cache.move_rows(moves_3N)
            if fed_2F is not None:
                # Whatever the answers are if they are not finite, a token is one of the vocabulary.
                tokens_F = self._answers[fed_2F[1]].long().clamp_(0, model.config.vocab_size - 1)
                self._staging.columns(width)[0][fed_2F[0]] = tokens_F
            if not is_replayed:
                # Launched one by one and without padding: from 512 rows of a large model on arithmetic takes longer
                # than launching, and padding would add to it.
                hidden_WC, _ = self._hidden(width, words)
                return self._read_out(plan, hidden_WC, model.logits, width)
            self.replay = self._replays[width]
            self.replay()
            self._plan = plan
            if not plan.is_simple:
                return self._read_out(plan, self._logits[:, : model.config.vocab_size], Tensor.float, width)
            num_read = min(width, MOST_READ)
            fetched = fetch(self._answers[: 3 * num_read])
        return lambda: plan.readouts(fetched().reshape(3, num_read), model.dtype)

    def _shape(self, forwards: Sequence[Forward], plan: ReadPlan) -> tuple[Shape, bool]:
        """The shape of a call, and whether there is a recording for it."""
        sizes = [len(forward.tokens) for forward in forwards]
        num_rows, num_reads = max(sum(sizes), plan.numbers.shape[1]), plan.numbers.shape[1]
        # A wider forward is of a batch, and some of its rows are read, simply.
        can_be_wide = plan.is_simple and num_reads <= MOST_READ and len(forwards) > 1
        if num_rows > (self._widths[-1] if can_be_wide else self._widest_alone):
            return (num_rows, num_words(max(sizes))), False
        width = self._widths[bisect_left(self._widths, num_rows)]
        return (width, num_words(width)), True

    def _read_out(self, plan: ReadPlan, x_WX: Tensor, head: Callable[[Tensor], Tensor], width: int) -> Collect:
        numbers_4W = self._staging.columns(width)[6:]
        return launch_reads(plan, x_WX, head, self._model.config.vocab_size, self._model.dtype, numbers_4W)

    def _hidden(self, width: int, words: int) -> tuple[Tensor, Tensor]:
        # The residual stream of the rows in the staging buffer, [W, C], and its final norm, of at least as many rows.
        rows_6W, bits_WB = self._staging.columns(width)[:6], self._staging.bits(width, words)
        cached = self.cache.keys, self.cache.values
        return fused_hidden(self._model, self._tables, rows_6W, bits_WB, *cached, self.choices, self._counters)

    def _compute(self, width: int) -> None:
        _, normed_RC = self._hidden(width, num_words(width))
        num_read = min(width, MOST_READ)
        rows_N, given_N, _, suppressed_N = self._staging.columns(width)[6:, :num_read]
        if width > MOST_READ:
            normed_RC, rows_N = normed_RC[rows_N], self._all_rows
        logits_RV = torch.mm(normed_RC, self._model.weights.head.t(), out=self._logits[: len(normed_RC)])
        logits_NV = logits_RV[:num_read, : self._model.config.vocab_size]
        read_rows(logits_NV, rows_N, given_N, suppressed_N, self._answers[: 3 * num_read].view(3, num_read))

    def _check(self) -> None:
        """Compares a forward of every width, and a wider forward of a batch, with the same forwards unrecorded."""
        widest = self._widths[-1]
        self._check_after(CHECKED_CONTEXT, (*self._widths, *([widest + 1] if self.cache.num_sequences > 1 else [])))
        most = min(self.cache.capacity, self._model.config.max_positions) - widest
        if most > MANY:
            self._check_after(min(LONG_CONTEXT, most), [width for width in LONG_CHECKED if width <= widest])

    def _check_after(self, context: int, widths: Sequence[int]) -> None:
        model, cache = self._model, self.cache
        num_sequences = min(cache.num_sequences, CHECKED_SEQUENCES)
        lengths = [context - sequence for sequence in range(num_sequences)]
        for sequence in range(num_sequences):  # of rows and moves of earlier requests
            cache.wipe(sequence)
        hidden_of(model, cache, [self._forward(0, length, length) for length in lengths], "sdpa")
        cache.lengths[:num_sequences] = lengths
        for width in widths:
            parts = np.array_split(range(width), min(width, num_sequences))
            sizes = [min(len(part), cache.capacity - length) for part, length in zip(parts, lengths, strict=False)]
            share = MOST_READ // len(parts) if MOST_READ < width <= self._widths[-1] else width
            forwards = [self._forward(*pair, share) for pair in zip(lengths, sizes, strict=False)]
            for sequence, size in enumerate(sizes):
                cache.stage(sequence, size)
            answers = self.read(forwards, ReadPlan.of(forwards), lengths[: len(forwards)])
            assert answers is not None
            with_margin = [replace(forward, reads=(replace(forward.reads[0], margin=True),)) for forward in forwards]
            plan = ReadPlan.of(with_margin)
            expected = read_out(plan, hidden_of(model, cache, forwards, "sdpa"), model.logits, model.config.vocab_size)
            _compare(f"{width} rows after {context}", answers, expected, TOLERANCES[model.dtype])
        for sequence in range(num_sequences):
            cache.wipe(sequence)

    def _forward(self, start: int, num_rows: int, most_read: int) -> Forward:
        # Causal or of two groups, so that both kinds of patterns are checked.
        positions = range(start, start + num_rows)
        tokens = [position * 7919 % self._model.config.vocab_size for position in positions]
        attention = causal(num_rows) if num_rows % 16 else groups([num_rows // 2] * 2)
        read = Read(rows=range(num_rows)[-most_read:], given=tokens[-most_read:])
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


def _nothing() -> None:
    pass


def _on(device: torch.device) -> AbstractContextManager[object]:
    # Graphs are recorded and kernels start on the current device.
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
