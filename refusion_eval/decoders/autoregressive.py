"""Autoregressive decoding: each forward predicts one token from the row of the token before it."""

from collections.abc import Sequence
from dataclasses import field

from refusion_eval.config import NonNegativeFloat, NonNegativeInt, PositiveInt, added_setting, settings_class
from refusion_eval.decoders import Decoder, Reads, Style
from refusion_eval.types import NOTHING, Commit, Decoding, Forward, Read, Response, StopRule, Trace, causal, draw_key


@settings_class("autoregressive")
class AutoregressiveSettings:
    """Settings of the autoregressive decoder.

    Attributes:
        gen_length: most tokens of the response, >= 1.
        temperature: 0 takes the most probable token; above 0 samples softmax(logits / temperature).
        seed: seed of the random draws.
        eos_ids: tokens that end the response; if there are none, it always has `gen_length` tokens.
        thought_budget: tokens after which a thought that goes on is ended, and the answer decoded in a part of its own
            (see `refusion_eval.decoders.thoughts`). None ends no thought, nor does a budget of `gen_length`.
        stop_rule: gets the tokens so far after each one; decoding ends when it returns True.
    """

    gen_length: PositiveInt = 512
    temperature: NonNegativeFloat = 0.0
    seed: NonNegativeInt = 0
    eos_ids: tuple[NonNegativeInt, ...] = ()
    thought_budget: NonNegativeInt | None = added_setting(None)
    stop_rule: StopRule | None = field(default=None, repr=False, compare=False)

    @property
    def num_positions(self) -> int:
        return self.gen_length


def decode(prompt: Sequence[int], settings: AutoregressiveSettings, trace: Trace) -> Decoding:
    """Decodes one prompt token by token: n forwards for n tokens."""
    tokens: list[int] = []
    # The first forward reads the whole prompt; every later one feeds the token that the forward before it predicted.
    forward_tokens, start, kind, commit = list(prompt), 0, "prefill", NOTHING
    while True:
        num_rows, position = len(forward_tokens), len(tokens)
        # The key depends on the position alone: the same token is drawn whatever else is in the batch.
        draws = (draw_key(settings.seed, position),) if settings.temperature > 0 else ()
        read = Read((num_rows - 1,), temperature=settings.temperature, draws=draws)
        positions = range(start, start + num_rows)
        (readout,) = yield Forward(forward_tokens, positions, causal(num_rows), (read,), commit, kind)
        token = int(readout.tokens[0])
        tokens.append(token)
        trace.fix((position,), (token,))
        is_eos = token in settings.eos_ids
        is_stopped = not is_eos and settings.stop_rule is not None and settings.stop_rule(tokens)
        if is_eos or is_stopped or len(tokens) == settings.gen_length:
            response = Response(tuple(tokens), "eos" if is_eos else "stop_string" if is_stopped else "length")
            trace.stop(response.stop, len(tokens))
            return response
        # Only here is the token fed back: nothing would be read of a forward after the last one.
        forward_tokens, start, kind, commit = [token], start + num_rows, "decode", Commit(range(num_rows))


DECODER = Decoder(
    decode,
    AutoregressiveSettings,
    label="AR",
    reads=Reads("causal", clean="next"),
    fits=("causal", "masked", "refusion"),
    trained_by=("pretrain", "sft"),
    style=Style("#000000", "s", (0, (5, 1.5)), order=1),
)
