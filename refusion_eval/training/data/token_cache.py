"""Fine-tuning data as token ids on the disk: tokenised once by `datasets`, memory-mapped, and seeded subsets of it.

A cache is a folder `<digest>.arrow`, named after what it was made from, with the columns `prompt` and `answer` (lists
of token ids, one sample a row) and `cache.json` (what it was made from, counts, and the report on the rows).
"""

import contextlib
import copy
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.compute
from datasets.exceptions import DatasetGenerationError
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerFast

from refusion_eval.errors import ConfigError, DataError
from refusion_eval.models.packaged import sha256_of
from refusion_eval.models.tokenizer import render_chat
from refusion_eval.training.data.rows import OnBad, Paths, RowReader, RowReport
from refusion_eval.training.objectives.example import TrainingSample

FACTS_FILE = "cache.json"
_ROWS_PER_BATCH = 256
_IDS = datasets.List(datasets.Value("int32"))
_COLUMNS = datasets.Features(prompt=_IDS, answer=_IDS)


class TokenCache:
    """Samples of a cache folder, all or a drawn part. They stay on the disk."""

    lengths: np.ndarray  # [n] tokens of each sample, prompt and answer
    prompt_lengths: np.ndarray  # [n] tokens of each prompt

    def __init__(self, directory: Path) -> None:
        self.directory, self.statement = Path(directory), "all"
        try:
            self.facts = json.loads((self.directory / FACTS_FILE).read_text(encoding="utf-8"))
            self.report = TypeAdapter(RowReport).validate_python(self.facts["report"])
            self._dataset = datasets.load_from_disk(str(self.directory))
            self.prompt_lengths, answer_lengths = (_lengths(self._dataset, name) for name in _COLUMNS)
            self.lengths = self.prompt_lengths + answer_lengths
            size = len(self._dataset), int(self.lengths.sum())
            is_complete = size == (self.facts["num_samples"], self.facts["num_tokens"])
        except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as problem:
            raise DataError(f"{self.directory} is not a token cache ({problem}); remove it") from problem
        if not is_complete:
            raise DataError(f"{self.directory} is damaged; remove it and build it again")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> TrainingSample:
        row = self._dataset[index]
        return TrainingSample(tuple(row["prompt"]), tuple(row["answer"]))

    def draw(self, *, max_samples: int | None, share: float | None, seed: int) -> "TokenCache":
        """Draws samples of a whole cache without replacement; they keep the order of the cache."""
        # Under one seed a smaller draw is part of a larger one: a study over data sizes (Appendix C.3) compares more
        # data, not other data.
        count = max(round((share or 1) * len(self)), 1) if max_samples is None else min(max_samples, len(self))
        numbers = np.sort(np.random.default_rng(seed).permutation(len(self))[:count])
        part = copy.copy(self)
        part._dataset = self._dataset.select(numbers)
        part.lengths, part.prompt_lengths = self.lengths[numbers], self.prompt_lengths[numbers]
        part.statement = f"{count} of {len(self)} samples of cache {self.directory.stem}, drawn with seed {seed}"
        return part


def _lengths(dataset: datasets.Dataset, column: str) -> np.ndarray:
    """[n], number of token ids in each row of a column."""
    return pyarrow.compute.list_value_length(dataset.data.column(column)).to_numpy().astype(np.int64)


def build_cache(
    paths: Paths,
    tokenizer: PreTrainedTokenizerFast,
    cache_dir: Path,
    *,
    max_length: int,
    on_bad: OnBad = "fail",
    workers: int = 0,
) -> TokenCache:
    """Tokenises files of rows in their order, or opens the cache that an earlier call made from the same files."""
    rows = RowReader(paths, on_bad=on_bad)
    states = _file_states(rows.files)
    # `on_bad` is not part of the name, as a cache without bad rows is the same under both.
    source = {
        "format": 1,
        "files": [{"path": str(path), "bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in rows.files],
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "chat_template": tokenizer.chat_template,
        "special_tokens": tokenizer.special_tokens_map | {"split": tokenizer.split_special_tokens},
        "eos": tokenizer.eos_token_id,
        "max_length": max_length,
    }
    directory = Path(cache_dir) / f"{_digest(source)}.arrow"
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        # A cache gets its name when it is complete; a killed call leaves this folder, which is never read.
        part = Path(tempfile.mkdtemp(prefix=f".{directory.stem}.", suffix=".part", dir=directory.parent))
        try:
            facts = source | _write(part, rows, tokenizer, max_length, workers)
            if _file_states(rows.files) != states:
                raise DataError("a file of training data changed while it was tokenised; start again")
            (part / "cache" / FACTS_FILE).write_text(json.dumps(facts, indent=1, default=str), encoding="utf-8")
            flush(part / "cache")
            with contextlib.suppress(OSError):  # it fails where another process made the same cache meanwhile
                (part / "cache").rename(directory)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    cache = TokenCache(directory)
    if on_bad == "fail":
        cache.report.refuse_bad()
    return cache


def flush(folder: Path) -> None:
    """Waits until a folder and all its content are on the disk."""
    for path in [folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _file_states(files: Iterable[Path]) -> list[tuple[int, int]]:
    return [(path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _digest(source: dict[str, Any]) -> str:
    """Name of a cache. A moved file is the same file, but the ending of its name decides how it is read."""
    files = [
        ([suffix for suffix in Path(file["path"]).suffixes if suffix in (".jsonl", ".gz")], file["sha256"])
        for file in source["files"]
    ]
    return hashlib.sha256(json.dumps(source | {"files": files}, sort_keys=True, default=str).encode()).hexdigest()[:24]


def encode(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]]) -> list[TrainingSample]:
    """Tokenises (query, response) pairs as at inference: prompt and response separately, then one EOS."""
    prompts = [
        render_chat(tokenizer, [{"role": "user", "content": query}], add_generation_prompt=True) for query, _ in pairs
    ]
    # Not verbose, as the caller limits the length of samples, not the tokenizer.
    prompt_ids, answer_ids = (
        tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for texts in (prompts, [response for _, response in pairs])
    )
    eos = (tokenizer.eos_token_id,)
    return [TrainingSample(tuple(ids), (*answer, *eos)) for ids, answer in zip(prompt_ids, answer_ids, strict=True)]


def _tokenised(
    text: datasets.Dataset, tokenizer: PreTrainedTokenizerFast, max_length: int, name: str
) -> datasets.Dataset:
    """The rows of token ids, without those that are too long, in a file with this name beside the rows of text."""

    def encode_batch(batch: dict[str, list[str]]) -> dict[str, list]:
        samples = encode(tokenizer, list(zip(batch["query"], batch["response"], strict=True)))
        samples = [sample for sample in samples if sample.length <= max_length]
        return {"prompt": [sample.prompt for sample in samples], "answer": [sample.answer for sample in samples]}

    return text.map(
        encode_batch,
        batched=True,
        batch_size=_ROWS_PER_BATCH,
        remove_columns=text.column_names,
        features=_COLUMNS,
        new_fingerprint=name,
        desc="tokenising",
    )


def _by_workers(
    workers: int, text: datasets.Dataset, tokenizer: PreTrainedTokenizerFast, max_length: int, name: str
) -> datasets.Dataset:
    """The rows of `_tokenised` from several processes; BrokenProcessPool where one dies."""
    # With the processes of `datasets` a call may wait for ever after one has died.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        shards = (text.shard(workers, number, contiguous=True) for number in range(workers))
        parts = [
            pool.submit(_tokenised, shard, tokenizer, max_length, f"{name}-{number}")
            for number, shard in enumerate(shards)
        ]
        return datasets.concatenate_datasets([part.result() for part in parts])


def _write(
    part: Path, rows: RowReader, tokenizer: PreTrainedTokenizerFast, max_length: int, workers: int
) -> dict[str, Any]:
    """Writes the Arrow files to `part / "cache"` and returns their entries of `cache.json`."""
    good_rows = iter(rows)
    first = next(good_rows, None)
    if first is None:  # `datasets` makes no data set without rows
        raise DataError(f"no sample is left of the training data: {rows.report.summary()}")

    def pairs() -> Iterator[dict[str, str]]:
        return map(asdict, chain([first], good_rows))

    if not sys.stderr.isatty():  # a log would hold a line for every change of a bar
        datasets.disable_progress_bars()
        print(f"tokenising {len(rows.files)} files", file=sys.stderr, flush=True)
    try:
        text = datasets.Dataset.from_generator(pairs, cache_dir=str(part / "text"), fingerprint=part.name)
        if workers:
            tokens = _by_workers(min(workers, len(text)), text, tokenizer, max_length, part.name)
        else:
            tokens = _tokenised(text, tokenizer, max_length, part.name)
        rows.report.num_too_long = len(text) - len(tokens)
        if not len(tokens):
            raise DataError(f"no sample is left of the training data: {rows.report.summary()}")
        tokens.save_to_disk(str(part / "cache"))
    except DatasetGenerationError as problem:
        raise problem.__cause__ or problem from None  # what went wrong while the rows were read or written
    except BrokenProcessPool as problem:
        raise ConfigError("a tokenising process died, probably for lack of memory; use fewer workers") from problem
    num_tokens = sum(int(_lengths(tokens, name).sum()) for name in _COLUMNS)
    return {"num_samples": len(tokens), "num_tokens": num_tokens, "report": asdict(rows.report)}
