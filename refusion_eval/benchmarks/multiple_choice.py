"""This project's prompts of all multiple-choice benchmarks, with their extraction rules."""

from collections.abc import Callable, Sequence
from typing import Any

from refusion_eval.benchmarks import LETTERS, Extraction, Extractor, Prompts
from refusion_eval.benchmarks.extract import letters
from refusion_eval.benchmarks.rows import Row


def lettered(choices: Sequence[str]) -> str:
    return "\n".join(f"{letter}. {choice.strip()}" for letter, choice in zip(LETTERS, choices, strict=False))


def answer_letter(row: Row) -> str:
    return str(row["answer"])


def choice_prompts(choices: Callable[[Row], Sequence[str]], gold: Callable[[Row], str], **options: Any) -> Prompts:
    def user(row: Row) -> str:
        end = "Think briefly, then end with: The answer is (<letter>)."
        return f"{row['question'].strip()}\n\n{lettered(choices(row))}\n\n{end}"

    def by_letter(rule: Callable[[str, int], Extraction]) -> Extractor:
        return lambda text, row: rule(text, len(choices(row)))

    rules = {"last": letters.last_letter_stated, "first": letters.first_letter_stated, "strict": letters.strict_letter}
    return Prompts(
        user=user,
        gold_text=lambda row: f"The answer is ({gold(row)}).",
        filters={name: by_letter(rule) for name, rule in rules.items()},
        version="1.3",
        **options,
    )
