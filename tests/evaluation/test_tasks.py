"""Which items of a task are asked where a limit leaves some out."""

import itertools
from collections import Counter

import pytest

from refusion_eval.benchmarks import BENCHMARKS, Task, get_task
from refusion_eval.evaluation.tasks import limited


@pytest.mark.parametrize("name", ["bbh", "math", "mmlu_pro", "mmlu_redux_ok"])
def test_a_limit_leaves_rows_of_every_part_of_sorted_rows(name):
    benchmark = BENCHMARKS[name]
    count = benchmark.source.num_rows
    parts = len(benchmark.source.configs) if name != "mmlu_pro" else 14
    left = limited(Task(benchmark), range(count), 4 * parts)
    of_parts = Counter(number * parts // count for number in left)
    assert len(of_parts) == parts
    assert max(of_parts.values()) <= 8
    assert left == sorted(left)


def test_a_higher_limit_leaves_what_a_lower_one_left_and_more():
    task, items = get_task("refusion_bbh"), range(1000)
    lefts = [set(limited(task, items, limit)) for limit in (1, 10, 11, 500, 999, 1000, 2000)]
    assert [len(left) for left in lefts] == [1, 10, 11, 500, 999, 1000, 1000]
    assert all(lower <= higher for lower, higher in itertools.pairwise(lefts))
    assert limited(task, items, None) == list(items)


@pytest.mark.parametrize("name", ["refusion_gsm8k", "mini_math"])
def test_a_limit_leaves_the_first_rows_where_they_are_like_the_others(name):
    assert limited(get_task(name), range(100), 3) == [0, 1, 2]
