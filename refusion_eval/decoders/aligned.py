"""Blocks that are counted from the first token of the prompt: what SDAR, Fast-dLLM v2 and LLaDA2 share.

Attention is full within a block, and a block sees the blocks before it. The prompt consists of blocks too; its rest,
which fills no whole block, stands in the first block that is generated. A finished block never changes, so its keys and
values are cached.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, ClassVar

from refusion_eval.config import PositiveInt, settings_class
from refusion_eval.decoders.canvas import Canvas, Filling, MaskedSettings
from refusion_eval.types import NOTHING, Commit, Decoding, Forward, Read, Trace, block_causal


@settings_class("aligned")
class AlignedSettings(MaskedSettings):
    """Settings of decoders whose blocks are counted from the first token of the prompt.

    Decoding ends after the block that holds one of `eos_ids`, or with the block in which position `gen_length` is;
    whole blocks are decoded, and the response is cut to `gen_length`.

    Attributes:
        block_length: positions of a block, as the model was trained with.
        separate_commit: compute the keys and values of the prompt and of finished blocks in forwards of their own, as
            released, instead of in the first forward of the next block.
        release_compatible: make the forwards of the release: `separate_commit`, also after the last block; and keep the
            tokens behind `gen_length` that the last block has.
    """

    prefills_by_block: ClassVar[bool] = False  # whether stored prompts take a forward for each block

    block_length: PositiveInt = 32
    separate_commit: bool = False
    release_compatible: bool = False

    @property
    def num_positions(self) -> int:  # after the prompt whose rest is the worst
        return self.gen_length + self.block_length - 1

    def positions_after(self, prompt_length: int) -> int:
        """Positions after a prompt of a length that decoding touches, up to the end of a block."""
        return self.gen_length + -(prompt_length + self.gen_length) % self.block_length

    @property
    def stores_apart(self) -> bool:
        """Whether the prompt and finished blocks have forwards of their own, which store their keys and values."""
        return self.separate_commit or self.release_compatible

    @property
    def ends_with_stop(self) -> bool:
        """Whether decoding ends after a block that holds a stop token."""
        return True


class AlignedCanvas(Canvas):
    """A canvas that grows by blocks, and what of it is cached; one of the blocks begins at `origin`."""

    def __init__(self, prompt: Sequence[int], settings: Any, trace: Trace, origin: int = 0) -> None:
        super().__init__(prompt, settings, trace, gen_length=0)
        self._size, self._origin = settings.block_length, origin
        self._most = None if settings.release_compatible else settings.gen_length  # tokens of the response
        # The first `num_cached` tokens are cached as soon as `commit` is done.
        self.num_cached, self.commit = 0, NOTHING

    def open(self, block: range) -> None:
        """Makes the text reach the end of a block."""
        self.extend(max(0, block.stop - len(self.tokens)))

    def region(self, block: range) -> range:
        """The response indices of a block."""
        return range(max(0, block.start - self.start), block.stop - self.start)

    def has_stop(self, positions: Iterable[int]) -> bool:
        """Whether one of some response indices holds a stop token."""
        return any(self.tokens[self.start + position] in self.settings.eos_ids for position in positions)

    def has_final_stop(self) -> bool:
        """Whether a stop token is in the response before all masks, also behind `gen_length`."""
        return self.has_stop(range(len(super()._gapless())))

    def forward(self, end: int, kind: str, reads: tuple[Read, ...] = (), num_final: int | None = None) -> Forward:
        """The forward of all rows up to `end` that are not cached; the first `num_final` tokens (all) are final."""
        fed, num_final = range(self.num_cached, end), end if num_final is None else num_final
        # Floor division also cuts what is before the origin.
        sizes = Counter((position - self._origin) // self._size for position in fed)
        tokens, attention = self.tokens[fed.start : end], block_causal(list(sizes.values()))
        forward = Forward(tokens, fed, attention, reads, self.commit, kind)
        self.commit, self.num_cached = Commit(range(num_final - fed.start)), num_final
        return forward

    def _gapless(self) -> list[int]:
        return super()._gapless()[: self._most]

    def denoise(self, block: range, positions: Sequence[int], step: int) -> Forward:
        """The forward of a block that is not final, which reads some response indices."""
        reads = self.reads(positions, step, self.num_cached)
        return self.forward(block.stop, "denoise", reads, num_final=block.start)


def decode_blocks(
    prompt: Sequence[int],
    settings: Any,
    trace: Trace,
    fill: Callable[[AlignedCanvas, range, Any, Iterator[int]], Filling],
) -> Decoding:
    """Decodes one prompt; `fill` fills a block of the canvas and numbers its steps."""
    canvas, steps, size = AlignedCanvas(prompt, settings, trace), count(), settings.block_length
    num_whole, end = len(prompt) // size * size, len(prompt) + settings.gen_length
    if settings.stores_apart and num_whole:
        for stored in range(size if settings.prefills_by_block else num_whole, num_whole + 1, size):
            yield canvas.forward(stored, "prefill")
    for first in range(num_whole, end, size):
        block = range(first, first + size)
        canvas.open(block)
        if reason := (yield from fill(canvas, block, settings, steps)):
            return canvas.finish(reason)
        is_last = block.stop >= end or (settings.ends_with_stop and canvas.has_stop(canvas.region(block)))
        if settings.stores_apart and (settings.release_compatible or not is_last):
            yield canvas.forward(block.stop, "store")
        if is_last:
            break
    return canvas.finish()
