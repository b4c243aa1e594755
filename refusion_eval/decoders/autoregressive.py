"""Autoregressive decoding: each forward predicts one token from the row of the token before it."""

from collections.abc import Sequence
from dataclasses import field

from refusion_eval.config import NonNegativeFloat, NonNegativeInt, PositiveInt, settings_class
from refusion_eval.decoders import Decoder, Reads, Style
from refusion_eval.types import (
    NOTHING,
    Commit,
    Decoding,
    Forward,
    Read,
    Response,
    StopReason,
    StopRule,
    Trace,
    causal,
    draw_key,
)


@settings_class("autoregressive")
class AutoregressiveSettings:
    """Settings of the autoregressive decoder.

    Attributes:
        gen_length: most tokens of the response, >= 1.
        temperature: 0 takes the most probable token; above 0 samples softmax(logits / temperature).
        seed: seed of the random draws.
        eos_ids: tokens that end the response; if there are none, it always has `gen_length` tokens.
        stop_rule: gets the tokens so far after each one; decoding ends when it returns True.

    Raises:
        ConfigError: a value is out of its range.
    """

    gen_length: PositiveInt = 512
    temperature: NonNegativeFloat = 0.0
    seed: NonNegativeInt = 0
    eos_ids: tuple[NonNegativeInt, ...] = ()
    stop_rule: StopRule | None = field(default=None, repr=False, compare=False)

    @property
    def num_positions(self) -> int:
        """Positions after the prompt that decoding may touch."""
        return self.gen_length


def decode(prompt: Sequence[int], settings: AutoregressiveSettings, trace: Trace) -> Decoding:
    """Decodes one prompt token by token.

    A response of n tokens takes n forwards: the last token is not fed back, as nothing would be read of that forward.
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
