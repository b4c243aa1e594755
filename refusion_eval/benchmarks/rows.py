"""Benchmark rows: where they come from, whether they are well formed, and how texts of theirs are kept secret."""

import gzip
import hashlib
import importlib.util
import logging
import re
import ssl
import urllib.error
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from refusion_eval.errors import DataError, MissingRowsError
from refusion_eval.untrusted import open_plain, parse_json

log = logging.getLogger(__name__)

Row = Mapping[str, Any]

DATA_VARIABLE = "REFUSION_EVAL_DATA"

# Bytes. The longest row of most benchmarks has some 20,000; a line without end would take all memory.
LONGEST_LINE = 16 * 2**20
_PATIENCE = 10  # seconds that the hub has for its first answer
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# Columns that identify a row, whichever benchmark it belongs to; the first that a row has counts.
_ID_COLUMNS = ("id", "question_id", "task_id", "Record ID", "unique_id", "ID", "key")

WITHHELD = "[withheld]"
# An answer to a sealed question that cannot be a quotation.
_LETTER = re.compile(r"\(?[A-Za-z]\)?")
LONGEST_QUOTE = 7  # words of a sealed text that a response may repeat
_MARKER = re.compile(r"\[sealed ([^\s\[\]]{1,80}) ([0-9a-f]{24})\]")
_OPTION_LABEL = re.compile(r"^\s*\(?[A-Z][).:]\s*")
_WORD = re.compile(r"\w+")
_SURROGATE = re.compile("[\ud800-\udfff]")


class ColumnType(NamedTuple):
    """The type of a column: a test of one value, and its description in messages."""

    accepts: Callable[[object], bool]
    description: str


def _is_texts(value: object) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(text, str) for text in value)


def _is_choices(value: Any) -> bool:
    match value:
        case {"text": text, "label": label}:
            return _is_texts(text) and _is_texts(label) and len(text) == len(label)
    return False


TEXT = ColumnType(lambda value: isinstance(value, str), "text")
TEXTS = ColumnType(_is_texts, "a list of texts")
ID = ColumnType(lambda value: isinstance(value, str | int) and not isinstance(value, bool), "text or a whole number")
SHORT_ANSWER = ColumnType(lambda value: isinstance(value, str | int | float), "text or a number")
CHOICES = ColumnType(_is_choices, "an object with the lists text and label, equally long")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one benchmark's rows are published, and what they must hold.

    Attributes:
        hub: dataset name on the hub, or the address of a file of JSON lines; None where there are synthetic items only.
        configs: the dataset's configurations, whose rows are read one after the other; (None,) if it has no choice.
        split: the split that is evaluated; or several, as `test+test2`, whose rows are read one after the other.
        is_file: whether a split is a file of JSON lines in the dataset, whose own loading code nobody should run.
        num_rows: rows of that split.
        sorted_by: what the rows are sorted by, where the first ones are of one subject or of one time.
        columns: columns that every row must have, with their types.
        labelled: the column whose value must be the label of a choice, and a function from a row to these labels.
        package: (module, file inside it) of an installed package that carries the rows.
        gated: the hub asks for an accepted licence and a token.
        longest_row: bytes of a row, in JSON, that are not refused.
    """

    hub: str | None
    configs: Sequence[str | None] = (None,)
    split: str
    num_rows: int
    columns: Mapping[str, ColumnType]
    labelled: tuple[str, Callable[[Row], Sequence[str]]] | None = None
    package: tuple[str, str] | None = None
    gated: bool = False
    is_file: bool = False
    sorted_by: str = ""
    longest_row: int = LONGEST_LINE

    @property
    def is_address(self) -> bool:
        """Whether `hub` is the address of a file and no dataset of the hub."""
        return "://" in (self.hub or "")


class Turns(NamedTuple):
    """The prompt of one item: the user turn, the system turn before it, the beginning of the response, its suffix."""

    user: str
    system: str = ""
    opened: str = ""
    behind: str | None = None  # what stands behind a gap; None without a gap
    is_gap_in_response: bool = False  # whether the gap follows `opened` in the response, and not `user` in a plain text


class Gap(NamedTuple):
    """A gap that a response fills, in a plain text without a chat template or in a response of a conversation.

    Attributes:
        suffix: a row -> the text behind the gap.
        length: (a row, what counts the tokens of a text) -> number of tokens of the gap.
        ends_at_eos: whether the text in the gap ends at the first end token; else all its tokens belong to it.
        first: the length at which the search for one up to `length` begins, which is larger; None searches none.
        opened: a row -> the response before the gap; None where the gap is in a plain text, behind the user's.
    """

    suffix: Callable[[Row], str]
    length: Callable[[Row, Callable[[str], int]], int]
    ends_at_eos: bool = False
    first: int | None = None
    opened: Callable[[Row], str] | None = None


def read_rows(path: Path, longest: int = LONGEST_LINE) -> list[dict[str, Any]]:
    """Reads JSON lines. Raises DataError, with the line's number, where one is not an object; and for no row at all."""
    rows: list[dict[str, Any]] = []
    for number, row in json_lines(path, longest):
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected a JSON object, found {type(row).__name__}")
        rows.append(row)
    if not rows:
        raise DataError(f"{path} holds no rows; write one JSON object a line, or name another folder")
    return rows


def json_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[tuple[int, Any]]:
    """Yields (line number from 1, value) for every line that is not blank; `.gz` files are decompressed.

    Raises:
        DataError: unreadable, an overlong line, not UTF-8, not JSON, or an object that has a key twice.
    """
    # Only a line feed ends a line: U+0085 and its kin occur inside real questions.
    for number, line in enumerate(byte_lines(path, longest), start=1):
        line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if not line.strip():
            continue
        try:
            yield number, parse_json(line.decode("utf-8"), object_pairs_hook=_unique_keys, largest=longest)
        except UnicodeDecodeError as problem:
            raise DataError(f"{path}, line {number}: not UTF-8 ({problem}); save the file as UTF-8") from problem
        except (ValueError, RecursionError) as problem:
            where = f"{path}, line {number}"
            raise DataError(f"{where}: not a JSON value ({problem}); write one JSON object a line") from problem


def byte_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[bytes]:
    """The lines of a file, read one at a time: neither a huge file nor a small one that unpacks to one fills memory."""
    try:
        with open_plain(path) as plain, gzip.open(plain) if path.suffix == ".gz" else plain as file:
            for number, line in enumerate(iter(partial(file.readline, longest + 1), b""), start=1):
                if len(line) > longest:
                    size = f"{longest // 2**20} MiB"
                    raise DataError(f"{path}, line {number} is longer than {size}; write one JSON object a line")
                yield line
    except (FileNotFoundError, IsADirectoryError) as problem:
        raise DataError(f"{path} is not a file; name a file of JSON lines") from problem
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"cannot read {path}: {problem}; copy or download the file again") from problem


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]:
        raise ValueError(f"key {twice[0]!r} occurs twice")  # which of the values is meant cannot be known
    return dict(pairs)


def find_rows(
    benchmark: str, source: Source, data_dir: str | Path | None, split: str, *, folder: str
) -> tuple[list[dict[str, Any]], str]:
    """Tries a directory of the user (None for none), an installed package and the Hugging Face hub, in that order.

    Returns the rows, and the file or dataset that they came from. In the directory of the user they are in `folder`.

    Raises:
        MissingRowsError: there are no rows in any of the places; the message names them and says what to do.
        DataError: the directory does not exist, or a file in it cannot be read.
    """
    tried: list[str] = []
    if data_dir is not None:
        directory = Path(data_dir).expanduser()
        if not directory.is_dir():
            raise DataError(f"data directory {directory} does not exist; name one with {folder}/{split}.jsonl in it")
        for place in (directory / folder, directory):
            if paths := split_files(place, split):
                rows = [row for path in paths for row in read_rows(path, source.longest_row)]
                return rows, ", ".join(map(str, paths))
        wanted = directory / folder / _named(split, ".jsonl[.gz]")
        tried.append(f"{wanted} (no such file)")
    else:
        tried.append(f"a directory (none named: --data, the model argument data_dir, or {DATA_VARIABLE})")
    if found := _published_rows(source, split, tried):
        if data_dir is not None:
            log.warning("%s; the rows of %s are those of %s", tried[0], benchmark, found[1])
        return found
    licence = (
        f"accept the licence at https://huggingface.co/datasets/{source.hub}, log in (`hf auth login` or HF_TOKEN)"
    )
    advice = f"{f'{licence} and ' if source.gated else ''}allow the download of {source.hub}, or put the rows, in hub "
    advice += f"columns, into DIR/{folder}/{_named(split, '.jsonl')} and name DIR"
    raise MissingRowsError(f"no {split} rows of {benchmark}; tried {'; '.join(tried)}. To go on: {advice}", advice)


def _published_rows(source: Source, split: str, tried: list[str]) -> tuple[list[dict[str, Any]], str] | None:
    """The rows of an installed package or of the hub, and where they are; or None, with all places added to `tried`."""
    if source.package is not None:
        module, inside = source.package
        spec = importlib.util.find_spec(module)
        if spec and spec.origin and split == source.split:
            path = Path(spec.origin).parent / inside
            if path.is_file():
                return read_rows(path), str(path)
        tried.append(f"the package {module} (not installed, or without {inside})")
    if source.hub is not None:
        try:
            if not source.is_address:
                return _hub_rows(source, split), source.hub
            import datasets  # takes a second

            return read_rows(Path(datasets.DownloadManager().download_and_extract(source.hub))), source.hub
        except (OSError, ValueError) as problem:
            told = f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}".removesuffix(f": {source.hub}")
            tried.append(f"{'' if source.is_address else 'the hub dataset '}{source.hub} ({told})")
    return None


def _hub_rows(source: Source, split: str) -> list[dict[str, Any]]:
    """The rows of a dataset of the hub; those of the local cache if the hub does not answer."""
    import datasets
    from huggingface_hub import constants, hf_hub_download

    assert source.hub is not None
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = offline = before or not _answers(constants.ENDPOINT)  # the libraries' own switch
    try:
        if source.is_file:
            names = [f"{part}.jsonl" for part in split.split("+")]
            paths = [Path(hf_hub_download(source.hub, name, repo_type="dataset")) for name in names]
            return [row for path in paths for row in read_rows(path, source.longest_row)]
        tables = [datasets.load_dataset(source.hub, config, split=split) for config in source.configs]
        return [dict(row) for table in tables for row in table]
    except OSError as problem:
        if offline:
            raise ConnectionError("the hub is not reached, and its cache has no such rows") from problem
        raise
    finally:
        constants.HF_HUB_OFFLINE = before


@cache
def _answers(endpoint: str) -> bool:
    """Whether the hub answers one request; its libraries would repeat theirs for half a minute for each dataset."""
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_PATIENCE).close()
    except urllib.error.HTTPError:
        return True
    except OSError as problem:  # the libraries may trust more certificates than Python does
        return isinstance(getattr(problem, "reason", None), ssl.SSLError)
    return True


def split_files(folder: Path, split: str) -> list[Path]:
    """The file of each part of a split in a folder; none where one is missing."""
    files = [[folder / f"{part}.{ending}" for ending in ("jsonl", "jsonl.gz")] for part in split.split("+")]
    found = [next((path for path in paths if path.exists()), None) for paths in files]
    return [] if None in found else [path for path in found if path is not None]


def _named(split: str, ending: str) -> str:
    return ", ".join(f"{part}{ending}" for part in split.split("+"))


def check_rows(rows: Sequence[Row], source: Source, origin: str) -> None:
    """Refuses malformed rows, in hub columns, before any text is generated; messages name their `origin`.

    Raises:
        DataError: a column is missing or holds a value of another type; an answer is none of the row's choices; a text
            is not Unicode; an id occurs twice.
    """
    numbers: dict[str, int] = {}
    for number, row in enumerate(rows):
        where = f"{origin}, row {number} (from 0)"
        _check_columns(row, source, where)
        item_id = next((str(row[column]) for column in _ID_COLUMNS if row.get(column) is not None), None)
        if item_id is not None and numbers.setdefault(item_id, number) != number:
            first = f"the id {item_id!r} is that of row {numbers[item_id]} already"
            raise DataError(f"{where}: {first}; ids must differ, remove or rename one of the rows")


def _check_columns(row: Row, source: Source, where: str) -> None:
    for column, type_ in source.columns.items():
        place = f"{where}: column {column!r}"
        if column not in row:
            names = ", ".join(sorted(row))
            raise DataError(f"{place} is missing (found: {names}); the columns must be those of the hub dataset")
        if not type_.accepts(row[column]):
            raise DataError(f"{place} is {row[column]!r:.60}; it must be {type_.description}")
        for text in _strings([row[column]]):
            if half := _SURROGATE.search(text):  # half of a pair, which no tokenizer can read
                character = f"a lone surrogate (character {half.start()})"
                raise DataError(f"{place} holds {character}, not text; write the whole character")
    if source.labelled is not None:
        column, labels_of = source.labelled
        labels = list(labels_of(row))
        if row[column] not in labels:
            choices = f"none of the row's choices ({', '.join(labels)})"
            raise DataError(f"{where}: column {column!r} is {row[column]!r:.60}, {choices}; correct the row")


def _strings(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from _strings(value.values())
        elif isinstance(value, list | tuple):
            yield from _strings(value)


class Sealing:
    """Replaces texts by markers, and markers by their texts. Nothing else leads from a marker to its text."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def seal(self, key: str, text: Any) -> Any:
        """Replaces a text, or each of a list, by a marker, which key (gpqa/rec123/question) and text alone decide."""
        if not isinstance(text, str):
            return [self.seal(key, part) for part in text]
        name = re.sub(r"[\s\[\]]", "_", key)[:80] or "_"
        digest = hashlib.sha256(f"{name}\0{text}".encode("utf-8", "surrogatepass")).hexdigest()[:24]
        self._texts[digest] = text
        return f"[sealed {name} {digest}]"

    def unseal(self, prompt: str) -> tuple[str, tuple[str, ...]]:
        """Puts the real texts in place of their markers; returns the real prompt, and the sealed texts in it.

        Raises:
            DataError: a marker whose text was never sealed here.
        """
        texts: list[str] = []

        def reveal(marker: re.Match[str]) -> str:
            name, digest = marker.groups()
            if digest not in self._texts:
                raise DataError(f"the text sealed as {name} is not known in this process; load its task here first")
            texts.append(self._texts[digest])
            return texts[-1]

        return _MARKER.sub(reveal, prompt), tuple(texts)

    def update(self, other: "Sealing") -> None:
        self._texts.update(other._texts)


def shown_answer(answer: str | None) -> str | None:
    """An answer to a sealed question as it may be shown, which is the letter of a choice; a sign for any other text."""
    return WITHHELD if answer is not None and not _LETTER.fullmatch(answer) else answer


def texts_of(doc: Mapping[str, Any], prompt: str) -> tuple[str, ...]:
    """The texts that must not be written, for an item whose task does not seal its rows, as lm-eval's own tasks."""
    # The prompt is taken line by line, because its few-shot examples are questions too. The label before a choice is
    # left out: a response may repeat it before the text of the choice, and it is the answer.
    lines = (_OPTION_LABEL.sub("", line) for line in prompt.splitlines())
    return tuple(dict.fromkeys(text for text in (*_strings(doc.values()), *lines) if text.strip()))


def redact(text: str, sealed_texts: tuple[str, ...]) -> str:
    """Withholds from a response every verbatim run of more than `LONGEST_QUOTE` words of a sealed text."""
    # Words are compared without case, punctuation or spacing between them.
    words = [(word.start(), word.end(), word.group().casefold()) for word in _WORD.finditer(text)]
    size = LONGEST_QUOTE + 1
    sealed_runs = {run for sealed in sealed_texts for run in _runs([w.casefold() for w in _WORD.findall(sealed)], size)}
    spans: list[tuple[int, int]] = []
    for start, run in enumerate(_runs([word for _, _, word in words], size)):
        if run in sealed_runs:
            begin, end = words[start][0], words[start + size - 1][1]
            if spans and begin <= spans[-1][1]:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((begin, end))
    for begin, end in reversed(spans):
        text = text[:begin] + WITHHELD + text[end:]
    return text


def _runs(words: list[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
