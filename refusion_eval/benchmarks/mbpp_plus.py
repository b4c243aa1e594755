"""MBPP+: short programs from a sentence and one assertion, judged on many more inputs."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from refusion_eval.benchmarks import Extraction
from refusion_eval.benchmarks.evalplus import Comparison, as_read, plus_benchmark
from refusion_eval.benchmarks.extract.programs import module_code
from refusion_eval.benchmarks.rows import Row

# JSON has lists in place of tuples, sets and complex numbers. Source of the arguments -> the numbers of the tasks whose
# arguments are these, from `evalplus/data/mbpp.py`.
_TUPLES = "[tuple(argument) for argument in arguments]"
_LISTS_OF_TUPLES = "[[tuple(part) for part in argument] for argument in arguments]"
_ARGUMENTS: Mapping[str, Sequence[int]] = {
    _TUPLES: (
        *(2, 116, 132, 143, 222, 261, 273, 394, 399, 421, 424, 429, 470, 560, 579, 596, 616, 630, 726, 740, 744, 809),
    ),
    _LISTS_OF_TUPLES: (63, 64, 70, 94, 120, 237, 272, 299, 400, 409, 417, 438, 473, 614, 780),
    "[[tuple(part) for part in arguments[0]], arguments[1]]": (75, 413, 444, 753),
    "[arguments[0], tuple(arguments[1])]": (106, 750),
    "[[set(part) if isinstance(part, list) and part else {} for part in arguments[0]]]": (115,),
    "[float(arguments[0]), complex(arguments[1])]": (124,),
    "[tuple(arguments[0]), arguments[1]]": (250, 405, 446, 617, 720, 763, 808),
    "[complex(arguments[0])]": (252,),
    "[tuple(tuple(part) for part in argument) for argument in arguments]": (259, 401, 445),
    "[tuple(tuple(part) if isinstance(part, list) else part for part in arguments[0])]": (278,),
    "[tuple(arguments[0]), arguments[1], arguments[2]]": (307,),
    # Lists at every depth, which no single expression turns into tuples.
    "(lambda deep: deep(deep, arguments))(lambda deep, value: tuple(deep(deep, part) for part in value) "
    "if isinstance(value, list) else value)": (580, 615, 791),
    "[{name: tuple(value) for name, value in arguments[0].items()}, *arguments[1:]]": (722,),
}
_ARGUMENTS_OF = {f"Mbpp/{number}": source for source, numbers in _ARGUMENTS.items() for number in numbers}

# The exceptions of `evalplus/eval/_special_oracle.py`: results in any order, results that are only there or not, and
# tasks whose sentence has more than one meaning.
_IS_THERE = "(value if isinstance(value, bool) else value is not None) == expected"
_DIGITS = "str(arguments[{}]).zfill(max(len(str(argument)) for argument in arguments))"
_ORACLES: Mapping[str, Sequence[str]] = {
    "set(value) == set(expected)": (
        "similar_elements",
        "find_char_long",
        "common_in_nested_lists",
        "extract_singly",
        "larg_nnum",
        "intersection_array",
        "find_dissimilar",
        "Diff",
    ),
    _IS_THERE: (
        "check_str",
        "text_match_three",
        "text_starta_endb",
    ),
    "True": ("are_equivalent",),
    "value == expected or value == 0": ("sum_div",),
    # The height of the pyramid may be that of its apex.
    "value == expected or abs(value - round(arguments[0] ** 2 + 2 * arguments[0] * evalplus_math.sqrt("
    "(arguments[0] / 2) ** 2 + arguments[1] ** 2))) <= tolerance": ("surface_Area",),
    # The digits may be compared one by one.
    "value == expected or value == sum(abs(int(one) - int(other)) for one, other in "
    f"zip({_DIGITS.format(0)}, {_DIGITS.format(1)}))": ("digit_distance_nums",),
}
_ORACLE_OF = {name: source for source, names in _ORACLES.items() for name in names}


def _comparison(row: Row) -> Comparison:
    oracle = _ORACLE_OF.get(row["entry_point"], Comparison.oracle)
    return Comparison(
        arguments=_ARGUMENTS_OF.get(row["task_id"], Comparison.arguments),
        expected="result is not None" if oracle == _IS_THERE else Comparison.expected,
        oracle=oracle,
    )


def _as_read(row: Row, number: int) -> dict[str, Any]:
    # Four inputs of Mbpp/255 give up to 1.7 million tuples of 77 texts, too much to pass from process to process.
    if row["task_id"] == "Mbpp/255":
        row = {**row, "plus_input": [arguments for arguments in row["plus_input"] if arguments[1] < 70]}
    return as_read(row, number)


def _program(text: str, row: Row) -> Extraction:
    return module_code(text, {"test_list": [row["entry_point"]]})  # found by the name that its function must have


def _user(row: Row) -> str:
    task, _, test = row["prompt"].strip().strip('"').strip().rpartition("\n")
    return f"{task}\n\nYour code must pass this test:\n{test}\n\nReply with the code in a python block."


_edition = partial(
    plus_benchmark,
    "mbpp",
    title="MBPP+",
    order=28,
    release="MbppPlus",
    user=_user,
    extract=_program,
    comparison=_comparison,
    normalise=_as_read,
)
BENCHMARK = _edition(version="v0.2.0", num_rows=378, stock_tasks=("mbpp_plus", "mbpp_plus_instruct"))

# The first edition, with 21 tasks that v0.2.0 leaves out.
VARIANTS = (_edition(version="v0.1.0", num_rows=399),)
