"""Infilling: known text stands on both sides of what is decoded.

A prompt carries it: `HOLE` stands in it for each token that is to be found, and what follows the last hole is the
suffix. The number of holes is the length of the response, whatever `gen_length` says; with `OPEN` behind them it is
searched (see `refusion_eval.decoders.gap_length`). Decoders of masked models have the suffix in their canvas; ReFusion
and Eso-LM read prefix and suffix in front of the masks, at their true positions; an autoregressive model has to be
asked for the middle by tokens that it was trained with (FIM), and ends it by itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from refusion_eval import decoders
from refusion_eval.decoders import NO_END, Decoder
from refusion_eval.decoders.gap_length import PUBLISHED, Search, searched_length
from refusion_eval.decoders.thoughts import has_budget
from refusion_eval.errors import ConfigError
from refusion_eval.types import HOLE, OPEN, Decode, Decoding, Stop, Trace

FimIds = Callable[[], Sequence[int]]  # the ids of a tokenizer's tokens before prefix, suffix and middle, if it has any


def span(prompt: Sequence[int]) -> range:
    """The places from the first hole to the last one, those of an open length included; empty if there is none."""
    holes = [place for place, token in enumerate(prompt) if token in (HOLE, OPEN)]
    return range(holes[0], holes[-1] + 1) if holes else range(0)


def lengths(prompt: Sequence[int]) -> range:
    """The lengths that the gap of a prompt may get."""
    longest = len(span(prompt))
    return range(1 if OPEN in prompt else longest, longest + 1)


def asks_by_fim(entry: Decoder) -> bool:
    return entry.reads.masked is None and entry.reads.left_to_right


def check_infilling(name: str, entry: Decoder, prompt: Sequence[int], fim_ids: FimIds) -> None:
    """Refuses (ConfigError) a prompt with holes that a decoder cannot fill."""
    places = span(prompt)
    if not places:
        return
    gap = list(prompt[places.start : places.stop])
    num_known = sum(token >= 0 for token in gap)
    if OPEN in gap and (num_known or gap[0] == OPEN or gap != sorted(gap, reverse=True)):
        raise ConfigError(
            f"a gap of open length ({OPEN} behind {HOLE}) begins with {HOLE} and is the only one; give the other gaps "
            "their lengths, or this one"
        )
    if asks_by_fim(entry):
        if not fim_ids() and places.stop < len(prompt):
            raise ConfigError(
                f"decoder={name} infills by FIM tokens, and the tokenizer has none; decode the prefix alone, as tasks "
                "with _prefix_only in their name do"
            )
    elif entry.infills is None:
        able = ", ".join(other for other, one in decoders.DECODERS.items() if one.infills is not None)
        why = "it writes blocks from left to right, and they see no later text"
        why = why if name in decoders.DECODERS else 'its Decoder does not say infills="gap"'
        raise ConfigError(f"decoder={name} does not infill: {why}; take one of {able}")
    if entry.infills != "gaps" and num_known:
        able = ", ".join(other for other, one in decoders.DECODERS.items() if one.infills == "gaps")
        raise ConfigError(f"decoder={name} fills one gap, and the prompt has several; take one of {able}")


def fitted(settings: Any, length: int) -> Any:
    """The settings for a gap of so many positions.

    Steps keep their share of the positions, and those of `alg=p2` their number, rounded up to a number that the gap
    allows (`with_steps`). Blocks that do not divide the gap become one; slots end with the gap.
    """
    if has_budget(settings):
        raise ConfigError(f"thought_budget={settings.thought_budget}: a gap holds no thought; leave it out")
    names = {field.name for field in fields(settings)}
    changes: dict[str, Any] = {"gen_length": length}
    block_length = getattr(settings, "block_length", None)
    if block_length is not None and getattr(settings, "schedule", "release") == "release":
        changes["block_length"] = length if length % block_length else block_length
    if "whole_slots" in names:
        changes["whole_slots"] = False
    if getattr(settings, "steps", None) is None or settings.gen_length == length:
        return replace(settings, **changes)
    share = -(-settings.steps * length // settings.gen_length)
    share = settings.steps if getattr(settings, "alg", None) == "p2" else share  # which masks tokens again
    return with_steps(lambda steps: replace(settings, **changes, steps=steps), share, length)


def with_steps(make: Callable[[int], Any], steps: int, length: int) -> Any:
    """The settings with so many steps for a gap of a length, or with the next larger number that they allow.

    Blocks have equal numbers of steps, and some decoders want a divisor of the length, or more than a few.
    """
    refusal: ConfigError | None = None
    for number in range(steps, steps + length + 1):
        try:
            return make(number)
        except ConfigError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def of_gap(entry: Decoder, prompt: Sequence[int], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a user gives for one prompt with holes, which is one block where nothing else is said."""
    length = len(span(prompt))
    if "gen_length" in given:
        raise ConfigError(f"gen_length={given['gen_length']} with a gap of {length} tokens; leave it out")
    chosen = {"gen_length": length, **given}
    defaults = {field.name: field.default for field in fields(entry.Settings)}
    whole, size = len(prompt) if given.get("schedule") == "dllm" else length, given.get("block_length")
    if defaults.get("block_length") is not None and size is None:
        chosen["block_length"] = whole
    elif isinstance(size, int) and size > 0 and whole == length and length % size:
        chosen["block_length"] = length  # as in `fitted`
    return chosen


def whole_gap(entry: Decoder) -> dict[str, Any]:
    """The settings with which all tokens of a gap are decoded, and none of them ends the text."""
    if entry.reads.masked is None:  # a model that writes from left to right says by it that the gap is full
        return {}
    return {field.name: NO_END[field.name] for field in fields(entry.Settings) if field.name in NO_END}


def over_gap(
    entry: Decoder, fim_ids: FimIds, bos_id: Callable[[], int | None] = lambda: None, search: Search = PUBLISHED
) -> Decode:
    """The decoder for prompts with holes, which `check_infilling` has let through.

    A beginning-of-text token in front of the prefix stays in front of the FIM tokens. `search` finds an open length.
    """

    def decode(prompt: Sequence[int], settings: Any, trace: Trace) -> Decoding:
        places = span(prompt)
        if asks_by_fim(entry):
            prefix, suffix = prompt[: places.start], prompt[places.stop :]
            prompt = prefix  # which is all if nothing stands behind the gap and there are no tokens to say so
            if ids := fim_ids():
                begin = prefix[:1] if prefix and prefix[0] == bos_id() else ()
                prompt = [*begin, ids[0], *prefix[len(begin) :], ids[1], *suffix, ids[2]]
        elif OPEN in prompt and not getattr(settings, "finds_length", False):
            length = yield from searched_length(entry.reads, prompt, places, settings.mask_id, search)
            prompt = [*prompt[: places.start], *[HOLE] * length, *prompt[places.stop :]]
            places = span(prompt)
        response = yield from entry.decode(prompt, fitted(settings, len(places)), trace)
        if response.stop != "length" or asks_by_fim(entry):  # which says by its end token that the gap is full
            return response
        # The gap is full, so nothing is cut off.
        trace.events[:] = [replace(event, reason="gap") if isinstance(event, Stop) else event for event in trace.events]
        return replace(response, stop="gap")

    return decode
