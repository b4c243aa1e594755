"""The decoders with blocks counted from the prompt's first token, without a cache: every forward computes all text.

Written from the public code, with lists of tokens in which a mask is None, so that they share nothing with the decoders
but the settings.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from refusion_eval.types import DROP_ALL, Decoding, Fix, Forward, Read, Response, Trace, block_causal

Text = list[int | None]


def order_of_fixes(trace: Trace) -> list[list[tuple[int, int]]]:
    """The positions fixed after each forward that fixes some, with their tokens."""
    by_forward: dict[int, list[tuple[int, int]]] = {}
    for event in trace.of(Fix):
        by_forward.setdefault(event.forward, []).extend(zip(event.positions, event.tokens, strict=True))
    return [sorted(fixed) for fixed in by_forward.values()]


def whole_text(text: Text, chosen: Any, rows: Sequence[int], num_tokens: int, **reads: Any) -> Forward:
    """The forward of the first `num_tokens` of a text, which reads some of its rows."""
    tokens = [chosen.mask_id if token is None else token for token in text[:num_tokens]]
    sizes = [min(chosen.block_length, num_tokens - first) for first in range(0, num_tokens, chosen.block_length)]
    read = replace(Read(list(rows), suppress=(chosen.mask_id,)), **reads)
    return Forward(tokens, range(num_tokens), block_causal(sizes), (read,), DROP_ALL)


def ended(text: Text, start: int, chosen: Any) -> Response:
    """The response of a text up to the first stop token, and up to the length that was asked for."""
    tokens = [int(token) for token in text[start:] if token is not None]
    if not chosen.release_compatible:
        tokens = tokens[: chosen.gen_length]
    stops = [index for index, token in enumerate(tokens) if token in chosen.eos_ids]
    return Response(tuple(tokens[: stops[0] + 1]), "eos") if stops else Response(tuple(tokens), "length")


def sdar(prompt: Sequence[int], chosen: Any, trace: Trace) -> Decoding:
    size, num_prompt = chosen.block_length, len(prompt)
    steps = chosen.denoising_steps or size
    num_blocks = -(-(num_prompt + chosen.gen_length) // size)
    text: Text = [*prompt, *[None] * (num_blocks * size - num_prompt)]
    for block in range(num_prompt // size, num_blocks):
        first, end = block * size, (block + 1) * size
        for step in range(size):
            masked = [place for place in range(first, end) if text[place] is None]
            if not masked:
                break
            quota = size // steps + (step < size % steps)
            (out,) = yield whole_text(text, chosen, masked, end, entropy=True)
            by_prob = sorted(range(len(masked)), key=lambda index: -out.probs[index])
            if chosen.remasking_strategy == "sequential":
                taken = range(min(quota, len(masked)))
            elif chosen.remasking_strategy == "entropy_bounded":
                by_entropy = sorted(range(len(masked)), key=lambda index: out.entropy[index])
                sums = [sum(out.entropy[other] for other in by_entropy[: n + 1]) for n in range(len(masked))]
                taken = by_entropy[: max(1, sum(total < chosen.eb_threshold for total in sums))]
            else:
                taken = by_prob[:quota]
                above = [index for index in by_prob if out.probs[index] > chosen.confidence_threshold]
                if chosen.remasking_strategy == "low_confidence_dynamic" and len(above) >= quota:
                    taken = above
            for index in sorted(taken):
                text[masked[index]] = int(out.tokens[index])
            trace.fix([masked[index] - num_prompt for index in taken], [int(out.tokens[index]) for index in taken])
        if any(token in chosen.eos_ids for token in text[max(first, num_prompt) : end]):
            del text[end:]
            break
    return ended(text, num_prompt, chosen)


def fast_dllm_v2(prompt: Sequence[int], chosen: Any, trace: Trace) -> Decoding:
    """Without `use_block_cache`, and as `release_compatible` says only in what is kept."""
    size, small, num_prompt = chosen.block_length, chosen.small_block_size, len(prompt)
    text: Text = list(prompt)
    last_block = (num_prompt + chosen.gen_length - 1) // size
    while True:
        if len(text) % size == 0:
            (out,) = yield whole_text(text, chosen, [len(text) - 1], len(text))
            trace.fix([len(text) - num_prompt], out.tokens)
            text.append(int(out.tokens[0]))
            if text[-1] in chosen.eos_ids:
                return ended(text, num_prompt, chosen)
        block = len(text) // size
        text += [None] * ((block + 1) * size - len(text))
        for first in range(block * size, (block + 1) * size, small):
            while masked := [place for place in range(first, first + small) if text[place] is None]:
                (out,) = yield whole_text(text, chosen, [place - 1 for place in masked], len(text))
                best = max(out.probs)
                taken = [i for i, prob in enumerate(out.probs) if prob > chosen.threshold or prob == best]
                for index in taken:
                    text[masked[index]] = int(out.tokens[index])
                trace.fix([masked[index] - num_prompt for index in taken], [int(out.tokens[i]) for i in taken])
        if block == last_block or any(token in chosen.eos_ids for token in text[max(num_prompt, block * size) :]):
            return ended(text, num_prompt, chosen)


def llada2(prompt: Sequence[int], chosen: Any, trace: Trace) -> Decoding:
    size, num_prompt = chosen.block_length, len(prompt)
    num_blocks = -(-(num_prompt + chosen.gen_length) // size)
    text: Text = [*prompt, *[None] * (num_blocks * size - num_prompt)]
    for block in range(num_prompt // size, num_blocks):
        places, edits = range(max(num_prompt, block * size), (block + 1) * size), 0
        while True:
            masked = [place for place in places if text[place] is None]
            if not masked and chosen.edit_threshold is None:
                break
            (out,) = yield whole_text(text, chosen, places, (block + 1) * size)
            guess = dict(zip(places, zip(out.tokens.tolist(), out.probs.tolist(), strict=True), strict=True))
            new = {place: guess[place][0] for place in masked if guess[place][1] > chosen.threshold}
            if masked and not new:
                best = max(masked, key=lambda place: guess[place][1])
                new[best] = guess[best][0]
            edits += not masked
            if edits > chosen.max_post_edit_steps:
                break
            if chosen.edit_threshold is not None:
                for place in set(places) - set(masked):
                    token, prob = guess[place]
                    if prob > chosen.edit_threshold and token != text[place]:
                        new[place] = token
            if not new:
                break
            for place, token in new.items():
                text[place] = token
            trace.fix([place - num_prompt for place in new], list(new.values()))
        if any(text[place] in chosen.eos_ids for place in places):
            del text[(block + 1) * size :]
            break
    return ended(text, num_prompt, chosen)


def freedave(prompt: Sequence[int], chosen: Any, trace: Trace) -> Decoding:
    """SDAR's one token a step by draft-and-verify; each draft has a forward of its own here."""
    size, num_prompt = chosen.block_length, len(prompt)
    num_blocks = -(-(num_prompt + chosen.gen_length) // size)
    text: Text = [*prompt, *[None] * (num_blocks * size - num_prompt)]

    def steps(draft: Text, end: int, out: Any) -> list[tuple[int, int]]:
        masked = [place for place in range(end) if draft[place] is None]
        order = sorted(range(len(masked)), key=lambda index: (masked[index] // size, -out.probs[index]))
        return [(masked[index], int(out.tokens[index])) for index in order]

    def with_steps(draft: Text, taken: list[tuple[int, int]]) -> Text:
        filled = list(draft)
        for place, token in taken:
            filled[place] = token
        return filled

    for block in range(num_prompt // size, num_blocks):
        first, end = block * size, (block + 1) * size
        num_ahead = min(-(-chosen.draft_steps // size), num_blocks - block - 1) if chosen.eager_acceptance_mode else 0
        last = end + num_ahead * size
        if None in text[first:end]:
            (out,) = yield whole_text(text, chosen, [place for place in range(last) if text[place] is None], last)
            known = steps(text, last, out)
        while None in text[first:end]:
            drafts = [with_steps(text, known[:n]) for n in range(1, min(chosen.draft_steps, len(known)) + 1)]
            new = drafts[0]
            if text[first:end].count(None) > 1 or num_ahead:
                after = []
                for draft in drafts:
                    masked = [place for place in range(last) if draft[place] is None]
                    if masked:
                        (out,) = yield whole_text(draft, chosen, masked, last)
                    after.append(steps(draft, last, out) if masked else [])
                best = 0
                while best + 1 < len(drafts) and with_steps(drafts[best], after[best][:1]) == drafts[best + 1]:
                    best += 1
                new, known = drafts[best], after[best]
                if None not in new[first:end]:
                    new = with_steps(new, known[:1])
            taken = [place for place in range(last) if text[place] is None and new[place] is not None]
            trace.fix([place - num_prompt for place in taken], [int(new[place] or 0) for place in taken])
            text = new
        if any(token in chosen.eos_ids for token in text[max(first, num_prompt) : end]):
            break
    gapless = text.index(None) if None in text else len(text)
    return ended(text[:gapless], num_prompt, chosen)
