"""What each benchmark asks of a model: one dataset row in, the text of the single user turn out.

The same function serves the tasks, the mini tasks and the training data of the embedded checkpoints, so that a model
is trained on the very words it is tested with. Zero-shot, chat style; the wording is this project's own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def lettered(choices: Sequence[str]) -> str:
    """Lists choices one a line with a letter by position: "A. first", "B. second", ..."""
    return "\n".join(f"{letter}. {choice.strip()}" for letter, choice in zip(LETTERS, choices, strict=False))


def _word_problem(row: Row) -> str:
    return f"{row['question'].strip()}\n\nSolve this step by step. End with: The answer is <number>."


def _mathematics(row: Row) -> str:
    return f"{row['problem'].strip()}\n\nSolve this step by step. Put the final answer in \\boxed{{}}."


def _choice(question: str, choices: Sequence[str]) -> str:
    return f"{question.strip()}\n\n{lettered(choices)}\n\nThink briefly, then end with: The answer is (<letter>)."


def _arc(row: Row) -> str:
    return _choice(row["question"], row["choices"]["text"])


def _mmlu_pro(row: Row) -> str:
    return _choice(row["question"], row["options"])


def _gpqa(row: Row) -> str:
    return _choice(row["question"], row["choices"])


def _humaneval(row: Row) -> str:
    function = row["prompt"].strip()
    return f"Complete this function. Reply with the whole function in a python block.\n\n```python\n{function}\n```"


def _mbpp(row: Row) -> str:
    tests = "\n".join(test.strip() for test in row["test_list"])
    return (
        f"{row['text'].strip()}\n\nYour code must pass these tests:\n{tests}\n\nReply with the code in a python block."
    )


PROMPTS: dict[str, Callable[[Row], str]] = {
    "mmlu_pro": _mmlu_pro,
    "arc_challenge": _arc,
    "gsm8k": _word_problem,
    "math": _mathematics,
    "gpqa": _gpqa,
    "humaneval": _humaneval,
    "mbpp": _mbpp,
}


def prompt(benchmark: str, row: Row) -> str:
    """Returns the user turn for one row.

    Args:
        benchmark: a key of `PROMPTS`.
        row: the dataset row in its hub columns; for gpqa the loader's normalised row (`question`, `choices` already
            shuffled).

    Raises:
        KeyError: the benchmark is unknown or the row lacks a column.
    """
    return PROMPTS[benchmark](row)
