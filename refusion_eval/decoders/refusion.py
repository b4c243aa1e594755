"""ReFusion (arXiv 2512.13586): plans slots, verifies their drafts, and completes what was rejected.

`refusion_slots` has the choices. With `fuse=False` this is the paper's algorithm; fused, some forwards are left out,
because one before them carried what they would read (`refusion_fused`). A slot under completion has k rows; a length is
how many of its tokens are valid.
"""

from collections.abc import Sequence
from itertools import count

import numpy as np

from refusion_eval.decoders import Decoder, Reads, Style, accepted_prefix, first_eos
from refusion_eval.decoders import refusion_slots as rules
from refusion_eval.decoders.refusion_fused import Fusion, Iteration, Steps
from refusion_eval.decoders.refusion_settings import RefusionSettings
from refusion_eval.decoders.refusion_slots import BoolArray, Drafts, Final, Rows, Verdicts
from refusion_eval.types import (
    NOTHING,
    Commit,
    Decoding,
    Forward,
    Read,
    Readout,
    Response,
    StopReason,
    TokenArray,
    Trace,
    causal,
    groups,
)


def decode(prompt: Sequence[int], settings: RefusionSettings, trace: Trace) -> Decoding:
    """Decodes one prompt: in each block plans and infills until none of its slots is masked; or token by token."""
    if settings.serial:
        return (yield from _decode_serial(prompt, settings, trace))
    context, start = rules.around(prompt)
    iterations, commit = count(), NOTHING
    text, blocks = Text(settings, trace), settings.blocks
    fusion = Fusion(start, settings) if settings.fused else None
    # The first plan also carries what is known, which is all of that forward that stays in the cache.
    for slots, next_slots in zip(blocks, [*blocks, range(0)][1:], strict=True):
        text.masked = list(slots)
        while text.masked:
            number = next(iterations)
            # A plan that was read in advance saw neither the prompt nor rows that are computed once more.
            readout = None if fusion is None or context.tokens else fusion.read("plan", len(commit.rows), *text.masked)
            if readout is None:
                (readout,) = yield rules.plan(context, text.masked, start, settings, number, commit)
                commit = Commit(range(len(context.tokens)))
                if fusion is not None:
                    fusion.priced((readout,))
            context = Rows((), ())
            drafts = rules.select_slots(text.masked, readout, settings, trace)
            # All drafts are one sequence. The first one of a slot always passes: its probability is the certainty that
            # selected the slot, and tau_token does not apply to it.
            checked_SK = rules.are_tokens(drafts.slots, settings) & (np.arange(settings.slot_size) > 0)
            sizes = [settings.num_tokens(drafts.slots)]
            forward = rules.verification(drafts, checked_SK, sizes, start, settings, commit)
            if fusion is None:
                readouts = yield forward
            else:
                iteration = Iteration(number, text.masked, next_slots, text.met_eos)
                readouts = yield from fusion.verify(forward, drafts, iteration)
            verdicts = rules.judged(drafts.tokens_SK, checked_SK, readouts, settings)
            final, uncomputed = rules.accepted(drafts, verdicts, settings)
            if final is None:
                completion = Completion(drafts, verdicts, start, settings, trace)
                yield from _complete(completion, settings, fusion)
                final, uncomputed = completion.final(), completion.uncomputed
            text.add(final)
            commit = Commit(range(len(final.tokens)))
            # Completed slots did not see each other, so their keys and values are not those of one sequence. The paper
            # keeps them all the same (section 5.5, Table 4). With `recompute_kv` the rows of one more forward enter the
            # cache instead of those of the verification. The paper makes it also where it changes nothing: ARC-C takes
            # 1.16 times as long, though its answers of two tokens end in the only slot of their only iteration.
            if settings.recompute_kv and fusion is None:
                yield Forward(*final.rows(start), causal(len(final.tokens)), (), kind="refresh")
            elif final.changes_keys(settings):  # the next plan computes them, at next to no cost
                context, commit = final.rows(start), NOTHING
            elif rows := [row for row in uncomputed if row < len(final.tokens)]:  # the verifier's own tokens
                tokens, positions = final.rows(start)
                context = Rows([tokens[row] for row in rows], [positions[row] for row in rows])
                commit = Commit([row for row in commit.rows if row not in rows])
            if text.stops():
                return text.finish("stop_string")
        if text.met_eos:
            return text.finish("eos")
    return text.finish("length")


def _complete(completion: "Completion", settings: RefusionSettings, fusion: Fusion | None) -> Steps[None]:
    """Completes slots independently of each other, in rounds of one prediction and one verification (Eq. 7-8)."""
    # No forward commits anything: each carries its slots whole, as groups that see the cache and themselves only.
    is_verified = not settings.verify_independently
    while not is_verified or not completion.end_round():
        if is_verified:
            missing = []
            for row in completion.unfinished:
                outcome = ("prediction", completion.slots[row], completion.valid_S[row])
                if fusion is None or (readout := fusion.read(*outcome)) is None:
                    missing.append(row)
                else:
                    completion.predict([row], readout)
            if missing:
                (readout,) = yield completion.prediction(missing)
                completion.predict(missing, readout)
            completion.record_drafts()
        forward = completion.verification()
        if fusion is None:
            readouts = yield forward
        else:
            readouts = yield from fusion.verify_groups(
                forward, completion.drafts, completion.valid_S, completion.final()
            )
        completion.lengthen(readouts)
        is_verified = True


def _decode_serial(prompt: Sequence[int], settings: RefusionSettings, trace: Trace) -> Decoding:
    """Decodes one prompt token by token from left to right (the left-to-right point of Figure 1): n forwards."""
    text, commit = Text(settings, trace), NOTHING
    fed, start = rules.around(prompt)
    for position in range(settings.gen_length):
        # The first token of a slot is read from a mask, with which each masked slot of the training begins, and every
        # other one from the token before it, as in clean slots. The mask is never kept.
        masks = Rows([settings.mask_id], [start + position]) if position % settings.slot_size == 0 else Rows([], [])
        tokens, positions = [*fed.tokens, *masks.tokens], [*fed.positions, *masks.positions]
        read = rules.plan_read((len(tokens) - 1,), (start + position,), settings, position)
        (readout,) = yield Forward(tokens, positions, causal(len(tokens)), (read,), commit, "decode")
        token = int(readout.tokens[0])
        text.tokens[position] = token
        trace.fix((position,), (token,))
        if token in settings.eos_ids:
            return text.finish("eos")
        if text.stops():
            return text.finish("stop_string")
        commit, fed = Commit(range(len(fed.tokens))), Rows([token], [start + position])
    return text.finish("length")


class Text:
    """What is decoded so far."""

    def __init__(self, settings: RefusionSettings, trace: Trace) -> None:
        self.tokens: dict[int, int] = {}  # final ones, by response index
        self.masked: list[int] = []  # slots of the current block that are not final yet, ascending
        self.met_eos = False  # whether the response ends within what is decoded so far
        self._settings, self._trace = settings, trace

    def add(self, final: Final) -> None:
        if not final.completed:  # a completion reports the tokens of each round
            self._trace.fix(final.positions, final.tokens)
        self.tokens.update(zip(final.positions, final.tokens, strict=True))
        self.masked = rules.masked_after(self.masked, final, self._settings)
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
        self, drafts: Drafts, verdicts_SK: Verdicts, start: int, settings: RefusionSettings, trace: Trace
    ) -> None:
        self.slots, self._start, self._settings, self._trace = drafts.slots, start, settings, trace
        self.size_S = settings.sizes_of(drafts.slots)
        self.tokens_SK, self.probs_SK = drafts.tokens_SK.copy(), drafts.probs_SK.copy()
        # How many tokens of each slot are valid, from its first one. A prefix that passed the global verification saw
        # more than its own slot; the release keeps it, and Eq. 7 as written verifies anew (`verify_independently`).
        self.valid_S = [0] * len(drafts.slots) if settings.verify_independently else self._valid(verdicts_SK.passed)
        # Rows of the last verification that hold another token than the one that became final there, the verifier's.
        self.uncomputed: list[int] = []
        self._num_reported_S = [0] * len(drafts.slots)
        self._keep_verifiers(verdicts_SK.tokens)

    @property
    def drafts(self) -> Drafts:
        return Drafts(self.slots, self.tokens_SK, self.probs_SK)

    @property
    def unfinished(self) -> list[int]:  # rows of slots
        return [row for row, (valid, size) in enumerate(zip(self.valid_S, self.size_S, strict=True)) if valid < size]

    def _valid(self, passed_SK: BoolArray) -> list[int]:
        return [min(accepted_prefix(passed_K), size) for passed_K, size in zip(passed_SK, self.size_S, strict=True)]

    def after_prefix(self, skipped: int = 0) -> BoolArray:
        """Which tokens stand after the valid prefix of their slot and the `skipped` tokens that follow it, [S, K]."""
        places_SK = np.arange(self._settings.slot_size) >= np.array(self.valid_S)[:, None] + skipped
        return places_SK & rules.are_tokens(self.slots, self._settings)

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
        passed_SK, tokens_SK = rules.judged(self.tokens_SK, self._checked(), readouts, self._settings)
        self.valid_S = self._valid(passed_SK)
        self._keep_verifiers(tokens_SK)

    def _keep_verifiers(self, tokens_SK: TokenArray) -> None:
        """Puts the verifier's tokens after the valid prefixes, which they lengthen; nothing by the paper's rule."""
        self.uncomputed = []
        if not self._settings.keeps_verifier:
            return
        for row, valid in enumerate(self.valid_S):
            if 0 < valid < self.size_S[row]:
                self.tokens_SK[row, valid] = tokens_SK[row, valid]
                self.valid_S[row] += 1
                self.uncomputed.append(row * self._settings.slot_size + valid)

    def predict(self, rows: Sequence[int], readout: Readout) -> None:
        """Puts predicted tokens after the valid prefixes of some slots, ascending."""
        start = 0
        for row in rows:
            valid, size = self.valid_S[row], self.size_S[row]
            end = start + size - valid
            self.tokens_SK[row, valid:size] = readout.tokens[start:end]
            self.probs_SK[row, valid:size] = readout.probs[start:end]
            start = end

    def prediction(self, rows: Sequence[int]) -> Forward:
        """The forward that drafts the likeliest tokens after the valid prefix of some slots (Eq. 8)."""
        slots, masked_SK = [self.slots[row] for row in rows], self.after_prefix()[rows]
        tokens_SK = np.where(masked_SK, self._settings.mask_id, self.tokens_SK[rows])
        read = Read(rows=np.flatnonzero(masked_SK).tolist(), suppress=self._settings.suppress)
        positions = self._settings.text_positions(slots, self._start)
        if self._settings.keeps_verifier:  # by the paper's rule not sampled at any temperature, as in the release
            read = rules.plan_read(read.rows, [positions[row] for row in read.rows], self._settings, 0)
        tokens = rules.flat(tokens_SK, slots, self._settings).tolist()
        return Forward(tokens, positions, groups([self.size_S[row] for row in rows]), (read,), kind="predict")

    def verification(self) -> Forward:
        """The forward that verifies each slot in a group of its own (Eq. 7)."""
        # Finished slots take part: the keys and values of all slots are kept from the last verification. No slot sees
        # another. All share the cache of what is final, so no copy of it is needed for each slot.
        return rules.verification(self.drafts, self._checked(), self.size_S, self._start, self._settings, NOTHING)

    def record_drafts(self) -> None:
        cells_SK = self.after_prefix()
        positions_SK = np.add.outer(self.slots, range(self._settings.slot_size))
        self._trace.draft(positions_SK[cells_SK].tolist(), self.tokens_SK[cells_SK].tolist())

    def end_round(self) -> bool:
        """Drops the slots after the first valid EOS and reports what became final; True if all slots are finished."""
        # A slot that meets EOS counts as valid to its end. An earlier slot may still meet EOS in a later round.
        positions, tokens = [], []
        for row, (slot, valid) in enumerate(zip(self.slots, self.valid_S, strict=True)):
            final = rules.final_tokens([slot], self.tokens_SK[row, :valid].tolist(), self._settings)
            positions += final.positions[self._num_reported_S[row] :]
            tokens += final.tokens[self._num_reported_S[row] :]
            self._num_reported_S[row] = len(final.tokens)
            if final.has_eos:
                self.slots, self.size_S = self.slots[: row + 1], self.size_S[: row + 1]
                self.tokens_SK, self.probs_SK = self.tokens_SK[: row + 1], self.probs_SK[: row + 1]
                self.valid_S = [*self.valid_S[:row], self.size_S[row]]
                break
        if tokens:
            self._trace.fix(positions, tokens)
        return not self.unfinished

    def final(self) -> Final:  # if all tokens are valid as they stand
        tokens = rules.flat(self.tokens_SK, self.slots, self._settings).tolist()
        return rules.final_tokens(self.slots, tokens, self._settings, completed=True)


DECODER = Decoder(
    decode,
    RefusionSettings,
    label="ReFusion",
    reads=Reads("causal", masked="own", clean="next"),
    infills="gap",
    fits=("masked", "refusion"),
    style=Style("#0072B2", "o", "-", order=0),
)
