"""d3LLM (arXiv 2601.07568): fills several blocks of a bidirectional model at once, by entropy, with a delayed cache.

Every row sees the prompt and the whole response, masks included. The response is filled in blocks, of which the first
ones are open; each forward opens at most one more, once enough of the last one is filled. Candidates are the masks of
all open blocks. A block becomes fully active once enough of the block before it is filled: from then on every forward
fills at least one of its masks, as long as no earlier fully active block has masks.

With `cache_delay_iter` the keys and values of finished blocks are kept, although they would change with every token
that is filled in. A block that is finished, as are all blocks before it, waits for that many forwards, each of which
computes the whole text, and is then stored by a forward of everything behind the cache. The prompt is finished from the
beginning. Every `refresh_interval`-th forward computes the whole text, too, and renews what is stored.

d3LLM was released for LLaDA and Dream. The models differ in the row that predicts a position and in small things that
the settings name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import ClassVar, NamedTuple

import numpy as np

from refusion_eval.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, settings_class
from refusion_eval.decoders import Decoder, Reads, Style, first_eos, rounded_threshold
from refusion_eval.decoders.canvas import Canvas, MaskedSettings
from refusion_eval.errors import ConfigError
from refusion_eval.types import (
    DROP_ALL,
    NOTHING,
    Commit,
    ConfidenceDtype,
    Decoding,
    Forward,
    ProbArray,
    Read,
    Trace,
    bidirectional,
)


@settings_class("d3llm_llada")
class D3llmLladaSettings(MaskedSettings):
    """Settings of d3LLM on LLaDA, named as in its release, with the defaults of its function.

    Attributes:
        confidence_dtype: float64 as released.
        early_stop: everything behind the first of `eos_ids` counts as end tokens, and only masks before it are filled.
        block_size: positions of a block; the last one may be shorter.
        threshold: a mask is filled if its entropy in nats is at most this, and the lowest one always; on Dream if it is
            below this.
        block_add_threshold: a block is opened once this share of the last open one is filled.
        decoded_token_threshold: a block becomes fully active once this share of the block before it is filled.
        cache_delay_iter: forwards between the end of a block and its storing, >= 0; None keeps no keys and values.
        refresh_interval: with `cache_delay_iter`, every forward of a number divisible by this renews the cache.
        release_compatible: where the end was found, the forward after it still fills the masks behind it. On Dream, a
            refresh keeps the keys of finished blocks that are not stored yet, which later forwards feed again, so that
            rows see them twice; and the first row of a cached forward predicts its own position, not the next one.
    """

    decoder: ClassVar[str] = "d3llm_llada"

    confidence_dtype: ConfidenceDtype = "float64"
    block_size: PositiveInt = 32
    threshold: NonNegativeFloat = 0.5
    block_add_threshold: Fraction = 0.5
    decoded_token_threshold: Fraction = 0.5
    cache_delay_iter: NonNegativeInt | None = None
    refresh_interval: PositiveInt | None = None
    release_compatible: bool = False

    def __post_init__(self) -> None:
        MaskedSettings.__post_init__(self)
        if self.refresh_interval is not None and self.cache_delay_iter is None:
            where = f"{self.decoder}: refresh_interval is {self.refresh_interval} and there is no cache"
            raise ConfigError(f"{where}; set cache_delay_iter, or leave out refresh_interval")
        if self.early_stop and not self.eos_ids:
            raise ConfigError(f"{self.decoder}: early_stop needs eos_ids, and there are none")

    def read(self, rows: Sequence[int], step: int, positions: Sequence[int]) -> Read:
        return replace(MaskedSettings.read(self, rows, step, positions), entropy=True)


@settings_class("d3llm_dream")
class D3llmDreamSettings(D3llmLladaSettings):
    """Settings of d3LLM on Dream, in which a row predicts the next position; the same, but for what they say."""

    decoder: ClassVar[str] = "d3llm_dream"
    shift: ClassVar[int] = 1


@dataclass(slots=True)
class _Block:
    start: int  # response indices; the prompt is the block before index 0
    end: int
    finished_at: int | None = None  # number of the forward from which on its delay counts
    is_stored: bool = False


class _Guess(NamedTuple):
    token: int
    score: np.floating


class _Blocks:
    """The open blocks, the prompt first, and which of them are cached."""

    def __init__(self, canvas: Canvas, settings: D3llmLladaSettings) -> None:
        self._canvas, self._settings = canvas, settings
        starts = range(0, settings.gen_length, settings.block_size)
        self._closed = [_Block(start, min(start + settings.block_size, settings.gen_length)) for start in starts]
        self.opened = [_Block(-canvas.start, 0, finished_at=0), self._closed.pop(0)]
        self.stored_to = -canvas.start  # response index up to which the blocks are stored

    def _num_masked(self, block: _Block) -> int:
        return len(self._canvas.masked(range(max(block.start, 0), block.end)))

    def _progress(self, block: _Block) -> float:
        return 1 - self._num_masked(block) / max(1, block.end - block.start)  # nothing may stand in front of a gap

    @property
    def end(self) -> int:
        return self.opened[-1].end

    def behind_cache(self) -> list[int]:
        """The first position behind the cache if its row is in the cache and it is masked, open or not."""
        edge = max(0, self.stored_to)
        return self._canvas.masked(range(edge, min(edge + self._settings.shift, self._settings.gen_length)))

    def end_at(self, position: int) -> None:
        """Opens all blocks, of which those behind the position of the end need no storing."""
        self.opened, self._closed = self.opened + self._closed, []
        for block in self.opened:
            block.is_stored |= block.start > position

    def open_next(self) -> None:
        if self._closed and self._progress(self.opened[-1]) >= self._settings.block_add_threshold:
            self.opened.append(self._closed.pop(0))

    def next_to_fill(self) -> _Block | None:
        """The first fully active block with masks."""
        for before, block in pairwise(self.opened):
            if self._num_masked(block) and self._progress(before) >= self._settings.decoded_token_threshold:
                return block
        return None

    def plan(self, number: int) -> tuple[int, Commit, str]:
        """Where the rows of a forward begin, which of them the forward after it may keep, and its kind."""
        settings, start = self._settings, -self._canvas.start
        if settings.cache_delay_iter is None:
            return start, NOTHING, "denoise"
        store_to = self._mark_stored(number, settings.cache_delay_iter)
        if store_to > self.stored_to:
            begin, self.stored_to = self.stored_to, store_to
            return begin, Commit(range(store_to - begin)), "store"
        waiting = [block for block in self.opened if block.finished_at is not None and not block.is_stored]
        is_due = settings.refresh_interval is not None and number % settings.refresh_interval == 0
        if self.stored_to == start:
            return start, NOTHING, "denoise"
        if waiting or is_due:
            kept_to = waiting[-1].start if waiting and settings.release_compatible else self.stored_to
            return start, Commit(range(kept_to - start)), "refresh"
        return self.stored_to, NOTHING, "denoise"

    def _mark_stored(self, number: int, delay: int) -> int:
        """Marks the blocks whose delay is over, and returns where the last one ends."""
        store_to = self.stored_to
        for block in self.opened:
            if block.end <= self.stored_to:
                continue
            if self._num_masked(block):
                break
            block.finished_at = number if block.finished_at is None else block.finished_at
            is_over = number - block.finished_at >= delay
            if is_over and not block.is_stored:
                block.is_stored, store_to = True, block.end
            # On LLaDA the delay of a block begins when that of the block before it is over.
            if not is_over and self._settings.shift == 0:
                break
        return store_to


def decode(prompt: Sequence[int], settings: D3llmLladaSettings, trace: Trace) -> Decoding:
    """Decodes one prompt in at most as many forwards as it fills masks: one block with masks is always fully active."""
    canvas = Canvas(prompt, settings, trace)
    blocks, commit, guesses = _Blocks(canvas, settings), NOTHING, dict[int, _Guess]()
    for number in count(1):
        masked = canvas.masked()
        response = canvas.tokens[canvas.start : canvas.start + settings.gen_length]
        end = first_eos(response, settings.eos_ids[:1]) if settings.early_stop else None
        if end is not None:
            canvas.fill(range(end + 1, settings.gen_length), settings.eos_ids[0])
            blocks.end_at(end)
        if not canvas.masked():
            break
        blocks.open_next()
        masked = masked if settings.release_compatible else canvas.masked()
        candidates = [position for position in masked if position < blocks.end]
        start, left, kind = blocks.plan(number)
        forward, positions = _forward(canvas, settings, number, start, [*candidates, *blocks.behind_cache()])
        (readout,) = yield replace(forward, commit=DROP_ALL if start == -canvas.start else commit, kind=kind)
        commit = left
        scores = settings.scores(readout, number, positions)
        guesses.update(zip(positions, map(_Guess, readout.tokens, scores), strict=True))
        chosen = [guesses[position] for position in candidates]
        scores = np.array([guess.score for guess in chosen])
        filled = _choose(settings, blocks, candidates, scores, rounded_threshold(settings.threshold, readout))
        tokens = {candidates[index]: chosen[index].token for index in filled}
        trace.select("token", candidates, scores.tolist(), list(tokens))
        # As released, a forward fills positions behind the end again, often with the end token that they have.
        new = {position: token for position, token in tokens.items() if canvas.tokens[canvas.start + position] != token}
        canvas.fix(list(new), new.values())
        if (reason := canvas.settled()) and not settings.release_compatible:
            return canvas.finish(reason)
    return canvas.finish()


def _forward(
    canvas: Canvas, settings: D3llmLladaSettings, number: int, start: int, wanted: Sequence[int]
) -> tuple[Forward, list[int]]:
    """The forward of all rows from response index `start` on, and which of the wanted positions it reads."""
    first = canvas.start + start
    fed, rows = range(first, len(canvas.tokens)), {}
    for position in wanted:
        # With a shift, the row that predicts the first position behind the cache is in the cache and cannot be read
        # again. That position keeps the guess of the last forward that computed the row.
        row = max(0, canvas.start + position - settings.shift) - first
        if row >= 0 or settings.release_compatible:
            rows[position] = max(row, 0)
    read = settings.read(list(rows.values()), number, list(rows))
    return Forward(canvas.tokens[first:], fed, bidirectional(len(fed)), (read,)), list(rows)


def _choose(
    settings: D3llmLladaSettings, blocks: _Blocks, candidates: Sequence[int], scores: ProbArray, threshold: float
) -> list[int]:
    """Indices of the candidates to fill: those of low entropy, and the best one where the rules ask for one."""
    if settings.shift:
        chosen = set(np.flatnonzero(scores > -threshold).tolist())
    else:
        chosen = {int(np.argmax(scores)), *np.flatnonzero(scores >= -threshold).tolist()}
    if (block := blocks.next_to_fill()) is not None:
        inside = [index for index, position in enumerate(candidates) if block.start <= position < block.end]
        if chosen.isdisjoint(inside):
            chosen.add(max(inside, key=scores.__getitem__))
    return sorted(chosen)


DECODERS = {
    "d3llm_dream": Decoder(
        decode,
        D3llmDreamSettings,
        label="Dream w/ d3LLM",
        reads=Reads("bidirectional", masked="next"),
        infills="gap",
        fits=("dream",),
        style=Style("#999933", "*", (0, (2, 2)), order=16),
    ),
    "d3llm_llada": Decoder(
        decode,
        D3llmLladaSettings,
        label="LLaDA w/ d3LLM",
        reads=Reads("bidirectional", masked="own"),
        infills="gap",
        fits=("llada",),
        style=Style("#999933", "d", (0, (4, 1, 2, 1)), order=15),
    ),
}
