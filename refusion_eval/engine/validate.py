"""Refuses inconsistent forwards before anything is computed for them."""

from refusion_eval.engine import masks
from refusion_eval.errors import DecodeError
from refusion_eval.types import Forward


def check_forward(forward: Forward, vocab_size: int) -> None:
    """Raises DecodeError unless rows, tokens, attention, reads and scores of a forward fit each other.

    Args:
        forward: forward of a decoder.
        vocab_size: vocabulary size of the model.
    """
    num_rows = len(forward.tokens)
    num_seen = sum(segment.size for segment in forward.attention)
    if not num_rows == len(forward.positions) == num_seen or num_rows == 0:
        raise DecodeError(
            f"{forward.kind}: {num_rows} tokens, {len(forward.positions)} positions, attention over {num_seen} rows; "
            "they must be equally many, at least one"
        )
    if not 0 <= min(forward.tokens) <= max(forward.tokens) < vocab_size or min(forward.positions) < 0:
        raise DecodeError(
            f"{forward.kind}: tokens {min(forward.tokens)} to {max(forward.tokens)}, positions from "
            f"{min(forward.positions)}; tokens must lie in 0..{vocab_size - 1}, positions must not be negative"
        )
    masks.check_attention(forward.attention)
    _check_reads(forward)
    scores = forward.scores
    if scores is not None and (
        any(not 0 <= row < num_rows for row in (*scores.queries, *scores.keys))
        or not scores.queries
        or scores.pooling < 1
        or scores.pooling % 2 == 0
    ):
        raise DecodeError(
            f"{forward.kind}: scores rows {list(scores.keys)} by the queries of {list(scores.queries)}, pooled over "
            f"{scores.pooling}, of {num_rows} rows; it takes at least one query, and an odd number to pool"
        )


def _check_reads(forward: Forward) -> None:
    num_rows = len(forward.tokens)
    for read in forward.reads:
        guides = read.guidance.rows if read.guidance else read.rows
        if any(not 0 <= row < num_rows for row in (*read.rows, *guides)) or len(guides) != len(read.rows):
            raise DecodeError(
                f"{forward.kind}: reads rows {list(read.rows)}, guided by {list(guides)}, of {num_rows} rows"
            )
        if read.temperature > 0 and len(read.draws) != len(read.rows):
            raise DecodeError(f"{forward.kind}: sampling {len(read.rows)} rows takes one draw key each")
