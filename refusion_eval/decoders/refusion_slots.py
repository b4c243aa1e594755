"""The rules of ReFusion (arXiv 2512.13586, section 4.2, Eq. 4-8), the settings, and the state of one decoding.

Attention is causal in the order in which tokens were accepted; position ids say where a token stands in the text. Where
paper and public release differ, the release's rule is followed (the published weights were tuned with it) except for
its defects, which `release_compatible` brings back.

A slot is named by the response index of its first position. Arrays are [S slots, K tokens a slot].
"""

from collections.abc import Sequence
from dataclasses import field, replace
from itertools import count
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from refusion_eval.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, added_setting, settings_class
from refusion_eval.decoders import above_or_best, accepted_prefix, check_mask_id, first_eos
from refusion_eval.errors import ConfigError
from refusion_eval.types import (
    Commit,
    Forward,
    ProbArray,
    Read,
    Readout,
    Response,
    StopReason,
    StopRule,
    TokenArray,
    Trace,
    causal,
    draw_key,
    groups,
)

BoolArray = npt.NDArray[np.bool_]
Order = Literal["confidence", "left_to_right", "random"]
CompletionRule = Literal["paper", "verifier"]


@settings_class("refusion")
class RefusionSettings:
    """Settings of the ReFusion decoder, named as in Table 6 of the paper.

    Attributes:
        gen_length: most tokens of the response, >= 1. Positions are decoded in whole slots; the surplus is cut.
        slot_size: k, consecutive positions that are drafted and verified together, >= 1.
        block_size: b, consecutive positions decoded before the next block begins; a multiple of k (App. C.4: b >= k).
        tau_slot: a masked slot is selected when its certainty exceeds this; the best one always is.
        tau_token: a drafted token is accepted when its probability given the tokens before it exceeds this.
        temperature: temperature of the drafts (Eq. 4); thresholds always see untempered probabilities.
        seed: seed of the random draws.
        mask_id: the mask token.
        eos_ids: tokens that end the response; if there are none, it always has `gen_length` tokens.
        left_to_right: `order="left_to_right"` by its former name.
        recompute_kv: after each iteration compute the tokens that became final once more, as one sequence, and keep
            these keys and values (section 5.5, Table 4). Fused, this costs next to nothing: measure with `fuse=False`.
        verify_independently: begin a completion by verifying every slot on its own, as Eq. 7 is written, instead of
            keeping the prefixes that the global verification found.
        release_compatible: reproduce the defects of the public release (docs/explanations/paper-and-release.md).
        fuse: let verifications carry likely next plans and predictions: the same tokens in fewer forwards. False is the
            paper's algorithm, and the default of commands and of Python's interface. None, which `Settings` have where
            nothing is given, is True, or False with `release_compatible`, which reproduces numbers of forwards.
        free_rows, row_cost: how the time of a forward grows with its rows (see `ForwardCost`), which decides how many
            branches a forward carries; None takes the values shipped for the device, or those that `tune` measured.
        order: how slots are selected: by "confidence" as above, or one at a time, "left_to_right" or at "random"
            (from the seed; compared in arXiv 2602.12586). Slots are drafted and verified whole in every order.
        serial: decode one token a forward from left to right, without drafts, thresholds and blocks: the paper's
            left-to-right point, which has the speed of an autoregressive model (Figure 1).
        completion: what follows the first rejected draft of a slot. "paper" (Eq. 7-8): the rest of the slot is drafted
            anew, and the first of these drafts is accepted whatever its probability. "verifier": the token that the
            verification itself chooses there is kept, as in speculative decoding, and only the tokens after it are
            drafted anew; drafts that are the verifier's own choice pass too. At a temperature above 0 a draft passes
            only if it is the verifier's sample (docs/explanations/verifier.md).
        thought_budget: tokens after which a thought that goes on is ended, and the answer decoded in a part of its own
            (see `refusion_eval.decoders.thoughts`). None ends no thought, nor does a budget of `gen_length`.
        stop_rule: gets the tokens decoded without a gap from the start; decoding ends when it returns True.
    """

    gen_length: PositiveInt = 512
    slot_size: PositiveInt = 32
    block_size: PositiveInt = 128
    tau_slot: Fraction = 0.9
    tau_token: Fraction = 0.4
    temperature: NonNegativeFloat = 0.0
    seed: NonNegativeInt = 0
    mask_id: NonNegativeInt
    eos_ids: tuple[NonNegativeInt, ...] = ()
    left_to_right: bool = False
    recompute_kv: bool = False
    verify_independently: bool = False
    release_compatible: bool = False
    fuse: bool | None = None
    free_rows: NonNegativeInt | None = None
    row_cost: NonNegativeFloat | None = None
    order: Order = added_setting("confidence")
    serial: bool = added_setting(False)
    completion: CompletionRule = added_setting("paper")
    thought_budget: NonNegativeInt | None = added_setting(None)
    stop_rule: StopRule | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.block_size < self.slot_size or self.block_size % self.slot_size:
            multiple = max(1, round(self.block_size / self.slot_size)) * self.slot_size
            sizes = f"block_size is {self.block_size} and slot_size {self.slot_size}"
            raise ConfigError(f"refusion: {sizes}; set block_size to whole slots (App. C.4), for example {multiple}")
        check_mask_id("refusion", self.mask_id, self.eos_ids)
        if self.left_to_right and self.order == "random":
            raise ConfigError("refusion: left_to_right=true and order=random exclude each other; give order alone")
        if self.serial:
            without_meaning = ("recompute_kv", "verify_independently", "left_to_right", "fuse")
            given = [f"{name}=true" for name in without_meaning if getattr(self, name)]
            given += [f"order={self.order}"] if self.order != "confidence" else []
            given += ["completion=verifier"] if self.keeps_verifier else []
            if given:
                raise ConfigError(f"refusion: serial=true decodes token by token, so leave out {', '.join(given)}")

        if self.release_compatible and self.keeps_verifier:
            raise ConfigError(
                "refusion: the release completes slots by the paper's rule; leave out completion=verifier"
            )

    @property
    def keeps_verifier(self) -> bool:
        return self.completion == "verifier"

    @property
    def num_positions(self) -> int:  # after the prompt, that decoding may touch: whole slots
        return -(-self.gen_length // self.slot_size) * self.slot_size

    @property
    def fused(self) -> bool:
        # The forward counts of the release are part of what `release_compatible` reproduces.
        return not (self.release_compatible or self.serial) if self.fuse is None else self.fuse

    @property
    def slot_order(self) -> Order:
        # The digest of every record contains `left_to_right`, so the name stays beside `order`.
        return "left_to_right" if self.left_to_right else self.order

    @property
    def without_effect(self) -> dict[str, str]:
        """Settings that change nothing beside the others, each with the reason and the settings that give it effect."""
        k, order = self.slot_size, self.slot_order
        reasons: dict[str, str] = {}
        if self.serial:
            serial = "serial=true decodes without thresholds; add `settings: {serial: false}`"
            return dict.fromkeys(("tau_slot", "tau_token"), serial)
        if order != "confidence":
            certain = "{left_to_right: false, order: confidence}"
            reasons["tau_slot"] = f"slots are selected by order={order}; add `settings: {certain}`"
        elif self.block_size == k:
            smaller = max(1, k // 4)
            sizes = f"{{slot_size: {smaller}, block_size: {8 * smaller}}}"
            reasons["tau_slot"] = f"a block holds one slot (slot_size = block_size = {k}); add `settings: {sizes}`"
        if k == 1:  # the first token of a slot is accepted in any case
            reasons["tau_token"] = "a slot holds one token; add `settings: {slot_size: 4, block_size: 32}`"
        elif self.keeps_verifier and self.temperature > 0:
            reasons["tau_token"] = f"completion={self.completion} samples exactly; add `settings: {{temperature: 0}}`"
        return reasons

    @property
    def is_random(self) -> bool:
        return self.temperature > 0 or self.order == "random"

    @property
    def suppress(self) -> tuple[int, ...]:
        # The release lets the mask token through, which would then stand in the text.
        return () if self.release_compatible else (self.mask_id,)

    def text_positions(self, slots: Sequence[int], num_prompt: int = 0) -> list[int]:
        """Response indices of all tokens of some slots, slot after slot; with a prompt, those in the whole text."""
        positions: list[int] = []
        for slot in slots:
            positions += range(num_prompt + slot, num_prompt + slot + self.slot_size)
        return positions


class Rows(NamedTuple):  # that a forward adds to the cache
    tokens: Sequence[int]
    positions: Sequence[int]  # position ids


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

    def rows(self, num_prompt: int) -> Rows:
        return Rows(self.tokens, [num_prompt + position for position in self.positions])


def block_slots(settings: RefusionSettings) -> list[range]:
    k, b, length = settings.slot_size, settings.block_size, settings.num_positions
    if settings.release_compatible:
        length = length // b * b  # the release never decodes what does not fill a block
    return [range(start, min(start + b, length), k) for start in range(0, length, b)]


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
    tokens = drafts.tokens_SK.ravel().tolist()
    kept = num_kept(num_passed, first_eos(tokens, settings.eos_ids), settings.slot_size)
    return final_tokens(drafts.slots, tokens[:kept], settings) if kept else None


def num_kept(num_passed: int, eos: int | None, slot_size: int) -> int:
    """Number of drafts that become final if the first `num_passed` pass and `eos` is the first EOS among all."""
    # Whole slots (Eq. 6): a slot is the unit that training masks, so none is left half final. An EOS ends the response,
    # so that what follows it in its slot need not pass.
    return eos + 1 if eos is not None and eos < num_passed else num_passed // slot_size * slot_size


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


class Text:
    def __init__(self, settings: RefusionSettings, trace: Trace) -> None:
        self.tokens: dict[int, int] = {}  # final ones, by response index
        self.masked: list[int] = []  # slots of the current block that are not final yet, ascending
        self.met_eos = False  # whether the response ends within what is decoded so far
        self._settings = settings
        self._trace = trace

    def add(self, final: Final) -> None:
        if not final.completed:  # a completion reports the tokens of each round
            self._trace.fix(final.positions, final.tokens)
        self.tokens.update(zip(final.positions, final.tokens, strict=True))
        self.masked = masked_after(self.masked, final, self._settings)
        self.met_eos |= final.has_eos

    def stops(self) -> bool:
        rule = self._settings.stop_rule
        return rule is not None and rule(self._gapless())

    def finish(self, reason: StopReason) -> Response:
        if self._settings.release_compatible:  # the release closes the gaps that dropped slots leave
            tokens = [self.tokens[position] for position in sorted(self.tokens)]
        else:
            tokens = self._gapless()[: self._settings.gen_length]
            eos = first_eos(tokens, self._settings.eos_ids)
            if eos is not None:
                tokens = tokens[: eos + 1]
            elif reason == "eos":
                reason = "length"  # the EOS stood in the surplus of the last slot
        self._trace.stop(reason, len(tokens))
        return Response(tuple(tokens), reason)

    def _gapless(self) -> list[int]:
        end = next(position for position in count() if position not in self.tokens)
        return [self.tokens[position] for position in range(end)]


class Completion:
    """Slots, ascending, that are completed independently of each other (Eq. 7-8): `tokens_SK`, valid or drafted."""

    def __init__(
        self, drafts: Drafts, verdicts_SK: Verdicts, num_prompt: int, settings: RefusionSettings, trace: Trace
    ) -> None:
        self.slots = drafts.slots
        self.tokens_SK, self.probs_SK = drafts.tokens_SK.copy(), drafts.probs_SK.copy()
        # How many tokens of each slot are valid, from its first one. A prefix that passed the global verification saw
        # more than its own slot; the release keeps it, and Eq. 7 as written verifies anew (`verify_independently`).
        self.valid_S = [0 if settings.verify_independently else accepted_prefix(row) for row in verdicts_SK.passed]
        # Slot row -> column of the verifier's token whose keys and values no forward has computed yet.
        self._uncomputed: dict[int, int] = {}
        self._num_reported_S = [0] * len(drafts.slots)
        self._num_prompt = num_prompt
        self._settings = settings
        self._trace = trace
        self._keep_verifiers(verdicts_SK.tokens)

    @property
    def unfinished(self) -> list[int]:  # rows of slots
        return [row for row, valid in enumerate(self.valid_S) if valid < self._settings.slot_size]

    def after_prefix(self, skipped: int = 0) -> BoolArray:
        """Which tokens stand after the valid prefix of their slot and the `skipped` tokens that follow it, [S, K]."""
        return np.arange(self._settings.slot_size) >= np.array(self.valid_S)[:, None] + skipped

    def _checked(self) -> BoolArray:
        """Which tokens a verification judges, [S, K]; no row predicts the first token of a slot."""
        # Valid tokens are not checked again. By the paper's rule the token after them is accepted whatever its
        # probability: it was predicted with the whole prefix in sight, and without it a round might not lengthen
        # anything. The verifier's own token lengthens each round.
        if not self._settings.keeps_verifier:
            return self.after_prefix(1)
        return self.after_prefix() & (np.arange(self._settings.slot_size) > 0)

    def lengthen(self, readouts: Sequence[Readout]) -> None:
        """Lengthens the valid prefixes by the tokens that pass their verification (Eq. 7)."""
        checked_SK = self._checked()
        passed_SK, tokens_SK = ~checked_SK, self.tokens_SK.copy()
        if checked_SK.any():
            passed_SK[checked_SK], tokens_SK[checked_SK] = judged(tokens_SK[checked_SK], readouts[0], self._settings)
        self.valid_S = [accepted_prefix(passed_K) for passed_K in passed_SK]
        self._keep_verifiers(tokens_SK)

    def _keep_verifiers(self, tokens_SK: TokenArray) -> None:
        """Puts the verifier's tokens after the valid prefixes, which they lengthen; nothing by the paper's rule."""
        self._uncomputed = {}
        if not self._settings.keeps_verifier:
            return
        for row, valid in enumerate(self.valid_S):
            if 0 < valid < self._settings.slot_size:
                self.tokens_SK[row, valid] = tokens_SK[row, valid]
                self.valid_S[row] += 1
                self._uncomputed[row] = valid

    def uncomputed_rows(self) -> list[int]:
        """Rows of the last verification that hold another token than the one that became final there."""
        return [row * self._settings.slot_size + column for row, column in self._uncomputed.items()]

    def predict(self, rows: Sequence[int], readout: Readout) -> None:
        """Puts predicted tokens after the valid prefixes of some slots, ascending."""
        start, k = 0, self._settings.slot_size
        for row in rows:
            valid = self.valid_S[row]
            end = start + k - valid
            self.tokens_SK[row, valid:], self.probs_SK[row, valid:] = (
                readout.tokens[start:end],
                readout.probs[start:end],
            )
            start = end

    def prediction(self, rows: Sequence[int]) -> Forward:
        """The forward that drafts the likeliest tokens after the valid prefix of some slots (Eq. 8)."""
        masked_SK = self.after_prefix()[rows]
        tokens_SK = np.where(masked_SK, self._settings.mask_id, self.tokens_SK[rows])
        read = Read(rows=np.flatnonzero(masked_SK).tolist(), suppress=self._settings.suppress)
        positions = self._settings.text_positions([self.slots[row] for row in rows], self._num_prompt)
        if self._settings.keeps_verifier:  # by the paper's rule not sampled at any temperature, as in the release
            read = plan_read(read.rows, [positions[row] for row in read.rows], self._settings, 0)
        return self._forward("predict", positions, tokens_SK, (read,))

    def verification(self) -> Forward:
        """The forward that verifies each slot in a group of its own, in which row m - 1 predicts token m (Eq. 7)."""
        # Finished slots take part: the keys and values of all slots are kept from the last verification.
        checked = np.flatnonzero(self._checked())
        given = self.tokens_SK.ravel()[checked].tolist()
        positions = self._settings.text_positions(self.slots, self._num_prompt)
        reads = (verify_read((checked - 1).tolist(), given, positions, self._settings),) if given else ()
        return self._forward("verify", positions, self.tokens_SK, reads)

    def _forward(self, kind: str, positions: list[int], tokens_SK: TokenArray, reads: tuple[Read, ...]) -> Forward:
        """A forward of some slots side by side, none of which sees another."""
        # All share the cache of what is final, so no copy of it is needed for each slot.
        attention = groups([self._settings.slot_size] * len(tokens_SK))
        return Forward(tokens_SK.ravel().tolist(), positions, attention, reads, kind=kind)

    def record_drafts(self) -> None:
        cells_SK = self.after_prefix()
        positions_SK = np.add.outer(self.slots, range(self._settings.slot_size))
        self._trace.draft(positions_SK[cells_SK].tolist(), self.tokens_SK[cells_SK].tolist())

    def end_round(self) -> bool:
        """Drops the slots after the first valid EOS and reports what became final; True if all slots are finished."""
        # A slot that meets EOS counts as valid to its end. An earlier slot may still meet EOS in a later round.
        positions, tokens = [], []
        for row, (slot, valid) in enumerate(zip(self.slots, self.valid_S, strict=True)):
            final = final_tokens([slot], self.tokens_SK[row, :valid].tolist(), self._settings)
            positions += final.positions[self._num_reported_S[row] :]
            tokens += final.tokens[self._num_reported_S[row] :]
            self._num_reported_S[row] = len(final.tokens)
            if final.has_eos:
                self.slots = self.slots[: row + 1]
                self.tokens_SK, self.probs_SK = self.tokens_SK[: row + 1], self.probs_SK[: row + 1]
                self.valid_S = [*self.valid_S[:row], self._settings.slot_size]
                break
        if tokens:
            self._trace.fix(positions, tokens)
        return not self.unfinished

    def final(self) -> Final:  # if all tokens are valid as they stand
        return final_tokens(self.slots, self.tokens_SK.ravel().tolist(), self._settings, completed=True)


def plan(
    context: Rows, masked: Sequence[int], num_prompt: int, settings: RefusionSettings, iteration: int, commit: Commit
) -> Forward:
    """The forward that drafts every masked slot of the block (Eq. 4), after rows that are to enter the cache."""
    # Causal, as in training (section 4.3): clean slots come first, in any order, and the masked ones follow.
    start = len(context.tokens)
    positions = settings.text_positions(masked, num_prompt)
    read = plan_read(range(start, start + len(positions)), positions, settings, iteration)
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
    trace.draft(settings.text_positions(drafts.slots), drafts.tokens_SK.ravel().tolist())
    return drafts


def verification(drafts: Drafts, num_prompt: int, settings: RefusionSettings, commit: Commit) -> Forward:
    """The forward of all drafts as one causal sequence, in which row m - 1 predicts token m (Eq. 6)."""
    # The first token of a slot is not read: its probability is the certainty that selected the slot, and tau_token does
    # not apply to it.
    tokens = drafts.tokens_SK.ravel().tolist()
    rows = [row for row in range(len(tokens) - 1) if (row + 1) % settings.slot_size]
    positions = settings.text_positions(drafts.slots, num_prompt)
    reads = (verify_read(rows, [tokens[row + 1] for row in rows], positions, settings),) if rows else ()
    return Forward(tokens, positions, causal(len(tokens)), reads, commit, "verify")


def verify_read(
    rows: Sequence[int], given: Sequence[int], positions: Sequence[int], settings: RefusionSettings
) -> Read:
    """Reads how likely the given tokens are where row m - 1 predicts token m, and, if it is kept, the likeliest one.

    The positions are those of all rows of the forward.
    """
    if not settings.keeps_verifier:
        return Read(rows=rows, given=given)
    return replace(plan_read(rows, [positions[row] + 1 for row in rows], settings, 0), given=given)


def judged(tokens_N: TokenArray, readout: Readout, settings: RefusionSettings) -> Verdicts:
    """Which tokens pass their verification, and the verifier's own."""
    assert readout.given is not None
    # tau_token is compared with untempered probabilities, whatever temperature the drafts were sampled with.
    passed_N = readout.given > settings.tau_token
    if settings.keeps_verifier:
        is_own_N = readout.tokens == tokens_N
        passed_N = is_own_N if settings.temperature > 0 else passed_N | is_own_N
    return Verdicts(passed_N, readout.tokens)


def judged_drafts(drafts: Drafts, readouts: Sequence[Readout], settings: RefusionSettings) -> Verdicts:
    """What the global verification says of all drafts (Eq. 6), [S, K]; the first one of a slot always passes."""
    passed_SK, tokens_SK = np.ones(drafts.tokens_SK.shape, dtype=bool), drafts.tokens_SK.copy()
    if settings.slot_size > 1:
        shape = (-1, settings.slot_size - 1)
        verdicts = judged(tokens_SK[:, 1:].ravel(), readouts[0], settings)
        passed_SK[:, 1:], tokens_SK[:, 1:] = verdicts.passed.reshape(shape), verdicts.tokens.reshape(shape)
    return Verdicts(passed_SK, tokens_SK)
