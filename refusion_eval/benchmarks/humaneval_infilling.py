"""HumanEval-Infilling: a part of a solution of HumanEval is missing, between a prefix and a suffix.

A score says nothing without the length of the gap, so the rule of it is part of each name, and with it of each record
and table: `humaneval_infilling_SET_RULE`, with further parts behind it.

SET: single_line, multi_line, random_span or random_span_light.
RULE: oracle (as many tokens as the missing text has), fixed_N (N tokens, all of which are the text), upto_N (N
    tokens, of which those before the first end token are the text) or open_N (as many as the system finds, N at most).
prefix_only: the suffix is left out, as a control.
wrong_suffix: the suffix is that of another function (`_with_wrong_suffixes`), as a control; programs have their own.
inner, last: only the items with a suffix that is not blank, or only the others, to which no suffix can help.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

from refusion_eval.benchmarks import Benchmark, CodeTest, Extraction, Prompts
from refusion_eval.benchmarks.rows import ID, TEXT, Gap, Row, Source
from refusion_eval.benchmarks.suffixes import PREFIX_ONLY, WRONG_SUFFIX, shown_suffix, with_wrong_suffixes

_ROWS = {"single_line": 1033, "multi_line": 5815, "random_span": 1640, "random_span_light": 164}
_NAME = re.compile(
    rf"humaneval_infilling_({'|'.join(_ROWS)})_(oracle|(?:fixed|upto|open)_[1-9][0-9]{{0,3}})({PREFIX_ONLY}|{WRONG_SUFFIX})?(_inner|_last)?"
)
_COMMIT = "88062ff9859c875d04db115b698ed4b0f0395170"
_SPOKEN = {
    "oracle": "oracle length",
    "fixed": "{} tokens",
    "upto": "up to {} tokens",
    "open": "length found by the system, at most {} tokens",
}
_FIRST_LENGTH = 8  # at which the published search (CAL) begins
_PARTS = {
    PREFIX_ONLY: "prefix only",
    WRONG_SUFFIX: "suffix of another function",
    "_inner": "suffix not blank",
    "_last": "suffix blank",
}


def _program(text: str, row: Row) -> Extraction:
    return Extraction(f"{row['prompt']}{text}{row['suffix']}", "prefix, text and suffix")


def _gold(row: Row) -> str:
    return f"{row['prompt']}{row['canonical_solution']}{row['suffix']}"


def _test(row: Row) -> CodeTest:
    # Program and test are one text in the original, so the test gets no function but the program's.
    return CodeTest(test=f"{row['test']}\ncheck({row['entry_point']})\n")


def _of_part(part: str, row: Row, _number: int) -> dict[str, Any] | None:
    is_last = not row["suffix"].strip()
    return dict(row) if not part or is_last == (part == "_last") else None


def _with_wrong_suffixes(rows: Sequence[Row]) -> list[dict[str, Any]]:
    def fits(other: Row, row: Row) -> bool:
        return other["entry_point"] != row["entry_point"] and bool(str(other["suffix"]).strip())

    lacking = "no other function has a suffix; give a file with several functions"
    return with_wrong_suffixes(rows, fits, lacking, "task_id")


@functools.cache
def named(name: str) -> Benchmark | None:
    """The benchmark of a name that the module describes; None for other names."""
    parts = _NAME.fullmatch(name)
    if parts is None:
        return None
    of_set, rule, control, part = (part or "" for part in parts.groups())
    kind, _, number = rule.partition("_")
    first = min(_FIRST_LENGTH, int(number) - 1) if kind == "open" else None
    if first == 0:  # there is nothing to find
        return None
    file = f"HumanEval-{of_set.title().replace('_', '').replace('SpanLight', 'Span')}Infilling"
    file += "Light" if of_set.endswith("light") else ""
    told = [f"HumanEval-Infilling {of_set.replace('_', '-')}", _SPOKEN[kind].format(number)]
    told += [_PARTS[one] for one in (control, part) if one]
    return Benchmark(
        name=name,
        title=", ".join(told),
        order=40,
        kind="code",
        source=Source(
            hub=f"https://github.com/openai/human-eval-infilling/raw/{_COMMIT}/data/{file}.jsonl.gz",
            split=file,
            num_rows=_ROWS[of_set],
            columns={
                "task_id": ID,
                **dict.fromkeys(("prompt", "suffix", "canonical_solution", "entry_point", "test"), TEXT),
            },
        ),
        gold=_gold,
        ours=Prompts(
            user=lambda row: str(row["prompt"]),
            gold_text=lambda row: str(row["canonical_solution"]),
            filters={"first": _program},
            clean=str,  # blanks and line ends are part of the program
            normalise=functools.partial(_of_part, part),
            arrange=_with_wrong_suffixes if control == WRONG_SUFFIX else None,
            gap=Gap(
                suffix=functools.partial(shown_suffix, control),
                length=lambda row, num_tokens: (
                    num_tokens(row["canonical_solution"]) if kind == "oracle" else int(number)
                ),
                ends_at_eos=kind in ("upto", "open"),
                first=first,
            ),
        ),
        id_column="task_id",
        test=_test,
        rows_of="humaneval_infilling",
        settings_of="humaneval",
        is_control=bool(control),
    )
