"""Fast-dLLM v2 (arXiv 2509.26328): block diffusion made from Qwen2.5, in which a row predicts the next position.

The blocks are counted from the first token of the prompt (`refusion_eval.decoders.aligned`). The forward that stores a
finished block also predicts the first token of the next one; a block is filled sub-block by sub-block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import ClassVar

from refusion_eval.config import NonNegativeFloat, PositiveInt, settings_class
from refusion_eval.decoders import Decoder, Reads, Style
from refusion_eval.decoders.aligned import AlignedCanvas
from refusion_eval.decoders.canvas import Filling, MaskedSettings, PositiveFraction
from refusion_eval.decoders.filling import Rule, above, fill
from refusion_eval.errors import ConfigError
from refusion_eval.types import NOTHING, Commit, Confidence, Decoding, Forward, Read, Trace, bidirectional


@settings_class("fast_dllm_v2")
class FastDllmV2Settings(MaskedSettings):
    """Settings of Fast-dLLM v2, named as in its release, where block_length is `block_size`.

    Decoding ends after the block in which one of `eos_ids` is, or with the block in which position `gen_length` is; the
    response is cut to `gen_length`. `early_stop` is what the `generate` of the published checkpoints does.

    Attributes:
        block_length: positions of a block, as the model was trained with.
        small_block_size: positions of a sub-block; divides block_length.
        threshold: a step commits all candidates whose probability exceeds this (strictly), and always the best one.
        top_p: which tokens stay in the sampled distribution; at temperature 0 it has no effect. Above 0 confidences are
            those of that distribution, tempered and truncated, as released.
        use_block_cache: once the first token of a sub-block is known, compute only the rows of the sub-block, and keep
            the keys and values of the block's other rows from the last forward of the whole block. They are stale,
            which changes tokens.
        release_compatible: gen_length is rounded down to whole blocks, counted from the start of the block in which the
            prompt ends; the last block, too, is stored and followed by one more token, unless a stop token was chosen
            in it; a stop token that begins a block is overlooked; and the first token of a block is the most probable
            one at every temperature.
    """

    decoder: ClassVar[str] = "fast_dllm_v2"
    shift: ClassVar[int] = 1

    block_length: PositiveInt = 32
    small_block_size: PositiveInt = 8
    threshold: NonNegativeFloat = 0.9
    top_p: PositiveFraction = 0.95
    use_block_cache: bool = False
    release_compatible: bool = False

    def __post_init__(self) -> None:
        MaskedSettings.__post_init__(self)
        if self.block_length % self.small_block_size:
            sizes = f"block_length is {self.block_length} and small_block_size {self.small_block_size}"
            raise ConfigError(f"fast_dllm_v2: {sizes}; set small_block_size to a divisor of block_length")
        if self.release_compatible and self.gen_length < self.block_length:
            sizes = f"gen_length is {self.gen_length} and block_length {self.block_length}"
            raise ConfigError(f"fast_dllm_v2: {sizes}; with release_compatible, set gen_length to a block or more")

    @property
    def num_positions(self) -> int:
        return self.gen_length + self.block_length

    def positions_after(self, prompt_length: int) -> int:
        """Positions after a prompt of a length that decoding touches, up to the end of a block."""
        size = self.block_length
        if self.release_compatible:  # and one token behind them, which no forward gets
            return self.gen_length // size * size - prompt_length % size
        return self.gen_length + -(prompt_length + self.gen_length) % size

    @property
    def confidence(self) -> Confidence:
        return Confidence(temperature=self.temperature or 1.0, dtype=self.confidence_dtype)

    def read(self, rows: Sequence[int], step: int, positions: Sequence[int]) -> Read:
        read = MaskedSettings.read(self, rows, step, positions)
        return replace(read, top_p=self.top_p) if self.temperature > 0 else read


def decode(prompt: Sequence[int], settings: FastDllmV2Settings, trace: Trace) -> Decoding:
    """Decodes one prompt, block after block."""
    canvas, steps, size = AlignedCanvas(prompt, settings, trace), count(), settings.block_length
    first, is_released = len(prompt) // size * size, settings.release_compatible
    end = first + settings.gen_length // size * size if is_released else len(prompt) + settings.gen_length
    block = range(first, first + size)
    canvas.open(block)
    if first:
        yield from _store(canvas, first, settings, steps)
    while block.start < end:
        if reason := canvas.settled():
            return canvas.finish(reason)
        region = canvas.region(block)
        own: Sequence[int] = canvas.masked(region) if is_released else region
        if not canvas.has_stop(own) and (reason := (yield from _fill(canvas, block, settings, steps))):
            return canvas.finish(reason)
        if canvas.has_stop(own) or (block.stop >= end and not is_released):
            break
        stored, block = block, range(block.stop, block.stop + size)
        canvas.open(block)
        yield from _store(canvas, stored.stop, settings, steps)
    return canvas.finish()


def _store(canvas: AlignedCanvas, end: int, settings: FastDllmV2Settings, steps: Iterator[int]) -> Filling:
    """Caches the text up to `end`, in whole blocks, and fills the position behind it unless the prompt has it."""
    position = canvas.masked(canvas.region(range(end, end + 1)))
    reads = canvas.reads(position, next(steps), canvas.num_cached)
    if settings.release_compatible:
        reads = tuple(replace(read, temperature=0.0, draws=(), top_p=1.0) for read in reads)
    for readout in (yield canvas.forward(end, "store", reads)):
        canvas.fix(position, readout.tokens)
    return None


def _fill(canvas: AlignedCanvas, block: range, settings: FastDllmV2Settings, steps: Iterator[int]) -> Filling:
    size, num_narrow = settings.small_block_size, -1  # forwards since that of the whole block; -1 before it

    def forward(masked: Sequence[int], step: int) -> Forward:
        nonlocal num_narrow
        first = canvas.start + masked[0]
        rows = range(first // size * size, first // size * size + size)
        num_narrow += 1
        # The row before the first position of a sub-block, which predicts it, is not among the sub-block's rows.
        if not settings.use_block_cache or num_narrow == 0 or first == rows.start:
            num_narrow = 0
            return canvas.denoise(block, masked, step)
        # The block's other rows have the keys and values of the last whole forward.
        others = [row - block.start for row in block if row not in rows]
        commit = Commit(others) if num_narrow == 1 else NOTHING
        canvas.commit = Commit(keep=block.start)  # those of the block are dropped before the next whole forward
        reads, tokens = canvas.reads(masked, step, rows.start), canvas.tokens[rows.start : rows.stop]
        return Forward(tokens, rows, bidirectional(size), reads, commit, "denoise")

    regions = [canvas.region(range(start, start + size)) for start in range(block.start, block.stop, size)]
    return (yield from fill(canvas, regions, steps, forward, Rule(above(settings.threshold))))


DECODER = Decoder(
    decode,
    FastDllmV2Settings,
    label="Fast-dLLM v2",
    reads=Reads("block_causal", masked="next", clean="next"),
    style=Style("#DDCC77", "p", (0, (1, 2)), order=21),
)
