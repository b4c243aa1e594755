"""A request, how far its decoding is, and what is wrong with a forward that its decoder asks for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from refusion_eval.engine.features import check_scores
from refusion_eval.engine.prefix import can_be_shared
from refusion_eval.errors import DecodeError
from refusion_eval.models.attention import check_attention
from refusion_eval.models.cache import KVCache
from refusion_eval.types import Decode, Decoding, Forward, ForwardDone, Readout, Response, RowScores, Trace


class Request(NamedTuple):
    decode: Decode
    prompt: Sequence[int]
    settings: Any


@dataclass(slots=True, eq=False)
class ActiveRequest:
    index: int
    request: Request
    sequence: int  # its place in the cache
    decoding: Decoding
    trace: Trace
    started: float
    prefilled: float | None = None
    pending: Forward | None = None
    response: Response | None = None
    error: DecodeError | None = None
    answers: tuple[Readout, ...] = ()  # of the last forward, until they are checked
    is_regular: bool = True  # whether no forward was guessed that the decoder did not ask for

    def advance(self, readouts: tuple[Readout, ...] | None) -> None:
        """Sends readouts to the decoder (None starts it) and stores its next forward or how it ended."""
        self.pending, self.answers = None, readouts or ()
        try:
            self.pending = next(self.decoding) if readouts is None else self.decoding.send(readouts)
        except StopIteration as stop:
            self.response = stop.value
        except DecodeError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - the failure of one request becomes its record; the others go on
            self.error = DecodeError(f"the decoder failed: {type(error).__name__}: {error}")
            self.error.__cause__ = error
        if self.pending is None:
            self.check_answers()

    def check_answers(self) -> None:
        """Refuses answers that are not finite, which the decoder has got already."""
        # Called once its next forward runs, for which the device need not wait. A sum of squares is finite only if all
        # probabilities are.
        if self.answers and not np.isfinite([answer.probs @ answer.probs for answer in self.answers]).all():
            done = [*self.trace.of(ForwardDone)][-1]
            self.fail(DecodeError(f"forward {done.forward} ({done.kind}): logits are not finite"))
        self.answers = ()

    def note_launch(self, cache: KVCache) -> None:
        """Does what is left to do of the forward before, and writes the trace of the one that runs now."""
        self.check_answers()
        if (forward := self.pending) is not None:
            # All rows that the decoder asked for, also those that were shared: TPF does not depend on the batch.
            self.trace.forward(forward.kind, len(forward.tokens), cache.lengths[self.sequence])

    def rows_needed(self, cache: KVCache) -> int:
        """Rows of the buffer that the committed rows and the next forward take."""
        return cache.lengths[self.sequence] + (0 if self.pending is None else len(self.pending.tokens))

    def fail(self, error: DecodeError) -> None:
        self.decoding.close()
        self.pending, self.error = None, error

    def is_awaited_by(self, request: Request) -> bool:
        """Whether the next forward computes the rows of a prompt that the other request can copy afterwards."""
        is_first = self.pending is not None and not self.trace.num_forwards and can_be_shared(self.pending)
        return is_first and self.request.prompt == request.prompt


def check_forward(forward: Forward, vocab_size: int) -> None:
    num_rows = len(forward.tokens)
    num_seen = sum([segment.size for segment in forward.attention])
    if not num_rows == len(forward.positions) == num_seen or num_rows == 0:
        sizes = f"{num_rows} tokens, {len(forward.positions)} positions, attention over {num_seen} rows"
        raise DecodeError(f"{forward.kind}: {sizes}; they must be equally many, at least one")
    if not 0 <= min(forward.tokens) <= max(forward.tokens) < vocab_size or min(forward.positions) < 0:
        numbers = f"tokens {min(forward.tokens)} to {max(forward.tokens)}, positions from {min(forward.positions)}"
        raise DecodeError(f"{forward.kind}: {numbers}; tokens must lie in 0..{vocab_size - 1}, positions from 0 on")
    check_attention(forward.attention)
    for read in forward.reads:
        guides = read.guidance.rows if read.guidance else read.rows
        for rows in (read.rows, guides) if read.guidance else (read.rows,):
            if len(guides) != len(read.rows) or (rows and not 0 <= min(rows) <= max(rows) < num_rows):
                shown = f"rows {list(read.rows)}, guided by {list(guides)}"
                raise DecodeError(f"{forward.kind}: reads {shown}, of {num_rows} rows")
        if read.temperature > 0 and len(read.draws) != len(read.rows):
            raise DecodeError(f"{forward.kind}: sampling {len(read.rows)} rows takes one draw key each")
        if read.given is not None and len(read.given) != len(read.rows):
            raise DecodeError(f"{forward.kind}: {len(read.given)} given tokens for {len(read.rows)} rows")
    if isinstance(forward.approximation, RowScores):
        check_scores(forward, forward.approximation)
