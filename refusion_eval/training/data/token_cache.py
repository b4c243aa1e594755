"""Fine-tuning data as token ids on the disk, mapped into memory, and seeded subsets of them.

A cache is a folder that `tokenise.build_cache` names after what it was made from:

    tokens.npy    [T] uint32, all samples' tokens one after the other
    offsets.npy   [2N + 1] int64: where the prompt and where the answer of each sample begin in it, and its end
    cache.json    files, tokenizer, template, EOS, longest sample, counts, and what became of the rows
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np

from refusion_eval.errors import ConfigError, DataError
from refusion_eval.training.data.rows import RowReport
from refusion_eval.training.data.samples import Sample

FORMAT = 1  # of the folder; a cache of another format is not found, and made anew
TOKENS_FILE, OFFSETS_FILE, FACTS_FILE = "tokens.npy", "offsets.npy", "cache.json"


class TokenCache(Sequence[Sample]):
    """The samples of a cache folder. They stay on the disk; a copy for another process is its path.

    Attributes:
        directory: the folder.
        facts: what it was made from, as `cache.json` says.
        report: what became of the rows.
        lengths: [N], number of tokens of each sample, prompt and answer.
        prompt_lengths: [N], those of the prompts alone.

    Args:
        directory: as `build_cache` made it.

    Raises:
        DataError: it is no whole cache of this format.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        try:
            self.facts = json.loads((self.directory / FACTS_FILE).read_text(encoding="utf-8"))
            self.report = RowReport.from_dict(self.facts["report"])
            # As plain arrays: slices of np.memmap take several times as long.
            self._tokens = np.asarray(np.load(self.directory / TOKENS_FILE, mmap_mode="r"))
            self._offsets = np.asarray(np.load(self.directory / OFFSETS_FILE, mmap_mode="r"))
            shapes = (2 * self.facts["num_samples"] + 1,), (self.facts["num_tokens"],)
            is_whole = self.facts["format"] == FORMAT and (self._offsets.shape, self._tokens.shape) == shapes
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise DataError(
                f"{self.directory} is no cache of tokens ({problem}); remove it and build it anew"
            ) from problem
        if not is_whole:
            raise DataError(f"{self.directory} is damaged or of another format; remove it and build it anew")
        self.lengths: np.ndarray = self._offsets[2::2] - self._offsets[:-1:2]
        self.prompt_lengths: np.ndarray = self._offsets[1::2] - self._offsets[:-1:2]

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> "SampleSubset": ...
    def __getitem__(self, index: int | slice) -> "Sample | SampleSubset":
        if isinstance(index, slice):
            return SampleSubset(self, np.arange(len(self))[index])
        number = range(len(self))[index]
        start, middle, end = self._offsets[2 * number : 2 * number + 3].tolist()
        return Sample(tuple(self._tokens[start:middle].tolist()), tuple(self._tokens[middle:end].tolist()))

    def __reduce__(self) -> tuple[type["TokenCache"], tuple[Path]]:
        return TokenCache, (self.directory,)


class SampleSubset(Sequence[Sample]):
    """Some samples of a cache.

    Attributes:
        cache: where they are.
        numbers: [n], their numbers in it.
        lengths: [n], number of tokens of each.
        prompt_lengths: [n], those of the prompts alone.
        statement: what was chosen and how, for records.
    """

    def __init__(self, cache: TokenCache, numbers: np.ndarray, statement: str = "") -> None:
        self.cache, self.numbers = cache, numbers
        self.lengths, self.prompt_lengths = cache.lengths[numbers], cache.prompt_lengths[numbers]
        self.statement = statement or f"{len(numbers)} of {len(cache)} samples, by their numbers"

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> "SampleSubset": ...
    def __getitem__(self, index: int | slice) -> "Sample | SampleSubset":
        if isinstance(index, slice):
            return SampleSubset(self.cache, self.numbers[index])
        return self.cache[int(self.numbers[index])]


def sample_subset(
    cache: TokenCache, *, max_samples: int | None = None, share: float | None = None, seed: int
) -> SampleSubset:
    """Draws samples without replacement, in the cache's order; under one seed, a smaller draw is part of a larger one.

    Nested draws are what a study over data sizes compares (Appendix C.3): more data, not other data.

    Args:
        cache: to draw from.
        max_samples: how many, at most; all if there are fewer.
        share: which share of them, in (0, 1], rounded, but one sample at least; this or `max_samples`.
        seed: of the draw.

    Raises:
        ConfigError: both or none is given, or one is out of range.
    """
    if (max_samples is None) == (share is None):
        raise ConfigError(f"max_samples is {max_samples} and share {share}; give one of them")
    if max_samples is not None:
        if max_samples < 1:
            raise ConfigError(f"max_samples is {max_samples}; it must be at least 1")
        count = min(max_samples, len(cache))
    elif share is not None:
        if not 0 < share <= 1:
            raise ConfigError(f"share is {share}; it must be above 0 and at most 1")
        count = max(round(share * len(cache)), 1)
    drawn = np.random.default_rng(seed).permutation(len(cache))[:count]
    statement = f"{count} of {len(cache)} samples of cache {cache.directory.name}, drawn with seed {seed}"
    return SampleSubset(cache, np.sort(drawn), statement)
