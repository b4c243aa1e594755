"""The prompt, the extraction rules and the text of a right answer of all multiple-choice benchmarks."""

from collections.abc import Callable, Sequence

from refusion_eval.benchmarks import LETTERS, Extraction, Extractor
from refusion_eval.benchmarks.extract import letters
from refusion_eval.benchmarks.rows import Row


def lettered(choices: Sequence[str]) -> str:
    return "\n".join(f"{letter}. {choice.strip()}" for letter, choice in zip(LETTERS, choices, strict=False))


def choice_prompt(question: str, choices: Sequence[str]) -> str:
    return f"{question.strip()}\n\n{lettered(choices)}\n\nThink briefly, then end with: The answer is (<letter>)."


def choice_filters(choices: Callable[[Row], Sequence[str]]) -> dict[str, Extractor]:
    def by_letter(rule: Callable[[str, int], Extraction]) -> Extractor:
        return lambda text, row: rule(text, len(choices(row)))

    return {
        "last": by_letter(letters.last_letter_stated),
        "first": by_letter(letters.first_letter_stated),
        "strict": by_letter(letters.strict_letter),
    }


def letter_text(gold: Callable[[Row], str]) -> Callable[[Row], str]:
    return lambda row: f"The answer is ({gold(row)})."
