"""Caches of tokens: made once, whole or not at all, and subsets."""

import errno
import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from miniature.tokenizer import train_tokenizer
from refusion_eval.errors import ConfigError, DataError
from refusion_eval.training.data import token_cache
from refusion_eval.training.data.rows import Row, RowReader
from refusion_eval.training.data.token_cache import TokenCache, build_cache, encode
from refusion_eval.training.objectives.example import TrainingSample

PAIRS = [(f"how many pens are {n} and {n * 7}?", f"The answer is {n * 8}." + " Really." * (n % 5)) for n in range(700)]
# Of a run that is killed at once: the cache's folder is where it works.
KILLED = """
import os, signal, sys
from pathlib import Path
from transformers import PreTrainedTokenizerFast
from refusion_eval.training.data import token_cache
token_cache.encode = lambda tokenizer, pairs: os.kill(os.getpid(), signal.SIGKILL)
tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[2])
token_cache.build_cache(sys.argv[1], tokenizer, Path(sys.argv[3]), max_length=64)
"""


def new_tokenizer(vocabulary_size: int = 300) -> PreTrainedTokenizerFast:
    texts = [text for query, response in PAIRS[:50] for text in ("user\n" + query, "assistant\n" + response)]
    return train_tokenizer(texts, vocabulary_size)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return new_tokenizer()


def write(path: Path, pairs: list[tuple[str, str]] = PAIRS) -> Path:
    rows = [{"query": query, "response": response} for query, response in pairs]
    if ".jsonl" in path.suffixes:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    else:
        data = json.dumps(rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.jsonl")


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the number of rows of each call of `encode` that a cache is built with."""
    calls: list[int] = []

    def counting(tokenizer: PreTrainedTokenizerFast, pairs: Iterable[tuple[str, str]]) -> list:
        samples = encode(tokenizer, pairs)
        calls.append(len(samples))
        return samples

    monkeypatch.setattr(token_cache, "encode", counting)
    return calls


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cache_holds_what_encode_makes_of_the_rows_of_all_files_in_order(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, workers: int
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number, name in enumerate(("a.json", "b.jsonl", "c.json.gz", "d.jsonl.gz")):
        write(folder / name, PAIRS[number * 175 : (number + 1) * 175])
    cache = build_cache(folder, tokenizer, tmp_path / "caches", max_length=64, workers=workers)
    expected = encode(tokenizer, PAIRS)
    assert list(cache) == expected
    assert cache.lengths.tolist() == [sample.length for sample in expected]
    assert cache.report.summary() == "700 rows read: 700 kept, 0 bad, 0 too long"


def test_samples_are_found_by_number(tmp_path: Path, data: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    cache, expected = build_cache(data, tokenizer, tmp_path, max_length=64), encode(tokenizer, PAIRS)
    assert cache[-1] == cache[699] == expected[699]
    for wrong in (700, -701):
        with pytest.raises(IndexError):
            cache[wrong]


def test_too_long_samples_are_left_out_whole_and_counted(
    tmp_path: Path, data: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    expected = encode(tokenizer, PAIRS)
    limit = int(np.median([sample.length for sample in expected]))
    kept = [sample for sample in expected if sample.length <= limit]
    cache = build_cache(data, tokenizer, tmp_path, max_length=limit)
    assert list(cache) == kept
    assert cache.lengths.max() == limit
    assert cache.report.num_too_long == len(PAIRS) - len(kept) > 0
    with pytest.raises(DataError, match="no sample is left of the training data: 700 rows read: 0 kept"):
        build_cache(data, tokenizer, tmp_path, max_length=3)


def test_the_facts_say_what_a_cache_was_made_from(
    tmp_path: Path, data: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    facts = build_cache(data, tokenizer, tmp_path, max_length=64).facts
    assert facts["files"][0].keys() == {"path", "bytes", "sha256"}
    assert (facts["files"][0]["path"], facts["files"][0]["bytes"]) == (str(data), data.stat().st_size)
    assert (facts["chat_template"], facts["eos"]) == (tokenizer.chat_template, tokenizer.eos_token_id)
    assert (facts["max_length"], facts["num_samples"]) == (64, len(PAIRS))


def test_a_second_call_tokenises_nothing_nor_does_one_for_a_moved_file(
    tmp_path: Path, data: Path, tokenizer: PreTrainedTokenizerFast, encodings: list[int]
) -> None:
    first = build_cache(data, tokenizer, tmp_path, max_length=64)
    assert sum(encodings) == len(PAIRS)
    moved = data.rename(tmp_path / "moved.jsonl")
    second = build_cache(moved, new_tokenizer(), tmp_path, max_length=64)
    assert sum(encodings) == len(PAIRS)
    assert second.directory == first.directory


def _change_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template += " "


def _change_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.eos_token = "<|endoftext|>"


@pytest.mark.parametrize("change", [_change_template, _change_eos])
def test_another_template_or_eos_makes_another_cache(
    tmp_path: Path, data: Path, change: Callable[[PreTrainedTokenizerFast], None]
) -> None:
    tokenizer = new_tokenizer()
    first = build_cache(data, tokenizer, tmp_path, max_length=64)
    change(tokenizer)
    second = build_cache(data, tokenizer, tmp_path, max_length=64)
    assert second.directory != first.directory
    assert list(second) == encode(tokenizer, PAIRS) != list(first)


def test_other_rows_another_vocabulary_or_limit_make_another_cache(
    tmp_path: Path, data: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    def directory(tokenizer: PreTrainedTokenizerFast = tokenizer, max_length: int = 64) -> Path:
        return build_cache(data, tokenizer, tmp_path / "caches", max_length=max_length).directory

    found = [directory(), directory(new_tokenizer(280)), directory(max_length=63)]
    content = data.read_text()
    data.write_text(content.replace("how many", "how mapy"))  # of the same size
    found.append(directory())
    assert len(set(found)) == 4
    data.write_text(content)
    assert directory() == found[0]
    assert sorted((tmp_path / "caches").iterdir()) == sorted(found)


def test_bad_rows_are_refused_even_if_a_cache_without_them_is_there(
    tmp_path: Path, data: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    data.write_text(data.read_text() + '{"query": "a"}\n')
    for _ in range(2):
        with pytest.raises(DataError, match=f"{data}, line 701: response: Field required"):
            build_cache(data, tokenizer, tmp_path / "caches", max_length=64)
        assert not [path for path in (tmp_path / "caches").iterdir() if path.name.startswith(".")]
        cache = build_cache(data, tokenizer, tmp_path / "caches", max_length=64, on_bad="skip")
        assert list(cache) == encode(tokenizer, PAIRS)
        assert (cache.report.num_read, cache.report.num_bad) == (701, 1)
        assert str(cache.report.bad[0]).startswith(f"{data}, line 701")


def test_files_without_a_good_row_leave_no_sample(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"query": "a"}\n')
    with pytest.raises(DataError, match="no sample is left of the training data: 1 rows read: 0 kept, 1 bad"):
        build_cache(data, tokenizer, tmp_path / "caches", max_length=64, on_bad="skip")
    assert list((tmp_path / "caches").iterdir()) == []


def test_a_fault_of_the_disk_is_told_as_it_is(
    tmp_path: Path, data: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(reader: RowReader) -> Iterator[Row]:
        yield Row("a query", "a response")
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(RowReader, "__iter__", fail)
    with pytest.raises(OSError, match="no space left"):
        build_cache(data, tokenizer, tmp_path / "caches", max_length=64)


def test_a_call_that_is_interrupted_leaves_nothing(
    tmp_path: Path, data: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(tokenizer: PreTrainedTokenizerFast, pairs: Iterable[tuple[str, str]]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(token_cache, "encode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_cache(data, tokenizer, tmp_path / "caches", max_length=64)
    assert list((tmp_path / "caches").iterdir()) == []


@pytest.mark.process
def test_what_a_killed_call_left_is_not_taken_for_a_cache(
    tmp_path: Path, data: Path, tokenizer: PreTrainedTokenizerFast, encodings: list[int]
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    arguments = [str(data), str(tmp_path / "tokenizer"), str(tmp_path / "caches")]
    root = Path(token_cache.__file__).parents[3]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], cwd=root)
    assert killed.returncode == -signal.SIGKILL
    (part,) = (tmp_path / "caches").iterdir()
    assert (part.name[0], part.suffix) == (".", ".part")
    with pytest.raises(DataError, match="is not a token cache"):
        TokenCache(part)
    cache = build_cache(data, loaded, tmp_path / "caches", max_length=64)
    assert sum(encodings) == len(PAIRS)
    assert cache.directory.stem == part.name.split(".")[1]
    assert list(cache) == encode(loaded, PAIRS)


def test_a_worker_that_dies_ends_the_call(
    tmp_path: Path, data: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "encode", lambda tokenizer, pairs: os._exit(1))
    with pytest.raises(ConfigError, match="a tokenising process died"):
        build_cache(data, tokenizer, tmp_path / "caches", max_length=64, workers=2)
    assert list((tmp_path / "caches").iterdir()) == []


def test_two_calls_at_once_end_with_one_cache(
    tmp_path: Path, data: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[TokenCache] = []

    def encode_in_the_middle_of_another_call(tokenizer: PreTrainedTokenizerFast, pairs: Iterable) -> list:
        monkeypatch.setattr(token_cache, "encode", encode)
        others.append(build_cache(data, tokenizer, tmp_path / "caches", max_length=64))
        return encode(tokenizer, pairs)

    monkeypatch.setattr(token_cache, "encode", encode_in_the_middle_of_another_call)
    cache = build_cache(data, tokenizer, tmp_path / "caches", max_length=64)
    assert list((tmp_path / "caches").iterdir()) == [cache.directory] == [others[0].directory]
    assert list(cache) == encode(tokenizer, PAIRS)


def test_a_file_that_changes_meanwhile_is_refused(
    tmp_path: Path, data: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def append(tokenizer: PreTrainedTokenizerFast, pairs: Iterable[tuple[str, str]]) -> list:
        with data.open("a") as file:
            file.write("\n")
        return encode(tokenizer, pairs)

    monkeypatch.setattr(token_cache, "encode", append)
    with pytest.raises(DataError, match="changed while it was tokenised"):
        build_cache(data, tokenizer, tmp_path / "caches", max_length=64)
    assert list((tmp_path / "caches").iterdir()) == []


def test_a_damaged_cache_is_refused(tmp_path: Path, data: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    directory = build_cache(data, tokenizer, tmp_path, max_length=64).directory
    (file,) = directory.glob("*.arrow")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=f"{directory} is (not a token cache|damaged)"):
        build_cache(data, tokenizer, tmp_path, max_length=64)
    file.write_bytes(content)
    facts = json.loads((directory / "cache.json").read_text())
    (directory / "cache.json").write_text(json.dumps(facts | {"num_samples": 5}))
    with pytest.raises(DataError, match="is damaged"):
        TokenCache(directory)


def test_a_copy_for_another_process_is_small_and_equal(
    tmp_path: Path, data: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    cache = build_cache(data, tokenizer, tmp_path, max_length=64)
    copied = pickle.dumps(cache)
    assert len(copied) < 20_000
    assert list(pickle.loads(copied)) == list(cache)


def test_a_smaller_draw_is_part_of_a_larger_one(tmp_path: Path, data: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    cache = build_cache(data, tokenizer, tmp_path, max_length=64)

    def drawn(max_samples: int | None = None, share: float | None = None, seed: int = 3) -> list[TrainingSample]:
        return list(cache.draw(max_samples=max_samples, share=share, seed=seed))

    whole = list(cache)
    draws = [drawn(share=share) for share in (0.001, 0.1, 0.5, 1)]
    assert [len(draw) for draw in draws] == [1, 70, 350, 700]
    for smaller, larger in pairwise(draws):
        assert set(smaller) < set(larger)
    assert draws[1] == sorted(draws[1], key=whole.index)
    assert drawn(max_samples=70) == draws[1] != drawn(max_samples=70, seed=4)
    assert drawn(max_samples=9999, seed=0) == whole
    part = cache.draw(max_samples=70, share=None, seed=3)
    assert part.lengths.tolist() == [sample.length for sample in draws[1]]
    assert part.prompt_lengths.tolist() == [len(sample.prompt) for sample in draws[1]]
    assert part.statement == f"70 of 700 samples of cache {cache.directory.stem}, drawn with seed 3"
