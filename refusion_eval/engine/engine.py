"""Runs decoders. The engine is the only caller of a model: it counts forwards, measures time and holds the KV cache."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from refusion_eval.engine.batch import FIRST_CAPACITY, Batch, BatchCounts
from refusion_eval.engine.features import check_reuse
from refusion_eval.engine.readout import Collect, ReadPlan, hidden_of, read_native, read_out
from refusion_eval.engine.recorded import CAPACITY_STEP, NOTHING_FED, OVERLAPPED_WIDTHS, Record, RecordedForwards
from refusion_eval.engine.request import ActiveRequest, Request, check_forward
from refusion_eval.engine.width import LoadCurve
from refusion_eval.errors import DecodeError
from refusion_eval.models import device
from refusion_eval.models.attention import Backend
from refusion_eval.models.cache import KVCache
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import Decode, Decoded, FeatureReuse, Forward, Readout, Trace

__all__ = ["Engine", "Request"]

log = logging.getLogger(__name__)


class Engine:
    """Runs decoders on one model: one request (`run`), with which speed is measured, or a batch (`run_many`)."""

    conditions_itself = False  # whether forwards take the logits of the forward before
    shares_prompts = True  # whether rows that prompts of a batch have in common are copied
    cache_class: type[KVCache] = KVCache

    def __init__(
        self,
        model: Transformer,
        attention: Backend,
        kv_budget: int | None = None,  # bytes for the keys and values of a batch; None is what is free
        record: Record | None = None,  # on CUDA as graphs; None computes every forward anew
        num_threads: int | None = None,  # of the forwards on a CPU; None is the number of the process
        *,
        overlap: bool = False,  # whether in a batch the host works while the device computes; of recorded forwards only
    ) -> None:
        self.model, self.attention = model, attention
        self._has_experts = getattr(model.config, "experts", None) is not None  # config: of transformers, in the bench
        self.kv_budget, self.num_threads = kv_budget, num_threads
        self._joules, self._record = device.energy_counter(model.device), record
        self.overlaps = overlap and record is not None
        if attention == "native":
            _ = model.native  # compiles before any request waits for it and before any time is taken
        self._cache = self._new_cache(1, FIRST_CAPACITY)
        self.recorded = self._recorded(self._cache)
        # Prices the rows of a batch by its load, in place of what settings say; then TPF depends on the batch.
        self.load_curve: LoadCurve | None = None
        self.batch_counts = BatchCounts()  # of the last batch
        self._batch: RecordedForwards | None = None  # of the last batch: recording takes longer than many batches

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values kept between calls of `run`, and of `run_many` if its forwards are recorded."""
        return self._cache.num_bytes + (0 if self._batch is None else self._batch.cache.num_bytes)

    @torch.inference_mode()  # once for a decoding: for each forward it would take as long as sending its numbers
    def run(self, decode: Decode, prompt: Sequence[int], settings: Any) -> Decoded:
        """Decodes one prompt; raises DecodeError if the decoder failed or asked for something impossible."""
        # The time runs from the prompt to the last token on the host, with the device synchronised at both ends. Every
        # forward that is read ends with a copy to the host, so no work is in flight between forwards.
        if self.recorded is not None:
            # Before the time is taken; settings without a length, as in tests, may outgrow the buffer.
            self.recorded.reserve(len(prompt) + getattr(settings, "num_positions", 0))
            self.recorded.prepare()
        self._cache.clear(0)  # not wiped: alone, no padding reaches beyond the rows of the sequence
        joules_before = None if self._joules is None else self._joules()
        if self._has_experts:
            self.model.num_experts_read.zero_()
        # In a batch the device is not synchronised: the forwards of other requests may be under way.
        device.synchronize(self.model.device)
        active = self._start(self._cache, 0, 0, Request(decode, prompt, settings))
        while active.pending is not None:
            self._cache.reserve(active.rows_needed(self._cache))
            if self.recorded is not None and self.recorded.is_outgrown:
                if not active.trace.num_unrecorded:
                    log.warning(
                        "a request whose settings name no length outgrew the KV buffer of its recorded forwards; its "
                        "other forwards are launched one by one, and its time counts them"
                    )
                active.trace.num_unrecorded += 1
            self._step(self._cache, [active], partial(self._launch, self.recorded))
            if active.prefilled is None:
                device.synchronize(self.model.device)  # nothing may be read of a first forward
                active.prefilled = time.perf_counter()
        if active.error is not None:
            raise active.error
        device.synchronize(self.model.device)
        decoded = self._finish(active)
        if self._has_experts:
            decoded = replace(decoded, num_experts_read=int(self.model.num_experts_read))
        if self._joules is None or joules_before is None:
            return decoded
        return replace(decoded, joules=self._joules() - joules_before)

    @torch.inference_mode()  # while the generator runs
    def run_many(self, requests: Iterable[Request], batch_size: int) -> Iterator[tuple[int, Decoded | DecodeError]]:
        """Yields the index of each request and what `run` returns or raises for it, in the order in which they end."""
        # Up to `batch_size` are decoded at a time; when one ends, the next begins (continuous batching).
        # In float32 the tokens are those of `run`, whatever the batch size. Keys and values stay within the budget: if
        # requests grow too long for it, the youngest are preempted and begin again later.
        config, dtype = self.model.config, self.model.dtype
        recorded, self._batch = self._batch, None  # taken, so that no other batch uses it at the same time
        budget = self.kv_budget
        if budget is None:
            budget = device.default_budget(self.model.device, config, dtype)
            budget += 0 if recorded is None else recorded.cache.num_bytes
        max_rows = device.rows_within(budget, config, dtype)
        batch_size = max(1, min(batch_size, max_rows // FIRST_CAPACITY))
        # A buffer that grows is recorded again, so a buffer with recordings has room for long texts from the beginning.
        step = FIRST_CAPACITY if self._record is None else CAPACITY_STEP[self.model.device.type]
        capacity = max(FIRST_CAPACITY, min(step, max_rows // batch_size))
        if recorded is not None and recorded.cache.num_sequences == batch_size <= max_rows // recorded.cache.capacity:
            cache = recorded.cache
        else:
            recorded = None  # its memory is free before the next buffer takes some
            cache = self._new_cache(batch_size, capacity)
            recorded = self._recorded(cache)
        if recorded is not None:
            recorded.prepare()
        batch = Batch(self, cache, recorded, (batch_size, capacity), max_rows)
        yield from batch.run(requests)
        self.batch_counts, self._batch = batch.counts, recorded

    def _recorded(self, cache: KVCache) -> RecordedForwards | None:
        if self._record is None:
            return None
        is_wide = self.overlaps and cache.num_sequences > 1
        return RecordedForwards(self.model, cache, self._record, OVERLAPPED_WIDTHS if is_wide else None)

    def _new_cache(self, num_sequences: int, capacity: int) -> KVCache:
        return self.cache_class(self.model.config, num_sequences, capacity, self.model.dtype, self.model.device)

    def _start(self, cache: KVCache, sequence: int, index: int, request: Request) -> ActiveRequest:
        trace = Trace()
        started = time.perf_counter()
        decoding = request.decode(request.prompt, request.settings, trace)
        active = ActiveRequest(index, request, sequence, decoding, trace, started)
        self._advance(cache, active, None)
        return active

    def _advance(self, cache: KVCache, request: ActiveRequest, readouts: tuple[Readout, ...] | None) -> None:
        """Advances the decoder to its next forward, whose commit it applies and whose rows it stages."""
        request.advance(readouts)
        if (forward := request.pending) is None:
            return
        try:
            check_forward(forward, self.model.config.vocab_size)
            if forward.self_conditioning is not None and not self.conditions_itself:
                raise DecodeError(f"{forward.kind}: {self.model.config.family} takes no logits of the forward before")
            cache.commit(request.sequence, forward.commit.rows, forward.commit.keep)
            if isinstance(forward.approximation, FeatureReuse):  # after the commit, which may empty the cache
                check_reuse(forward, forward.approximation, cache, request.sequence)
        except DecodeError as error:
            request.fail(error)
            request.check_answers()  # a forward made of answers that are not finite may be impossible for that reason
        else:
            cache.stage(request.sequence, len(forward.tokens))

    def _step(
        self,
        cache: KVCache,
        batch: Sequence[ActiveRequest],
        launch: Callable[..., Collect | None],
        counts: BatchCounts | None = None,
    ) -> None:
        """Computes the pending forwards of requests, in the order of their places, in one call and advances each."""
        forwards, sequences, end = list[Forward](), list[int](), 0
        for request in batch:
            assert request.pending is not None
            forwards.append(request.pending)
            sequences.append(request.sequence)
        collect = launch(cache, forwards, sequences)
        assert collect is not None
        for request in batch:
            request.note_launch(cache)
        started = time.perf_counter()
        readouts = collect()
        if counts is not None:
            counts.add(forwards, time.perf_counter() - started)
        for request, forward in zip(batch, forwards, strict=True):
            start, end = end, end + len(forward.reads)
            if request.pending is not None:
                self._advance(cache, request, tuple(readouts[start:end]))

    def _launch(
        self,
        recorded: RecordedForwards | None,
        cache: KVCache,
        forwards: Sequence[Forward],
        sequences: Sequence[int],
        fed: Mapping[int, int] = NOTHING_FED,
    ) -> Collect | None:
        """Starts one model call, and one more for each forward that reuses features; the answers come in order.

        Args:
            sequences: places of the forwards in the cache, ascending.
            fed: for places whose forward before has not been read, the number of its read in the last call. All its
                rows will stay, and its answer is the token of the only row of this forward. None is returned, and
                nothing is done, if this call cannot be recorded.
        """
        if recorded is not None:
            lengths = list[int]()
            for place in sequences:
                lengths.append(cache.lengths[place] + (cache.staged[place] if place in fed else 0))
            collect = recorded.launch(forwards, ReadPlan.of(forwards), lengths, sequences, fed)
            if collect is not None or fed:
                return collect
        readouts = self._compute(cache, forwards, sequences)
        return lambda: readouts

    def _compute(self, cache: KVCache, forwards: Sequence[Forward], sequences: Sequence[int]) -> list[Readout]:
        """Makes a model call that is not recorded, and answers all reads."""
        model, plan = self.model, ReadPlan.of(forwards)
        cache.move_rows()
        with device.cpu_threads(self.num_threads):
            hidden_TC = hidden_of(model, cache, forwards, self.attention, sequences)
            if self.attention == "native" and plan.is_simple and plan.numbers.size:
                return read_native(plan, hidden_TC, model)
            return read_out(plan, hidden_TC, model.logits, model.config.vocab_size, model.dtype)

    def _finish(self, request: ActiveRequest) -> Decoded:
        seconds = time.perf_counter() - request.started
        assert request.response is not None
        response, trace = request.response, request.trace
        prefill_seconds = None if request.prefilled is None else request.prefilled - request.started
        return Decoded(
            tuple(response.tokens),
            response.stop,
            trace.num_forwards,
            seconds,
            trace,
            prefill_seconds,
            num_forced=response.num_forced,
        )
