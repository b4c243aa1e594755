"""ReFusion: plan which slots to decode, draft them in parallel, verify the drafts, complete what was rejected.

arXiv 2512.13586, section 4.2 and Eq. 4-8. Attention is causal in the order in which tokens were accepted; position ids
say where a token stands in the text. Where the paper and the public release differ, the release's rule is followed (it
is what the published weights were tuned with) except for its defects, which `release_compatible` brings back.

Names: a slot is named by the response index of its first position; `S` slots, `k` tokens a slot, `v` tokens valid.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np

from refusion_eval.decoders import validate
from refusion_eval.decoders.choose import above_or_best, accepted_prefix, first_eos
from refusion_eval.errors import ConfigError
from refusion_eval.trace import Trace
from refusion_eval.types import (
    NOTHING,
    Commit,
    Decoding,
    Forward,
    ProbArray,
    Read,
    Readout,
    Response,
    StopRule,
    TokenArray,
    causal,
    draw_key,
    groups,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusionSettings:
    """Settings of the ReFusion decoder, named as in the paper's Table 6.

    Attributes:
        gen_length: most tokens of the response, >= 1. Positions are decoded in whole slots; the surplus is cut.
        slot_size: k, consecutive positions that are drafted and verified together, >= 1.
        block_size: b, consecutive positions decoded before the next block begins; a multiple of k (App. C.4: b >= k).
        tau_slot: a masked slot is selected when its certainty exceeds this; the best one always is.
        tau_token: a drafted token is accepted when its probability given the tokens before it exceeds this.
        temperature: of the drafts (Eq. 4); thresholds always see untempered probabilities.
        seed: of the random draws.
        mask_id: the mask token.
        eos_ids: tokens that end the response; none means that it always has `gen_length` tokens.
        left_to_right: select slots one after another in position order (Figure 1) instead of by certainty.
        recompute_kv: after slots were completed independently, one more forward lets them see each other and keeps
            those keys and values instead (section 5.5, Table 4).
        verify_independently: begin a completion by verifying every slot on its own, as Eq. 7 is written, instead of
            keeping the prefixes that the global verification found.
        release_compatible: reproduce the defects of the public release (README, "Paper and release").
        stop_rule: told the tokens decoded without a gap from the start; decoding ends when it says so.

    Raises:
        ConfigError: a value is out of its range, or sizes do not fit each other.
    """

    gen_length: int = 512
    slot_size: int = 32
    block_size: int = 128
    tau_slot: float = 0.9
    tau_token: float = 0.4
    temperature: float = 0.0
    seed: int = 0
    mask_id: int
    eos_ids: tuple[int, ...] = ()
    left_to_right: bool = False
    recompute_kv: bool = False
    verify_independently: bool = False
    release_compatible: bool = False
    stop_rule: StopRule | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("gen_length", "slot_size", "block_size"):
            validate.require_integer("refusion", name, getattr(self, name), at_least=1)
        validate.require_integer("refusion", "seed", self.seed, at_least=0)
        validate.require_integer("refusion", "mask_id", self.mask_id, at_least=0)
        validate.require_token_ids("refusion", "eos_ids", self.eos_ids)
        validate.require_number("refusion", "tau_slot", self.tau_slot, 0.0, 1.0)
        validate.require_number("refusion", "tau_token", self.tau_token, 0.0, 1.0)
        validate.require_number("refusion", "temperature", self.temperature, 0.0)
        validate.require_flags(
            "refusion",
            left_to_right=self.left_to_right,
            recompute_kv=self.recompute_kv,
            verify_independently=self.verify_independently,
            release_compatible=self.release_compatible,
        )
        if self.block_size < self.slot_size or self.block_size % self.slot_size:
            multiple = max(1, round(self.block_size / self.slot_size)) * self.slot_size
            raise ConfigError(
                f"refusion: block_size is {self.block_size} and slot_size {self.slot_size}; a block holds whole slots "
                f"(App. C.4), so set block_size to a multiple of slot_size, for example {multiple}"
            )
        if self.mask_id in self.eos_ids:
            raise ConfigError(f"refusion: mask_id {self.mask_id} is also an end-of-sequence id; set either one right")

    @property
    def num_positions(self) -> int:
        """Positions behind the prompt that decoding may touch: `gen_length` in whole slots."""
        return -(-self.gen_length // self.slot_size) * self.slot_size


class _Step(NamedTuple):
    """What one plan-and-infill step did to the masked slots of the block."""

    kept: Commit
    masked: list[int]
    met_eos: bool


class _Tokens(NamedTuple):
    """Tokens and their position ids."""

    tokens: list[int]
    positions: list[int]


class _Drafts(NamedTuple):
    """The selected slots, ascending, and their drafted tokens [S, k]."""

    slots: list[int]
    tokens_SK: TokenArray


def decode(prompt: Sequence[int], settings: RefusionSettings, trace: Trace) -> Decoding:
    """Decodes one prompt: block after block, in each plan and infill until no slot is masked.

    Args:
        prompt: token ids, at least one.
        settings: see `RefusionSettings`.
        trace: receives the events.
    """
    return (yield from _Decoder(prompt, settings, trace).run())


class _Decoder:
    """The state of one decoding: the response so far, and what of the previous forward the next one commits."""

    def __init__(self, prompt: Sequence[int], settings: RefusionSettings, trace: Trace) -> None:
        self.prompt = list(prompt)
        self.settings = settings
        self.trace = trace
        self.response: dict[int, int] = {}
        self.commit = NOTHING
        self.suppress = () if settings.release_compatible else (settings.mask_id,)
        self.iterations = count()
        self.is_first_forward = True
        self.to_refresh: _Tokens | None = None

    def run(self) -> Decoding:
        for block in self._blocks():
            masked = list(block)
            met_eos = False
            while masked:
                drafts = yield from self._plan(masked)
                step = yield from self._infill(drafts, masked)
                self.commit, masked = step.kept, step.masked
                met_eos |= step.met_eos
                if self._stop_rule_holds():
                    return self._finish("stop_string")
            if met_eos:
                return self._finish("eos")
        return self._finish("length")

    def _blocks(self) -> list[range]:
        """The first positions of the slots of each block; the last block may be shorter."""
        k, b, length = self.settings.slot_size, self.settings.block_size, self.settings.num_positions
        if self.settings.release_compatible:
            length = length // b * b  # the release leaves out what does not fill a block
        return [range(start, min(start + b, length), k) for start in range(0, length, b)]

    def _positions(self, slots: Sequence[int]) -> list[int]:
        """Position ids of all tokens of these slots, slot after slot."""
        first, k = len(self.prompt), self.settings.slot_size
        return [first + slot + column for slot in slots for column in range(k)]

    def _forward(
        self, kind: str, tokens: Sequence[int], positions: Sequence[int], sizes: Sequence[int], reads: tuple[Read, ...]
    ) -> Generator[Forward, tuple[Readout, ...], tuple[Readout, ...]]:
        """One forward that commits what the previous one earned; with several sizes, rows form independent groups."""
        attention = causal(len(tokens)) if len(sizes) == 1 else groups(sizes)
        commit, self.commit = self.commit, NOTHING
        return (yield Forward(tokens, positions, attention, reads, commit, kind))

    def _plan(self, masked: list[int]) -> Generator[Forward, tuple[Readout, ...], _Drafts]:
        """Drafts every masked slot of the block in one forward and selects the certain ones (Eq. 4-5).

        The first plan also carries the prompt, which is the only part of it that stays in the cache.
        """
        settings, k = self.settings, self.settings.slot_size
        if self.to_refresh is not None:
            yield from self._refresh(self.to_refresh)
        prefix = self.prompt if self.is_first_forward else []
        self.is_first_forward = False
        num_masks = len(masked) * k
        iteration = next(self.iterations)
        read = Read(
            rows=range(len(prefix), len(prefix) + num_masks),
            suppress=self.suppress,
            temperature=settings.temperature,
            draws=tuple(draw_key(settings.seed, iteration, slot + column) for slot in masked for column in range(k))
            if settings.temperature > 0
            else (),
        )
        tokens = [*prefix, *[settings.mask_id] * num_masks]
        positions = [*range(len(prefix)), *self._positions(masked)]
        (readout,) = yield from self._forward("plan", tokens, positions, [len(tokens)], (read,))
        if prefix:
            self.commit = Commit(range(len(prefix)))
        certainty_S = readout.probs.reshape(-1, k)[:, 0]
        chosen = [0] if settings.left_to_right else above_or_best(certainty_S, settings.tau_slot)
        slots = [masked[index] for index in chosen]
        drafts = _Drafts(slots, readout.tokens.reshape(-1, k)[chosen])
        self.trace.select("slot", masked, certainty_S.tolist(), slots)
        self.trace.draft(self._response_positions(slots), drafts.tokens_SK.ravel().tolist())
        return drafts

    def _refresh(self, done: _Tokens) -> Generator[Forward, tuple[Readout, ...], None]:
        """Runs slots that were completed independently once more as one sequence, so that they see each other."""
        self.to_refresh = None
        num_rows = len(done.tokens)
        yield from self._forward("refresh", done.tokens, done.positions, [num_rows], ())
        self.commit = Commit(range(num_rows))

    def _response_positions(self, slots: Sequence[int]) -> list[int]:
        return [slot + column for slot in slots for column in range(self.settings.slot_size)]

    def _infill(self, drafts: _Drafts, masked: list[int]) -> Generator[Forward, tuple[Readout, ...], _Step]:
        """Verifies all drafts as one causal sequence (Eq. 6); accepts whole slots, or completes them one by one."""
        k = self.settings.slot_size
        tokens = drafts.tokens_SK.ravel().tolist()
        # Row m - 1 predicts token m. The first token of a slot is never compared with tau_token: planning vouches for it.
        rows = [row for row in range(len(tokens) - 1) if (row + 1) % k]
        reads = (Read(rows=rows, given=[tokens[row + 1] for row in rows]),) if rows else ()
        readouts = yield from self._forward("verify", tokens, self._positions(drafts.slots), [len(tokens)], reads)
        accepted_SK = np.ones(drafts.tokens_SK.shape, dtype=bool)
        if rows:
            accepted_SK[:, 1:] = self._above_tau_token(readouts[0].given).reshape(-1, k - 1)
        num_accepted = accepted_prefix(accepted_SK.ravel())
        eos = first_eos(tokens[:num_accepted], self.settings.eos_ids)
        if eos is not None:
            self.trace.fix(self._keep(drafts.slots, tokens[: eos + 1]), tokens[: eos + 1])
            last = drafts.slots[eos // k]
            # Selected slots before the one with EOS were accepted whole; those after it go with all later masked slots.
            left = [slot for slot in masked if slot < last and slot not in drafts.slots]
            return _Step(Commit(range(eos + 1)), left, met_eos=True)
        if num_accepted < k:
            return (yield from self._complete(drafts, masked, accepted_SK))
        num_slots = num_accepted // k
        done, done_tokens = drafts.slots[:num_slots], tokens[: num_slots * k]
        self.trace.fix(self._keep(done, done_tokens), done_tokens)
        return _Step(Commit(range(len(done_tokens))), [slot for slot in masked if slot not in done], met_eos=False)

    def _above_tau_token(self, probs: ProbArray | None) -> np.ndarray:
        assert probs is not None
        return probs > self.settings.tau_token

    def _complete(
        self, drafts: _Drafts, masked: list[int], accepted_SK: np.ndarray
    ) -> Generator[Forward, tuple[Readout, ...], _Step]:
        """Completes the selected slots independently of each other, in rounds of prediction and verification (Eq. 7-8).

        Every round accepts at least one token a slot. A slot that meets EOS ends the later ones.
        """
        k = self.settings.slot_size
        slots, tokens_SK = list(drafts.slots), drafts.tokens_SK.copy()
        valid_S = [accepted_prefix(row) for row in accepted_SK]
        if self.settings.verify_independently:
            valid_S = yield from self._verify_slots(slots, tokens_SK, [0] * len(slots))
        fixed_S = [0] * len(slots)
        while True:
            eos_row = self._first_row_with_eos(tokens_SK, valid_S)
            if eos_row is not None:
                slots, tokens_SK, valid_S = slots[: eos_row + 1], tokens_SK[: eos_row + 1], [*valid_S[:eos_row], k]
            fixed_S = self._fix_valid(slots, tokens_SK, valid_S, fixed_S)
            if min(valid_S) == k:
                break
            yield from self._predict(slots, tokens_SK, valid_S)
            valid_S = yield from self._verify_slots(slots, tokens_SK, valid_S)
        tokens = tokens_SK.ravel().tolist()
        left = [slot for slot in masked if slot not in drafts.slots]
        if eos_row is not None:
            eos = first_eos(tokens, self.settings.eos_ids)
            assert eos is not None
            tokens = tokens[: eos + 1]
            left = self._before_eos(left, masked, eos_row, slots[-1])
        self._keep(slots, tokens)
        kept = Commit(range(len(tokens)))
        if self.settings.recompute_kv and len(slots) > 1:
            self.to_refresh, kept = _Tokens(tokens, self._positions(slots)[: len(tokens)]), NOTHING
        return _Step(kept, left, met_eos=eos_row is not None)

    def _first_row_with_eos(self, tokens_SK: TokenArray, valid_S: list[int]) -> int | None:
        eos_ids = self.settings.eos_ids
        rows = enumerate(zip(tokens_SK, valid_S, strict=True))
        return next((row for row, (tokens_K, valid) in rows if first_eos(tokens_K[:valid], eos_ids) is not None), None)

    def _before_eos(self, left: list[int], masked: list[int], eos_row: int, eos_slot: int) -> list[int]:
        """The masked slots that stay when a completion met EOS: those before its slot.

        The release confuses the row among the selected slots with the index among the masked ones and loses text.
        """
        if self.settings.release_compatible:
            kept = set(masked[:eos_row])
            return [slot for slot in left if slot in kept]
        return [slot for slot in left if slot < eos_slot]

    def _predict(
        self, slots: list[int], tokens_SK: TokenArray, valid_S: list[int]
    ) -> Generator[Forward, tuple[Readout, ...], None]:
        """Draws the tokens behind the valid prefix of every unfinished slot again, in place (always the likeliest)."""
        k, mask_id = self.settings.slot_size, self.settings.mask_id
        open_rows = [row for row, valid in enumerate(valid_S) if valid < k]
        tokens: list[int] = []
        rows: list[int] = []
        for row in open_rows:
            rows.extend(range(len(tokens) + valid_S[row], len(tokens) + k))
            tokens.extend([*tokens_SK[row, : valid_S[row]].tolist(), *[mask_id] * (k - valid_S[row])])
        positions = self._positions([slots[row] for row in open_rows])
        read = Read(rows=rows, suppress=self.suppress)
        (readout,) = yield from self._forward("predict", tokens, positions, [k] * len(open_rows), (read,))
        start = 0
        for row in open_rows:
            num_new = k - valid_S[row]
            tokens_SK[row, valid_S[row] :] = readout.tokens[start : start + num_new]
            start += num_new
        drafted = [(slots[row] + column, row, column) for row in open_rows for column in range(valid_S[row], k)]
        self.trace.draft([position for position, _, _ in drafted], [tokens_SK[row, col] for _, row, col in drafted])

    def _verify_slots(
        self, slots: list[int], tokens_SK: TokenArray, valid_S: list[int]
    ) -> Generator[Forward, tuple[Readout, ...], list[int]]:
        """Verifies every slot in its own group and returns the new valid lengths.

        Valid tokens are not checked again, the token behind them is accepted whatever its probability, and the
        following ones while they exceed tau_token. Finished slots ride along: their keys and values are kept from the
        last verification.
        """
        k = self.settings.slot_size
        spans = [(row, column) for row, valid in enumerate(valid_S) for column in range(valid + 1, k)]
        reads = ()
        if spans:
            rows = [row * k + column - 1 for row, column in spans]
            reads = (Read(rows=rows, given=[int(tokens_SK[row, column]) for row, column in spans]),)
        tokens = tokens_SK.ravel().tolist()
        readouts = yield from self._forward("verify", tokens, self._positions(slots), [k] * len(slots), reads)
        accepted_SK = np.ones(tokens_SK.shape, dtype=bool)
        if spans:
            accepted_SK[tuple(np.transpose(spans))] = self._above_tau_token(readouts[0].given)
        return [accepted_prefix(row) for row in accepted_SK]

    def _keep(self, slots: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Adds tokens to the response: they fill these slots in order, the last one perhaps only in part."""
        positions = self._response_positions(slots)[: len(tokens)]
        self.response.update(zip(positions, tokens, strict=True))
        return positions

    def _fix_valid(self, slots: list[int], tokens_SK: TokenArray, valid_S: list[int], fixed_S: list[int]) -> list[int]:
        """Reports the newly valid tokens of slots under completion as final, in each slot no further than its EOS."""
        positions: list[int] = []
        tokens: list[int] = []
        fixed = []
        for slot, tokens_K, valid, start in zip(slots, tokens_SK.tolist(), valid_S, fixed_S, strict=False):
            eos = first_eos(tokens_K[:valid], self.settings.eos_ids)
            end = valid if eos is None else eos + 1
            positions.extend(range(slot + start, slot + end))
            tokens.extend(tokens_K[start:end])
            fixed.append(max(start, end))
        self.trace.fix(positions, tokens)
        return fixed

    def _stop_rule_holds(self) -> bool:
        rule = self.settings.stop_rule
        return rule is not None and rule(self._gapless())

    def _gapless(self) -> list[int]:
        """The response from its start to the first position that is not final."""
        tokens = []
        for position in count():
            if position not in self.response:
                return tokens
            tokens.append(self.response[position])
        raise AssertionError("unreachable")

    def _finish(self, reason: str) -> Response:
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
        return Response(tuple(tokens), reason)  # type: ignore[arg-type]
