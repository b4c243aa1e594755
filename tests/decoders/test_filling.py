"""The denoising loop: which forwards a rule asks for, and what they fill."""

import re
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from refusion_eval.decoders.canvas import Canvas, MaskedSettings
from refusion_eval.decoders.dllm_cache import text_forward
from refusion_eval.decoders.drafts import Drafts
from refusion_eval.decoders.filling import Rule, above, at_least, fill
from refusion_eval.types import Fix
from tests.decoders.scripted import readout, run_scripted

MASK, EOS = 99, 98
PROBS = {2: 0.5, 3: 0.9, 4: 0.7, 5: 0.8}  # of the positions of the text


GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "own-decoder.md"


def filled(rule, tokens=(1, 2, 3, 4), regions=(range(4),), **settings):
    """What each forward fills after a prompt of two tokens, and whether it reads anything."""
    chosen = MaskedSettings(gen_length=4, mask_id=MASK, eos_ids=(EOS,), **settings)

    def decode(prompt, settings, trace):
        canvas = Canvas(prompt, settings, trace)
        reason = yield from fill(canvas, regions, count(), partial(text_forward, canvas, settings), rule)
        return canvas.finish(reason)

    return fixed(decode, chosen, tokens)


def fixed(decode, settings, tokens):
    def answer(forward, read):
        positions = [forward.positions[row] for row in read.rows]
        return readout([tokens[position - 2] for position in positions], [PROBS[position] for position in positions])

    _, trace, forwards = run_scripted(decode, [7, 7], settings, answer)
    fixes = {event.forward: sorted(event.positions) for event in trace.of(Fix)}
    return [fixes.get(number) if forward.reads else "nothing read" for number, forward in enumerate(forwards)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule(quotas=[2, 2]), [[1, 3], [0, 2]]),
        (Rule(quotas=[2]), [[1, 3], [2], [0]]),  # then one a step
        (Rule(quotas=[0, 4]), ["nothing read", [0, 1, 2, 3]]),
        (Rule(quotas=[4], fewest=3), [[0, 1, 2, 3], "nothing read", "nothing read"]),
        (Rule(at_least(0.6)), [[1, 2, 3], [0]]),
        (Rule(above(0.95)), [[1], [3], [2], [0]]),  # the best one where none is above
        (Drafts(4), [None, [0, 1, 2, 3]]),
    ],
)
def test_a_rule_says_what_forwards_fill(rule, expected):
    assert filled(rule) == expected


def test_a_rule_begins_anew_in_each_region():
    regions = [range(2), range(2, 4)]
    assert filled(Rule(quotas=[2]), regions=regions) == [[0, 1], [2, 3]]
    assert filled(Drafts(4), regions=regions) == [None, [0, 1], None, [2, 3]]


def test_decoding_ends_with_the_forward_that_settles_the_text():
    assert filled(Rule(above(0.95)), (EOS, 2, 3, 4), [range(2), range(2, 4)], early_stop=True) == [[1], [0]]


def test_the_rule_of_the_guide_fills_half_of_the_masks_in_each_forward():
    (code,) = re.findall(r"^```python\n(from functools.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    exec(code, names := {"__name__": "guide"})
    decoder = names["DECODER"]
    chosen = decoder.Settings(gen_length=4, mask_id=MASK, eos_ids=(EOS,))
    assert fixed(decoder.decode, chosen, (1, 2, 3, 4)) == [[1, 3], [2], [0]]
