"""Synthetic gaps that only the text behind them settles: what a system that sees the suffix can do, and no other.

`mini_infill_KIND` is asked of the embedded models with the true suffix, `mini_infill_KIND_prefix_only` without one and
`mini_infill_KIND_wrong_suffix` with that of another item, as controls. The gap has as many tokens as the text that
stood there. It is right where it fits the true suffix:

math: a chain of calculations, in which each begins with the result of the one before it; any that holds, with at
    least as many calculations, is right.
program: a function with the asserts behind it; any that passes them is right.
text: sentences about a person, which a list behind them repeats; only their own words are right.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from refusion_eval.benchmarks import Benchmark, CodeTest, Extraction, Extractor, Prompts
from refusion_eval.benchmarks.rows import TEXT, Gap, Row, Source
from refusion_eval.benchmarks.suffixes import PREFIX_ONLY, WRONG_SUFFIX, shown_suffix, with_wrong_suffixes

_CONTROLS = {"": "", PREFIX_ONLY: ", prefix only", WRONG_SUFFIX: ", suffix of another item"}
_CALCULATION = re.compile(r"(\d{1,9})([-+*/])(\d{1,9})=(\d{1,9})\. ?")
_APPLY: Mapping[str, Callable[[int, int], float]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left / right if right else -1,
}


def chain_holds(text: str) -> bool:
    """Whether every calculation of a text is right and begins with the result of the one before it.

    Behind them may stand "The answer is" with the last result, and nothing else.
    """
    found = [
        (int(left), operation, int(right), int(value)) for left, operation, right, value in _CALCULATION.findall(text)
    ]
    results = [value for *_, value in found]
    are_right = all(_APPLY[operation](left, right) == value for left, operation, right, value in found)
    is_chain = [left for left, *_ in found[1:]] == results[:-1]
    rest = _CALCULATION.sub("", text).strip()
    return bool(found) and are_right and is_chain and rest in ("", f"The answer is {results[-1]}.")


def _whole(text: str, row: Row) -> Extraction:
    return Extraction(f"{row['prefix']}{text}{row['suffix']}", "prefix, text and suffix")


def _program(text: str, row: Row) -> Extraction:
    body, _, _ = str(row["suffix"]).partition("\nassert ")
    return Extraction(f"{row['prefix']}{text}{body}".removeprefix("```python"), "prefix, text and what is not a test")


def _words(text: str, _row: Row) -> Extraction:
    return Extraction(" ".join(text.split()), "words")


def _asserts(row: Row) -> CodeTest:
    return CodeTest(test="\n".join(re.findall(r"^assert .+$", str(row["suffix"]), re.MULTILINE)))


def _middle(row: Row) -> str:
    return str(row["middle"])


def _with_wrong_suffixes(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The suffixes are of the same grade, and where the gap has the name of a function, of another one."""

    def fits(other: Row, row: Row) -> bool:
        names = [re.findall(r"(?<=assert )\w+", str(one["suffix"]))[:1] for one in (other, row)]
        return other["grade"] == row["grade"] and (row["grade"] != "1" or not names[1] or names[0] != names[1])

    return with_wrong_suffixes(rows, fits, "no other item of its grade has another suffix")


class _Kind(NamedTuple):
    title: str
    kind: Literal["text", "code"]
    rule: Extractor
    is_right: Callable[[str, str], bool] | None = None


_KINDS = {
    "math": _Kind(
        "calculations", "text", _whole, lambda gold, text: chain_holds(text) and text.count("=") >= gold.count("=")
    ),
    "program": _Kind("programs", "code", _program),
    "text": _Kind("descriptions", "text", _words),
}


def _benchmark(name: str, control: str) -> Benchmark:
    title, kind, rule, is_right = _KINDS[name]
    return Benchmark(
        name=f"infill_{name}{control}",
        title=f"Infilling, {title}{_CONTROLS[control]}",
        order=41,
        kind=kind,
        source=Source(
            hub=None,
            split="test",
            num_rows=100,
            columns=dict.fromkeys(("query", "prefix", "middle", "suffix", "grade"), TEXT),
        ),
        gold=lambda row: rule(_middle(row), row).answer or "",
        ours=Prompts(
            user=lambda row: str(row["query"]),
            gold_text=_middle,
            filters={"gap": rule},
            clean=str,
            arrange=_with_wrong_suffixes if control == WRONG_SUFFIX else None,
            is_right=is_right,
            gap=Gap(
                opened=lambda row: str(row["prefix"]),
                suffix=functools.partial(shown_suffix, control),
                length=lambda row, num_tokens: num_tokens(_middle(row)),
            ),
        ),
        test=_asserts if kind == "code" else None,
        rows_of=f"infill_{name}",
        is_control=bool(control),
    )


_BENCHMARKS = {one.name: one for name in _KINDS for one in (_benchmark(name, control) for control in _CONTROLS)}


def named(name: str) -> Benchmark | None:
    """The benchmark of a name that the module describes; None for other names."""
    return _BENCHMARKS.get(name)
