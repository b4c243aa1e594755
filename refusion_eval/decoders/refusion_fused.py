"""ReFusion with fused forwards: the tokens of `refusion`, in fewer forwards.

A verification carries speculative branches (see `speculation`): the plan that follows it under each likely outcome, and
the predictions that follow if slots have to be completed. When the outcome of a branch comes true, the branch's readout
takes the place of a forward. Slots that have to be refreshed (`recompute_kv`) enter the cache with the next plan.

The decoder `refusion` is this module's `decode`, which leaves the work to the plain algorithm if `fuse` is off.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import numpy as np

from refusion_eval.decoders import refusion
from refusion_eval.decoders.choose import accepted_prefix
from refusion_eval.decoders.decoder import Decoder, Reads, Style
from refusion_eval.decoders.refusion_settings import RefusionSettings
from refusion_eval.decoders.refusion_slots import (
    NO_ROWS,
    Accepted,
    Completed,
    Completion,
    Drafts,
    Rows,
    Text,
    accepted_drafts,
    block_slots,
    masked_after_acceptance,
    masked_after_completion,
    needs_refresh,
)
from refusion_eval.decoders.speculation import (
    Branch,
    Outcome,
    SlotForecast,
    acceptance,
    attach_branches,
    branch_readouts,
    length_chances,
    profitable_branches,
    profitable_lengths,
)
from refusion_eval.trace import Trace
from refusion_eval.types import NOTHING, Commit, Decoding, Forward, Read, Readout, Segment


def decode(prompt: Sequence[int], settings: RefusionSettings, trace: Trace) -> Decoding:
    """Decodes one prompt, with fused forwards or by the paper's algorithm, as the settings say.

    Args:
        prompt: token ids, at least one.
        settings: settings of the decoder.
        trace: receives the events.
    """
    return (_decode_fused if settings.fused else refusion.decode)(prompt, settings, trace)


class _PlanContext(NamedTuple):
    """What decides which plan follows a verification, besides the outcome of the verification.

    Attributes:
        masked: masked slots of the block.
        next_slots: the slots of the next block; empty after the last one.
        met_eos: whether the response ends in what is decoded so far.
        iteration: number of the next plan.
        num_prompt: tokens of the prompt.
    """

    masked: Sequence[int]
    next_slots: Sequence[int]
    met_eos: bool
    iteration: int
    num_prompt: int


def _decode_fused(prompt: Sequence[int], settings: RefusionSettings, trace: Trace) -> Decoding:
    num_prompt, iterations = len(prompt), count()
    text, blocks = Text(num_prompt, settings, trace), block_slots(settings)
    context, commit = Rows(list(prompt), range(num_prompt)), NOTHING
    ready: Mapping[Outcome, Readout] = {}
    for slots, next_slots in zip(blocks, [*blocks[1:], range(0)], strict=True):
        text.masked = list(slots)
        while text.masked:
            iteration = next(iterations)
            readout = None if context.tokens else ready.get(_plan_outcome(len(commit.rows), text.masked))
            if readout is None:
                (readout,) = yield refusion.plan(context, text.masked, num_prompt, settings, iteration, commit)
                commit = Commit(range(len(context.tokens)))
            context = NO_ROWS
            drafts = refusion.select_slots(text.masked, readout, settings, trace)
            next_plan = _PlanContext(text.masked, next_slots, text.met_eos, iteration + 1, num_prompt)
            forward = refusion.verification(drafts, num_prompt, settings, commit)
            forward, branches = _with_branches(forward, drafts, next_plan, settings)
            readouts = yield forward
            ready = branch_readouts(branches, readouts)
            passed_SK = refusion.passed_drafts(drafts, readouts, settings)
            accepted = accepted_drafts(drafts, accepted_prefix(passed_SK.ravel()), settings)
            if accepted is not None:
                text.accept(drafts, accepted)
                commit = Commit(range(accepted.num_tokens))
            else:
                completion = Completion(drafts, passed_SK, num_prompt, settings, trace)
                ready = yield from _complete(completion, drafts, next_plan, ready, settings)
                rows = text.take_over(drafts, completion.completed())
                commit = Commit(range(len(rows.tokens)))
                if needs_refresh(completion.completed(), settings):
                    context, commit = rows, NOTHING
            if text.stops():
                return text.finish("stop_string")
        if text.met_eos:
            return text.finish("eos")
    return text.finish("length")


def _complete(
    completion: Completion,
    drafts: Drafts,
    next_plan: _PlanContext,
    ready: Mapping[Outcome, Readout],
    settings: RefusionSettings,
) -> Generator[Forward, tuple[Readout, ...], Mapping[Outcome, Readout]]:
    """As the plain completion, with branches on its verifications; returns the readouts of the last branches."""
    if settings.verify_independently:
        ready = yield from _verify_groups(completion, drafts, next_plan, settings)
    while not completion.end_round():
        missing = []
        for row in completion.unfinished:
            known = ready.get(_prediction_outcome(completion.slots[row], completion.valid_S[row]))
            if known is None:
                missing.append(row)
            else:
                completion.draft(row, known.tokens, known.probs)
        if missing:
            (readout,) = yield refusion.prediction(completion, missing, settings)
            completion.predict(missing, readout)
        completion.record_drafts()
        ready = yield from _verify_groups(completion, drafts, next_plan, settings)
    return ready


def _verify_groups(
    completion: Completion, drafts: Drafts, next_plan: _PlanContext, settings: RefusionSettings
) -> Generator[Forward, tuple[Readout, ...], Mapping[Outcome, Readout]]:
    branches = _branches_of_round(completion, drafts, next_plan, settings)
    readouts = yield attach_branches(refusion.group_verification(completion), branches, settings.mask_id)
    refusion.lengthen_prefixes(completion, readouts, settings.tau_token)
    return branch_readouts(branches, readouts)


def _plan_outcome(num_kept: int, masked: Sequence[int]) -> Outcome:
    return ("plan", num_kept, *masked)


def _prediction_outcome(slot: int, length: int) -> Outcome:
    return ("prediction", slot, length)


def _plan_branch(
    num_kept: int, masked: Sequence[int], met_eos: bool, next_plan: _PlanContext, settings: RefusionSettings
) -> Branch | None:
    """The next plan if the first `num_kept` rows of a verification stay; None if decoding then ends."""
    if not masked and not met_eos:
        masked = next_plan.next_slots
    if not masked:
        return None
    positions = [next_plan.num_prompt + position for position in settings.response_positions(masked)]
    read = refusion.plan_read((), positions, settings, next_plan.iteration)
    return Branch(_plan_outcome(num_kept, masked), (0, num_kept), positions, read)


def _prediction_branch(slot: int, length: int, first_row: int, num_prompt: int, settings: RefusionSettings) -> Branch:
    """The masks after the first `length` tokens of a slot whose rows begin at `first_row` of the verification."""
    positions = range(num_prompt + slot + length, num_prompt + slot + settings.slot_size)
    read = Read(rows=(), suppress=settings.suppress)
    return Branch(_prediction_outcome(slot, length), (first_row, first_row + length), positions, read)


def _with_branches(
    forward: Forward, drafts: Drafts, next_plan: _PlanContext, settings: RefusionSettings
) -> tuple[Forward, list[Branch]]:
    """A global verification with the branches that pay, and these branches."""
    plans = profitable_branches(_next_plans(drafts, next_plan, settings), settings.forward_cost, len(forward.tokens))
    num_rows = len(forward.tokens) + sum(len(branch.positions) for branch in plans)
    forward, predictions = _first_predictions(forward, drafts, next_plan.num_prompt, num_rows, settings)
    branches = [*plans, *predictions]
    return attach_branches(forward, branches, settings.mask_id), branches


def _next_plans(drafts: Drafts, next_plan: _PlanContext, settings: RefusionSettings) -> list[tuple[float, Branch]]:
    """The plans that may follow a global verification, each with its chance."""
    accept_SK = acceptance(drafts.probs_SK, settings.tau_token)
    accept_SK[:, 0] = 1
    chances: dict[Accepted, float] = {}
    for num_passed, chance in enumerate(length_chances(accept_SK.ravel()).tolist()):
        accepted = accepted_drafts(drafts, num_passed, settings)
        if accepted is not None:
            chances[accepted] = chances.get(accepted, 0.0) + chance
    plans = []
    for accepted, chance in chances.items():
        masked = masked_after_acceptance(next_plan.masked, drafts.slots, accepted, settings.slot_size)
        met_eos = next_plan.met_eos or accepted.has_eos
        branch = _plan_branch(accepted.num_tokens, masked, met_eos, next_plan, settings)
        if branch is not None:
            plans.append((chance, branch))
    return plans


def _first_predictions(
    forward: Forward, drafts: Drafts, num_prompt: int, num_rows: int, settings: RefusionSettings
) -> tuple[Forward, list[Branch]]:
    """Adds to a global verification the predictions that pay in case not even its first slot is accepted.

    The first slot sees no other draft, so its rows in the verification serve. The other slots need rows of their own,
    which see no other draft either.

    Args:
        forward: the global verification of the drafts.
        drafts: the selected slots.
        num_prompt: tokens of the prompt.
        num_rows: rows of the forward, with the branches attached so far.
        settings: settings of the decoder.

    Returns:
        The forward with the copied slots, and the branches to attach to it.
    """
    if settings.verify_independently:  # the completion then begins with a verification of its own
        return forward, []
    k = settings.slot_size
    slots = zip(drafts.tokens_SK.tolist(), acceptance(drafts.probs_SK, settings.tau_token), strict=True)
    forecasts = [SlotForecast.estimate(tokens_K, accept_K, 0, settings.eos_ids) for tokens_K, accept_K in slots]
    # If the first slot is finished, no completion follows.
    forecasts = [replace(forecasts[0], finished=0.0), *(replace(slot, copied_rows=k) for slot in forecasts[1:])]
    branches: list[Branch] = []
    for row, lengths in enumerate(profitable_lengths(forecasts, k, settings.forward_cost, num_rows)):
        slot, first_row = drafts.slots[row], 0
        if row > 0 and lengths:
            first_row = len(forward.tokens)
            forward = replace(
                forward,
                tokens=[*forward.tokens, *drafts.tokens_SK[row].tolist()],
                positions=[*forward.positions, *range(num_prompt + slot, num_prompt + slot + k)],
                attention=(*forward.attention, Segment(k)),
            )
        branches += [_prediction_branch(slot, length, first_row, num_prompt, settings) for length in lengths]
    return forward, branches


def _branches_of_round(
    completion: Completion, drafts: Drafts, next_plan: _PlanContext, settings: RefusionSettings
) -> list[Branch]:
    """The branches that pay on a verification of groups: the plan if all slots finish now, else next predictions."""
    k, cost, unfinished = settings.slot_size, settings.forward_cost, completion.unfinished
    accept_SK = acceptance(completion.probs_SK, settings.tau_token)
    forecasts = [
        SlotForecast.estimate(
            completion.tokens_SK[row].tolist(), accept_SK[row], completion.valid_S[row], settings.eos_ids
        )
        for row in unfinished
    ]
    branches: list[Branch] = []
    num_rows = len(completion.slots) * k
    plan = _plan_after_completion(completion.completed(), drafts, next_plan, settings)
    if plan is not None:
        chance = float(np.prod([slot.finished for slot in forecasts]))
        branches = profitable_branches([(chance, plan)], cost, num_rows)
        num_rows += sum(len(branch.positions) for branch in branches)
    if forecasts:
        for row, lengths in zip(unfinished, profitable_lengths(forecasts, k, cost, num_rows), strict=True):
            slot = completion.slots[row]
            branches += [
                _prediction_branch(slot, length, row * k, next_plan.num_prompt, settings) for length in lengths
            ]
    return branches


def _plan_after_completion(
    completed: Completed, drafts: Drafts, next_plan: _PlanContext, settings: RefusionSettings
) -> Branch | None:
    """The plan that follows if a completion ends like this; slots that need a refresh cannot carry it."""
    if needs_refresh(completed, settings):
        return None
    masked = masked_after_completion(next_plan.masked, drafts.slots, completed, settings)
    met_eos = next_plan.met_eos or completed.eos_row is not None
    return _plan_branch(len(completed.tokens), masked, met_eos, next_plan, settings)


DECODERS = {
    "refusion": Decoder(
        decode,
        RefusionSettings,
        label="ReFusion",
        reads=Reads("causal", masked="own", clean="next"),
        fits=("masked", "refusion"),
        style=Style("#0072B2", "o", "-", order=0),
    )
}
