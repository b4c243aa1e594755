"""Fine-tuning data as token ids on the disk: tokenised once by `datasets`, memory-mapped, and seeded subsets of it.

A cache is a folder `<digest>.arrow`, named after what it was made from, with the columns `prompt` and `answer` (lists
of token ids, one sample a row) and `cache.json` (what it was made from, counts, and the report on the rows).
"""

import copy
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.compute
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerFast

from refusion_eval.errors import ConfigError, DataError
from refusion_eval.training.data.rows import OnBad, Paths, RowReader, RowReport
from refusion_eval.training.data.samples import TrainingSample, encode

FACTS_FILE = "cache.json"
_ROWS_PER_BATCH = 256
_IDS = datasets.List(datasets.Value("int32"))
_COLUMNS = datasets.Features(prompt=_IDS, answer=_IDS)


class TokenCache:
    """Samples of a cache folder, all or a drawn part. They stay on the disk.

    Attributes:
        lengths: [n] tokens of each sample, prompt and answer.
        prompt_lengths: [n] tokens of each prompt.

    Raises:
        DataError: the folder is not a complete cache.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.statement = Path(directory), "all"
        try:
            self.facts = json.loads((self.directory / FACTS_FILE).read_text(encoding="utf-8"))
            self.report = RowReport.from_dict(self.facts["report"])
            self._dataset = datasets.load_from_disk(str(self.directory))
            self.prompt_lengths, answer_lengths = (_lengths(self._dataset, name) for name in _COLUMNS)
            self.lengths: np.ndarray = self.prompt_lengths + answer_lengths
            size = len(self._dataset), int(self.lengths.sum())
            is_complete = size == (self.facts["num_samples"], self.facts["num_tokens"])
        except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as problem:
            raise DataError(
                f"{self.directory} is not a token cache ({problem}); remove it and build it again"
            ) from problem
        if not is_complete:
            raise DataError(f"{self.directory} is damaged; remove it and build it again")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> TrainingSample:
        row = self._dataset[index]
        return TrainingSample(tuple(row["prompt"]), tuple(row["answer"]))

    def draw(self, *, max_samples: int | None, share: float | None, seed: int) -> "TokenCache":
        """Draws samples of a whole cache without replacement; they keep the order of the cache.

        Under one seed a smaller draw is part of a larger one: a study over data sizes (Appendix C.3) compares more
        data, not other data. `share` is in (0, 1] and counts where `max_samples` is None.
        """
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
    """Tokenises files of rows, or opens what an earlier call made from the same files with the same tokenizer.

    The samples have the order of the rows for any number of workers. A cache gets its name when it is complete; an
    interrupted call leaves a folder `.*.part`, which is never read.

    Args:
        max_length: samples of more tokens, prompt and answer, are left out and counted; none is cut.
        on_bad: see `RowReader`; not part of the name, as a cache without bad rows is the same under both.

    Raises:
        ConfigError: the tokenizer belongs to no chat model, or a worker died.
        DataError: no file, a bad row under "fail", no sample left, or a file that changed meanwhile.
    """
    rows = RowReader(paths, on_bad=on_bad)
    states = _file_states(rows.files)
    source = {
        "format": 1,
        "files": [_file_facts(path) for path in rows.files],
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "chat_template": tokenizer.chat_template,
        "special_tokens": tokenizer.special_tokens_map | {"split": tokenizer.split_special_tokens},
        "eos": tokenizer.eos_token_id,
        "max_length": max_length,
    }
    directory = Path(cache_dir) / f"{_digest(source)}.arrow"
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{directory.stem}.", suffix=".part", dir=directory.parent))
        try:
            facts = source | _write(part, rows, tokenizer, max_length, workers)
            if _file_states(rows.files) != states:
                raise DataError("a file of training data changed while it was tokenised; start again")
            _publish(part / "cache", directory, facts)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    cache = TokenCache(directory)
    if on_bad == "fail":
        cache.report.refuse_bad()
    return cache


def _file_states(files: Iterable[Path]) -> list[tuple[int, int]]:
    return [(path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _file_facts(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise DataError(f"{path} cannot be read ({problem.strerror}); make it readable or leave it out") from problem
    return {"path": str(path), "bytes": path.stat().st_size, "sha256": sha256}


def _digest(source: dict[str, Any]) -> str:
    """Name of a cache. A moved file is the same file, but the ending of its name decides how it is read."""
    files = [
        ([suffix for suffix in Path(file["path"]).suffixes if suffix in (".jsonl", ".gz")], file["sha256"])
        for file in source["files"]
    ]
    return hashlib.sha256(json.dumps(source | {"files": files}, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _write(
    part: Path, rows: RowReader, tokenizer: PreTrainedTokenizerFast, max_length: int, workers: int
) -> dict[str, Any]:
    """Writes the Arrow files to `part / "cache"` and returns their entries of `cache.json`."""
    good_rows = iter(rows)
    first = next(good_rows, None)
    if first is None:  # `datasets` makes no data set without rows
        raise DataError(f"no sample is left of the training data: {rows.report.summary()}")

    def pairs() -> Iterator[dict[str, str]]:
        for row in chain([first], good_rows):
            yield {"query": row.query, "response": row.response}

    def encode_batch(batch: dict[str, list[str]]) -> dict[str, list]:
        samples = encode(tokenizer, zip(batch["query"], batch["response"], strict=True))
        samples = [sample for sample in samples if sample.length <= max_length]
        return {"prompt": [sample.prompt for sample in samples], "answer": [sample.answer for sample in samples]}

    bars_were_on = datasets.utils.is_progress_bar_enabled()
    if not sys.stderr.isatty():  # a log would hold a line for every change of a bar
        datasets.disable_progress_bars()
        print(f"tokenising {len(rows.files)} files", file=sys.stderr, flush=True)
    try:
        text = datasets.Dataset.from_generator(pairs, cache_dir=str(part / "text"), fingerprint=part.name)
        tokens = text.map(
            encode_batch,
            batched=True,
            batch_size=_ROWS_PER_BATCH,
            remove_columns=text.column_names,
            features=_COLUMNS,
            num_proc=workers or None,
            new_fingerprint=part.name,  # the folder has the name of what it was made from
            desc="tokenising",
        )
        if not len(tokens):
            rows.report.num_too_long = len(text)
            raise DataError(f"no sample is left of the training data: {rows.report.summary()}")
        tokens.save_to_disk(str(part / "cache"))
    except DatasetGenerationError as problem:
        raise problem.__cause__ or problem from None  # what went wrong while the rows were read or written
    except RuntimeError as problem:
        if "died" not in str(problem):
            raise
        raise ConfigError(
            "a tokenising process died, probably for lack of memory; use fewer workers, or 0"
        ) from problem
    finally:
        if bars_were_on:
            datasets.enable_progress_bars()
    rows.report.num_too_long = len(text) - len(tokens)
    num_tokens = sum(int(_lengths(tokens, name).sum()) for name in _COLUMNS)
    return {"num_samples": len(tokens), "num_tokens": num_tokens, "report": asdict(rows.report)}


def _publish(part: Path, directory: Path, facts: dict[str, Any]) -> None:
    (part / FACTS_FILE).write_text(json.dumps(facts, indent=1, default=str), encoding="utf-8")
    for path in part.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        part.rename(directory)
    except OSError:
        if not directory.exists():  # else another process made the same cache meanwhile
            raise
