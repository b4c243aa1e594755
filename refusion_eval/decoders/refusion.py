"""ReFusion by the paper's algorithm: plan slots, verify their drafts, complete what was rejected.

arXiv 2512.13586, section 4.2, Eq. 4-8. Attention is causal in the order in which tokens were accepted; position ids say
where a token stands in the text. Where paper and public release differ, the release's rule is followed (the published
weights were tuned with it) except for its defects, which `release_compatible` brings back.

`refusion_fused` makes the same tokens in fewer forwards and is tested against this module. The decoder "refusion" uses
this module with `fuse=false` or `serial=true`, and `refusion_fused` otherwise.

A slot is named by the response index of its first position. Arrays are [S slots, K tokens a slot].
"""

from collections.abc import Generator, Sequence
from itertools import count

import numpy as np

from refusion_eval.decoders import above_or_best, accepted_prefix
from refusion_eval.decoders.refusion_settings import RefusionSettings
from refusion_eval.decoders.refusion_slots import (
    NO_ROWS,
    BoolArray,
    Completion,
    Drafts,
    Rows,
    Text,
    accepted_drafts,
    block_slots,
)
from refusion_eval.types import NOTHING, Commit, Decoding, Forward, Read, Readout, Trace, causal, draw_key


def decode(prompt: Sequence[int], settings: RefusionSettings, trace: Trace) -> Decoding:
    """Decodes one prompt: in each block plans and infills until none of its slots is masked."""
    num_prompt, iterations = len(prompt), count()
    text = Text(settings, trace)
    # The first plan also carries the prompt, which is all of that forward that stays in the cache.
    context, commit = Rows(list(prompt), range(num_prompt)), NOTHING
    for slots in block_slots(settings):
        text.masked = list(slots)
        while text.masked:
            (readout,) = yield plan(context, text.masked, num_prompt, settings, next(iterations), commit)
            drafts = select_slots(text.masked, readout, settings, trace)
            readouts = yield verification(drafts, num_prompt, settings, Commit(range(len(context.tokens))))
            passed_SK = passed_drafts(drafts, readouts, settings)
            final = accepted_drafts(drafts, accepted_prefix(passed_SK.ravel()), settings)
            if final is not None:
                trace.fix(final.positions, final.tokens)
            else:
                completion = Completion(drafts, passed_SK, num_prompt, settings, trace)
                yield from _complete(completion, settings)
                final = completion.final()
            text.add(final)
            context, commit = NO_ROWS, Commit(range(len(final.tokens)))
            # Completed slots did not see each other, so their keys and values are not those of one sequence. The paper
            # keeps them all the same (section 5.5, Table 4). With this setting the rows of one more forward enter the
            # cache instead of those of the verification.
            if settings.recompute_kv:
                yield Forward(*final.rows(num_prompt), causal(len(final.tokens)), (), kind="refresh")
            if text.stops():
                return text.finish("stop_string")
        if text.met_eos:
            return text.finish("eos")
    return text.finish("length")


def decode_serial(prompt: Sequence[int], settings: RefusionSettings, trace: Trace) -> Decoding:
    """Decodes one prompt token by token from left to right (the left-to-right point of Figure 1): n forwards."""
    text, num_prompt = Text(settings, trace), len(prompt)
    fed, start, commit = list(prompt), 0, NOTHING
    for position in range(settings.gen_length):
        # The first token of a slot is read from a mask, with which each masked slot of the training begins, and every
        # other one from the token before it, as in clean slots.
        tokens = [*fed, settings.mask_id] if position % settings.slot_size == 0 else fed
        read = plan_read((len(tokens) - 1,), (num_prompt + position,), settings, position)
        positions = range(start, start + len(tokens))
        (readout,) = yield Forward(tokens, positions, causal(len(tokens)), (read,), commit, "decode")
        token = int(readout.tokens[0])
        text.tokens[position] = token
        trace.fix((position,), (token,))
        if token in settings.eos_ids:
            return text.finish("eos")
        if text.stops():
            return text.finish("stop_string")
        commit, start, fed = Commit(range(len(fed))), start + len(fed), [token]  # a mask is never kept
    return text.finish("length")


def plan(
    context: Rows, masked: Sequence[int], num_prompt: int, settings: RefusionSettings, iteration: int, commit: Commit
) -> Forward:
    """The forward that drafts every masked slot of the block (Eq. 4), after rows that are to enter the cache."""
    # Causal, as in training (section 4.3): clean slots come first, in any order, and the masked ones follow.
    start = len(context.tokens)
    positions = [num_prompt + position for position in settings.response_positions(masked)]
    read = plan_read(range(start, start + len(positions)), positions, settings, iteration)
    tokens = [*context.tokens, *[settings.mask_id] * len(positions)]
    return Forward(tokens, [*context.positions, *positions], causal(len(tokens)), (read,), commit, "plan")


def plan_read(rows: Sequence[int], positions: Sequence[int], settings: RefusionSettings, iteration: int) -> Read:
    """Reads the draft of each masked position and its probability (Eq. 4); row i predicts its own position."""
    sampled = settings.temperature > 0
    draws = tuple(draw_key(settings.seed, iteration, position) for position in positions) if sampled else ()
    return Read(rows=rows, suppress=settings.suppress, temperature=settings.temperature, draws=draws)


def select_slots(masked: Sequence[int], readout: Readout, settings: RefusionSettings, trace: Trace) -> Drafts:
    """Selects the slots whose certainty exceeds tau_slot, or the most certain one (Eq. 5); one slot in other orders."""
    k = settings.slot_size
    probs_SK, tokens_SK = readout.probs.reshape(-1, k), readout.tokens.reshape(-1, k)
    # The first token stands for the slot: the others were drafted without seeing the tokens before them.
    certainty_S = probs_SK[:, 0]
    match settings.slot_order:
        case "confidence":
            selected = above_or_best(certainty_S, settings.tau_slot)
        case "left_to_right":
            selected = [0]
        case "random":
            selected = [min(range(len(masked)), key=lambda index: draw_key(settings.seed, masked[index]))]
    drafts = Drafts([masked[index] for index in selected], tokens_SK[selected], probs_SK[selected])
    trace.select("slot", masked, certainty_S.tolist(), drafts.slots)
    trace.draft(settings.response_positions(drafts.slots), drafts.tokens_SK.ravel().tolist())
    return drafts


def verification(drafts: Drafts, num_prompt: int, settings: RefusionSettings, commit: Commit) -> Forward:
    """The forward of all drafts as one causal sequence, in which row m - 1 predicts token m (Eq. 6)."""
    # The first token of a slot is not read: its probability is the certainty that selected the slot, and tau_token does
    # not apply to it.
    tokens = drafts.tokens_SK.ravel().tolist()
    rows = [row for row in range(len(tokens) - 1) if (row + 1) % settings.slot_size]
    reads = (Read(rows=rows, given=[tokens[row + 1] for row in rows]),) if rows else ()
    positions = [num_prompt + position for position in settings.response_positions(drafts.slots)]
    return Forward(tokens, positions, causal(len(tokens)), reads, commit, "verify")


def passed_drafts(drafts: Drafts, readouts: Sequence[Readout], settings: RefusionSettings) -> BoolArray:
    """Which drafts exceed tau_token given all drafts before them (Eq. 6), [S, K]; the first of a slot always passes."""
    passed_SK = np.ones(drafts.tokens_SK.shape, dtype=bool)
    if settings.slot_size > 1:
        probs = readouts[0].given
        assert probs is not None
        # tau_token is compared with untempered probabilities, whatever temperature the drafts were sampled with.
        passed_SK[:, 1:] = (probs > settings.tau_token).reshape(-1, settings.slot_size - 1)
    return passed_SK


def _complete(completion: Completion, settings: RefusionSettings) -> Generator[Forward, tuple[Readout, ...], None]:
    """Completes slots independently of each other, in rounds of one prediction and one verification (Eq. 7-8)."""
    # No forward commits anything: each carries its slots whole, as groups that see the cache and themselves only.
    if settings.verify_independently:
        lengthen_prefixes(completion, (yield group_verification(completion)), settings.tau_token)
    while not completion.end_round():
        rows = completion.unfinished
        (readout,) = yield prediction(completion, rows, settings)
        completion.predict(rows, readout)
        completion.record_drafts()
        lengthen_prefixes(completion, (yield group_verification(completion)), settings.tau_token)


def prediction(completion: Completion, rows: Sequence[int], settings: RefusionSettings) -> Forward:
    """The forward that drafts the tokens after the valid prefix of some slots, always the likeliest ones (Eq. 8)."""
    # Not sampled at any temperature, as in the release.
    masked_SK = completion.after_prefix()[rows]
    tokens_SK = np.where(masked_SK, settings.mask_id, completion.tokens_SK[rows])
    read = Read(rows=np.flatnonzero(masked_SK).tolist(), suppress=settings.suppress)
    return completion.forward("predict", rows, tokens_SK, (read,))


def group_verification(completion: Completion) -> Forward:
    """The forward that verifies each slot in a group of its own, in which row m - 1 predicts token m (Eq. 7)."""
    # Finished slots take part: the keys and values of all slots are kept from the last verification.
    checked = np.flatnonzero(completion.after_prefix(1))
    given = completion.tokens_SK.ravel()[checked]
    reads = (Read(rows=(checked - 1).tolist(), given=given.tolist()),) if len(checked) else ()
    return completion.forward("verify", range(len(completion.slots)), completion.tokens_SK, reads)


def lengthen_prefixes(completion: Completion, readouts: Sequence[Readout], tau_token: float) -> None:
    """Lengthens the valid prefixes by the tokens that exceed tau_token (Eq. 7)."""
    # Valid tokens are not checked again. The token after them is accepted whatever its probability: it was predicted
    # with the whole prefix in sight, and without it a round might not lengthen anything.
    checked_SK = completion.after_prefix(1)
    passed_SK = ~checked_SK
    if checked_SK.any():
        probs = readouts[0].given
        assert probs is not None
        passed_SK[checked_SK] = probs > tau_token
    completion.valid_S = [accepted_prefix(passed_K) for passed_K in passed_SK]
