"""ReFusion: plan which slots to decode, draft them in parallel, verify the drafts, complete what was rejected.

arXiv 2512.13586, section 4.2 and Eq. 4-8. Attention is causal in the order in which tokens were accepted; position ids
say where a token stands in the text. Where the paper and the public release differ, the release's rule is followed (it
is what the published weights were tuned with) except for its defects, which `release_compatible` brings back.

Forwards may be fused: a verification then carries the plan that follows it under each likely outcome (see `fuse`).

Names: a slot is named by the response index of its first position; arrays are [S slots, K tokens a slot].
"""

from collections.abc import Generator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np

from refusion_eval.decoders.choose import above_or_best, accepted_prefix, first_eos
from refusion_eval.decoders.completion import Completed, Completion, Drafts, first_predictions
from refusion_eval.decoders.decoder import Decoder, Reads, Style
from refusion_eval.decoders.fuse import Key, Rider, acceptance, by_key, length_chances, plans_that_pay, with_riders
from refusion_eval.decoders.refusion_settings import RefusionSettings
from refusion_eval.trace import Trace
from refusion_eval.types import (
    NOTHING,
    Commit,
    Decoding,
    Forward,
    Read,
    Readout,
    Response,
    StopReason,
    causal,
    draw_key,
)


class _Prefix(NamedTuple):
    """Rows that enter the cache before a plan: the prompt, or slots that were completed independently of each other."""

    tokens: Sequence[int]
    positions: Sequence[int]


def _plan_key(num_kept: int, masked: Sequence[int]) -> Key:
    return ("plan", num_kept, *masked)


def decode(prompt: Sequence[int], settings: RefusionSettings, trace: Trace) -> Decoding:
    """Decodes one prompt: block after block, in each plan and infill until no slot is masked.

    Args:
        prompt: token ids, at least one.
        settings: see `RefusionSettings`.
        trace: receives the events.
    """
    return (yield from _Refusion(prompt, settings, trace).run())


class _Outcome(NamedTuple):
    """How a global verification ends when it accepts at least one slot, or an EOS.

    Attributes:
        num_kept: drafts that stay, up to whole slots or to the EOS.
        has_eos: whether the last of them is an EOS.
    """

    num_kept: int
    has_eos: bool


class _Refusion:
    """The state of one decoding.

    Attributes:
        response: final tokens by response index.
        blocks: the slots of each block; the last block may be shorter.
        block: the block at work.
        iteration: the next plan's number.
        masked: slots of the current block that are not final yet, ascending.
        met_eos: whether the response ends within what is decoded so far.
        commit: what the next forward commits of the previous one.
        readouts: what rode along in the previous forward, by its hypothesis.
        refresh: what is to be run once more before the next plan, if anything.
    """

    def __init__(self, prompt: Sequence[int], settings: RefusionSettings, trace: Trace) -> None:
        self.prompt = list(prompt)
        self.settings = settings
        self.trace = trace
        self.response: dict[int, int] = {}
        self.blocks = self._cut_blocks()
        self.block = 0
        self.iteration = 0
        self.masked: list[int] = []
        self.met_eos = False
        self.commit = NOTHING
        self.readouts: Mapping[Key, Readout] = {}
        self.refresh: _Prefix | None = None

    def run(self) -> Decoding:
        for block, slots in enumerate(self.blocks):
            self.block, self.masked = block, list(slots)
            while self.masked:
                drafts = yield from self._plan()
                yield from self._infill(drafts)
                if self.settings.stop_rule is not None and self.settings.stop_rule(self._gapless()):
                    return self._finish("stop_string")
            if self.met_eos:
                return self._finish("eos")
        return self._finish("length")

    def _cut_blocks(self) -> list[range]:
        k, b, length = self.settings.slot_size, self.settings.block_size, self.settings.num_positions
        if self.settings.release_compatible:
            length = length // b * b  # the release never decodes what does not fill a block
        return [range(start, min(start + b, length), k) for start in range(0, length, b)]

    def _position_ids(self, slots: Sequence[int]) -> list[int]:
        return [len(self.prompt) + position for position in self.settings.response_positions(slots)]

    def _forward(
        self, kind: str, tokens: Sequence[int], positions: Sequence[int], reads: tuple[Read, ...]
    ) -> Generator[Forward, tuple[Readout, ...], tuple[Readout, ...]]:
        """One causal forward that commits what was earned before it."""
        commit, self.commit = self.commit, NOTHING
        return (yield Forward(tokens, positions, causal(len(tokens)), reads, commit, kind))

    def _plan(self) -> Generator[Forward, tuple[Readout, ...], Drafts]:
        """Drafts every masked slot of the block and selects the certain ones (Eq. 4-5).

        The very first plan also carries the prompt, which is the only part of it that stays in the cache. If the plan
        rode along in the verification before, there is nothing left to compute.
        """
        settings, k = self.settings, self.settings.slot_size
        readout = None if self.refresh else self.readouts.get(_plan_key(len(self.commit.rows), self.masked))
        if readout is None:
            readout = yield from self._run_plan()
        self.iteration += 1
        probs_SK, tokens_SK = readout.probs.reshape(-1, k), readout.tokens.reshape(-1, k)
        certainty_S = probs_SK[:, 0]
        chosen = [0] if settings.left_to_right else above_or_best(certainty_S, settings.tau_slot)
        drafts = Drafts([self.masked[index] for index in chosen], tokens_SK[chosen], probs_SK[chosen])
        self.trace.select("slot", self.masked, certainty_S.tolist(), drafts.slots)
        self.trace.draft(settings.response_positions(drafts.slots), drafts.tokens_SK.ravel().tolist())
        return drafts

    def _run_plan(self) -> Generator[Forward, tuple[Readout, ...], Readout]:
        """The forward of a plan, behind what has to enter the cache first: the prompt, or slots to be refreshed."""
        prefix = _Prefix(self.prompt, range(len(self.prompt))) if self.iteration == 0 else _Prefix([], [])
        if self.refresh is not None:
            prefix, self.refresh = self.refresh, None
            if not self.settings.fused:
                yield from self._forward("refresh", prefix.tokens, prefix.positions, ())
                self.commit, prefix = Commit(range(len(prefix.tokens))), _Prefix([], [])
        start, positions = len(prefix.tokens), self._position_ids(self.masked)
        read = self._plan_read(range(start, start + len(positions)), positions, self.iteration)
        tokens = [*prefix.tokens, *[self.settings.mask_id] * len(positions)]
        (readout,) = yield from self._forward("plan", tokens, [*prefix.positions, *positions], (read,))
        self.commit = Commit(range(start))
        return readout

    def _plan_read(self, rows: Sequence[int], positions: Sequence[int], iteration: int) -> Read:
        settings = self.settings
        sampled = settings.temperature > 0
        draws = tuple(draw_key(settings.seed, iteration, position) for position in positions) if sampled else ()
        return Read(rows=rows, suppress=settings.suppress, temperature=settings.temperature, draws=draws)

    def _plan_rider(self, num_kept: int, masked: list[int], met_eos: bool) -> Rider | None:
        """The next plan under the hypothesis that the first `num_kept` rows of a verification stay; None if none is."""
        if not masked and not met_eos and self.block + 1 < len(self.blocks):
            masked = list(self.blocks[self.block + 1])
        if not masked:
            return None
        positions = self._position_ids(masked)
        read = self._plan_read((), positions, self.iteration)
        return Rider(_plan_key(num_kept, masked), (0, num_kept), positions, read)

    def _infill(self, drafts: Drafts) -> Generator[Forward, tuple[Readout, ...], None]:
        """Verifies all drafts as one causal sequence (Eq. 6); accepts whole slots, or has them completed one by one."""
        k = self.settings.slot_size
        tokens = drafts.tokens_SK.ravel().tolist()
        # Row m - 1 predicts token m. Planning vouches for the first token of a slot: tau_token does not apply to it.
        rows = [row for row in range(len(tokens) - 1) if (row + 1) % k]
        reads = (Read(rows=rows, given=[tokens[row + 1] for row in rows]),) if rows else ()
        readouts = yield from self._verify(drafts, tokens, reads)
        accepted_SK = np.ones(drafts.tokens_SK.shape, dtype=bool)
        if rows:
            probs = readouts[0].given
            assert probs is not None
            accepted_SK[:, 1:] = (probs > self.settings.tau_token).reshape(-1, k - 1)
        num_accepted = accepted_prefix(accepted_SK.ravel())
        outcome = self._outcome(tokens, num_accepted)
        if outcome is None:
            completed = yield from Completion(
                drafts,
                accepted_SK,
                len(self.prompt),
                self.settings,
                self.trace,
                self.readouts,
                partial(self._plan_after_completion, drafts),
            ).run()
            self._store(drafts, completed)
            return
        self.masked, done = self._masked_after(drafts, outcome)
        self.trace.fix(self._keep(done, tokens[: outcome.num_kept]), tokens[: outcome.num_kept])
        self.commit = Commit(range(outcome.num_kept))
        self.met_eos |= outcome.has_eos

    def _outcome(self, tokens: Sequence[int], num_accepted: int) -> _Outcome | None:
        """What accepting the first drafts leads to; None is a completion."""
        eos = first_eos(tokens[:num_accepted], self.settings.eos_ids)
        if eos is not None:
            return _Outcome(eos + 1, has_eos=True)
        k = self.settings.slot_size
        return _Outcome(num_accepted // k * k, has_eos=False) if num_accepted >= k else None

    def _masked_after(self, drafts: Drafts, outcome: _Outcome) -> tuple[list[int], list[int]]:
        """The slots that are masked after an outcome, and those that it finishes."""
        done = drafts.slots[: -(-outcome.num_kept // self.settings.slot_size)]
        masked = [slot for slot in self.masked if slot not in done and not (outcome.has_eos and slot > done[-1])]
        return masked, done

    def _verify(
        self, drafts: Drafts, tokens: list[int], reads: tuple[Read, ...]
    ) -> Generator[Forward, tuple[Readout, ...], tuple[Readout, ...]]:
        """The forward of the global verification, with the plans and predictions that may follow it."""
        commit, self.commit = self.commit, NOTHING
        positions = self._position_ids(drafts.slots)
        forward = Forward(tokens, positions, causal(len(tokens)), reads, commit, "verify")
        riders: list[Rider] = []
        if self.settings.fused:
            cost = self.settings.forward_cost
            riders = plans_that_pay(self._next_plans(drafts, tokens), cost, len(tokens))
            num_rows = len(tokens) + sum(len(rider.positions) for rider in riders)
            forward, predictions = first_predictions(forward, drafts, len(self.prompt), self.settings, num_rows)
            riders += predictions
        readouts = yield with_riders(forward, riders, self.settings.mask_id)
        self.readouts = by_key(riders, readouts)
        return readouts

    def _next_plans(self, drafts: Drafts, tokens: list[int]) -> list[tuple[float, Rider]]:
        """The plans that may follow the global verification, each with its chance."""
        accept_SK = acceptance(drafts.probs_SK, self.settings.tau_token)
        accept_SK[:, 0] = 1
        chances: dict[_Outcome, float] = {}
        for num_accepted, chance in enumerate(length_chances(accept_SK.ravel()).tolist()):
            outcome = self._outcome(tokens, num_accepted)
            if outcome is not None:
                chances[outcome] = chances.get(outcome, 0.0) + chance
        plans = []
        for outcome, chance in chances.items():
            masked, _ = self._masked_after(drafts, outcome)
            rider = self._plan_rider(outcome.num_kept, masked, self.met_eos or outcome.has_eos)
            if rider is not None:
                plans.append((chance, rider))
        return plans

    def _store(self, drafts: Drafts, completed: Completed) -> None:
        """Takes over completed slots, whose keys and values know the cache and their own slot only."""
        self.masked = self._masked_after_completion(drafts, completed)
        positions = self._keep(completed.slots, completed.tokens)
        self.commit, self.readouts = Commit(range(len(positions))), completed.readouts
        if self._needs_refresh(completed):
            position_ids = [len(self.prompt) + position for position in positions]
            self.refresh, self.commit = _Prefix(completed.tokens, position_ids), NOTHING
        self.met_eos |= completed.eos_row is not None

    def _needs_refresh(self, completed: Completed) -> bool:
        return self.settings.recompute_kv and len(completed.slots) > 1

    def _masked_after_completion(self, drafts: Drafts, completed: Completed) -> list[int]:
        masked = [slot for slot in self.masked if slot not in drafts.slots]
        if completed.eos_row is None:
            return masked
        if self.settings.release_compatible:
            # The release takes the row among the selected slots for an index among the masked ones, and loses text.
            return [slot for slot in masked if slot in self.masked[: completed.eos_row]]
        return [slot for slot in masked if slot < completed.slots[-1]]

    def _plan_after_completion(self, drafts: Drafts, completed: Completed) -> Rider | None:
        """The plan that follows if a completion ends like this; slots that need a refresh cannot carry it."""
        if self._needs_refresh(completed):
            return None
        masked = self._masked_after_completion(drafts, completed)
        return self._plan_rider(len(completed.tokens), masked, self.met_eos or completed.eos_row is not None)

    def _keep(self, slots: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Adds tokens to the response: they fill these slots in order, the last one perhaps only in part."""
        positions = self.settings.response_positions(slots)[: len(tokens)]
        self.response.update(zip(positions, tokens, strict=True))
        return positions

    def _gapless(self) -> list[int]:
        """The response from its start to the first position that is not final."""
        end = next(position for position in count() if position not in self.response)
        return [self.response[position] for position in range(end)]

    def _finish(self, reason: StopReason) -> Response:
        if self.settings.release_compatible:
            tokens = [self.response[position] for position in sorted(self.response)]
        else:
            tokens = self._gapless()[: self.settings.gen_length]
            eos = first_eos(tokens, self.settings.eos_ids)
            if eos is not None:
                tokens = tokens[: eos + 1]
            elif reason == "eos":
                reason = "length"  # the EOS stood in the surplus of the last slot
        self.trace.stop(reason, len(tokens))
        return Response(tuple(tokens), reason)


DECODER = Decoder(
    decode,
    RefusionSettings,
    label="ReFusion",
    reads=Reads("causal", masked="own", clean="next"),
    fits=("masked", "refusion"),
    style=Style("#0072B2", "o", "-", order=0),
)
