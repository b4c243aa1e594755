"""The rows of `guard_choice`."""

from datasets import Dataset

ROWS = [
    {"question": "How many is 7 + 5?", "choices": ["12", "75", "it is twelve of them, all told"], "answer": 0},
    {"question": "Which one is a metal?", "choices": ["robin", "gold"], "answer": 1},
    {"question": "def double(x):\n    return", "choices": ["2 * x", "x - 2", "None", "print"], "answer": 0},
]


def choices(**_: object) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(ROWS)}
