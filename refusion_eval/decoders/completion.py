"""The completion loop of ReFusion: slots whose drafts were rejected are finished independently of each other.

Eq. 7-8 of arXiv 2512.13586, in rounds of one prediction and one verification. Nothing is committed in between: each
forward carries the slots whole, as groups that see the cache and themselves only.
"""

from collections.abc import Generator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from refusion_eval.decoders.choose import accepted_prefix, first_eos
from refusion_eval.decoders.refusion_settings import RefusionSettings
from refusion_eval.trace import Trace
from refusion_eval.types import Forward, Read, Readout, TokenArray, groups


class Drafts(NamedTuple):
    """Slots, ascending, and the tokens drafted for them [S, k]."""

    slots: list[int]
    tokens_SK: TokenArray


class Completed(NamedTuple):
    """What a completion leaves: its rows 0 .. len(tokens) - 1 of the last forward are those of `tokens`.

    Attributes:
        slots: the finished slots; those behind the one that met EOS are dropped.
        tokens: their tokens, slot after slot, up to and including the first EOS.
        eos_row: index in `slots` of the one that met EOS (the last one), or None.
    """

    slots: list[int]
    tokens: list[int]
    eos_row: int | None


class Completion:
    """The slots under completion: their tokens, and how many of each are valid so far."""

    def __init__(
        self,
        drafts: Drafts,
        accepted_SK: npt.NDArray[np.bool_],
        prompt_length: int,
        settings: RefusionSettings,
        trace: Trace,
    ) -> None:
        self.slots = list(drafts.slots)
        self.tokens_SK = drafts.tokens_SK.copy()
        self.valid_S = [accepted_prefix(row) for row in accepted_SK]
        self.fixed_S = [0] * len(drafts.slots)
        self.prompt_length = prompt_length
        self.settings = settings
        self.trace = trace

    def run(self) -> Generator[Forward, tuple[Readout, ...], Completed]:
        """Runs rounds until every slot is valid; each round accepts at least one token a slot.

        A slot that meets EOS counts as valid to its end, and the slots behind it are dropped; an earlier slot may still
        meet EOS later and take over.
        """
        if self.settings.verify_independently:
            self.valid_S = [0] * len(self.slots)
            yield from self._verify()
        while True:
            eos_row = self._end_at_eos()
            self._fix_valid()
            if min(self.valid_S) == self.settings.slot_size:
                break
            yield from self._predict()
            yield from self._verify()
        tokens = self.tokens_SK.ravel().tolist()
        eos = first_eos(tokens, self.settings.eos_ids)
        return Completed(self.slots, tokens if eos is None else tokens[: eos + 1], eos_row)

    def _end_at_eos(self) -> int | None:
        """Drops the slots behind the first one with a valid EOS and returns its row."""
        for row, valid in enumerate(self.valid_S):
            if first_eos(self.tokens_SK[row, :valid], self.settings.eos_ids) is not None:
                self.slots = self.slots[: row + 1]
                self.tokens_SK = self.tokens_SK[: row + 1]
                self.valid_S = [*self.valid_S[:row], self.settings.slot_size]
                return row
        return None

    def _forward(
        self, kind: str, slots: list[int], tokens: list[int], reads: tuple[Read, ...]
    ) -> Generator[Forward, tuple[Readout, ...], tuple[Readout, ...]]:
        positions = [self.prompt_length + position for position in self.settings.response_positions(slots)]
        return (yield Forward(tokens, positions, groups([self.settings.slot_size] * len(slots)), reads, kind=kind))

    def _predict(self) -> Generator[Forward, tuple[Readout, ...], None]:
        """Draws the tokens behind the valid prefix of every unfinished slot again (always the likeliest, Eq. 8)."""
        k, mask_id = self.settings.slot_size, self.settings.mask_id
        unfinished = [row for row, valid in enumerate(self.valid_S) if valid < k]
        tokens: list[int] = []
        rows: list[int] = []
        for row in unfinished:
            valid = self.valid_S[row]
            rows.extend(range(len(tokens) + valid, len(tokens) + k))
            tokens.extend([*self.tokens_SK[row, :valid].tolist(), *[mask_id] * (k - valid)])
        read = Read(rows=rows, suppress=self.settings.suppress)
        (readout,) = yield from self._forward("predict", [self.slots[row] for row in unfinished], tokens, (read,))
        spans = [(row, column) for row in unfinished for column in range(self.valid_S[row], k)]
        self.tokens_SK[tuple(np.transpose(spans))] = readout.tokens
        self.trace.draft([self.slots[row] + column for row, column in spans], readout.tokens.tolist())

    def _verify(self) -> Generator[Forward, tuple[Readout, ...], None]:
        """Verifies every slot in its own group and lengthens the valid prefixes (Eq. 7).

        Valid tokens are not checked again, the token behind them is accepted whatever its probability, and those after
        it while they exceed tau_token. Finished slots ride along: the keys and values of all slots are kept from the
        last verification.
        """
        k = self.settings.slot_size
        spans = [(row, column) for row, valid in enumerate(self.valid_S) for column in range(valid + 1, k)]
        tokens = self.tokens_SK.ravel().tolist()
        reads: tuple[Read, ...] = ()
        if spans:
            indices = [row * k + column for row, column in spans]
            reads = (Read(rows=[index - 1 for index in indices], given=[tokens[index] for index in indices]),)
        readouts = yield from self._forward("verify", self.slots, tokens, reads)
        accepted_SK = np.ones(self.tokens_SK.shape, dtype=bool)
        if spans:
            probs = readouts[0].given
            assert probs is not None
            accepted_SK[tuple(np.transpose(spans))] = probs > self.settings.tau_token
        self.valid_S = [accepted_prefix(row) for row in accepted_SK]

    def _fix_valid(self) -> None:
        """Reports the newly valid tokens as final, in each slot no further than its EOS."""
        positions: list[int] = []
        tokens: list[int] = []
        for row, slot in enumerate(self.slots):
            tokens_K = self.tokens_SK[row, : self.valid_S[row]].tolist()
            eos = first_eos(tokens_K, self.settings.eos_ids)
            start, end = self.fixed_S[row], len(tokens_K) if eos is None else eos + 1
            positions.extend(range(slot + start, slot + end))
            tokens.extend(tokens_K[start:end])
            self.fixed_S[row] = max(start, end)
        if positions:
            self.trace.fix(positions, tokens)
