"""Prompts that have no right answers: of given lengths, and the conversations of SPEED-Bench."""

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from refusion_eval.bench.bench import PROMPTED, mini_texts
from refusion_eval.benchmarks import BENCHMARKS, Task
from refusion_eval.benchmarks.rows import ID, TEXTS, ColumnType, Source, check_rows, find_rows
from refusion_eval.errors import ConfigError, DataError

SPEED_BENCH = "speed_bench"
SPLITS = ("qualitative", *(f"throughput_{size}k" for size in (1, 2, 8, 16, 32)))
_FLAG = ColumnType(lambda value: isinstance(value, bool), "true or false")
_TEXT_OR_NONE = ColumnType(lambda value: isinstance(value, str | None), "text or null")
_COLUMNS = {
    "question_id": ID,
    **dict.fromkeys(("category", "sub_category", "source", "src_id", "difficulty"), _TEXT_OR_NONE),
    "turns": TEXTS,
    "multiturn": _FLAG,
}
# The published rows hold this in the place of texts whose licence forbids copies, until the script of its authors has
# fetched them from their sources.
_NOT_FETCHED = re.compile(r"(?i)full benchmark data should be fetched")

_LENGTH = re.compile(r"(\d{1,6})(k?)", re.IGNORECASE)
_NUM_MINI = 300  # questions whose words are drawn
CHARACTERS_A_TOKEN = 8  # more than tokenizers of this kind of text reach in the mean


class Prompt(NamedTuple):
    """A conversation, of which a system answers each turn; its own answers stand between the turns.

    Attributes:
        group: what figures are given for: a length, or a category of SPEED-Bench.
        name: tells the prompts of a group apart.
        turns: texts of the user.
        length: tokens that the prompt has, template included, to which the text is cut; None for the text as it is.
    """

    group: str
    name: str
    turns: Sequence[str]
    length: int | None = None


class Workload(NamedTuple):
    """Prompts, what their texts are in words, and whether these were generated."""

    prompts: Sequence[Prompt]
    source: str
    generated: bool = False


def parse_lengths(text: str) -> list[int]:
    """Numbers of tokens such as `128,1k,4k`, in rising order; k stands for 1,024."""
    lengths = set()
    for word in text.split(","):
        found = _LENGTH.fullmatch(word.strip())
        if found is None or not int(found[1]):
            raise ConfigError(f"--prompt-lengths: {word.strip()!r} is no length; give some such as 128,1k,4k")
        lengths.add(int(found[1]) * (1024 if found[2] else 1))
    return sorted(lengths)


def long_prompts(lengths: Sequence[int], count: int, data: Path | None) -> Workload:
    """`count` prompts of each length, made of the questions of the benchmarks in `data`; of drawn words without it.

    Raises:
        DataError: the folder has no benchmark, or too little text for the longest prompt.
    """
    questions = list(_questions(data)) if data is not None else []
    if data is not None and not questions:
        raise DataError(
            f"{data} has rows of none of {', '.join(PROMPTED)}; name a folder with one, or leave --data out"
        )
    wanted = CHARACTERS_A_TOKEN * max(lengths)
    if questions:
        texts, has = [], sum(map(len, questions))
        if has < wanted:
            few = f"{has:,} characters of questions, too few for {max(lengths):,} tokens"
            raise DataError(f"{data} has {few}; name a folder with more, or leave --data out")
        for number in range(count):  # each begins with another question
            start = number * len(questions) // count
            texts.append("\n\n".join([*questions[start:], *questions[:start]]))
        source = f"questions of real benchmarks, joined ({data})"
    else:
        words, entropy = _mini_words()
        draw = random.Random(0)
        texts = [" ".join(draw.choices(*words, k=wanted // 2)) for _ in range(count)]
        source = f"generated: words of the mini tasks by their frequency, each drawn alone, {entropy:.1f} bits a word"
    prompts = [Prompt(f"{size:,}", str(n), [text], size) for size in lengths for n, text in enumerate(texts)]
    return Workload(prompts, source, generated=not questions)


def _questions(data: Path) -> Iterator[str]:
    tasks = [
        task for task in map(Task, map(BENCHMARKS.__getitem__, PROMPTED)) if (data / task.benchmark.folder).is_dir()
    ]
    by_task = [[task.benchmark.prompts.user(row) for row in task.rows(data)] for task in tasks]
    return (text for turn in itertools.zip_longest(*by_task) for text in turn if text is not None)


def _mini_words() -> tuple[tuple[list[str], list[int]], float]:
    """Words with their numbers, and the entropy of one word in bits."""
    counts = Counter(word for text in mini_texts(_NUM_MINI) for word in text.split())
    total = counts.total()
    return (list(counts), list(counts.values())), sum(n / total * math.log2(total / n) for n in counts.values())


def speed_bench(split: str, data: Path | None, limit: int | None) -> Workload:
    """Conversations of SPEED-Bench (arXiv 2604.09557), by category and difficulty; the first `limit` of each.

    `data` holds `speed_bench/<split>.jsonl`, as the script of its authors writes it.

    Raises:
        MissingRowsError: there are no rows.
        DataError: they are malformed, or their texts were not fetched yet.
    """
    if split not in SPLITS:
        raise ConfigError(f"SPEED-Bench has no split {split!r}; it has {', '.join(SPLITS)}")
    source = Source(hub="nvidia/SPEED-Bench", configs=(split,), split="test", num_rows=0, columns=_COLUMNS)
    # A file has the name of the configuration; on the hub each of them has one split.
    name = split if data is not None else source.split
    found, origin = find_rows(SPEED_BENCH, source, data, name, folder=SPEED_BENCH)
    check_rows(found, source, origin)
    prompts, counts = [], Counter[str]()
    for number, row in enumerate(found):
        if any(_NOT_FETCHED.search(turn) for turn in row["turns"]):
            raise DataError(
                f"{origin}, row {number} (from 0): its text was not fetched from {row['source']}; run the script that "
                "comes with SPEED-Bench, which writes whole rows"
            )
        group = ", ".join(filter(None, (row["category"], row["difficulty"])))
        counts[group] += 1
        if limit is None or counts[group] <= limit:
            prompts.append(Prompt(group, str(row["question_id"]), row["turns"]))
    return Workload(prompts, f"SPEED-Bench, {split} ({origin})")
