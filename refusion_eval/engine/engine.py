"""Runs decoders: the only caller of a model. It counts forwards, takes times, and holds the KV buffer.

`run` serves one request, which is what speed is measured with; `run_many` keeps a batch of requests alive and lets the
next one in when one ends (continuous batching). No decoder knows the difference.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from refusion_eval.engine.bandwidth import cache_bytes_per_row
from refusion_eval.engine.device import synchronize
from refusion_eval.engine.features import check_reuse
from refusion_eval.engine.hidden import hidden_of
from refusion_eval.engine.memory import default_budget, rows_within
from refusion_eval.engine.prefix import SharedPrefix, behind
from refusion_eval.engine.readout import PackedRead, read_out
from refusion_eval.engine.static import StaticForwards
from refusion_eval.engine.validate import check_forward
from refusion_eval.errors import DecodeError
from refusion_eval.models.attention import Backend
from refusion_eval.models.cache import KVCache
from refusion_eval.models.transformer import Transformer
from refusion_eval.trace import Trace
from refusion_eval.types import Decode, Decoded, Decoding, Forward, Readout, Response

FIRST_CAPACITY = 512


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be decoded.

    Attributes:
        decode: the decoder.
        prompt: its token ids.
        settings: the decoder's own settings.
    """

    decode: Decode
    prompt: Sequence[int]
    settings: Any


@dataclass(slots=True)
class _Live:
    """A request being decoded: its generator, and the forward that it waits for, or how it ended."""

    index: int
    request: Request
    decoding: Decoding
    trace: Trace
    started: float
    prefilled: float | None = None
    pending: Forward | None = None
    response: Response | None = None
    error: DecodeError | None = None

    def advance(self, readouts: tuple[Readout, ...] | None) -> None:
        """Hands readouts to the decoder (None starts it) and keeps what it wants next, or how it ended."""
        self.pending = None
        try:
            self.pending = next(self.decoding) if readouts is None else self.decoding.send(readouts)
        except StopIteration as stop:
            self.response = stop.value
        except DecodeError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - one request's failure becomes its record, the others go on
            self.error = DecodeError(f"the decoder failed: {type(error).__name__}: {error}")
            self.error.__cause__ = error

    def fail(self, error: DecodeError) -> None:
        """Ends the request with an error."""
        self.decoding.close()
        self.pending, self.error = None, error


class Engine:
    """Runs decoders on one model.

    Args:
        model: the transformer.
        attention: the attention backend, as `choose_backend` resolved it.
        kv_budget: bytes that the keys and values of a batch may take; None is what `default_budget` finds free.
        static: whether `run` computes all but prefills with fixed shapes, on CUDA as recorded graphs.
    """

    def __init__(
        self, model: Transformer, attention: Backend, kv_budget: int | None = None, static: bool = False
    ) -> None:
        self.model = model
        self.attention = attention
        self.kv_budget = kv_budget
        self._cache = self._new_cache(1)
        self._static = StaticForwards(model, self._cache) if static else None

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values that are kept between requests decoded alone; those of a batch are let go of."""
        return self._cache.keys.nbytes + self._cache.values.nbytes

    def run(self, decode: Decode, prompt: Sequence[int], settings: Any, trace: Trace | None = None) -> Decoded:
        """Decodes one prompt.

        The time runs from the prompt to the last token on the host, the device synchronised at both ends; every forward
        that is read ends with a copy to the host, so nothing stays in flight between them.

        Args:
            decode: the decoder.
            prompt: token ids.
            settings: the decoder's own settings.
            trace: an empty one of the caller's that receives the events, to be read while decoding goes on.

        Raises:
            DecodeError: the decoder failed or asked for something impossible.
        """
        self._cache.clear(0)
        batch = [self._start(self._cache, 0, 0, Request(decode, prompt, settings), trace)]
        while batch[0].pending is not None:
            self._cache.reserve(self._rows_needed(self._cache, batch))
            self._step(self._cache, batch, None)
            if batch[0].prefilled is None:
                synchronize(self.model.device)  # for a first forward of which nothing is read
                batch[0].prefilled = time.perf_counter()
        if batch[0].error is not None:
            raise batch[0].error
        return self._finish(batch[0])

    def run_many(self, requests: Iterable[Request], batch_size: int) -> Iterator[tuple[int, Decoded | DecodeError]]:
        """Decodes many prompts, up to `batch_size` at a time.

        In float32 the tokens are those of `run`, whatever the batch size. A request that fails yields its error.
        Prompts that begin alike share their prefill. Keys and values stay within the budget: where requests grow too
        long for it, the youngest leave the batch and begin again later.

        Args:
            requests: consumed as places become free.
            batch_size: requests alive at once, >= 1.

        Yields:
            (index of the request, what `run` returns or the error that it raises), in the order in which they end.
        """
        budget = default_budget(self.model.device) if self.kv_budget is None else self.kv_budget
        max_rows = rows_within(budget, self.model.config, self.model.dtype)
        batch_size = max(1, min(batch_size, max_rows // FIRST_CAPACITY))
        cache, shared = self._new_cache(batch_size), SharedPrefix()
        waiting, again = enumerate(requests), deque[tuple[int, Request]]()
        batch: list[_Live] = []
        while True:
            while len(batch) < batch_size and (entry := again.popleft() if again else next(waiting, None)) is not None:
                cache.wipe(len(batch))
                batch.append(self._start(cache, len(batch), *entry))
            if not batch:
                return
            if all(live.pending is not None for live in batch):
                batch_size, left = self._make_room(cache, batch, max_rows)
                again.extendleft(reversed(left))
                if all(live.pending is not None for live in batch):
                    self._step(cache, batch, shared)
            for place in reversed(range(len(batch))):
                live = batch[place]
                if live.pending is not None:
                    continue
                # The last sequence takes the free place, so that the live ones stay the first of the buffer.
                last = batch.pop()
                if last is not live:
                    cache.move(len(batch), place)
                    batch[place] = last
                yield live.index, live.error or self._finish(live)

    def _rows_needed(self, cache: KVCache, batch: Sequence[_Live], first_place: int = 0) -> int:
        """Rows of the longest of some sequences once their pending forwards are computed."""
        forwards = [live.pending for live in batch if live.pending is not None]
        lengths = cache.lengths[first_place : first_place + len(forwards)]
        return max(length + len(forward.tokens) for length, forward in zip(lengths, forwards, strict=True))

    def _make_room(self, cache: KVCache, batch: list[_Live], max_rows: int) -> tuple[int, list[tuple[int, Request]]]:
        """Grows the buffer for the pending forwards, within the budget.

        Returns:
            How many sequences the buffer holds now, and what had to leave the batch for it.
        """
        needed = self._rows_needed(cache, batch)
        if needed <= cache.capacity:
            return cache.num_sequences, []
        if needed > max_rows:
            self._fail_too_long(cache, batch, max_rows)
            return cache.num_sequences, []
        num_sequences = min(cache.num_sequences, max_rows // needed)
        left = [(live.index, live.request) for live in batch[num_sequences:]]
        for live in batch[num_sequences:]:
            live.decoding.close()
        del batch[num_sequences:]
        cache.resize(num_sequences, min(max(needed, 2 * cache.capacity), max_rows // num_sequences))
        return num_sequences, left

    def _fail_too_long(self, cache: KVCache, batch: Sequence[_Live], max_rows: int) -> None:
        """Ends the requests that would not fit the budget even alone."""
        budget = max_rows * cache_bytes_per_row(self.model.config, self.model.dtype) / 2**30
        for place, live in enumerate(batch):
            needed = self._rows_needed(cache, [live], place)
            if needed > max_rows:
                live.fail(
                    DecodeError(
                        f"a sequence of {needed} rows exceeds the KV budget of {max_rows} rows ({budget:.2f} GiB); "
                        "raise kv_budget_gib or shorten the prompt"
                    )
                )

    def _new_cache(self, num_sequences: int) -> KVCache:
        model = self.model
        return KVCache(model.config, num_sequences, FIRST_CAPACITY, model.dtype, model.device)

    def _start(self, cache: KVCache, place: int, index: int, request: Request, trace: Trace | None = None) -> _Live:
        trace = Trace() if trace is None else trace
        synchronize(self.model.device)
        started = time.perf_counter()
        live = _Live(index, request, request.decode(request.prompt, request.settings, trace), trace, started)
        self._advance(cache, place, live, None)
        return live

    def _advance(self, cache: KVCache, place: int, live: _Live, readouts: tuple[Readout, ...] | None) -> None:
        """Lets the decoder go on, and stages the forward that it wants next."""
        live.advance(readouts)
        if live.pending is None:
            return
        try:
            check_forward(live.pending, self.model.config.vocab_size)
            commit = live.pending.commit
            cache.commit(place, commit.rows, commit.replace, commit.keep, commit.best)
            check_reuse(live.pending, cache, place)
        except DecodeError as error:
            live.fail(error)
        else:
            cache.stage(place, len(live.pending.tokens))

    def _step(self, cache: KVCache, batch: Sequence[_Live], shared: SharedPrefix | None) -> None:
        """Computes the pending forwards of sequences 0 .. len(batch) - 1 in one model call and advances each.

        The trace tells the rows that a decoder asked for, whether they were computed or shared.
        """
        forwards = [live.pending for live in batch if live.pending is not None]
        if shared is None:
            readouts = iter(self._compute(cache, forwards))
        else:
            readouts = iter(self._compute_shared(cache, forwards, shared))
        for place, (live, forward) in enumerate(zip(batch, forwards, strict=True)):
            live.trace.forward(forward.kind, len(forward.tokens), cache.lengths[place])
            answers = tuple(next(readouts) for _ in forward.reads)
            if all(np.isfinite(answer.probs).all() for answer in answers):
                self._advance(cache, place, live, answers)
            else:
                live.fail(DecodeError(f"forward {live.trace.num_forwards - 1} ({forward.kind}): logits are not finite"))

    def _compute_shared(self, cache: KVCache, forwards: Sequence[Forward], shared: SharedPrefix) -> list[Readout]:
        """As `_compute`, without the rows that prompts have in common with the stored one."""
        filled = [shared.fill(cache, place, forward) for place, forward in enumerate(forwards)]
        for place, num_rows in enumerate(filled):
            cache.lengths[place] += num_rows  # for this one call they count as committed
        readouts = self._compute(cache, [behind(*pair) for pair in zip(forwards, filled, strict=True)])
        for place, num_rows in enumerate(filled):
            cache.lengths[place] -= num_rows
            shared.keep(cache, place, forwards[place], num_rows)
        return readouts

    @torch.inference_mode()
    def _compute(self, cache: KVCache, forwards: Sequence[Forward]) -> list[Readout]:
        """One model call, and one more for each forward that reuses features: the answers to all reads, in order."""
        model = self.model
        widths = [len(forward.tokens) for forward in forwards]
        if self._static is not None and cache is self._cache and self._static.serves(forwards[0]):
            hidden_TC = self._static.hidden(forwards[0])
        else:
            hidden_TC = hidden_of(model, cache, forwards, self.attention)
        packed_reads, first_row = [], 0
        for forward, width in zip(forwards, widths, strict=True):
            packed_reads += [PackedRead(read, first_row) for read in forward.reads]
            first_row += width
        return read_out(packed_reads, hidden_TC, model.logits, model.config.vocab_size, model.dtype)

    def _finish(self, live: _Live) -> Decoded:
        synchronize(self.model.device)
        seconds = time.perf_counter() - live.started
        assert live.response is not None
        response, trace = live.response, live.trace
        prefill_seconds = None if live.prefilled is None else live.prefilled - live.started
        return Decoded(tuple(response.tokens), response.stop, trace.num_forwards, seconds, trace, prefill_seconds)
