"""The mini tasks as endless, seeded streams of items, and their committed test files.

`python -m miniature.data [DIR]` writes the test files again, byte for byte (default: tasks/mini).
"""

import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from miniature.family import EMBEDDED, Family
from miniature.gaps import KINDS, test_rows
from miniature.item import Item
from miniature.steps import GRADES
from refusion_eval.benchmarks import BENCHMARKS

NUM_TEST_ITEMS = 100
TEST_SEED = 2512


def items(benchmark: str, *, test: bool, seed: int, family: Family = EMBEDDED) -> Iterator[Item]:
    """Yields items of one split for ever; the same arguments give the same items."""
    rng = random.Random(f"{benchmark} {'test' if test else 'train'} {seed}")
    grades = family.test_grades if test else GRADES
    while True:
        item = family.draws[benchmark](rng, grades)
        if item.held_out == test:
            yield item


def drill_pairs(drill: str, *, seed: int, count: int, family: Family = EMBEDDED) -> list[tuple[str, str]]:
    """The first `count` (query, response) pairs of one drill; the same arguments give the same pairs."""
    rng = random.Random(f"{drill} {seed}")
    return [family.drills[drill](rng) for _ in range(count)]


def held_out_items(benchmark: str, family: Family = EMBEDDED) -> list[Item]:
    """The test items: the first `NUM_TEST_ITEMS` of the test stream with distinct prompts."""
    distinct: dict[str, Item] = {}
    for item in items(benchmark, test=True, seed=TEST_SEED, family=family):
        distinct.setdefault(normalised(BENCHMARKS[benchmark].prompts.user(item.prompt_row)), item)
        if len(distinct) == NUM_TEST_ITEMS:
            break
    return list(distinct.values())


def asked_items(benchmark: str, family: Family = EMBEDDED) -> list[Item]:
    """The test items with the prompt rows that a run makes of the committed file.

    They differ from those of `held_out_items` in gpqa, where a run orders the choices by a hash of the item's id. The
    gold response still names the letter of the former order.
    """
    normalise = BENCHMARKS[benchmark].prompts.normalise
    asked = []
    for number, item in enumerate(held_out_items(benchmark, family)):
        prompt_row = normalise(_published(benchmark, number, item), number) if normalise else item.prompt_row
        assert prompt_row is not None, f"{benchmark} leaves out committed item {number}"
        asked.append(replace(item, prompt_row=prompt_row))
    return asked


def normalised(text: str) -> str:
    """Lower case, single blanks: the form in which prompts are compared."""
    return " ".join(text.lower().split())


def _identity(benchmark: str, number: int) -> dict[str, Any]:
    """The id columns of a row, named as in the hub dataset; gsm8k and math have none."""
    columns: dict[str, dict[str, Any]] = {
        "mmlu_pro": {"question_id": number},
        "arc_challenge": {"id": f"mini_arc_{number}"},
        "gpqa": {"Record ID": f"mini_gpqa_{number}"},
        "humaneval": {"task_id": f"MiniHumanEval/{number}"},
        "mbpp": {"task_id": number},
    }
    return columns.get(benchmark, {})


def _published(benchmark: str, number: int, item: Item) -> dict[str, Any]:
    """The committed row of a test item."""
    return {**_identity(benchmark, number), **item.row}


def held_out_text(benchmark: str) -> str:
    """The committed test file, in the hub dataset's columns: one JSON object a line."""
    return _as_lines(_published(benchmark, number, item) for number, item in enumerate(held_out_items(benchmark)))


def gapped_text(kind: str) -> str:
    """The committed test file of a kind of texts with gaps."""
    return _as_lines(test_rows(kind, NUM_TEST_ITEMS, TEST_SEED))


def _as_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_test_files(tasks_dir: Path) -> None:
    """Writes `<tasks_dir>/<benchmark>/test.jsonl` for every mini task."""
    texts = {name: held_out_text(name) for name in EMBEDDED.draws} | {
        f"infill_{kind}": gapped_text(kind) for kind in KINDS
    }
    for benchmark, text in texts.items():
        path = tasks_dir / benchmark / "test.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_test_files(Path(sys.argv[1] if len(sys.argv) > 1 else "tasks/mini"))
