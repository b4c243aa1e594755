"""Programs of two helper functions and a main function that composes them (humaneval, mbpp).

A composition is a main function and the kinds of its helpers, whatever their constants and names. Whole compositions
are held out, so the test programs are new combinations of parts that are known from training.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from miniature.item import Item, key_is_held_out
from miniature.parts import draw_step
from miniature.steps import GRADES, HARDEST_GRADE, LIMITS, Refused, Step, Steps, drawn
from refusion_eval.benchmarks.extract.programs import fenced

VERBS = ("make", "get", "find", "build", "compute", "apply", "run", "take", "give", "solve", "form", "pick")
_NOUNS = ("value", "result", "score", "number", "total", "price", "level", "amount", "point", "size", "weight", "rank")
_PARAMETERS = {"number": ("x", "n", "value"), "list": ("items", "numbers", "values")}
_DEFAULT_PARAMETERS = {"number": ("x",), "list": ("items",)}


class _Kind(NamedTuple):
    """A simple function of a number n.

    Attributes:
        asks: its task, with `{p}` (n) and the constants `{a}` and `{b}`.
        body: its lines with the same fields, indented relative to the function.
    """

    asks: str
    body: str


_KINDS: tuple[_Kind, ...] = (
    _Kind("add {a} to {p}", "return {p} + {a}"),
    _Kind("subtract {a} from {p}", "return {p} - {a}"),
    _Kind("multiply {p} by {a}", "return {p} * {a}"),
    _Kind("multiply {p} by {a} and add {b}", "return {p} * {a} + {b}"),
    _Kind("square {p} and add {a}", "return {p} * {p} + {a}"),
    _Kind("check if {p} is divisible by {a}", "return {p} % {a} == 0"),
    _Kind("check if {p} is greater than {a}", "return {p} > {a}"),
    _Kind("return {p} if it is greater than {a} and {b} if not", "if {p} > {a}:\n    return {p}\nreturn {b}"),
)
_CHECKS = tuple(kind for kind in _KINDS if kind.asks.startswith("check"))
_CHANGES = tuple(kind for kind in _KINDS if not kind.asks.startswith("check"))


class _Main(NamedTuple):
    """A main function.

    Attributes:
        asks: its task, with `{p}` (its parameter), `{f}` and `{g}` (the names of its helpers).
        body: its lines with the same fields, indented relative to the function.
    """

    asks: str
    body: str


# The first grade calls two changes of a number; the others have a list, a check f and a change g.
_TRAINED_MAINS: Mapping[int, Sequence[_Main]] = {
    1: (
        _Main("give {g}({f}({p}))", "return {g}({f}({p}))"),
        _Main("add {f}({p}) and {g}({p})", "return {f}({p}) + {g}({p})"),
        _Main("subtract {g}({p}) from {f}({p})", "return {f}({p}) - {g}({p})"),
        _Main("give the larger of {f}({p}) and {g}({p})", "return max({f}({p}), {g}({p}))"),
    ),
    2: (
        _Main("list {g}(n) for all n in {p} with {f}(n)", "return [{g}(n) for n in {p} if {f}(n)]"),
        _Main("sum {g}(n) for all n in {p} with {f}(n)", "return sum({g}(n) for n in {p} if {f}(n))"),
        _Main("sort {g}(n) for all n in {p} with {f}(n)", "return sorted({g}(n) for n in {p} if {f}(n))"),
        _Main("count the n in {p} with {f}({g}(n))", "return sum({f}({g}(n)) for n in {p})"),
        _Main("check if {f}({g}(n)) holds for all n in {p}", "return all({f}({g}(n)) for n in {p})"),
        _Main("check if {f}({g}(n)) holds for any n in {p}", "return any({f}({g}(n)) for n in {p})"),
    ),
    3: (
        _Main(
            "go through {p} and list {g}(n) until {f}(n)",
            "result = []\nfor n in {p}:\n    if {f}(n):\n        break\n    result.append({g}(n))\nreturn result",
        ),
        _Main(
            "go through {p} and add up {g}(n) until {f}(n)",
            "total = 0\nfor n in {p}:\n    if {f}(n):\n        break\n    total += {g}(n)\nreturn total",
        ),
        _Main(
            "go through {p} and give {g}(n) of the last n with {f}(n) or 0",
            "last = 0\nfor n in {p}:\n    if {f}(n):\n        last = {g}(n)\nreturn last",
        ),
        _Main(
            "go through {p} and give {g}(n) of the first n with {f}(n) or 0",
            "for n in {p}:\n    if {f}(n):\n        return {g}(n)\nreturn 0",
        ),
        _Main(
            "go through {p} and multiply by {g}(n) where {f}(n)",
            "total = 1\nfor n in {p}:\n    if {f}(n):\n        total *= {g}(n)\nreturn total",
        ),
    ),
}


def _with_change_twice(main: _Main) -> _Main:
    """A main function of a list that applies its change to the result of its change."""
    once, twice = "{g}(n)", "{g}({g}(n))"
    return _Main(main.asks.replace(once, twice), main.body.replace(once, twice))


_TWICE = tuple(_with_change_twice(main) for grade in (2, 3) for main in _TRAINED_MAINS[grade])
_MAINS = {**_TRAINED_MAINS, HARDEST_GRADE: (*_TRAINED_MAINS[3], *_TWICE)}

NUM_TESTS = 4


@dataclass(frozen=True, kw_only=True)
class _Program:
    key: str
    name: str
    parameter: str
    asks: str
    helpers: str
    body: str  # of the main function, indented, ends in a line break
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    @property
    def head(self) -> str:
        return f"def {self.name}({self.parameter}):\n"

    @property
    def code(self) -> str:
        return f"{self.helpers}\n{self.head}{self.body}"

    def literal_test(self, called: str, number: int) -> str:
        return f"assert {called}({self.inputs[number]!r}) == {self.outputs[number]!r}"


def _outputs_of(program: str, name: str, inputs: Sequence[Any]) -> list[Any]:
    """What a function of a program returns for each input; the program is made of this package's own tables."""
    namespace: dict[str, Any] = {}
    exec(program, namespace)
    return [namespace[name](value) for value in inputs]


def _indented(body: str) -> str:
    return "".join(f"    {line}\n" for line in body.split("\n"))


def _calculations(rng: random.Random) -> Sequence[Step]:
    """A calculation for each of two constants."""
    steps = Steps(LIMITS[GRADES[-1]])
    for _ in range(2):
        draw_step(rng, steps, rng.choice("++--*/"))
    return steps.steps


def _helper(rng: random.Random, kind: _Kind, name: str, is_calculated: bool) -> tuple[str, str]:
    """The definition of a helper and a sentence about it."""
    constants: Sequence[Step] = [Step(str(value), value) for value in (rng.randint(2, 9), rng.randint(2, 9))]
    if is_calculated and kind in _CHANGES:
        constants = drawn(rng, _calculations)
    asked, written = ({"p": "n", "a": a, "b": b} for a, b in zip(*constants, strict=True))
    definition = f"def {name}(n):\n{_indented(kind.body.format(**written))}"
    return definition, f"{name}(n) is to {kind.asks.format(**asked)}"


def _program(
    rng: random.Random,
    grade: int,
    helper_names: Sequence[str] | None,
    parameters: Mapping[str, Sequence[str]],
    is_calculated: bool,
) -> _Program:
    """Draws a program whose tests no constant passes; raises Refused if all results are equal.

    Args:
        rng: source of all choices.
        grade: 1 to 4.
        helper_names: names of f and g; None for drawn ones.
        parameters: names of the main function's parameter, by its type.
        is_calculated: whether the prompt asks for the constants of changes as calculations, whose results the program
            has. Those of checks stay numbers: few tests would notice a wrong one.
    """
    number = rng.randrange(len(_MAINS[grade]))
    main = _MAINS[grade][number]
    kinds = rng.sample(_CHANGES, 2) if grade == 1 else [rng.choice(_CHECKS), rng.choice(_CHANGES)]
    names = helper_names or rng.sample(VERBS, 2)
    helpers = [_helper(rng, kind, name, is_calculated) for kind, name in zip(kinds, names, strict=True)]
    name = f"{rng.choice(VERBS)}_{rng.choice(_NOUNS)}"
    parameter = rng.choice(parameters["number" if grade == 1 else "list"])
    fields = {"p": parameter, "f": names[0], "g": names[1]}
    inputs = [rng.randint(1, 20) if grade == 1 else [rng.randint(1, 12) for _ in range(3)] for _ in range(30)]
    program = _Program(
        key=f"composition {grade} {number} {kinds[0].asks} {kinds[1].asks}",
        name=name,
        parameter=parameter,
        asks=f"{main.asks.format(**fields)}, where {helpers[0][1]} and {helpers[1][1]}",
        helpers="\n".join(definition for definition, _ in helpers),
        body=_indented(main.body.format(**fields)),
        inputs=(),
        outputs=(),
    )
    results = list(zip(inputs, _outputs_of(program.code, name, inputs), strict=True))
    first_of = {repr(output): place for place, (_, output) in reversed(list(enumerate(results)))}
    if len(first_of) == 1:
        raise Refused
    # Inputs with different results come first.
    places = [*sorted(first_of.values()), *(place for place in range(len(results)) if place not in first_of.values())]
    chosen = [results[place] for place in places[:NUM_TESTS]]
    return replace(program, inputs=[value for value, _ in chosen], outputs=[output for _, output in chosen])


def draw_humaneval(rng: random.Random, grades: Sequence[int], is_calculated: bool = False) -> Item:
    """A signature and docstring, which names the helpers, to be completed."""
    grade = rng.choice(grades)
    program = drawn(
        rng, lambda rng: _program(rng, grade, helper_names=None, parameters=_PARAMETERS, is_calculated=is_calculated)
    )
    checks = "\n".join(f"    {program.literal_test('candidate', number)}" for number in range(NUM_TESTS))
    row = {
        "prompt": f'{program.head}    """{program.asks[0].upper()}{program.asks[1:]}."""\n',
        "canonical_solution": f"{program.body}\n{program.helpers}",
        "test": f"def check(candidate):\n{checks}\n",
        "entry_point": program.name,
    }
    held_out = key_is_held_out(program.key)
    return Item(held_out=held_out, row=row, prompt_row=row, response=fenced(program.code))


def draw_mbpp(rng: random.Random, grades: Sequence[int], is_calculated: bool = False) -> Item:
    """A sentence and three asserts, which alone give the name of the main function."""
    grade, names = rng.choice(grades), ("first", "second")
    program = drawn(
        rng,
        lambda rng: _program(
            rng, grade, helper_names=names, parameters=_DEFAULT_PARAMETERS, is_calculated=is_calculated
        ),
    )
    row = {
        "text": f"Write a function to {program.asks}.",
        "code": program.code,
        "test_list": [program.literal_test(program.name, number) for number in range(3)],
        "test_setup_code": "",
        "challenge_test_list": [],
    }
    held_out = key_is_held_out(program.key)
    return Item(held_out=held_out, row=row, prompt_row=row, response=fenced(program.code))
