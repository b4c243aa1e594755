"""Answer filters for recorded texts: this project's extraction rules, those of other projects, and a user's own.

A filter has one rule for each benchmark that it applies to. A rule finds the answers. They are compared with the right
ones by the benchmark's judge, unless the rule has a comparison of its own.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from refusion_eval.benchmarks import BENCHMARKS, Benchmark, Extraction, Row
from refusion_eval.benchmarks.base import Extractor
from refusion_eval.benchmarks.extract.programs import NO_CODE, fenced_blocks
from refusion_eval.errors import ConfigError
from refusion_eval.scoring.judge import CORRECT, NO_ANSWER, WRONG, OnVerdict, Verdict, judge_extractions

# The filter that must give what a run recorded.
OURS = "ours"

# As a filter's name: print them all.
LIST = "list"

_OPENING, _CLOSING = "```python\n", "\n```"

Items = Sequence[tuple[Row, str]]
UserFunction = Callable[[str, Row], str | None]


@dataclass(frozen=True)
class Rule:
    """A filter's rule for the texts of one benchmark.

    Attributes:
        find: finds the answers of (row, text) pairs, one each, in order.
        is_right: compares (right answer, found answer); None for the benchmark's own judge.
    """

    find: Callable[[Items], list[Extraction]]
    is_right: Callable[[str, str], bool] | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerFilter:
    """One way to find answers in recorded texts.

    Attributes:
        name: its name on the command line.
        description: one line about what it finds.
        source: the project that the rule comes from.
        rules: benchmark -> rule; texts of other benchmarks are left out.
        reads: "text" for the response as the task saw it; "canvas" for every token that was fixed, those after the
            first end token included.
    """

    name: str
    description: str
    source: str
    rules: Mapping[str, Rule]
    reads: Literal["text", "canvas"] = "text"


def judge_by_rule(
    benchmark: Benchmark,
    rule: Rule,
    items: Items,
    *,
    workers: int | None = None,
    sandbox: str = "auto",
    on_verdict: OnVerdict | None = None,
) -> list[Verdict]:
    """Judges texts by a rule; all other arguments are those of `judge_texts`."""
    rows, extractions = [row for row, _ in items], rule.find(items)
    if rule.is_right is None:
        return judge_extractions(benchmark, rows, extractions, workers=workers, sandbox=sandbox, on_verdict=on_verdict)
    verdicts = []
    for row, found in zip(rows, extractions, strict=True):
        if found.answer is None:
            verdicts.append(Verdict(None, NO_ANSWER, found.how))
        else:
            gold = benchmark.gold(row)
            verdict = CORRECT if rule.is_right(gold, found.answer) else WRONG
            verdicts.append(Verdict(found.answer, verdict, f"{found.how}; expected {gold}"))
    return verdicts


def _each(rule: Extractor) -> Rule:
    return Rule(lambda items: [rule(text, row) for row, text in items])


def _own(filter_name: str | None) -> dict[str, Rule]:
    """This project's rule of that name (None: the default one), for the benchmarks that have it."""
    return {
        name: _each(bench.filters[filter_name or bench.default_filter])
        for name, bench in BENCHMARKS.items()
        if filter_name is None or filter_name in bench.filters
    }


def _first_block(text: str, row: Row) -> Extraction:
    blocks = fenced_blocks(text)
    return Extraction(blocks[0], "first fenced block") if blocks else NO_CODE


def _first_block_after_prompt(text: str, row: Row) -> Extraction:
    """The block may be the whole function, which then replaces the prompt's, or only its body."""
    found = _first_block(text, row)
    return found if found.answer is None else Extraction(f"{row['prompt']}\n{found.answer}", found.how)


def _release(benchmark: str) -> Rule:
    def rule(text: str, row: Row) -> Extraction:
        return BENCHMARKS[benchmark].extract(release_block(text), row)

    return _each(rule)


def release_block(text: str) -> str:
    """The text as the release's adapter hands it to every task: the inside of its first closed Python block, if any."""
    start = text.find(_OPENING)
    end = text.find(_CLOSING, start + len(_OPENING))
    return text if start < 0 or end < 0 else text[start + len(_OPENING) : end]


def custom_filter(name: str) -> AnswerFilter:
    """A filter of a user's own function, given as module:function and imported as `python -m` here would import it.

    Raises:
        ConfigError: the function cannot be imported.
    """
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function: UserFunction = getattr(importlib.import_module(module_name), function_name)
    except Exception as problem:
        raise ConfigError(
            f"filter {name}: cannot be imported ({type(problem).__name__}: {problem}); name a function of a module in "
            "the current folder or an installed one"
        ) from problem
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise ConfigError(f"filter {name}: {function_name} is no function; write one of (text, doc) that returns text")

    def rule(text: str, row: Row) -> Extraction:
        try:
            answer = function(text, row)
        except Exception as problem:
            raise ConfigError(f"filter {name}: it failed on a text: {type(problem).__name__}: {problem}") from problem
        if answer is not None and not isinstance(answer, str):
            raise ConfigError(f"filter {name}: it returned {type(answer).__name__}; return text, or None for no answer")
        return Extraction(answer, name)

    return AnswerFilter(
        name=name,
        description="a function of the user",
        source="the user",
        rules=dict.fromkeys(BENCHMARKS, _each(rule)),
    )


# This project's extraction rules, and how other projects take programs and texts from a response. The list of all
# filters is `refusion_eval.lm_eval_plugin.filters.FILTERS`, which has those of lm-eval's own tasks in between.
OWN_RULES = (
    AnswerFilter(
        name=OURS,
        description="the tasks' own extraction: what a run's tables are made with",
        source="this project, tasks/*/README.md",
        rules=_own(None),
    ),
    AnswerFilter(
        name="last",
        description="the last statement of an answer",
        source="this project",
        rules=_own("last"),
    ),
    AnswerFilter(
        name="first",
        description="the first statement of an answer, for base models that run on; of code, what `ours` does",
        source="this project",
        rules=_own("first"),
    ),
    AnswerFilter(
        name="strict",
        description="the very form that the prompt asks for, and no other",
        source="this project",
        rules=_own("strict"),
    ),
)
OTHER_FORMS = (
    AnswerFilter(
        name="first-fenced-block",
        description="the first fenced block as it is; of humaneval behind the prompt",
        source="the instruct forms of lm-eval humaneval and mbpp, without their opened fence",
        rules={"humaneval": _each(_first_block_after_prompt), "mbpp": _each(_first_block)},
    ),
    AnswerFilter(
        name="raw-continuation",
        description="the whole text as code; of humaneval behind the prompt",
        source="lm-eval humaneval (create_test), mbpp",
        rules={
            "humaneval": _each(lambda text, row: Extraction(str(row["prompt"]) + text, "prompt and whole text")),
            "mbpp": _each(lambda text, _: Extraction(text, "whole text")),
        },
    ),
    AnswerFilter(
        name="release-block",
        description="the first closed Python block replaces the answer in every task, then the tasks' own extraction",
        source="ML-GSAI/ReFusion eval.py",
        rules={name: _release(name) for name in BENCHMARKS},
    ),
    AnswerFilter(
        name="whole-canvas",
        description="also the text behind the first end token, without special tokens, then the tasks' own extraction",
        source="ML-GSAI/LLaDA",
        rules=_own(None),
        reads="canvas",
    ),
)
