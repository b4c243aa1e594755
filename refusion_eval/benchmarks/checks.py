"""Whether benchmark rows have the right columns and types, answers among their choices, and ids of their own."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from refusion_eval.benchmarks.rows import ColumnType, Row, Source
from refusion_eval.errors import DataError

LONGEST_QUOTE = 60  # characters of a wrong value that a message quotes


def _is_texts(value: object) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(text, str) for text in value)


def _is_choices(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    text, label = value.get("text"), value.get("label")
    return _is_texts(text) and _is_texts(label) and len(text or ()) == len(label or ())


TEXT = ColumnType(lambda value: isinstance(value, str), "text")
TEXTS = ColumnType(_is_texts, "a list of texts")
ID = ColumnType(lambda value: isinstance(value, str | int) and not isinstance(value, bool), "text or a whole number")
SHORT_ANSWER = ColumnType(lambda value: isinstance(value, str | int | float), "text or a number")
CHOICES = ColumnType(_is_choices, "an object with the lists text and label, equally long")

# Columns that identify a row, whichever benchmark it belongs to; the first that a row has counts.
_ID_COLUMNS = ("id", "question_id", "task_id", "Record ID")


def must_be_listed(column: str, labels: Callable[[Row], Sequence[str]]) -> Callable[[Row], str | None]:
    """A check that a row's answer is the label of one of its choices.

    Args:
        column: the column with the answer.
        labels: a row -> the labels of its choices.

    Returns:
        The check: a row -> what is wrong with it, or None.
    """

    def check(row: Row) -> str | None:
        listed = list(labels(row))
        if row[column] in listed:
            return None
        return (
            f"column {column!r} is {_quoted(row[column])}, which is none of the row's choices "
            f"({', '.join(map(str, listed))}); correct the row"
        )

    return check


def check_rows(rows: Sequence[Row], source: Source, origin: str) -> None:
    """Refuses malformed rows before any text is generated.

    Args:
        rows: the rows of one benchmark, in hub columns.
        source: says which columns they must have.
        origin: the file or dataset that they come from, for messages.

    Raises:
        DataError: a column is missing or holds a value of another type; an answer is none of the row's choices; a text
            is no Unicode; an id occurs twice.
    """
    numbers: dict[str, int] = {}
    for number, row in enumerate(rows):
        where = f"{origin}, row {number} (from 0)"
        _check_columns(row, source, where)
        problem = source.check(row) if source.check else None
        if problem:
            raise DataError(f"{where}: {problem}")
        ids = [str(row[column]) for column in _ID_COLUMNS if row.get(column) is not None][:1]
        for item_id in ids:
            if item_id in numbers:
                raise DataError(
                    f"{where}: the id {item_id!r} is that of row {numbers[item_id]} already; ids must differ, remove "
                    "or rename one of the rows"
                )
            numbers[item_id] = number


def _check_columns(row: Row, source: Source, where: str) -> None:
    missing = [column for column in source.columns if column not in row]
    if missing:
        raise DataError(
            f"{where}: column {missing[0]!r} is missing (found: {', '.join(sorted(row))}); "
            "the columns must be those of the hub dataset"
        )
    for column, type_ in source.columns.items():
        if not type_.accepts(row[column]):
            raise DataError(f"{where}: column {column!r} is {_quoted(row[column])}; it must be {type_.description}")
        for text in _texts(row[column]):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as problem:  # half of a surrogate pair, which no tokenizer can read
                raise DataError(
                    f"{where}: column {column!r} holds a lone surrogate (character {problem.start}), which is no text; "
                    "write the whole character"
                ) from problem


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"
