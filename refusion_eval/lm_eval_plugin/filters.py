"""The answer filters that recorded texts can be judged with; those of lm-eval's own tasks run lm-eval's own code.

Patterns, pipelines and comparison options are those of the installed lm-eval's task files, which a user compares with.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from refusion_eval.benchmarks import BENCHMARKS, Extraction, Row
from refusion_eval.benchmarks.extract.frames import NOTHING
from refusion_eval.config import check_keys
from refusion_eval.errors import ConfigError
from refusion_eval.scoring.filters import OTHER_FORMS, OWN_RULES, AnswerFilter, Rule, custom_filter, per_text_rule

# lm-eval loads slowly, so it is imported inside the functions that need it: the filters of this project do not.

# What lm-eval's filters return where nothing matches.
INVALID = ("[invalid]", "[invalidanswer]")

_METRIC = "exact_match"

# The patterns that lm-eval removes from an answer before it compares take quadratic time: of 100,000 digits, seconds.
_LONGEST_COMPARED = 2_000

_STATEMENT_START, _STATEMENT_END = "Final Answer: The final answer is", " I hope it is correct"


class _TaskFileLoader(yaml.SafeLoader):
    """Reads a task file without importing the functions that it names."""


_TaskFileLoader.add_constructor("!function", lambda _loader, node: node.value)


def find(task_file: str, filter_name: str, items: Sequence[tuple[Row, str]]) -> list[Extraction]:
    if not items:
        return []
    from lm_eval.api.instance import Instance
    from lm_eval.filters import build_filter_ensemble

    pipeline = _entry(task_file, "filter_list", "name", filter_name)["filter"]
    steps = [(step["function"], {key: step[key] for key in step if key != "function"}) for step in pipeline]
    instances = [Instance("generate_until", dict(row), ("", {}), 0, resps=[text]) for row, text in items]
    build_filter_ensemble(filter_name, steps).apply(instances)
    return [_extraction(instance.filtered_resps[filter_name], f"lm-eval {filter_name}") for instance in instances]


def is_right(task_file: str, gold: str, answer: str) -> bool:
    """Compares as the task does, by lm-eval's exact match with its options. An overlong text is not an answer."""
    from lm_eval.api.registry import get_metric

    options = _entry(task_file, "metric_list", "metric", _METRIC)
    if len(answer) > _LONGEST_COMPARED:
        return False
    not_passed_on = ("metric", "aggregation", "higher_is_better")
    given = {key: value for key, value in options.items() if key not in not_passed_on}
    return bool(get_metric(_METRIC)(predictions=[answer], references=[gold], **given)[_METRIC] == 1)


def minerva_statement(text: str, _row: Row) -> Extraction:
    """The text between "Final Answer: The final answer is" and "I hope it is correct.", as in `minerva_math`."""
    from lm_eval.tasks.minerva_math import utils

    # lm-eval's pattern searches the end of the statement from every start to the end of the line, which is quadratic in
    # the number of starts. It matches the first line that has both, from its first start, so it gets only that part.
    # The pattern wants one character before the end and one after it; lm-eval appends an end to every text.
    for line in f"{text}{_STATEMENT_END.strip()}.".split("\n"):
        start = line.find(_STATEMENT_START)
        end = line.find(_STATEMENT_END, start + len(_STATEMENT_START) + 1) if start >= 0 else -1
        if 0 <= end < len(line) - len(_STATEMENT_END):
            text = line[start : end + len(_STATEMENT_END) + 1]
            return _extraction(utils.get_unnormalized_answer(text), "lm-eval get_unnormalized_answer")
    return NOTHING


def minerva_box(text: str, _row: Row) -> Extraction:
    """The last box of a text as `minerva_math` reads it from solutions."""
    from lm_eval.tasks.minerva_math import utils

    box = utils.last_boxed_only_string(text)
    try:
        return NOTHING if box is None else _extraction(utils.remove_boxed(box), "lm-eval last_boxed_only_string")
    except AssertionError:  # it finds \\fbox and boxes with a space before the brace, but cannot open them
        return NOTHING


def _extraction(answer: str, how: str) -> Extraction:
    return NOTHING if answer in INVALID else Extraction(answer, how)


@cache
def _entry(task_file: str, section: str, key: str, name: str) -> Mapping[str, Any]:
    """The entry of a list in a task file whose key has this value."""
    import lm_eval

    path = Path(lm_eval.__file__).parent / "tasks" / task_file
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=_TaskFileLoader) if path.is_file() else {}
    entry: Mapping[str, Any] | None = next((row for row in content.get(section, ()) if row[key] == name), None)
    if entry is None:
        raise ConfigError(
            f"lm_eval {lm_eval.__version__}: tasks/{task_file} has no {name} in its {section}; install lm_eval "
            "0.4.13, which these filters were written for"
        )
    return entry


def _rules(filter_name: str, **task_files: str) -> dict[str, Rule]:
    """Benchmark -> the rule of that filter in a task file of lm-eval."""
    return {
        benchmark: Rule(partial(find, task_file, filter_name), partial(is_right, task_file))
        for benchmark, task_file in task_files.items()
    }


_GSM8K, _GPQA = "gsm8k/gsm8k.yaml", "gpqa/generative/_gpqa_generative_n_shot_yaml"

# The filters of lm-eval's own tasks.
TASK_FILTERS = (
    AnswerFilter(
        name="strict-match",
        description='gsm8k: the number after "####"; gpqa: what follows "The answer is "; compared as strings',
        source="lm-eval gsm8k, gpqa_*_generative_n_shot",
        rules=_rules("strict-match", gsm8k=_GSM8K, gpqa=_GPQA),
    ),
    AnswerFilter(
        name="flexible-extract",
        description='gsm8k: the last run of digits; gpqa: the last "(X)"; compared as strings',
        source="lm-eval gsm8k, gpqa_*_generative_n_shot",
        rules=_rules("flexible-extract", gsm8k=_GSM8K, gpqa=_GPQA),
    ),
    AnswerFilter(
        name="cot-strict-match",
        description='the number after "The answer is ", which one more character must follow; compared as strings',
        source="lm-eval gsm8k_cot, strict-match",
        rules=_rules("strict-match", gsm8k="gsm8k/gsm8k-cot.yaml"),
    ),
    AnswerFilter(
        name="custom-extract",
        description='the first "answer is (X)"',
        source="lm-eval mmlu_pro",
        rules=_rules("custom-extract", mmlu_pro="mmlu_pro/_default_template_yaml"),
    ),
    AnswerFilter(
        name="minerva-box",
        description="the last box as lm-eval reads it from solutions; compared as the math task compares",
        source="lm-eval minerva_math, last_boxed_only_string",
        rules={"math": per_text_rule(minerva_box)},
    ),
    AnswerFilter(
        name="minerva-statement",
        description='"Final Answer: The final answer is X. I hope it is correct."; compared as the math task compares',
        source="lm-eval minerva_math, get_unnormalized_answer",
        rules={"math": per_text_rule(minerva_statement)},
    ),
)

# Every filter that a user can name.
FILTERS: dict[str, AnswerFilter] = {
    answer_filter.name: answer_filter for answer_filter in (*OWN_RULES, *TASK_FILTERS, *OTHER_FORMS)
}


def find_filter(name: str) -> AnswerFilter:
    if ":" in name:
        return custom_filter(name)
    check_keys([name], FILTERS, "", what="filter", offered=[*FILTERS, "module:function"])
    return FILTERS[name]


def describe() -> list[str]:
    """One line for each filter: its name, what it does, its source, and the benchmarks that it applies to."""
    width = max(map(len, FILTERS))
    lines = [
        f"{rule.name:<{width}}  {rule.description} [{rule.source}; "
        f"{'all benchmarks' if rule.rules.keys() == BENCHMARKS.keys() else ', '.join(rule.rules)}]"
        for rule in FILTERS.values()
    ]
    return [*lines, f"{'module:function':<{width}}  your own (text, doc) -> str or None; this runs your code"]
