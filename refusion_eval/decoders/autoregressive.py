"""Autoregressive decoding: one token a forward, each from the logits of the row before it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from refusion_eval.decoders import validate
from refusion_eval.decoders.decoder import Decoder, Reads, Style
from refusion_eval.trace import Trace
from refusion_eval.types import (
    NOTHING,
    Commit,
    Decoding,
    Forward,
    Read,
    Response,
    StopReason,
    StopRule,
    causal,
    draw_key,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoregressiveSettings:
    """Settings of the autoregressive decoder.

    Attributes:
        gen_length: most tokens of the response, >= 1.
        temperature: 0 is greedy; above 0 samples softmax(logits / temperature).
        seed: of the random draws.
        eos_ids: tokens that end the response; none means that it always has `gen_length` tokens.
        stop_rule: told the tokens so far after each one; decoding ends when it says so.

    Raises:
        ConfigError: a value is out of its range.
    """

    gen_length: int = 512
    temperature: float = 0.0
    seed: int = 0
    eos_ids: tuple[int, ...] = ()
    stop_rule: StopRule | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        validate.require_integer("autoregressive", "gen_length", self.gen_length, at_least=1)
        validate.require_number("autoregressive", "temperature", self.temperature, 0.0)
        validate.require_integer("autoregressive", "seed", self.seed, at_least=0)
        validate.require_token_ids("autoregressive", "eos_ids", self.eos_ids)

    @property
    def num_positions(self) -> int:
        """Positions behind the prompt that decoding may touch."""
        return self.gen_length


def decode(prompt: Sequence[int], settings: AutoregressiveSettings, trace: Trace) -> Decoding:
    """Decodes one prompt token by token.

    The last token is never fed back: nothing would be read of that forward. So a response of n tokens takes n forwards.
    """
    tokens: list[int] = []
    forward_tokens, start, kind, commit = list(prompt), 0, "prefill", NOTHING
    while True:
        num_rows, position = len(forward_tokens), len(tokens)
        read = Read(
            rows=(num_rows - 1,),
            temperature=settings.temperature,
            draws=(draw_key(settings.seed, position),) if settings.temperature > 0 else (),
        )
        positions = range(start, start + num_rows)
        (readout,) = yield Forward(forward_tokens, positions, causal(num_rows), (read,), commit, kind)
        token = int(readout.tokens[0])
        tokens.append(token)
        trace.fix((position,), (token,))
        if token in settings.eos_ids:
            return _finish(tokens, "eos", trace)
        if settings.stop_rule is not None and settings.stop_rule(tokens):
            return _finish(tokens, "stop_string", trace)
        if len(tokens) == settings.gen_length:
            return _finish(tokens, "length", trace)
        forward_tokens, start, kind, commit = [token], start + num_rows, "decode", Commit(range(num_rows))


def _finish(tokens: list[int], reason: StopReason, trace: Trace) -> Response:
    trace.stop(reason, len(tokens))
    return Response(tuple(tokens), reason)


DECODER = Decoder(
    decode,
    AutoregressiveSettings,
    label="AR",
    reads=Reads("causal", clean="next"),
    fits=("causal", "masked", "refusion"),
    trained_by=("pretrain", "sft"),
    style=Style("#000000", "s", (0, (5, 1.5)), order=1),
)
