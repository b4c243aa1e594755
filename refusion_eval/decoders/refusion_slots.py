"""The choices of ReFusion (arXiv 2512.13586, section 4.2, Eq. 4-6): which slots and tokens, and the forwards they need.

Attention is causal in the order in which tokens were accepted; position ids say where a token stands in the text. Where
paper and public release differ, the release's rule is followed (the published weights were tuned with it) except for
its defects, which `release_compatible` brings back.

A slot is named by the response index of its first position. Arrays are [S slots, K tokens a slot]. If the last slot is
short, arrays are filled up behind its tokens, which is at their end, because slots ascend; `in_slots` and `flat` do it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from refusion_eval.decoders import above_or_best, accepted_prefix, first_eos
from refusion_eval.decoders.refusion_settings import RefusionSettings
from refusion_eval.types import (
    HOLE,
    Commit,
    Forward,
    ProbArray,
    Read,
    Readout,
    TokenArray,
    Trace,
    causal,
    draw_key,
    groups,
)

BoolArray = npt.NDArray[np.bool_]


PADDING = -1  # no token has this id


def in_slots(values_N: npt.NDArray[Any], slot_size: int, padding: int) -> npt.NDArray[Any]:
    """The values of all tokens of some slots, ascending, [S, K]."""
    return np.append(values_N, np.full(-len(values_N) % slot_size, padding, values_N.dtype)).reshape(-1, slot_size)


def flat(values_SK: npt.NDArray[Any], slots: Sequence[int], settings: RefusionSettings) -> npt.NDArray[Any]:
    """The values of the tokens of these slots, without padding, [N]."""
    return values_SK.ravel() if settings.whole_slots else values_SK.ravel()[: settings.num_tokens(slots)]


def are_tokens(slots: Sequence[int], settings: RefusionSettings) -> BoolArray:
    """Which places of arrays hold tokens of these slots, [S, K]."""
    return np.add.outer(slots, np.arange(settings.slot_size)) < settings.num_positions


class Rows(NamedTuple):  # that a forward adds to the cache
    tokens: Sequence[int]
    positions: Sequence[int]  # position ids


def around(prompt: Sequence[int]) -> tuple[Rows, int]:
    """What is known, in causal order at its true positions, and the position of the first token that is not."""
    # A suffix stands in front of the masks, as clean slots do in training: these are shuffled, and all masks follow.
    known = [place for place, token in enumerate(prompt) if token != HOLE]
    start = prompt.index(HOLE) if HOLE in prompt else len(prompt)
    return Rows([prompt[place] for place in known], known), start


class Drafts(NamedTuple):
    """Selected slots, ascending, and the tokens drafted for them."""

    slots: list[int]
    tokens_SK: TokenArray
    probs_SK: ProbArray  # of each token when it was drafted


class Verdicts(NamedTuple):
    """What a verification says of drafts; `tokens` are its own choices, and drafts where it does not choose."""

    passed: BoolArray
    tokens: TokenArray


class Final(NamedTuple):
    """Tokens that become final in one iteration; they are the first rows of its last verification."""

    slots: list[int]  # ascending; the slots after the one that meets EOS are dropped
    tokens: list[int]  # slot after slot, up to and including the first EOS
    positions: list[int]  # response index of each token
    has_eos: bool  # whether the last token is an EOS
    completed: bool  # whether the slots were completed independently of each other instead of verified together

    def rows(self, start: int) -> Rows:
        return Rows(self.tokens, [start + position for position in self.positions])

    def changes_keys(self, settings: RefusionSettings) -> bool:
        """Whether computing the tokens anew changes their keys: others than completed slots see each other."""
        return settings.recompute_kv and self.completed and len(self.slots) > 1


def final_tokens(slots: list[int], tokens: list[int], settings: RefusionSettings, completed: bool = False) -> Final:
    """The tokens that become final if these, the first of some slots, are valid: all up to an EOS."""
    eos = first_eos(tokens, settings.eos_ids)
    if eos is not None:
        tokens = tokens[: eos + 1]
    slots = slots[: -(-len(tokens) // settings.slot_size)]
    positions = settings.text_positions(slots)[: len(tokens)]
    return Final(slots, tokens, positions, eos is not None, completed)


def accepted_drafts(drafts: Drafts, num_passed: int, settings: RefusionSettings) -> Final | None:
    """The drafts that become final if the first `num_passed` pass verification; None if a completion must follow."""
    tokens = flat(drafts.tokens_SK, drafts.slots, settings).tolist()
    kept = num_kept(min(num_passed, len(tokens)), first_eos(tokens, settings.eos_ids), len(tokens), settings.slot_size)
    return final_tokens(drafts.slots, tokens[:kept], settings) if kept else None


def num_kept(num_passed: int, eos: int | None, num_drafts: int, slot_size: int) -> int:
    """Number of drafts that become final if the first `num_passed` pass and `eos` is the first EOS among all."""
    # Whole slots (Eq. 6): a slot is the unit that training masks, so none is left half final. An EOS ends the response,
    # so that what follows it in its slot need not pass.
    if eos is not None and eos < num_passed:
        return eos + 1
    return num_passed if num_passed == num_drafts else num_passed // slot_size * slot_size


def accepted(drafts: Drafts, verdicts_SK: Verdicts, settings: RefusionSettings) -> tuple[Final | None, list[int]]:
    """What becomes final by the global verification, and the rows of it that hold another token than the final one."""
    num_passed = accepted_prefix(verdicts_SK.passed.ravel())
    if not settings.keeps_verifier or num_passed == verdicts_SK.passed.size:
        return accepted_drafts(drafts, num_passed, settings), []
    tokens_SK = drafts.tokens_SK.copy()
    tokens_SK.flat[num_passed] = verdicts_SK.tokens.flat[num_passed]
    return accepted_drafts(drafts._replace(tokens_SK=tokens_SK), num_passed + 1, settings), [num_passed]


def masked_after(masked: Sequence[int], final: Final, settings: RefusionSettings) -> list[int]:
    """The slots that stay masked once tokens are final; those after an EOS are dropped."""
    rest = [slot for slot in masked if slot not in final.slots]
    if not final.has_eos:
        return rest
    # Slots may become final in any order: those before the EOS are still part of the response.
    if final.completed and settings.release_compatible:
        # The release takes the row among the selected slots for an index among the masked ones, and loses text.
        return [slot for slot in rest if slot in masked[: len(final.slots) - 1]]
    return [slot for slot in rest if slot < final.slots[-1]]


def plan(
    context: Rows, masked: Sequence[int], start: int, settings: RefusionSettings, iteration: int, commit: Commit
) -> Forward:
    """The forward that drafts every masked slot of the block (Eq. 4), after rows that are to enter the cache."""
    # Causal, as in training (section 4.3): clean slots come first, in any order, and the masked ones follow.
    num_known = len(context.tokens)
    positions = settings.text_positions(masked, start)
    read = plan_read(range(num_known, num_known + len(positions)), positions, settings, iteration)
    tokens = [*context.tokens, *[settings.mask_id] * len(positions)]
    return Forward(tokens, [*context.positions, *positions], causal(len(tokens)), (read,), commit, "plan")


def plan_read(rows: Sequence[int], positions: Sequence[int], settings: RefusionSettings, iteration: int) -> Read:
    """Reads the draft of each masked position and its probability (Eq. 4); row i predicts its own position."""
    draws: tuple[int, ...] = ()
    if settings.temperature > 0:
        # The verifier's rule draws equal noise for draft and verification, so that they often choose the same token.
        iterations = () if settings.keeps_verifier else (iteration,)
        draws = tuple(draw_key(settings.seed, *iterations, position) for position in positions)
    return Read(rows=rows, suppress=settings.suppress, temperature=settings.temperature, draws=draws)


def select_slots(masked: Sequence[int], readout: Readout, settings: RefusionSettings, trace: Trace) -> Drafts:
    """Selects the slots whose certainty exceeds tau_slot, or the most certain one (Eq. 5); one slot in other orders."""
    k = settings.slot_size
    probs_SK, tokens_SK = in_slots(readout.probs, k, 1), in_slots(readout.tokens, k, PADDING)
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
    trace.draft(settings.text_positions(drafts.slots), flat(drafts.tokens_SK, drafts.slots, settings).tolist())
    return drafts


def verification(
    drafts: Drafts,
    checked_SK: BoolArray,
    sizes: Sequence[int],
    start: int,
    settings: RefusionSettings,
    commit: Commit,
) -> Forward:
    """The forward of drafts in groups of these sizes; row m - 1 predicts token m, if it is to be checked (Eq. 6-7)."""
    checked = np.flatnonzero(checked_SK)
    rows, given = (checked - 1).tolist(), drafts.tokens_SK.ravel()[checked].tolist()
    positions = settings.text_positions(drafts.slots, start)
    read = Read(rows=rows, given=given)
    if settings.keeps_verifier:
        read = replace(plan_read(rows, [positions[row] + 1 for row in rows], settings, 0), given=given)
    tokens = flat(drafts.tokens_SK, drafts.slots, settings).tolist()
    return Forward(tokens, positions, groups(sizes), (read,) if rows else (), commit, "verify")


def judged(
    tokens_SK: TokenArray, checked_SK: BoolArray, readouts: Sequence[Readout], settings: RefusionSettings
) -> Verdicts:
    """What a verification says of the tokens that it checked, [S, K]; all others pass."""
    passed_SK, tokens_SK = ~checked_SK, tokens_SK.copy()
    for readout in readouts:  # none if nothing was checked
        assert readout.given is not None
        # tau_token is compared with untempered probabilities, whatever temperature the drafts were sampled with.
        passed_N = readout.given > settings.tau_token
        if settings.keeps_verifier:
            is_own_N = readout.tokens == tokens_SK[checked_SK]
            passed_N = is_own_N if settings.temperature > 0 else passed_N | is_own_N
        passed_SK[checked_SK], tokens_SK[checked_SK] = passed_N, readout.tokens
    return Verdicts(passed_SK, tokens_SK)
