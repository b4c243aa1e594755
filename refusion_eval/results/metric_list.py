"""Every metric once: its name, unit and meaning, and what it is made of."""

from typing import Literal, NamedTuple

ACCURACY, PASS_AT_1 = "accuracy", "pass@1"
SCORES = (ACCURACY, PASS_AT_1)
# Beginnings of the metrics of several samples of an item; the number of samples follows.
AVG_AT, PASS_AT, MAJORITY_AT = OF_SAMPLES = ("avg@", "pass@", "majority@")
# The share of items that a rule counts as right and whose text states no answer.
UNSTATED = "right_without_answer"
PERCENT = "percent"

# The samples that a metric is made of: those that were timed alone, by this engine or by a server on a machine that is
# not known ("apart"); those for which a server told something; all that were decoded; or all, if any of them thinks.
Samples = Literal["timed", "apart", "told", "decoded", "thoughts"]


class Metric(NamedTuple):
    """One metric of a task.

    Attributes:
        label: its name on the page, with the unit.
        unit: what the values are counted in; empty for a plain ratio.
        meaning: its definition, for the reference.
        samples: the samples that it is made of; None for a metric with a function of its own in `measured`.
        of: attributes of these samples: two whose sums are divided, or one that is averaged.
        is_speed: whether it depends on the machine.
        is_cost: whether less of it is better.
    """

    name: str
    label: str
    unit: str
    meaning: str
    samples: Samples | None = None
    of: tuple[str, ...] = ()
    is_speed: bool = False
    is_cost: bool = False


def _speed(name: str, label: str, unit: str, meaning: str, *of: str, samples: Samples = "timed") -> Metric:
    is_cost = unit in ("s", "J", "J/token")
    return Metric(name, label, unit, meaning, samples if of else None, of, is_speed=True, is_cost=is_cost)


_TPS, _RATE, _PER_FORWARD = "tokens/s", "forwards/s", "tokens/forward"
_THINKING = "thinking blocks (tags included); only where a text has one"
_OF_SERVER = "of a server on a machine that is not known, by the client's clock"

# In the order of tables and files. Metrics that depend on the number of samples, on a filter or on a scorer follow.
METRICS = (
    Metric(
        ACCURACY,
        "Accuracy, %",
        PERCENT,
        "share of items judged right; for several samples an item, the mean over items of the share of right samples",
    ),
    Metric(PASS_AT_1, "Accuracy, %", PERCENT, "the accuracy of programs"),
    Metric("extracted", "Answer found, %", PERCENT, "share of answers in which the extraction found something"),
    _speed("tps", "TPS", _TPS, "all tokens / all seconds, batch 1", "tokens", "seconds"),
    _speed("tps_mean", "TPS, mean of samples", _TPS, "mean over samples of tokens / seconds", "tps"),
    _speed(
        "decode_tps",
        "TPS after the first forward",
        _TPS,
        "tokens / seconds without the first forward, which reads the prompt",
        *("later_tokens", "later_seconds"),
    ),
    _speed(
        "prefill_seconds", "First forward, s", "s", "mean time up to the end of the first forward", "prefill_seconds"
    ),
    _speed("latency_mean", "Latency, mean, s", "s", "mean of seconds a sample", "seconds"),
    _speed("latency_p50", "Latency, median, s", "s", "median of seconds a sample"),
    _speed("latency_p95", "Latency, 95th percentile, s", "s", "95th percentile of seconds a sample"),
    _speed(
        "speedup",
        "Speed-up",
        "x",
        "TPS / TPS of the autoregressive backbone by this engine's loop, on the same items on the same machine",
    ),
    _speed(
        "speedup_stock",
        "Speed-up over transformers",
        "x",
        "TPS / TPS of the autoregressive backbone by transformers' `generate`",
    ),
    _speed("forwards_per_second", "Forwards per second", _RATE, "all forwards / all seconds", *("forwards", "seconds")),
    _speed(
        "mbu",
        "MBU, %",
        PERCENT,
        "memory bandwidth utilisation: bytes of weights and cache that the forwards read / seconds / measured copy "
        "bandwidth of the device",
        *("least_seconds", "seconds"),
    ),
    # Reading the cache, which would only lower the limit, is left out.
    _speed(
        "one_token_share",
        "Share of the one-token limit, %",
        PERCENT,
        "TPS / (copy bandwidth / bytes of the weights): TPS as a share of the speed at which each reading of the "
        "weights gives one token",
        *("serial_seconds", "seconds"),
    ),
    _speed(
        "joules_mean",
        "Energy per sample, J",
        "J",
        "joules of a response, from the device's own counter; empty without such a counter",
        "joules",
    ),
    _speed("joules_per_token", "Energy per token, J", "J/token", "joules of a token", "joules", "tokens"),
    _speed("server_tps", "Server TPS", _TPS, f"TPS {_OF_SERVER}", "tokens", "seconds", samples="apart"),
    _speed(
        "server_latency_mean", "Server latency, mean, s", "s", f"mean latency {_OF_SERVER}", "seconds", samples="apart"
    ),
    _speed("server_latency_p50", "Server latency, median, s", "s", f"median latency {_OF_SERVER}"),
    _speed("server_latency_p95", "Server latency, 95th percentile, s", "s", f"95th percentile of latency {_OF_SERVER}"),
    _speed(
        "server_forwards_per_second",
        "Server forwards per second",
        _RATE,
        f"forwards per second {_OF_SERVER}",
        *("forwards", "seconds"),
        samples="apart",
    ),
    _speed(
        "server_first_byte",
        "First byte of a server, s",
        "s",
        "mean time from the request to the first byte of the answer, by the client's clock",
        "first_byte_seconds",
        samples="told",
    ),
    _speed(
        "server_own_tps",
        "TPS by the server's clock",
        _TPS,
        "the server's tokens / its own seconds of prefill and generation, where it tells them",
        *("completion_tokens", "own_seconds"),
        samples="told",
    ),
    _speed(
        "server_queue",
        "Queue of a server, s",
        "s",
        "mean time that a request waited in the server's queue, as it tells it",
        "queue_seconds",
        samples="told",
    ),
    Metric("tpf", "TPF", _PER_FORWARD, "all tokens / all forwards", "decoded", ("tokens", "forwards")),
    Metric(
        "tpf_release",
        "TPF as in the release",
        _PER_FORWARD,
        "the figure that ReFusion's release computes: the mean over iterations of tokens / forwards of the iteration; "
        "counts slots that EOS cuts off; only without fused forwards, because fused iterations share forwards",
        "decoded",
        ("tpf_release",),
    ),
    Metric(
        "tpf_decoder",
        "TPF of the decoder",
        _PER_FORWARD,
        "all tokens / all forwards but those of an encoder, as DiffusionGemma's release counts; only of a model that "
        "has one. Its `tpf` and `forwards_mean` count both",
        *("decoded", ("tokens", "decoder_forwards")),
    ),
    Metric("tokens_mean", "Tokens per sample", "tokens", "mean tokens of a sample", "decoded", ("tokens",)),
    Metric(
        "forwards_mean",
        "Forwards per sample",
        "forwards",
        "mean forwards of a sample",
        *("decoded", ("forwards",)),
        is_cost=True,
    ),
    Metric(
        "tokens_no_eos_mean",
        "Tokens per sample, without EOS",
        "tokens",
        "tokens without the EOS",
        *("decoded", ("tokens_no_eos",)),
    ),
    Metric(
        "tokens_canvas_mean",
        "Tokens per sample, with those behind EOS",
        "tokens",
        "all positions that were decoded, including those after the EOS; papers on methods that decode a response of "
        "fixed length may use these figures",
        *("decoded", ("tokens_canvas",)),
    ),
    Metric(
        "tpf_canvas",
        "TPF, with tokens behind EOS",
        _PER_FORWARD,
        "all decoded positions / all forwards",
        *("decoded", ("tokens_canvas", "forwards")),
    ),
    Metric(
        "draft_acceptance",
        "Share of drafts accepted",
        "",
        "accepted drafts of a server / its drafts",
        *("told", ("accepted", "drafted")),
    ),
    Metric(
        "cut",
        "Cut at the limit, %",
        PERCENT,
        "share of answers that reached the length of the settings, and so may lack their end; a full gap is none",
        is_cost=True,
    ),
    Metric(
        "collapsed",
        "Collapsed, %",
        PERCENT,
        "share of answers that show one of the four following signs; right answers may show them, too",
        is_cost=True,
    ),
    Metric("empty", "Empty, %", PERCENT, "share of answers without a letter or digit outside thinking", is_cost=True),
    Metric(
        "repeating",
        "Repeating, %",
        PERCENT,
        "share of answers that end in a piece of at most 200 characters, four times in a row over 60 characters or "
        "more (a ruled line: over 120), or that have 40 or more sequences of four words of which less than half are "
        "different",
        is_cost=True,
    ),
    Metric(
        "special_tokens",
        "With special tokens, %",
        PERCENT,
        "share of answers with a mask or another special token left in them",
        is_cost=True,
    ),
    Metric(
        "other_script",
        "In another script, %",
        PERCENT,
        "share of answers in which a tenth of the letters are of a script that is neither Latin nor Greek nor that of "
        "most answers to the task",
        is_cost=True,
    ),
    Metric(
        "thought_tokens_mean",
        "Thought tokens",
        "tokens",
        f"tokens inside {_THINKING}. Tokens, TPS and TPF count them too",
        *("thoughts", ("thought_tokens",)),
    ),
    Metric(
        "answer_tokens_mean",
        "Answer tokens",
        "tokens",
        "tokens outside thinking blocks",
        *("thoughts", ("answer_tokens",)),
    ),
    Metric(
        "cut_in_thought",
        "Cut in a thought, %",
        PERCENT,
        "share of texts that end inside a thinking block",
        *("thoughts", ("cut_in_thought",)),
        is_cost=True,
    ),
    Metric(
        "ended_by_budget",
        "Thoughts ended by budget, %",
        PERCENT,
        "share of texts whose thought was ended because its budget (`thought_budget`) was spent. The tokens that ended "
        "it are counted with those of thoughts and answers; no other figure counts them, because no forward chose them",
        *("thoughts", ("ended_by_budget",)),
    ),
    Metric(
        "strict",
        "Strict form, %",
        PERCENT,
        "accuracy if only answers in the exact form that the prompt asks for count (GSM8K, choice tasks)",
    ),
    Metric(
        UNSTATED,
        "Right without a stated answer, %",
        PERCENT,
        "for MATH with the prompts of the release: share of items that are right by the release's rule although the "
        "text has neither a box nor a stated answer",
    ),
)
BY_NAME = {metric.name: metric for metric in METRICS}
# Those of a server are of a machine and a dtype that are not known, so no speed of this engine shares their columns.
SPEED_METRICS = tuple(metric.name for metric in METRICS if metric.is_speed)
SERVER_METRICS = tuple(name for name in SPEED_METRICS if name.startswith("server_"))
_PLACES = {name: place for place, name in enumerate(BY_NAME)}


def is_cost(name: str) -> bool:
    """Whether less of a metric is better."""
    return name in BY_NAME and BY_NAME[name].is_cost


def place_of(name: str) -> tuple[int, str]:
    """By this metrics are sorted: those of the list in its order, then others by name."""
    return _PLACES.get(name, len(_PLACES)), name
