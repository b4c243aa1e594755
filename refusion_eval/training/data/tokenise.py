"""Fine-tuning data tokenised once, by several processes, into a cache on the disk (`token_cache`)."""

import hashlib
import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from refusion_eval.errors import ConfigError, DataError
from refusion_eval.training.data.npy_writer import NpyWriter
from refusion_eval.training.data.rows import OnBad, Paths, RowReader, read_rows
from refusion_eval.training.data.samples import check_tokenizer, encode
from refusion_eval.training.data.token_cache import FACTS_FILE, FORMAT, OFFSETS_FILE, TOKENS_FILE, TokenCache

_ROWS_PER_TASK = 256
_TASKS_PER_WORKER = 4  # that wait or run; more would only hold more rows in memory

_Pairs = list[tuple[str, str]]


class Progress(NamedTuple):
    """How far a cache is.

    Attributes:
        share: of the files' bytes that were read.
        num_rows: rows that were read, good or bad; some are still being tokenised.
        num_samples: samples that were written.
        num_tokens: their tokens.
    """

    share: float
    num_rows: int
    num_samples: int
    num_tokens: int


class _Encoded(NamedTuple):
    """The samples of one task: their tokens, and the lengths of prompt, answer, prompt, answer and so on."""

    tokens: np.ndarray
    lengths: np.ndarray
    num_too_long: int


def build_cache(
    paths: Paths,
    tokenizer: PreTrainedTokenizerFast,
    cache_dir: Path,
    *,
    max_length: int,
    on_bad: OnBad = "fail",
    workers: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
) -> TokenCache:
    """Tokenises files of rows, or opens what an earlier call made of the same files with the same tokenizer.

    The order of the samples is that of the rows, whatever the number of workers. A cache appears under its name when
    it is whole; what an interrupted call left is named `.*.part` and is never read. Every call reads the files once
    to hash them. If several processes need a cache, let one build it first: otherwise each does the work.

    Args:
        paths: see `read_rows`.
        tokenizer: with a chat template; samples are those of `encode`.
        cache_dir: holds one folder for each cache; created if it is missing.
        max_length: samples of more tokens, prompt and answer, are left out, not cut, and counted.
        on_bad: see `read_rows`; not part of the name, as a cache without bad rows is the same under both.
        workers: processes that tokenise, started by spawning, so that a script that calls this needs the usual
            `if __name__ == "__main__"`; 0 is none but this one, with the tokenizer's own threads.
        on_progress: called every few hundred rows.

    Raises:
        ConfigError: a limit is out of range, the tokenizer is no chat model's, or a worker died.
        DataError: no file, a bad row under "fail", no sample left, or a file that changed meanwhile.
    """
    if max_length < 2 or workers < 0:
        raise ConfigError(f"max_length is {max_length} and workers {workers}; they must be at least 2 and at least 0")
    check_tokenizer(tokenizer)
    rows = read_rows(paths, on_bad=on_bad)
    states = _file_states(rows.files)
    source = {
        "format": FORMAT,
        "files": [_file_facts(path) for path in rows.files],
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "chat_template": tokenizer.chat_template,
        "special_tokens": tokenizer.special_tokens_map | {"split": tokenizer.split_special_tokens},
        "eos": tokenizer.eos_token_id,
        "max_length": max_length,
    }
    directory = Path(cache_dir) / _digest(source)
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".part", dir=directory.parent))
        try:
            facts = source | _write(part, rows, tokenizer, max_length, workers, on_progress)
            if _file_states(rows.files) != states:
                raise DataError("a file of training data changed while it was tokenised; start again")
            _publish(part, directory, facts)
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
    """Name of a cache. A moved file is the same file, but its name's ending decides how it is read."""
    files = [
        ([suffix for suffix in Path(file["path"]).suffixes if suffix in (".jsonl", ".gz")], file["sha256"])
        for file in source["files"]
    ]
    return hashlib.sha256(json.dumps(source | {"files": files}, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _write(
    part: Path,
    rows: RowReader,
    tokenizer: PreTrainedTokenizerFast,
    max_length: int,
    workers: int,
    on_progress: Callable[[Progress], None] | None,
) -> dict[str, Any]:
    """Writes the two arrays; what `cache.json` says of them."""
    total_bytes = sum(path.stat().st_size for path in rows.files)
    num_tokens = num_samples = num_too_long = 0
    with ExitStack() as stack:
        tokens = stack.enter_context(NpyWriter(part / TOKENS_FILE, np.uint32))
        offsets = stack.enter_context(NpyWriter(part / OFFSETS_FILE, np.int64))
        offsets.append(np.zeros(1))
        for encoded in stack.enter_context(closing(_encode_all(_tasks(rows), tokenizer, max_length, workers))):
            tokens.append(encoded.tokens)
            offsets.append(num_tokens + encoded.lengths.cumsum())
            num_tokens += len(encoded.tokens)
            num_samples += len(encoded.lengths) // 2
            num_too_long += encoded.num_too_long
            if on_progress is not None:
                share = rows.bytes_read / max(total_bytes, 1)
                on_progress(Progress(share, rows.report.num_read, num_samples, num_tokens))
    rows.report.num_too_long = num_too_long
    if not num_samples:
        raise DataError(f"no sample is left of the training data: {rows.report.summary()}")
    return {"num_samples": num_samples, "num_tokens": num_tokens, "report": asdict(rows.report)}


def _publish(part: Path, directory: Path, facts: dict[str, Any]) -> None:
    with (part / FACTS_FILE).open("w", encoding="utf-8") as file:
        json.dump(facts, file, indent=1, default=str)
        file.flush()
        os.fsync(file.fileno())
    part.chmod(0o755)
    try:
        part.rename(directory)
    except OSError:
        if not directory.exists():  # else another process made the same meanwhile
            raise


def _tasks(rows: RowReader) -> Iterator[_Pairs]:
    pairs = ((row.query, row.response) for row in rows)
    while task := list(islice(pairs, _ROWS_PER_TASK)):
        yield task


def _encode_all(
    tasks: Iterable[_Pairs], tokenizer: PreTrainedTokenizerFast, max_length: int, workers: int
) -> Generator[_Encoded, None, None]:
    """Encodes tasks in their order, reading no further ahead than the workers need."""
    if not workers:
        yield from (_encode(task, tokenizer, max_length) for task in tasks)
        return
    pending: deque[Future[_Encoded]] = deque()
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(tokenizer, max_length)
    ) as pool:
        try:
            for task in tasks:
                pending.append(pool.submit(_encode_in_worker, task))
                if len(pending) > _TASKS_PER_WORKER * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as problem:
            raise ConfigError(
                "a tokenising process died, of too little memory or of a script without "
                'if __name__ == "__main__"; use fewer workers, or 0'
            ) from problem
        finally:
            pool.shutdown(cancel_futures=True)


def _encode(task: _Pairs, tokenizer: PreTrainedTokenizerFast, max_length: int) -> _Encoded:
    samples = encode(tokenizer, task)
    kept = [sample for sample in samples if sample.length <= max_length]
    parts = [part for sample in kept for part in (sample.prompt, sample.answer)]
    return _Encoded(
        tokens=np.fromiter(chain.from_iterable(parts), dtype=np.uint32),
        lengths=np.array([len(part) for part in parts], dtype=np.int64),
        num_too_long=len(samples) - len(kept),
    )


_worker_settings: list[tuple[PreTrainedTokenizerFast, int]] = []  # of this process, if it is a worker


def _start_worker(tokenizer: PreTrainedTokenizerFast, max_length: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    _worker_settings.append((tokenizer, max_length))


def _encode_in_worker(task: _Pairs) -> _Encoded:
    return _encode(task, *_worker_settings[0])
