"""The prompt, the extraction rules and the text of a right answer of all multiple-choice benchmarks."""

from collections.abc import Callable, Sequence

from refusion_eval.benchmarks import LETTERS, Extraction, Extractor
from refusion_eval.benchmarks.extract import letters
from refusion_eval.benchmarks.rows import Row


def lettered(choices: Sequence[str]) -> str:
    """Lists choices one a line with a letter by position: "A. first", "B. second", ..."""
    return "\n".join(f"{letter}. {choice.strip()}" for letter, choice in zip(LETTERS, choices, strict=False))


def choice_prompt(question: str, choices: Sequence[str]) -> str:
    """The user turn: the question, the choices with letters, and the form of the answer that is asked for."""
    return f"{question.strip()}\n\n{lettered(choices)}\n\nThink briefly, then end with: The answer is (<letter>)."


def choice_filters(choices: Callable[[Row], Sequence[str]]) -> dict[str, Extractor]:
    """The extraction rules for the letter of a choice."""

    def by_letter(rule: Callable[[str, int], Extraction]) -> Extractor:
        return lambda text, row: rule(text, len(choices(row)))

    return {
        "last": by_letter(letters.last_letter_stated),
        "first": by_letter(letters.first_letter_stated),
        "strict": by_letter(letters.strict_letter),
    }


def letter_text(gold: Callable[[Row], str]) -> Callable[[Row], str]:
    """The right answer as the prompt asks for it, from a benchmark's function for its letter."""
    return lambda row: f"The answer is ({gold(row)})."
