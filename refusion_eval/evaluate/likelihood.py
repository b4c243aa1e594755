"""Log-likelihood of given tokens by the autoregressive reading: each token from the logits of the row before it.

ReFusion's attention is causal and it is trained on next tokens within a slot, so it has this reading as well.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from refusion_eval.errors import DecodeError
from refusion_eval.trace import Trace
from refusion_eval.types import NOTHING, Commit, Decoding, Forward, Read, Response, causal

# Rows of one forward: bounds the logits that exist at a time.
ROWS_PER_FORWARD = 512

# Readouts are float32: a smaller probability arrives as 0 and counts as this one (-103.28 nats).
SMALLEST_PROBABILITY = 2.0**-149


class Likelihood(NamedTuple):
    """Sum of the continuation's log-probabilities in nats, and whether greedy decoding would have written it."""

    log_probability: float
    is_greedy: bool


@dataclass(frozen=True, slots=True)
class LikelihoodSettings:
    """What one scoring needs beside the tokens.

    Attributes:
        num_context: leading tokens that are given, >= 1; the tokens behind them are scored.
        found: receives each scored token's log-probability and whether it was the likeliest, in order.
    """

    num_context: int
    found: list[tuple[float, bool]] = field(default_factory=list, compare=False)

    @property
    def num_positions(self) -> int:
        """Positions behind the prompt: all tokens are given."""
        return 0

    def total(self) -> Likelihood:
        """The result, once the scoring is through."""
        return Likelihood(math.fsum(value for value, _ in self.found), all(greedy for _, greedy in self.found))


def score(prompt: Sequence[int], settings: LikelihoodSettings, trace: Trace) -> Decoding:
    """Scores `prompt[num_context:]` given what is before each token; shaped like a decoder so that the engine runs it.

    Raises:
        DecodeError: there is no context token to predict the first one from.
    """
    if settings.num_context < 1:
        raise DecodeError("log-likelihood: a continuation needs at least one token before it; pass a prefix token")
    fed = prompt[:-1]
    commit = NOTHING
    for start in range(0, len(fed), ROWS_PER_FORWARD):
        rows = range(start, min(start + ROWS_PER_FORWARD, len(fed)))
        wanted = [row for row in rows if row + 1 >= settings.num_context]
        given = [prompt[row + 1] for row in wanted]
        reads = (Read(rows=[row - start for row in wanted], given=given),) if wanted else ()
        readouts = yield Forward(prompt[rows.start : rows.stop], rows, causal(len(rows)), reads, commit, "score")
        commit = Commit(range(len(rows)))
        for readout in readouts:
            assert readout.given is not None
            for token, chosen, probability in zip(given, readout.tokens, readout.given, strict=True):
                log_probability = math.log(max(float(probability), SMALLEST_PROBABILITY))
                settings.found.append((log_probability, int(chosen) == token))
    trace.stop("length", 0)
    return Response((), "length")
