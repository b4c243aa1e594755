"""d3LLM's release as a decoder: counters of masks, flags and a cache of rows, kept as plainly as there."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from refusion_eval.types import DROP_ALL, Commit, Decoding, Forward, Read, Response, Trace, bidirectional

FAR = 10_000


def released(prompt: Sequence[int], chosen: Any, trace: Trace) -> Decoding:
    """What the release does, defects included; it keeps rows by committing them, and nothing else of this project."""
    on_dream, length, num_prompt = chosen.shift == 1, chosen.gen_length, len(prompt)
    text = np.array([*prompt, *[chosen.mask_id] * length])
    is_mask = np.array([False] * num_prompt + [True] * length)
    eos = chosen.eos_ids[0] if chosen.early_stop else None
    delay, interval = chosen.cache_delay_iter, chosen.refresh_interval or FAR
    spans = [
        (first, min(first + chosen.block_size, num_prompt + length))
        for first in range(num_prompt, num_prompt + length, chosen.block_size)
    ]
    blocks = [{"span": (0, num_prompt), "masks": 0, "active": True, "since": 0, "kept": False}]

    def add(masks: int, active: bool, since: int | None = None, kept: bool = False) -> None:
        blocks.append({"span": spans[len(blocks) - 1], "masks": masks, "active": active, "since": since, "kept": kept})

    def progress(block: dict[str, Any]) -> float:
        return 1 - block["masks"] / (block["span"][1] - block["span"][0])

    add(spans[0][1] - spans[0][0], True)
    cached: int | None = None  # rows that the cache holds
    manual, number, commit = 0, 0, DROP_ALL
    while is_mask.any() or len(blocks) <= len(spans):
        number += 1
        stale, has_end = is_mask.copy(), False
        ends = (
            np.flatnonzero(~is_mask & (text == eos) & (np.arange(len(text)) >= num_prompt)) if chosen.early_stop else []
        )
        if len(ends):
            has_end, end = True, ends[0]
            text[end + 1 :], is_mask[end + 1 :] = eos, False
            for block in blocks[1:]:
                first, last = block["span"]
                actual = int(is_mask[first:last].sum())
                if first > end or on_dream or last > end:
                    block["active"] |= block["masks"] != actual and actual == 0
                    block["masks"] = actual
                if on_dream and first > end:
                    block["kept"] = True
                    block["since"] = number if block["since"] is None else block["since"]
            while len(blocks) <= len(spans) and spans[len(blocks) - 1][0] > end:
                add(0, True, number, True)
            if not is_mask.any():
                break
        for before, block in pairwise(blocks):
            block["active"] |= progress(before) >= chosen.decoded_token_threshold
        if len(blocks) <= len(spans) and not has_end:
            last = blocks[-1]
            if progress(last) >= chosen.block_add_threshold or last["masks"] == 0:
                first, end_of_block = spans[len(blocks) - 1]
                add(int(is_mask[first:end_of_block].sum()), progress(last) >= chosen.decoded_token_threshold)
        open_to = max(block["span"][1] for block in blocks[1:] if block["active"] or block["masks"] > 0)
        begin, store, refresh_to = 0, 0, None
        if delay is not None:
            ready = []
            for block in blocks:
                if block["span"][1] <= manual:
                    continue
                if block["masks"]:
                    break
                block["since"] = number if block["since"] is None else block["since"]
                if number - block["since"] >= delay and not block["kept"]:
                    ready.append(block)
                    block["kept"] = True
                elif number - block["since"] < delay and not on_dream:
                    break
            waiting = [block for block in blocks if not block["masks"] and block["since"] is not None]
            waiting = [block for block in waiting if not block["kept"]]
            if ready:
                begin, store = manual, ready[-1]["span"][1] - manual
            elif cached is not None and not waiting and number % interval:
                begin = manual
            elif cached is not None:
                refresh_to = waiting[-1]["span"][0] if waiting else manual
        uses_cache = store > 0 or begin > 0
        candidates = np.flatnonzero(stale[:open_to])
        rows = candidates - begin - on_dream
        rows[rows < 0] = 0
        read = Read(rows.tolist(), suppress=(chosen.mask_id,), confidence=chosen.confidence, entropy=True)
        if not uses_cache or cached is None:
            commit = DROP_ALL
        fed = range(begin, len(text))
        (out,) = yield Forward(text[begin:].tolist(), fed, bidirectional(len(fed)), (read,), commit)
        commit = Commit(range(store))
        if store:
            manual, cached = manual + store, (cached or 0) + store
        if refresh_to is not None:
            commit, cached = Commit(range(refresh_to)), refresh_to
        entropy = out.entropy
        filled = entropy < chosen.threshold if on_dream else entropy <= chosen.threshold
        if not on_dream:
            filled[np.argmin(entropy)] = True
        for block in blocks[1:]:
            if block["active"] and block["masks"] > 0:
                inside = (candidates >= block["span"][0]) & (candidates < block["span"][1])
                if not filled[inside].any():
                    filled[np.flatnonzero(inside)[np.argmin(entropy[inside])]] = True
                break
        new = filled & (text[candidates] != out.tokens)
        text[candidates[filled]], is_mask[candidates[filled]] = out.tokens[filled], False
        for block in blocks[1:]:
            first, last = block["span"]
            num_filled = int(((candidates[filled] >= first) & (candidates[filled] < last)).sum())
            block["masks"] = max(0, block["masks"] - num_filled)
        trace.fix((candidates[new] - num_prompt).tolist(), out.tokens[new].tolist())
    return Response(tuple(text[num_prompt:].tolist()), "length")
