"""ReFusion: plan which slots to decode, draft them in parallel, verify the drafts, complete what was rejected.

arXiv 2512.13586, section 4.2 and Eq. 4-8. Attention is causal in the order in which tokens were accepted; position ids
say where a token stands in the text. Where the paper and the public release differ, the release's rule is followed (it
is what the published weights were tuned with) except for its defects, which `release_compatible` brings back.

Names: a slot is named by the response index of its first position; arrays are [S slots, K tokens a slot].
"""

from collections.abc import Generator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from refusion_eval.decoders.choose import above_or_best, accepted_prefix, first_eos
from refusion_eval.decoders.completion import Completed, Completion, Drafts
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


class _Refresh(NamedTuple):
    """Slots that were completed independently and are to be run once more as one sequence."""

    tokens: list[int]
    positions: list[int]


def decode(prompt: Sequence[int], settings: RefusionSettings, trace: Trace) -> Decoding:
    """Decodes one prompt: block after block, in each plan and infill until no slot is masked.

    Args:
        prompt: token ids, at least one.
        settings: see `RefusionSettings`.
        trace: receives the events.
    """
    return (yield from _Refusion(prompt, settings, trace).run())


class _Refusion:
    """The state of one decoding.

    Attributes:
        response: final tokens by response index.
        masked: slots of the current block that are not final yet, ascending.
        met_eos: whether the response ends within what is decoded so far.
        commit: what the next forward commits of the previous one.
        refresh: what is to be run once more before the next plan, if anything.
    """

    def __init__(self, prompt: Sequence[int], settings: RefusionSettings, trace: Trace) -> None:
        self.prompt = list(prompt)
        self.settings = settings
        self.trace = trace
        self.response: dict[int, int] = {}
        self.masked: list[int] = []
        self.met_eos = False
        self.commit = NOTHING
        self.refresh: _Refresh | None = None

    def run(self) -> Decoding:
        iterations = count()
        for block in self._blocks():
            self.masked = list(block)
            while self.masked:
                drafts = yield from self._plan(next(iterations))
                yield from self._infill(drafts)
                if self.settings.stop_rule is not None and self.settings.stop_rule(self._gapless()):
                    return self._finish("stop_string")
            if self.met_eos:
                return self._finish("eos")
        return self._finish("length")

    def _blocks(self) -> list[range]:
        """The slots of each block; the last block may be shorter."""
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

    def _plan(self, iteration: int) -> Generator[Forward, tuple[Readout, ...], Drafts]:
        """Drafts every masked slot of the block in one forward and selects the certain ones (Eq. 4-5).

        The very first plan also carries the prompt, which is the only part of it that stays in the cache.
        """
        if self.refresh is not None:
            yield from self._run_refresh(self.refresh)
        settings, k = self.settings, self.settings.slot_size
        prefix = self.prompt if iteration == 0 else []
        num_masks = len(self.masked) * k
        positions = self._position_ids(self.masked)
        sampled = settings.temperature > 0
        read = Read(
            rows=range(len(prefix), len(prefix) + num_masks),
            suppress=settings.suppress,
            temperature=settings.temperature,
            draws=tuple(draw_key(settings.seed, iteration, position) for position in positions) if sampled else (),
        )
        tokens = [*prefix, *[settings.mask_id] * num_masks]
        (readout,) = yield from self._forward("plan", tokens, [*range(len(prefix)), *positions], (read,))
        self.commit = Commit(range(len(prefix)))
        certainty_S = readout.probs.reshape(-1, k)[:, 0]
        chosen = [0] if settings.left_to_right else above_or_best(certainty_S, settings.tau_slot)
        drafts = Drafts([self.masked[index] for index in chosen], readout.tokens.reshape(-1, k)[chosen])
        self.trace.select("slot", self.masked, certainty_S.tolist(), drafts.slots)
        self.trace.draft(settings.response_positions(drafts.slots), drafts.tokens_SK.ravel().tolist())
        return drafts

    def _run_refresh(self, done: _Refresh) -> Generator[Forward, tuple[Readout, ...], None]:
        """Lets slots that were completed independently see each other (section 5.5)."""
        self.refresh = None
        yield from self._forward("refresh", done.tokens, done.positions, ())
        self.commit = Commit(range(len(done.tokens)))

    def _infill(self, drafts: Drafts) -> Generator[Forward, tuple[Readout, ...], None]:
        """Verifies all drafts as one causal sequence (Eq. 6); accepts whole slots, or has them completed one by one."""
        k = self.settings.slot_size
        tokens = drafts.tokens_SK.ravel().tolist()
        # Row m - 1 predicts token m. Planning vouches for the first token of a slot: tau_token does not apply to it.
        rows = [row for row in range(len(tokens) - 1) if (row + 1) % k]
        reads = (Read(rows=rows, given=[tokens[row + 1] for row in rows]),) if rows else ()
        readouts = yield from self._forward("verify", tokens, self._position_ids(drafts.slots), reads)
        accepted_SK = np.ones(drafts.tokens_SK.shape, dtype=bool)
        if rows:
            probs = readouts[0].given
            assert probs is not None
            accepted_SK[:, 1:] = (probs > self.settings.tau_token).reshape(-1, k - 1)
        num_accepted = accepted_prefix(accepted_SK.ravel())
        eos = first_eos(tokens[:num_accepted], self.settings.eos_ids)
        if eos is None and num_accepted < k:
            completion = Completion(drafts, accepted_SK, len(self.prompt), self.settings, self.trace)
            self._store(drafts, (yield from completion.run()))
            return
        num_kept = num_accepted // k * k if eos is None else eos + 1
        done = drafts.slots[: -(-num_kept // k)]
        self.trace.fix(self._keep(done, tokens[:num_kept]), tokens[:num_kept])
        self.commit = Commit(range(num_kept))
        self.masked = [slot for slot in self.masked if slot not in done and (eos is None or slot < done[-1])]
        self.met_eos |= eos is not None

    def _store(self, drafts: Drafts, completed: Completed) -> None:
        """Takes over completed slots, whose keys and values know the cache and their own slot only."""
        positions = self._keep(completed.slots, completed.tokens)
        self.commit = Commit(range(len(positions)))
        if self.settings.recompute_kv and len(completed.slots) > 1:
            position_ids = [len(self.prompt) + position for position in positions]
            self.refresh, self.commit = _Refresh(completed.tokens, position_ids), NOTHING
        masked = [slot for slot in self.masked if slot not in drafts.slots]
        if completed.eos_row is not None:
            self.met_eos = True
            if self.settings.release_compatible:
                # The release takes the row among the selected slots for an index among the masked ones, and loses text.
                masked = [slot for slot in masked if slot in self.masked[: completed.eos_row]]
            else:
                masked = [slot for slot in masked if slot < completed.slots[-1]]
        self.masked = masked

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
