"""Items of the two programming tasks: complete a function (humaneval) and write one from its tests (mbpp)."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from miniature.item import Item, key_is_held_out

VERBS = ("make", "get", "find", "build", "compute", "apply", "run", "take", "give", "solve", "form", "pick")
NOUNS = ("value", "result", "score", "number", "total", "price", "level", "amount", "point", "size", "weight", "rank")
PARAMETERS = {"number": ("x", "n", "value"), "list": ("items", "numbers", "values"), "text": ("text", "word", "line")}
DEFAULT_PARAMETERS = {"number": ("x",), "list": ("items",), "text": ("text",)}


class Kind(NamedTuple):
    """A simple function.

    Attributes:
        on: "number", "list" or "text": the type of its argument.
        asks: its task, with `{p}` (the parameter) and the constants `{a}` and `{b}`.
        body: its lines with the same fields, indented relative to the function.
    """

    on: str
    asks: str
    body: str


KINDS: tuple[Kind, ...] = (
    Kind("number", "add {a} to {p}", "return {p} + {a}"),
    Kind("number", "subtract {a} from {p}", "return {p} - {a}"),
    Kind("number", "multiply {p} by {a}", "return {p} * {a}"),
    Kind("number", "multiply {p} by {a} and add {b}", "return {p} * {a} + {b}"),
    Kind("number", "square {p} and add {a}", "return {p} * {p} + {a}"),
    Kind("number", "check if {p} is divisible by {a}", "return {p} % {a} == 0"),
    Kind("number", "check if {p} is greater than {a}", "return {p} > {a}"),
    Kind("number", "return {p} if it is greater than {a} and {b} if not", "if {p} > {a}:\n    return {p}\nreturn {b}"),
    Kind("list", "add {a} to each entry of {p}", "return [entry + {a} for entry in {p}]"),
    Kind("list", "multiply each entry of {p} by {a}", "return [entry * {a} for entry in {p}]"),
    Kind("list", "keep the entries of {p} greater than {a}", "return [entry for entry in {p} if entry > {a}]"),
    Kind("list", "keep the entries of {p} divisible by {a}", "return [entry for entry in {p} if entry % {a} == 0]"),
    Kind(
        "list",
        "count the entries of {p} greater than {a}",
        "count = 0\nfor entry in {p}:\n    if entry > {a}:\n        count += 1\nreturn count",
    ),
    Kind(
        "list",
        "sum the entries of {p} divisible by {a}",
        "total = 0\nfor entry in {p}:\n    if entry % {a} == 0:\n        total += entry\nreturn total",
    ),
    Kind(
        "list",
        "sum the entries of {p} times {a}",
        "total = 0\nfor entry in {p}:\n    total += entry * {a}\nreturn total",
    ),
    Kind("list", "multiply the largest entry of {p} by {a}", "return max({p}) * {a}"),
    Kind("list", "add {a} to the smallest entry of {p}", "return min({p}) + {a}"),
    Kind("list", "return the first {a} entries of {p}", "return {p}[:{a}]"),
    Kind("text", "repeat {p} {a} times", "return {p} * {a}"),
    Kind("text", "check if {p} is longer than {a}", "return len({p}) > {a}"),
)

_WORDS = ("sun", "tree", "river", "cat", "window", "ab", "lamp", "garden")


@dataclass(frozen=True, kw_only=True)
class _Function:
    key: str
    name: str
    parameter: str
    asks: str
    body: str  # indented, ends in a line break
    inputs: Sequence[Any]
    outputs: Sequence[Any]


def _input(rng: random.Random, on: str) -> Any:
    if on == "number":
        return rng.randint(1, 20)
    if on == "text":
        return rng.choice(_WORDS)
    return [rng.randint(1, 12) for _ in range(3)]


def outputs_of(program: str, name: str, inputs: Sequence[Any]) -> list[Any]:
    """What a function of a program returns for each input; the program is made of this package's own tables."""
    namespace: dict[str, Any] = {}
    exec(program, namespace)
    return [namespace[name](value) for value in inputs]


def _function(rng: random.Random, parameters: Mapping[str, Sequence[str]]) -> _Function:
    number = rng.randrange(len(KINDS))
    kind = KINDS[number]
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    parameter = rng.choice(parameters[kind.on])
    fields = {"p": parameter, "a": a, "b": b}
    body = "".join(f"    {line}\n" for line in kind.body.format(**fields).split("\n"))
    inputs = [_input(rng, kind.on) for _ in range(4)]
    outputs = outputs_of(f"def {name}({parameter}):\n{body}", name, inputs)
    constants = f"{a} {b}" if "{b}" in kind.asks else f"{a}"
    asks = kind.asks.format(**fields)
    return _Function(
        key=f"{number} {constants}",
        name=name,
        parameter=parameter,
        asks=asks,
        body=body,
        inputs=inputs,
        outputs=outputs,
    )


def _response(function: _Function) -> str:
    return f"```python\ndef {function.name}({function.parameter}):\n{function.body}```"


def _literal_test(function: _Function, called: str, number: int) -> str:
    return f"assert {called}({function.inputs[number]!r}) == {function.outputs[number]!r}"


def draw_humaneval(rng: random.Random) -> Item:
    """A signature and docstring to be completed; the test is a `check(candidate)`."""
    function = _function(rng, parameters=PARAMETERS)
    asks = function.asks[0].upper() + function.asks[1:]
    checks = "\n".join(f"    {_literal_test(function, 'candidate', number)}" for number in range(4))
    row = {
        "prompt": f'def {function.name}({function.parameter}):\n    """{asks}."""\n',
        "canonical_solution": function.body,
        "test": f"def check(candidate):\n{checks}\n",
        "entry_point": function.name,
    }
    return Item(held_out=key_is_held_out(function.key), row=row, prompt_row=row, response=_response(function))


def draw_mbpp(rng: random.Random) -> Item:
    """A sentence and three asserts, which alone give the function's name."""
    function = _function(rng, parameters=DEFAULT_PARAMETERS)
    row = {
        "text": f"Write a function to {function.asks}.",
        "code": f"def {function.name}({function.parameter}):\n{function.body}",
        "test_list": [_literal_test(function, function.name, number) for number in range(3)],
        "test_setup_code": "",
        "challenge_test_list": [],
    }
    return Item(held_out=key_is_held_out(function.key), row=row, prompt_row=row, response=_response(function))
