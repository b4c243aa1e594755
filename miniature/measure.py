"""Accuracy and tokens a forward of a model on held-out draws, for the frontier and for what training prints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from miniature.data import TEST_SEED, held_out_items, items, normalised
from miniature.family import Family
from miniature.item import Item
from refusion_eval import api
from refusion_eval.benchmarks import BENCHMARKS, Benchmark
from refusion_eval.scoring.judge import judge_texts
from refusion_eval.types import ForwardDone, Trace

DRAW_SEED = TEST_SEED + 1
MAX_DRAWS = 20_000

# Settings of a quick look at a decoder: blocks of 8 tokens, which all objectives are trained for.
PLAIN: Mapping[str, Mapping[str, Any]] = {
    "autoregressive": {},
    "refusion": {"slot_size": 8, "block_size": 8},
    "llada": {"block_length": 8},
    "bd3lm": {"block_length": 8},
    "idlm": {"gen_block_size": 4, "temperature": 0.0},
    "wedlm": {"window_size": 8},
}


class Answer(NamedTuple):
    """The verdict on one answer and what it took; `rows` are the query rows of all its forwards, the prompt's too."""

    right: bool
    tokens: int
    forwards: int
    rows: int


@dataclass(frozen=True)
class Measured:
    """The answers of one system to the items of a task, in their order."""

    answers: Sequence[Answer]

    @property
    def passed(self) -> list[bool]:
        """Which answers are right."""
        return [answer.right for answer in self.answers]

    @property
    def tokens(self) -> int:
        """The tokens of all answers, up to and including the first EOS of each."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def forwards(self) -> int:
        """The forwards of all answers."""
        return sum(answer.forwards for answer in self.answers)

    @property
    def accuracy(self) -> float:
        """The share of right answers in percent."""
        return 100 * sum(self.passed) / len(self.answers)

    @property
    def tpf(self) -> float:
        """Tokens a forward: all tokens by all forwards."""
        return self.tokens / self.forwards


def num_rows(trace: Trace) -> int:
    """The query rows that the model computed for a response, over all its forwards."""
    return sum(event.rows for event in trace.of(ForwardDone))


def draws(family: Family, benchmark: str, count: int) -> list[Item]:
    """The first `count` distinct items of the test stream with another seed that are no test items.

    Fewer where a task has so few: the search ends after `MAX_DRAWS` items.
    """
    prompts = BENCHMARKS[benchmark].prompts
    seen = {normalised(prompts.user(item.prompt_row)) for item in held_out_items(benchmark, family)}
    chosen: list[Item] = []
    for item in islice(items(benchmark, test=True, seed=DRAW_SEED, family=family), MAX_DRAWS):
        prompt = normalised(prompts.user(item.prompt_row))
        if prompt not in seen:
            seen.add(prompt)
            chosen.append(item)
        if len(chosen) == count:
            break
    return chosen


def measure(
    model: api.LoadedModel, decoder: str, benchmark: Benchmark, chosen: Sequence[Item], **settings: Any
) -> Measured:
    """Decodes and judges draws of one benchmark; `settings` are those of the decoder."""
    asked = [benchmark.prompts.user(item.prompt_row) for item in chosen]
    decoded = api.generate_many(model, asked, decoder, **settings)
    answers = [(dict(item.prompt_row), one.text or "") for item, one in zip(chosen, decoded, strict=True)]
    verdicts = judge_texts(benchmark, answers)
    return Measured(
        [
            Answer(verdict.passed, len(one.tokens), one.num_forwards, num_rows(one.trace))
            for verdict, one in zip(verdicts, decoded, strict=True)
        ]
    )
