"""What D2F's decoders are compared with: their own blocks as they go, and the same algorithm without a cache."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from refusion_eval.decoders.d2f import D2fLladaSettings, decode
from refusion_eval.types import DROP_ALL, Decoding, Fix, Forward, Read, Response, Trace, block_causal


class Snapshot(NamedTuple):
    """A forward, and [state, masks left, full] of each block of the response when it starts."""

    forward: Forward
    blocks: list[list[Any]]


def watched(seen: list[Snapshot]) -> Any:
    """The decoder, telling of every forward."""

    def blocks(forward: Forward, num_prompt: int, chosen: D2fLladaSettings) -> list[list[Any]]:
        """Cached, finished or active; masks left; whether the block before it is decoded enough."""
        cached, size, end = forward.positions[0], chosen.block_size, forward.positions[-1] + 1
        masks, states, ratio = dict(zip(forward.positions, forward.tokens, strict=True)), [], 1.0
        for start in range(num_prompt, end, size):
            num_masked = sum(masks.get(place) == chosen.mask_id for place in range(start, start + size))
            active = num_masked > 0 or (states and states[-1][0] == "a")
            states.append(["a" if active else "c" if start < cached else "t", num_masked])
            states[-1].append(int(ratio >= chosen.decoded_token_threshold))
            ratio = (size - num_masked) / size
        return states

    def watching(prompt: Sequence[int], chosen: D2fLladaSettings, trace: Trace) -> Decoding:
        decoding = decode(prompt, chosen, trace)
        forward = next(decoding)
        while True:
            seen.append(Snapshot(forward, blocks(forward, len(prompt), chosen)))
            readouts = yield forward
            try:
                forward = decoding.send(readouts)
            except StopIteration as stop:
                return stop.value

    return watching


def fixed_after(trace: Trace) -> list[dict[int, int]]:
    """Response positions and their tokens that became final after each forward."""
    fixed: list[dict[int, int]] = [{} for _ in range(trace.num_forwards)]
    for event in trace.of(Fix):
        fixed[event.forward].update(zip(event.positions, event.tokens, strict=True))
    return fixed


def recomputed(prompt: Sequence[int], chosen: D2fLladaSettings, trace: Trace) -> Decoding:
    """The algorithm without a cache: every forward computes the whole text, and reads the masks anew."""
    size, text, full, halted = chosen.block_size, [], set(), False

    def ratio(block: int) -> float:
        return 1.0 if block < 0 else sum(token is not None for token in text[block * size :][:size]) / size

    while True:
        last = len(text) // size - 1
        if last + 1 < chosen.gen_length // size and not halted and ratio(last) >= chosen.block_add_threshold:
            text += [None] * size
        full |= {block for block in range(len(text) // size) if ratio(block - 1) >= chosen.decoded_token_threshold}
        masked = [index for index, token in enumerate(text) if token is None]
        if not masked:
            return Response(tuple(text), "length")
        tokens = [*prompt, *(chosen.mask_id if token is None else token for token in text)]
        attention = block_causal([len(prompt), *[size] * (len(text) // size)])
        read = Read([len(prompt) + index - chosen.shift for index in masked], suppress=(chosen.mask_id,))
        read = replace(read, margin=True, entropy=True)
        (out,) = yield Forward(tokens, range(len(tokens)), attention, (read,), DROP_ALL)
        scores = {"default": out.probs, "margin_confidence": out.margin, "neg_entropy": -out.entropy}
        fixed: dict[int, int] = {}
        for block in sorted({index // size for index in masked}):
            asked = [number for number, index in enumerate(masked) if index // size == block]
            sure = [number for number in asked if out.probs[number] > chosen.skip_threshold]
            if not sure and block in full:
                sure = [max(asked, key=scores[chosen.sampling_strategy].__getitem__)]
            fixed |= {masked[number]: int(out.tokens[number]) for number in sure}
        for index, token in fixed.items():
            text[index] = token
        trace.fix(list(fixed), list(fixed.values()))
        halted = halted or any(token in chosen.halting for token in fixed.values())
