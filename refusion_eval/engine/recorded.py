"""Records small forwards once (CUDA graphs) and replays them.

At batch 1 a forward of a large model is a few hundred small kernels, and launching them one by one can take longer than
reading the weights from memory. A forward is padded to the next of a few widths. Its numbers go to the device in one
copy, one graph computes everything from the tokens to the answers of its reads, and one copy brings these back:

    tokens, positions, places, pattern, reads -> staging buffer -> graph: layers, logits, readout -> table of answers

The graph reads on the device where each row belongs, so it serves every forward of its width, of one sequence or of a
batch. A batch also has wider forwards. They make the same kernels, launched one by one and without padding: from 512
rows of a large model on arithmetic takes longer than launching, and padding would add to it.

Shapes: W padded rows, V vocabulary, B 64-bit words a row of the visibility pattern.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from refusion_eval.engine.readout import (
    STATISTICS_OF_SIMPLE,
    PackedRead,
    ReadPlan,
    fetch,
    hidden_of,
    read_out,
    statistics_of,
)
from refusion_eval.engine.staging import Staging
from refusion_eval.errors import ConfigError
from refusion_eval.models.cache import KVCache
from refusion_eval.models.fused import fused_hidden, num_words, read_rows
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import Forward, Read, Readout, causal, groups

# Finer where a wide forward is bound by arithmetic, which padding costs too.
WIDTHS = (1, 2, 4, *range(8, 65, 8), 80, 96, 128, 160, 192, 224, *range(256, 513, 32))
CAPACITY_STEP = {"cpu": 512, "cuda": 4096}  # the KV buffer grows by multiples of so many rows
NUM_WARM_UPS = 2  # before a recording: libraries choose kernels and allocate workspaces in their first calls
CHECKED_CONTEXT = 70  # committed rows of the forwards that check a recording
CHECKED_SEQUENCES = 3  # of a batch
# The largest mean difference of log-probabilities between a recorded forward and one that is not.
TOLERANCES = {torch.float32: 0.01, torch.bfloat16: 0.5, torch.float16: 0.2}
CLEAR_MARGIN = 0.5  # between the two largest probabilities: no rounding turns their order round


# Records a computation on buffers that stay where they are; returns a function that repeats it on their new contents.
Record = Callable[[Callable[[], None]], Callable[[], None]]


class CudaGraphs:
    """Records computations as CUDA graphs, whose intermediate tensors share one pool of memory."""

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
    """Returns the recorder for a device: CUDA graphs on a GPU, a no-op on a CPU."""
    return CudaGraphs(device) if device.type == "cuda" else lambda compute: compute


class RecordedForwards:
    """The recorded forwards over one KV buffer."""

    def __init__(self, model: Transformer, cache: KVCache, record: Record) -> None:
        self._model, self._cache, self._record = model, cache, record
        cache.defers_moves = True
        self._staging = Staging(model.device)
        self._tables = model.rotary.grow(model.config.max_positions)
        self._logits = torch.empty(WIDTHS[-1], model.config.vocab_size, dtype=model.dtype, device=model.device)
        self._answers = torch.empty(3 * WIDTHS[-1], device=model.device)
        self._replays: dict[int, Callable[[], None]] = {}
        self._keys: Tensor | None = None
        self._checked = False

    def reserve(self, num_rows: int) -> None:
        """Makes room for texts of so many rows; what is stored is kept."""
        needed, step = max(num_rows, CHECKED_CONTEXT + WIDTHS[-1]), CAPACITY_STEP[self._model.device.type]
        if needed > self._cache.capacity or self._cache.capacity % step:
            capacity = -(-max(needed, self._cache.capacity) // step) * step
            self._cache.resize(self._cache.num_sequences, capacity)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Records the forwards of all widths, unless that is done for the buffer as it is; checks them the first time.

        Raises:
            ConfigError: forwards cannot be recorded here, or compute something else than without a recording.
        """
        if self._keys is self._cache.keys:
            return
        self._keys, self._replays = None, {}
        try:
            with _on(self._model.device):
                for width in reversed(WIDTHS):  # the largest first: the others fit in its memory
                    self._staging.send((), (), ReadPlan(()), width, num_words(width), np.empty((3, 0), dtype=np.int64))
                    self._replays[width] = self._record(partial(self._compute, width))
                if not self._checked:
                    self._check()
        except ConfigError:
            raise
        except Exception as error:  # Triton has errors of its own, for example where it finds no C compiler
            raise ConfigError(
                f"forwards cannot be recorded on {self._model.device}: {type(error).__name__}: {error}; run with "
                "--no-cuda-graphs (cuda_graphs=False)"
            ) from error
        self._checked, self._keys = True, self._cache.keys

    def serves(self, forwards: Sequence[Forward], plan: ReadPlan) -> bool:
        """Whether forwards can be computed here."""
        # Forwards that score rows, reuse features or are guided cannot: their work differs each time.
        if self._keys is not self._cache.keys or plan.guides:
            return False
        if any(forward.approximation is not None for forward in forwards):
            return False
        width, words = _shape(forwards, plan)
        # A wide forward of one sequence is not served: attention without a pattern suits a long causal text better.
        return width <= WIDTHS[-1] or (len(forwards) > 1 and self._staging.holds(width, words, 0))

    @torch.inference_mode()
    def read(self, forwards: Sequence[Forward], plan: ReadPlan, lengths: Sequence[int]) -> list[Readout]:
        """Computes forwards that are served and answers their reads."""
        width, words = _shape(forwards, plan)
        with _on(self._model.device):
            moved_3N = self._cache.moved_rows()
            if not self._staging.holds(width, words, moved_3N.shape[1]):  # then two copies instead of one
                self._cache.move_rows()
                moved_3N = moved_3N[:, :0]
            self._cache.move_rows(self._staging.send(forwards, lengths, plan, width, words, moved_3N))
            columns = self._staging.columns(width)
            if width > WIDTHS[-1]:
                hidden_WC, _ = self._hidden(width, words)
                model = self._model
                return read_out(plan, hidden_WC, model.logits, model.config.vocab_size, model.dtype, columns[6:9])
            self._replays[width]()
            if not plan.is_simple:
                return plan.readouts(fetch(statistics_of(plan, self._logits, columns[6:9])), self._model.dtype)
            answers_3W = fetch(self._answers[: 3 * width]).reshape(3, width)
        return plan.readouts(answers_3W[STATISTICS_OF_SIMPLE, : len(plan.suppressed)], self._model.dtype)

    def _hidden(self, width: int, words: int) -> tuple[Tensor, Tensor]:
        """The residual stream of the rows in the staging buffer and its final norm, both [W, C]."""
        columns = self._staging.columns(width)
        bits_WB, cache = self._staging.bits(width, words), self._cache
        return fused_hidden(
            self._model, self._tables, columns[0], columns[1], columns[2:6], bits_WB, cache.keys, cache.values
        )

    def _compute(self, width: int) -> None:
        """One forward of a recorded width from the staging buffer to the table of answers."""
        _, normed_WC = self._hidden(width, num_words(width))
        logits_WV = torch.mm(normed_WC, self._model.weights.head.t(), out=self._logits[:width])
        rows_W, given_W, _, suppressed_W = self._staging.columns(width)[6:]
        read_rows(logits_WV, rows_W, given_W, suppressed_W, self._answers[: 3 * width].view(3, width))

    def _check(self) -> None:
        """Compares a forward of every width, and a wider one of a batch, with the same forwards unrecorded."""
        model, cache = self._model, self._cache
        num_sequences = min(cache.num_sequences, CHECKED_SEQUENCES)
        lengths = [CHECKED_CONTEXT - sequence for sequence in range(num_sequences)]
        contexts = [self._forward(0, length) for length in lengths]
        cache.lengths[:num_sequences] = [0] * num_sequences
        hidden_of(model, cache, contexts, "sdpa")
        cache.lengths[:num_sequences] = lengths
        for width in WIDTHS if num_sequences == 1 else (*WIDTHS, WIDTHS[-1] + 1):
            parts = np.array_split(range(width), min(width, num_sequences))
            sizes = [min(len(part), cache.capacity - length) for part, length in zip(parts, lengths, strict=False)]
            forwards = [self._forward(*pair) for pair in zip(lengths, sizes, strict=False)]
            reads = [read for forward in forwards for read in forward.reads]
            firsts = np.cumsum([0, *sizes])[:-1].tolist()
            plans = []
            for margin in (False, True):
                reads_here = [replace(read, margin=margin) for read in reads]
                plans.append(ReadPlan([PackedRead(*pair) for pair in zip(reads_here, firsts, strict=True)]))
            answers = self.read(forwards, plans[0], lengths[: len(forwards)])
            hidden_TC = hidden_of(model, cache, forwards, "sdpa")
            expected = read_out(plans[1], hidden_TC, model.logits, model.config.vocab_size)
            _compare(width, answers, expected, TOLERANCES[model.dtype])
        for sequence in range(num_sequences):
            cache.clear(sequence)

    def _forward(self, start: int, num_rows: int) -> Forward:
        # Causal or of two groups, so that both kinds of patterns are checked.
        positions = range(start, start + num_rows)
        tokens = [position * 7919 % self._model.config.vocab_size for position in positions]
        attention = causal(num_rows) if num_rows % 16 else groups([num_rows // 2] * 2)
        read = Read(rows=range(num_rows), given=tokens)
        return Forward(tokens, positions, attention, (read,))


def _compare(width: int, answers: Sequence[Readout], expected: Sequence[Readout], tolerance: float) -> None:
    """Raises ConfigError if the answers to the reads of a forward differ from the expected ones."""
    difference = max(_difference(*pair) for pair in zip(answers, expected, strict=True))
    num_clear = num_wrong = 0
    for answer, right in zip(answers, expected, strict=True):
        assert right.margin is not None
        clear = right.margin > CLEAR_MARGIN
        num_clear += int(clear.sum())
        num_wrong += int((answer.tokens != right.tokens)[clear].sum())
    if not difference <= tolerance or num_wrong:
        raise ConfigError(
            f"a recorded forward of {width} rows differs from the same forward that is not recorded: {difference:.3g} "
            f"in log-probability on average, {num_wrong} of {num_clear} clear tokens; the kernels do not work on this "
            "device, so run with --no-cuda-graphs (cuda_graphs=False)"
        )


def _difference(answer: Readout, expected: Readout) -> float:
    """Mean difference of the log-probabilities of given tokens."""
    assert answer.given is not None
    assert expected.given is not None
    smallest = np.finfo(np.float32).tiny
    logs = [np.log(np.maximum(readout, smallest)) for readout in (answer.given, expected.given)]
    return float(np.abs(logs[0] - logs[1]).mean())


def _shape(forwards: Sequence[Forward], plan: ReadPlan) -> tuple[int, int]:
    """The width to which forwards are padded, and the words of a row of their pattern."""
    widest = max(len(forward.tokens) for forward in forwards)
    num_rows = max(sum(len(forward.tokens) for forward in forwards), len(plan.suppressed))
    width = next((width for width in WIDTHS if width >= num_rows), None)
    return (num_rows, num_words(widest)) if width is None else (width, num_words(width))


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one, on which graphs are recorded and kernels start; no effect for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
