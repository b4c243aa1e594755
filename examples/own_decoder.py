"""A decoder in one file: it fills masks from left to right, a few in each forward, here of the embedded ReFusion.

python examples/own_decoder.py
refusion-eval run --model embedded:refusion --decoder examples/own_decoder.py:DECODER --tasks gsm8k --limit 20
"""

from collections.abc import Sequence

import refusion_eval
from refusion_eval.config import PositiveInt, settings_class
from refusion_eval.decoders import Decoder, Reads
from refusion_eval.decoders.canvas import Canvas, MaskedSettings
from refusion_eval.types import NOTHING, Commit, Decoding, Forward, Trace, causal


@settings_class("leftmost")
class LeftmostSettings(MaskedSettings):
    """Settings of the decoder.

    Attributes:
        per_forward: masks that become final in each forward.
    """

    per_forward: PositiveInt = 4


def decode(prompt: Sequence[int], settings: LeftmostSettings, trace: Trace) -> Decoding:
    """Decodes one prompt. A forward feeds what became final in the one before, and the next masks."""
    canvas, num_cached, commit, step = Canvas(prompt, settings, trace), 0, NOTHING, 0
    while masked := canvas.masked()[: settings.per_forward]:
        end = canvas.start + masked[-1] + 1
        rows = [canvas.start + position - num_cached for position in masked]
        read = settings.read(rows, step, masked)
        fed = range(num_cached, end)
        (readout,) = yield Forward(canvas.tokens[num_cached:end], fed, causal(len(fed)), (read,), commit)
        # The rows before the masks stay in the cache; the masks' own rows do not, because their tokens change.
        commit, num_cached = Commit(range(rows[0])), canvas.start + masked[0]
        canvas.fix(masked, readout.tokens)
        step += 1
        if reason := canvas.settled():  # with early_stop=True, as soon as the end of the text is final
            return canvas.finish(reason)
    return canvas.finish()


DECODER = Decoder(decode, LeftmostSettings, label="Leftmost", reads=Reads("causal", masked="own"))


if __name__ == "__main__":
    model = refusion_eval.load_model("embedded")
    question = "There are 12 books on a shelf and 5 in a bag. Then Ben gets 4 more. Ben sells 8 of them. "
    question += "How many books are there in the end?"
    question += "\n\nSolve this step by step. End with: The answer is <number>."
    prompt = model.tokenizer.encode(model.tokenizer.render_chat([{"role": "user", "content": question}]))
    for count in (1, 4, 8):
        out = refusion_eval.generate(model, prompt, decoder=DECODER, gen_length=48, per_forward=count, early_stop=True)
        print(f"{count} masks a forward, {out.num_forwards:2} forwards: {model.tokenizer.decode(out.tokens)}")
