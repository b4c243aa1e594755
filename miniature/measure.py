"""Accuracy and tokens a forward of a model on held-out draws, for the frontier and for what training prints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from miniature.data import TEST_SEED, held_out_items, items, normalised
from miniature.family import Family
from miniature.item import Item
from refusion_eval import api
from refusion_eval.benchmarks import BENCHMARKS, Benchmark
from refusion_eval.scoring.judge import judge_texts

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


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Which answers are right, and the forwards and tokens that all of them took."""

    passed: Sequence[bool]
    forwards: int
    tokens: int

    @property
    def accuracy(self) -> float:
        """The share of right answers in percent."""
        return 100 * sum(self.passed) / len(self.passed)

    @property
    def tpf(self) -> float:
        """Tokens a forward."""
        return self.tokens / self.forwards


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
    return Measured(
        passed=[verdict.passed for verdict in judge_texts(benchmark, answers)],
        forwards=sum(one.num_forwards for one in decoded),
        tokens=sum(len(one.tokens) for one in decoded),
    )
