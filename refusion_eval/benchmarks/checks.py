"""Whether benchmark rows are what the tasks take them for: columns, their types, answers among the choices, ids."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from refusion_eval.benchmarks.prompts import LETTERS, Row
from refusion_eval.errors import DataError

MOST_SHOWN = 60  # characters of a wrong value that a message quotes


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_name(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _is_short_answer(value: object) -> bool:
    return isinstance(value, str | int | float)


def _is_texts(value: object) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(item, str) for item in value)


def _is_choices(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    text, label = value.get("text"), value.get("label")
    return _is_texts(text) and _is_texts(label) and len(text or ()) == len(label or ())


# What a column holds, where it is not text: a test, and how messages call it. Column names mean the same everywhere.
_KINDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "id": (_is_name, "text or a whole number"),
    "question_id": (_is_name, "text or a whole number"),
    "task_id": (_is_name, "text or a whole number"),
    "options": (_is_texts, "a list of texts"),
    "test_list": (_is_texts, "a list of texts"),
    "choices": (_is_choices, "an object with the lists text and label, equally long"),
    "Correct Answer": (_is_short_answer, "text or a number"),
    "Incorrect Answer 1": (_is_short_answer, "text or a number"),
    "Incorrect Answer 2": (_is_short_answer, "text or a number"),
    "Incorrect Answer 3": (_is_short_answer, "text or a number"),
}
_TEXT = (_is_text, "text")
_IDS = ("id", "question_id", "task_id", "Record ID")


def check_rows(rows: Sequence[Row], columns: Sequence[str], origin: str) -> None:
    """Refuses rows that a task would stumble over later, when texts have been generated.

    Args:
        rows: of one benchmark, in hub columns.
        columns: those that every row must have.
        origin: the file or dataset, for messages.

    Raises:
        DataError: a column is missing, holds something else than it should, or an id occurs twice; an answer is none of
            the row's choices.
    """
    numbers: dict[str, int] = {}
    for number, row in enumerate(rows):
        where = f"{origin}, row {number} (from 0)"
        missing = [column for column in columns if column not in row]
        if missing:
            raise DataError(
                f"{where}: column {missing[0]!r} is missing (found: {', '.join(sorted(row))}); "
                "the columns must be those of the hub dataset"
            )
        for column in columns:
            is_right, meant = _KINDS.get(column, _TEXT)
            if not is_right(row[column]):
                raise DataError(f"{where}: column {column!r} is {_shown(row[column])}; it must be {meant}")
            _check_unicode(row[column], f"{where}: column {column!r}")
        _check_answer(row, where)
        for item_id in [str(row[column]) for column in _IDS if row.get(column) is not None][:1]:
            if item_id in numbers:
                raise DataError(
                    f"{where}: the id {item_id!r} is that of row {numbers[item_id]} already; ids must differ, remove "
                    "or rename one of the rows"
                )
            numbers[item_id] = number


def _check_answer(row: Row, where: str) -> None:
    """The letter or label of a row with listed choices is that of one of them."""
    if "answerKey" in row and "choices" in row:
        labels, column = list(row["choices"]["label"]), "answerKey"
    elif "options" in row and "answer" in row:
        labels, column = list(LETTERS[: len(row["options"])]), "answer"
    else:
        return
    if row[column] not in labels:
        raise DataError(
            f"{where}: column {column!r} is {_shown(row[column])}, which is none of the row's choices "
            f"({', '.join(map(str, labels))}); correct the row"
        )


def _check_unicode(value: object, where: str) -> None:
    """Refuses half of a surrogate pair, which no tokenizer can read."""
    texts: list[Any] = [value]
    while texts:
        text = texts.pop()
        if isinstance(text, Mapping):
            texts.extend(text.values())
        elif isinstance(text, str):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as problem:
                raise DataError(
                    f"{where} holds a lone surrogate (character {problem.start}), which is no text; write the whole "
                    "character"
                ) from problem
        elif isinstance(text, Sequence):
            texts.extend(text)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
