"""DreamOn (arXiv 2602.01326): fills a gap of open length, which grows and shrinks while it is filled.

Each forward decides about one mask, the most certain one. The expand token makes two masks of it, as long as the gap is
not at its longest and has not grown as often as it may have tokens. The first of the end tokens deletes it and all
masks behind it. Every other token stays.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from refusion_eval.decoders import first_eos, most_confident, response_of
from refusion_eval.types import HOLE, OPEN, Decoding, Fix, Forward, Trace, bidirectional


def fill_open_gap(prompt: Sequence[int], settings: Any, trace: Trace) -> Decoding:
    """Fills the gap of a prompt with `OPEN` in it; the settings are those of Dream's decoder."""
    start, end = prompt.index(HOLE), len(prompt) - prompt[::-1].index(OPEN)
    before, behind, longest = prompt[:start], prompt[end:], end - start
    gap = [settings.mask_id] * prompt.count(HOLE)
    filled_at = [0] * len(gap)  # the forward of each token
    num_grown = 0
    for step in count():
        masked = [place for place, token in enumerate(gap) if token == settings.mask_id]
        if not masked:
            break
        text = [*before, *gap, *behind]
        read = settings.read([max(0, start + place - 1) for place in masked], step, masked)
        if len(gap) < longest and num_grown < longest:
            read = replace(read, exclude=())  # settings exclude the expand token
        (readout,) = yield Forward(text, range(len(text)), bidirectional(len(text)), (read,), kind="denoise")
        (best,) = most_confident(settings.scores(readout, step, masked), 1)
        place, token = masked[best], int(readout.tokens[best])
        if token == settings.expand_id:
            gap[place : place + 1] = [settings.mask_id] * 2
            filled_at.insert(place, 0)
            num_grown += 1
        elif token in settings.eos_ids[:1]:
            kept = [index for index in range(len(gap)) if index < place or index not in masked]
            gap, filled_at = [gap[index] for index in kept], [filled_at[index] for index in kept]
        else:
            gap[place], filled_at[place] = token, trace.num_forwards - 1
    # A place is only known in the end, so the trace has the places of the filled gap.
    for forward in sorted(set(filled_at)):
        places = [place for place, number in enumerate(filled_at) if number == forward]
        trace.events.append(Fix(forward, tuple(places), tuple(gap[place] for place in places)))
    trace.events.sort(key=lambda event: event.forward)
    return response_of(gap, first_eos(gap, settings.eos_ids), "length", trace)
