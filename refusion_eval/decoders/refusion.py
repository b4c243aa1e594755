"""ReFusion (arXiv 2512.13586): plans slots, verifies their drafts, and completes what was rejected.

`refusion_slots` has the rules. With `fuse=False` this is the paper's algorithm. Fused, it makes the same tokens in
fewer forwards: a verification carries speculative branches, which are the plan that follows it under each likely
outcome, and the predictions that follow if slots have to be completed. Attention is causal, so masks after the drafts
cannot change what is read of the drafts, and each branch sees only the rows that are accepted under its outcome. If
that outcome comes true, the readout of the branch is exactly that of the forward that it saves. Only cost decides how
many branches are attached. A slot under completion has k rows; a length is how many of its tokens are valid.
"""

import math
from collections import defaultdict
from collections.abc import Container, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from refusion_eval.decoders import Decoder, Reads, Style, first_eos
from refusion_eval.decoders import refusion_slots as rules
from refusion_eval.decoders.refusion_slots import Completion, Drafts, Final, RefusionSettings, Rows, Text
from refusion_eval.types import NOTHING, Commit, Decoding, Forward, ProbArray, Read, Readout, Segment, Trace, causal

MAX_LENGTHS = 8  # outcomes that are considered for one slot: bounds the work on the host, whatever rows cost

OutcomeKey = tuple[object, ...]
T = TypeVar("T")
Steps = Generator[Forward, tuple[Readout, ...], T]  # a part of a decoding


class Ready(NamedTuple):
    """What branches have read: whether it is sampled -> what was read, and for each outcome its part of that."""

    readouts: Mapping[bool, Readout] = MappingProxyType({})
    places: Mapping[OutcomeKey, tuple[bool, int, int]] = MappingProxyType({})

    def of(self, *outcome: object) -> Readout | None:
        if outcome not in self.places:
            return None
        is_sampled, first, end = self.places[outcome]
        readout = self.readouts[is_sampled]
        return Readout(readout.tokens[first:end], readout.probs[first:end])


def decode(prompt: Sequence[int], settings: RefusionSettings, trace: Trace) -> Decoding:
    """Decodes one prompt: in each block plans and infills until none of its slots is masked; or token by token."""
    if settings.serial:
        return (yield from _decode_serial(prompt, settings, trace))
    num_prompt, iterations = len(prompt), count()
    text, blocks = Text(settings, trace), rules.block_slots(settings)
    # The first plan also carries the prompt, which is all of that forward that stays in the cache.
    context, commit = Rows(list(prompt), range(num_prompt)), NOTHING
    ready = Ready()  # of the last verification; nothing unless fused
    for slots, next_slots in zip(blocks, [*blocks, range(0)][1:], strict=True):
        text.masked = list(slots)
        while text.masked:
            number = next(iterations)
            # A plan that was read in advance saw neither the prompt nor rows that are computed once more.
            readout = None if context.tokens else ready.of("plan", len(commit.rows), *text.masked)
            if readout is None:
                (readout,) = yield rules.plan(context, text.masked, num_prompt, settings, number, commit)
                commit = Commit(range(len(context.tokens)))
            context = Rows((), ())
            drafts = rules.select_slots(text.masked, readout, settings, trace)
            step = _Iteration(number, drafts, text.masked, next_slots, text.met_eos, num_prompt, settings)
            readouts, ready = yield from _with_branches(*step.verification(commit), settings)
            verdicts = rules.judged_drafts(drafts, readouts, settings)
            final, uncomputed = rules.accepted(drafts, verdicts, settings)
            if final is None:
                completion = Completion(drafts, verdicts, num_prompt, settings, trace)
                ready = yield from _complete(completion, step, ready)
                final, uncomputed = completion.final(), completion.uncomputed_rows()
            text.add(final)
            commit = Commit(range(len(final.tokens)))
            # Completed slots did not see each other, so their keys and values are not those of one sequence. The paper
            # keeps them all the same (section 5.5, Table 4). With `recompute_kv` the rows of one more forward enter the
            # cache instead of those of the verification. The paper makes it also where it changes nothing: ARC-C takes
            # 1.16 times as long, though its answers of two tokens end in the only slot of their only iteration.
            if settings.recompute_kv and not settings.fused:
                yield Forward(*final.rows(num_prompt), causal(len(final.tokens)), (), kind="refresh")
            elif _changes_keys(final, settings):  # the next plan computes them, at next to no cost
                context, commit = final.rows(num_prompt), NOTHING
            elif rows := [row for row in uncomputed if row < len(final.tokens)]:  # the verifier's own tokens
                tokens, positions = final.rows(num_prompt)
                context = Rows([tokens[row] for row in rows], [positions[row] for row in rows])
                commit = Commit([row for row in commit.rows if row not in rows])
            if text.stops():
                return text.finish("stop_string")
        if text.met_eos:
            return text.finish("eos")
    return text.finish("length")


def _decode_serial(prompt: Sequence[int], settings: RefusionSettings, trace: Trace) -> Decoding:
    """Decodes one prompt token by token from left to right (the left-to-right point of Figure 1): n forwards."""
    text, num_prompt = Text(settings, trace), len(prompt)
    fed, start, commit = list(prompt), 0, NOTHING
    for position in range(settings.gen_length):
        # The first token of a slot is read from a mask, with which each masked slot of the training begins, and every
        # other one from the token before it, as in clean slots.
        tokens = [*fed, settings.mask_id] if position % settings.slot_size == 0 else fed
        read = rules.plan_read((len(tokens) - 1,), (num_prompt + position,), settings, position)
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


def _changes_keys(final: Final, settings: RefusionSettings) -> bool:
    """Whether recomputing final tokens changes their keys and values: others than completed slots see each other."""
    return settings.recompute_kv and final.completed and len(final.slots) > 1


def _complete(completion: Completion, step: "_Iteration", ready: Ready) -> Steps[Ready]:
    """Completes slots independently of each other, in rounds of one prediction and one verification (Eq. 7-8)."""
    # No forward commits anything: each carries its slots whole, as groups that see the cache and themselves only.
    if step.settings.verify_independently:
        ready = yield from _verify_groups(completion, step)
    while not completion.end_round():
        missing = []
        for row in completion.unfinished:
            readout = ready.of("prediction", completion.slots[row], completion.valid_S[row])
            if readout is None:
                missing.append(row)
            else:
                completion.predict([row], readout)
        if missing:
            (readout,) = yield completion.prediction(missing)
            completion.predict(missing, readout)
        completion.record_drafts()
        ready = yield from _verify_groups(completion, step)
    return ready


def _verify_groups(completion: Completion, step: "_Iteration") -> Steps[Ready]:
    forward, branches = completion.verification(), step.branches_of_groups(completion)
    readouts, ready = yield from _with_branches(forward, branches, step.settings)
    completion.lengthen(readouts)
    return ready


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Time of a forward by its number of rows, in units of the time of a forward of one row."""

    free_rows: int  # up to this many rows a forward takes no longer than one of a single row
    row_cost: float  # what every further row adds

    def gain(self, chance: float, saved_rows: int, num_rows: int, extra_rows: int) -> float:
        """Expected saving of extra rows: perhaps a forward of `saved_rows`, less the wider forward for certain."""
        # This runs for every branch of every forward, and a GPU waits for it, so it calls no other function of Python.
        free, unit = self.free_rows, self.row_cost
        saved, narrow, wide = max(saved_rows, free), max(num_rows, free), max(num_rows + extra_rows, free)
        return chance * (1.0 + unit * (saved - free)) - ((1.0 + unit * (wide - free)) - (1.0 + unit * (narrow - free)))


class Branch(NamedTuple):
    """Masks after a verification, read as if the verification had one certain outcome."""

    outcome: OutcomeKey
    sees: tuple[int, int]  # rows of the verification that are accepted under it: first, last + 1
    positions: Sequence[int]  # position ids of the masks
    draws: tuple[int, ...] = ()  # a draw key for each if their tokens are sampled


def _with_branches(
    forward: Forward, branches: Sequence[Branch], settings: RefusionSettings
) -> Steps[tuple[tuple[Readout, ...], Ready]]:
    """Makes a forward with branches after its rows; returns its own readouts, and those of the branches."""
    if not branches:  # always, unless fused: nothing is copied between two forwards
        return (yield forward), Ready()
    tokens, positions, attention = list(forward.tokens), list(forward.positions), list(forward.attention)
    # One read for all branches that are sampled and one for all others: every read takes time on the host, and most
    # branches are never looked at.
    rows: dict[bool, list[int]] = defaultdict(list)
    draws: list[int] = []
    places: dict[OutcomeKey, tuple[bool, int, int]] = {}
    for branch in branches:
        start, size, is_sampled = len(tokens), len(branch.positions), bool(branch.draws)
        tokens += [settings.mask_id] * size
        positions += branch.positions
        attention.append(Segment(size, sees=(branch.sees,)))
        places[branch.outcome] = (is_sampled, len(rows[is_sampled]), len(rows[is_sampled]) + size)
        rows[is_sampled] += range(start, start + size)
        draws += branch.draws
    reads = list(forward.reads)
    for is_sampled, own_rows in rows.items():
        temperature, keys = (settings.temperature, tuple(draws)) if is_sampled else (0.0, ())
        reads.append(Read(own_rows, suppress=settings.suppress, temperature=temperature, draws=keys))
    readouts = yield Forward(tokens, positions, tuple(attention), tuple(reads), forward.commit, forward.kind)
    num_own = len(forward.reads)
    return readouts[:num_own], Ready(dict(zip(rows, readouts[num_own:], strict=True)), places)


def profitable_branches(candidates: Sequence[tuple[float, Branch]], cost: ForwardCost, num_rows: int) -> list[Branch]:
    """The branches that are worth their rows, the likeliest first."""
    branches: list[Branch] = []
    for chance, branch in sorted(candidates, key=lambda candidate: candidate[0], reverse=True):
        size = len(branch.positions)
        if cost.gain(chance, size, num_rows, size) > 0:
            branches.append(branch)
            num_rows += size
    return branches


def acceptance(probs_SK: ProbArray, tau_token: float) -> ProbArray:
    # Chances are estimated by the drafts' own probabilities: a draft that is likely with masks before it is likely with
    # tokens before it. Only speed depends on the estimate, never a token.
    return np.ones_like(probs_SK) if tau_token <= 0 else probs_SK.copy()


def length_chances(accept_N: ProbArray) -> npt.NDArray[np.float64]:
    """Chance that exactly the first l of N tokens are accepted, for l = 0 .. N."""
    reach = np.empty(len(accept_N) + 1)
    reach[0] = 1
    accept_N.cumprod(dtype=np.float64, out=reach[1:])
    reach[:-1] *= 1 - accept_N.astype(np.float64)
    return reach


class SlotForecast(NamedTuple):
    """How a verification may leave one slot."""

    finished: float  # chance that the slot needs no further prediction
    lengths: Sequence[tuple[float, int]]  # (chance, length) of the other outcomes, the likeliest first
    copied_rows: int = 0  # rows that branches of this slot need besides their masks

    @classmethod
    def estimate(
        cls, tokens_K: Sequence[int], accept_K: ProbArray, valid: int, eos_ids: Container[int]
    ) -> "SlotForecast":
        """Estimates the chances of a slot of which the first `valid` tokens are valid."""
        size = len(tokens_K)
        # Of valid + 1, ..., size valid tokens: the token after the valid ones is accepted in any case.
        chances = length_chances(accept_K[valid + 1 :])
        # A slot that reaches its EOS is finished, whatever follows.
        eos = first_eos(tokens_K[valid:], eos_ids)
        num_open = size - valid - 1 if eos is None else min(eos, size - valid - 1)
        lengths = sorted([(float(chances[i]), valid + 1 + i) for i in range(num_open)], reverse=True)
        return cls(float(chances[num_open:].sum()), lengths[:MAX_LENGTHS])


def profitable_lengths(
    forecasts: Sequence[SlotForecast], slot_size: int, cost: ForwardCost, num_rows: int
) -> list[list[int]]:
    """For each slot the lengths for which its next prediction is attached."""
    # A forward is saved only if every unfinished slot is covered, so all slots get equally many, as many as pay.
    nothing_to_save = math.prod([slot.finished for slot in forecasts])
    best_number, best_gain = 0, 0.0
    chances, rows = [0.0] * len(forecasts), 0
    for number in range(max([len(slot.lengths) for slot in forecasts], default=0)):
        covered = 1.0
        for index, slot in enumerate(forecasts):
            if number < len(slot.lengths):
                chance, length = slot.lengths[number]
                chances[index] += chance
                rows += slot_size - length + (slot.copied_rows if number == 0 else 0)
            covered *= slot.finished + chances[index]
        gain = cost.gain(covered - nothing_to_save, len(forecasts) * slot_size, num_rows, rows)
        if gain > best_gain:
            best_number, best_gain = number + 1, gain
    return [[length for _, length in slot.lengths[:best_number]] for slot in forecasts]


@dataclass(frozen=True, slots=True)
class _Iteration:
    """One iteration of plan and infilling, whose verifications carry what is likely to follow."""

    number: int  # of its plan, from 0
    drafts: Drafts  # the selected slots
    masked: Sequence[int]  # slots of the block, the selected ones included
    next_slots: Sequence[int]  # of the next block; empty after the last one
    met_eos: bool  # whether the response ends in what was decoded before
    num_prompt: int
    settings: RefusionSettings

    @property
    def cost(self) -> ForwardCost:
        """The settings' cost, or a guess for a device that nobody has measured."""
        row_cost = self.settings.row_cost
        return ForwardCost(self.settings.free_rows or 0, 0.02 if row_cost is None else row_cost)

    def verification(self, commit: Commit) -> tuple[Forward, list[Branch]]:
        """The global verification with the branches that pay, and these branches."""
        forward = rules.verification(self.drafts, self.num_prompt, self.settings, commit)
        if not self.settings.fused:
            return forward, []
        plans = profitable_branches(self._next_plans(), self.cost, len(forward.tokens))
        # A completion begins with a verification of its own, or goes on after a token that nobody has drafted.
        if self.settings.verify_independently or self.settings.keeps_verifier:
            return forward, plans
        num_rows = len(forward.tokens) + sum(len(branch.positions) for branch in plans)
        forward, predictions = self._first_predictions(forward, num_rows)
        return forward, plans + predictions

    def branches_of_groups(self, completion: Completion) -> list[Branch]:
        """The branches that pay on a verification of groups: the plan if all slots finish now, else predictions."""
        if not self.settings.fused:
            return []
        k, unfinished = self.settings.slot_size, completion.unfinished
        valid_S = [completion.valid_S[row] for row in unfinished]
        forecasts = self._forecasts(completion.tokens_SK[unfinished].tolist(), completion.probs_SK[unfinished], valid_S)
        branches: list[Branch] = []
        num_rows = len(completion.slots) * k
        plan = self._plan_after(completion.final())
        if plan is not None:
            chance = math.prod([slot.finished for slot in forecasts])
            branches = profitable_branches([(chance, plan)], self.cost, num_rows)
            num_rows += sum(len(branch.positions) for branch in branches)
        if self.settings.keeps_verifier:
            return branches
        for row, lengths in zip(unfinished, profitable_lengths(forecasts, k, self.cost, num_rows), strict=True):
            branches += [self._prediction(completion.slots[row], length, row * k) for length in lengths]
        return branches

    def _forecasts(self, tokens_SK: list[list[int]], probs_SK: ProbArray, valid_S: list[int]) -> list[SlotForecast]:
        slots = zip(tokens_SK, acceptance(probs_SK, self.settings.tau_token), valid_S, strict=True)
        return [SlotForecast.estimate(*slot, self.settings.eos_ids) for slot in slots]

    def _next_plans(self) -> list[tuple[float, Branch]]:
        """The plans that may follow the global verification, each with its chance."""
        accept_SK = acceptance(self.drafts.probs_SK, self.settings.tau_token)
        accept_SK[:, 0] = 1  # tau_token does not apply to the first token of a slot
        eos = first_eos(self.drafts.tokens_SK.ravel().tolist(), self.settings.eos_ids)
        chances: dict[int, float] = defaultdict(float)
        # Outcomes that leave the same tokens are one branch.
        for num_passed, chance in enumerate(length_chances(accept_SK.ravel()).tolist()):
            chances[rules.num_kept(num_passed, eos, self.settings.slot_size)] += chance
        plans = []
        for kept, chance in chances.items():
            final = rules.accepted_drafts(self.drafts, kept, self.settings)
            if final is not None and (plan := self._plan_after(final)) is not None:
                plans.append((chance, plan))
        return plans

    def _plan_after(self, final: Final) -> Branch | None:
        """The plan that follows if these tokens become final; None if none follows or keys and values change before."""
        # The key names all that the plan depends on: how many rows stay, and which slots are masked.
        masked = rules.masked_after(self.masked, final, self.settings)
        if not masked and not (self.met_eos or final.has_eos):
            masked = list(self.next_slots)
        if not masked or _changes_keys(final, self.settings):
            return None
        positions = self.settings.text_positions(masked, self.num_prompt)
        read = rules.plan_read((), positions, self.settings, self.number + 1)
        num_kept = len(final.tokens)
        return Branch(("plan", num_kept, *masked), (0, num_kept), positions, read.draws)

    def _prediction(self, slot: int, length: int, first_row: int) -> Branch:
        """The masks after the first `length` tokens of a slot whose rows begin at `first_row` of the verification."""
        start = self.num_prompt + slot
        positions = range(start + length, start + self.settings.slot_size)
        return Branch(("prediction", slot, length), (first_row, first_row + length), positions)

    def _first_predictions(self, forward: Forward, num_rows: int) -> tuple[Forward, list[Branch]]:
        """Adds to a global verification the predictions that pay in case not even its first slot is accepted."""
        # The first slot sees no other draft, so its rows in the verification serve. The other slots need rows of their
        # own, which see no other draft either.
        k, drafts = self.settings.slot_size, self.drafts
        forecasts = self._forecasts(drafts.tokens_SK.tolist(), drafts.probs_SK, [0] * len(drafts.slots))
        # If the first slot is finished, no completion follows.
        forecasts = [forecasts[0]._replace(finished=0.0), *(slot._replace(copied_rows=k) for slot in forecasts[1:])]
        branches: list[Branch] = []
        for row, lengths in enumerate(profitable_lengths(forecasts, k, self.cost, num_rows)):
            slot, first_row = drafts.slots[row], 0
            if row > 0 and lengths:
                first_row = len(forward.tokens)
                start = self.num_prompt + slot
                forward = replace(
                    forward,
                    tokens=[*forward.tokens, *drafts.tokens_SK[row].tolist()],
                    positions=[*forward.positions, *range(start, start + k)],
                    attention=(*forward.attention, Segment(k)),
                )
            branches += [self._prediction(slot, length, first_row) for length in lengths]
        return forward, branches


DECODER = Decoder(
    decode,
    RefusionSettings,
    label="ReFusion",
    reads=Reads("causal", masked="own", clean="next"),
    fits=("masked", "refusion"),
    style=Style("#0072B2", "o", "-", order=0),
)
