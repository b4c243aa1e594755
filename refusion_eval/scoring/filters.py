"""Answer filters for recorded texts: this project's extraction rules, those of other projects, and a user's own."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

from refusion_eval.benchmarks import BENCHMARKS, Benchmark, Extraction, Extractor, Row
from refusion_eval.benchmarks.extract.programs import NO_CODE, fenced_blocks
from refusion_eval.benchmarks.extract.release import release_block
from refusion_eval.errors import ConfigError

OURS = "ours"  # the filter that must give what a run recorded

Items = Sequence[tuple[Row, str]]
UserFunction = Callable[[str, Row], str | None]


class Rule(NamedTuple):
    find: Callable[[Items], list[Extraction]]
    is_right: Callable[[str, str], bool] | None = None  # None for the comparison of the benchmark's judge


class AnswerFilter(NamedTuple):
    name: str
    description: str
    source: str
    rules: Mapping[str, Rule]
    reads: Literal["text", "canvas"] = "text"  # the canvas has every token that was fixed, also behind the end token

    def rule_of(self, benchmark: str) -> Rule | None:
        """The rule for a benchmark, if there is one.

        What is not listed, as a window, has that of a listed one; a benchmark that is like none has its own rule alone.
        """
        listed, folder = BENCHMARKS.keys(), BENCHMARKS[benchmark].folder
        names = [benchmark] if benchmark in listed else [name for name in listed if BENCHMARKS[name].folder == folder]
        if names:
            return self.rules.get(names[0])
        return per_text_rule(BENCHMARKS[benchmark].extract) if self.name == OURS else None


def per_text_rule(rule: Extractor) -> Rule:
    return Rule(lambda items: [rule(text, row) for row, text in items])


def _own(filter_name: str | None) -> dict[str, Rule]:
    """This project's rule of that name (None: the default one), for the benchmarks that have it."""
    return {
        name: per_text_rule(partial(bench.extract, filter_name=filter_name))
        for name, bench in BENCHMARKS.items()
        if filter_name is None or filter_name in bench.prompts.filters
    }


def _first_block(text: str, row: Row) -> Extraction:
    blocks = fenced_blocks(text)
    return Extraction(blocks[0], "first fenced block") if blocks else NO_CODE


def _first_block_after_prompt(text: str, row: Row) -> Extraction:
    """The block may be the whole function, which then replaces the prompt's, or only its body."""
    block = _first_block(text, row)
    return block if block.answer is None else Extraction(f"{row['prompt']}\n{block.answer}", block.how)


def _in_release_block(benchmark: Benchmark, text: str, row: Row) -> Extraction:
    return benchmark.extract(release_block(text), row)


def custom_filter(name: str) -> AnswerFilter:
    """A filter of a user's own function, given as module:function and imported as `python -m` here would import it."""
    module_name, _, function_name = name.partition(":")
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        function: UserFunction = getattr(importlib.import_module(module_name), function_name)
    except Exception as problem:
        raise ConfigError(
            f"filter {name}: cannot be imported ({type(problem).__name__}: {problem}); name a function of a module in "
            "the current folder or an installed one"
        ) from problem
    finally:
        sys.path.remove(folder)  # the module may itself have put folders before this one
    if not callable(function):
        raise ConfigError(f"filter {name}: {function_name} is not a function; define (text, doc) -> text or None")

    def rule(text: str, row: Row) -> Extraction:
        try:
            answer = function(text, row)
        except Exception as problem:
            raise ConfigError(f"filter {name}: it failed on a text: {type(problem).__name__}: {problem}") from problem
        if answer is not None and not isinstance(answer, str):
            raise ConfigError(f"filter {name}: it returned {type(answer).__name__}; return text, or None for no answer")
        return Extraction(answer, name)

    return AnswerFilter(name, "a function of the user", "the user", dict.fromkeys(BENCHMARKS, per_text_rule(rule)))


# This project's extraction rules, and how other projects take programs and texts from a response. The list of all
# filters is `refusion_eval.lm_eval_plugin.filters.FILTERS`, which has those of lm-eval's own tasks in between.
_TASKS = "this project, tasks/*/README.md"
OWN_RULES = (
    AnswerFilter(OURS, "the tasks' own extraction: what a run's tables are made with", _TASKS, _own(None)),
    AnswerFilter("last", "the last statement of an answer", "this project", _own("last")),
    AnswerFilter(
        "first",
        "the first statement of an answer, for base models that run on; of code, what `ours` does",
        "this project",
        _own("first"),
    ),
    AnswerFilter("strict", "the very form that the prompt asks for, and no other", "this project", _own("strict")),
)
OTHER_FORMS = (
    AnswerFilter(
        "first-fenced-block",
        "the first fenced block as it is, for humaneval after the prompt",
        "the instruct forms of lm-eval humaneval and mbpp, without their opened fence",
        {"humaneval": per_text_rule(_first_block_after_prompt), "mbpp": per_text_rule(_first_block)},
    ),
    AnswerFilter(
        "raw-continuation",
        "the whole text as code, for humaneval after the prompt",
        "lm-eval humaneval (create_test), mbpp",
        {
            "humaneval": per_text_rule(lambda text, row: Extraction(f"{row['prompt']}{text}", "prompt and whole text")),
            "mbpp": per_text_rule(lambda text, _: Extraction(text, "whole text")),
        },
    ),
    AnswerFilter(
        "release-block",
        "the first closed Python block replaces the answer in every task, then the tasks' own extraction",
        "ML-GSAI/ReFusion eval.py",
        {name: per_text_rule(partial(_in_release_block, bench)) for name, bench in BENCHMARKS.items()},
    ),
    AnswerFilter(
        "whole-canvas",
        "also the text after the first end token, without special tokens, then the tasks' own extraction",
        "ML-GSAI/LLaDA",
        _own(None),
        reads="canvas",
    ),
)
