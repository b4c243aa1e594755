"""A script that compares mathematical expressions: it reads lines `[gold, answer, whole]`, and writes true or false.

With `whole`, two texts are compared, and it writes `[verdict, what was read in the second]`.
"""

import json
import logging
import resource
import sys
from functools import lru_cache
from typing import Any

from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy
from math_verify import parse, verify
from sympy import (
    Eq,
    Expr,
    FiniteSet,
    Float,
    I,
    Intersection,
    MatrixBase,
    Rational,
    Set,
    Symbol,
    Union,
    preorder_traversal,
)

# The script imports nothing of this project, so that it starts quickly. A hostile expression may hang it or use up its
# memory; then `Comparer` kills it.
_MEMORY_BYTES = 4 << 30
# The library's own normal form takes any letter behind a number for a unit, so only its spellings of commands are used.
_SPELLINGS = NormalizationConfig(basic_latex=False, units=False, malformed_operators=True, nits=False, boxed="none")
_LETTERS = ConversionConfig(lowercase_symbols=False)
_LONGEST_READ = 1_000  # characters
_IMAGINARY_UNIT = Symbol("i", real=True)

# Digits of a computation, and the part of the greater number that a difference of two equal numbers may be.
_DIGITS = 200
_NOTHING = Rational(1, 10**100)
_ROUNDING = Rational(5, 10**7)  # half of the sixth place of a decimal that was rounded


@lru_cache(maxsize=4096)
def parsed(form: str) -> Any:
    r"""The expression of a normal form, its decimals as exact fractions; \lor and \land between ranges make one set."""
    for joint, joined in (("\\lor ", Union), ("\\land ", Intersection)):
        if joint in form:
            sets = [_as_set(parsed(part)) for part in form.split(joint)]
            whole = joined(*sets)
            return Union(*sets) if whole.is_empty else whole  # "x<1 and x>3" means both ranges
    return _exact(latex2sympy(form, is_real=True, normalization_config=_SPELLINGS, conversion_config=_LETTERS))


def _exact(expression: Any) -> Any:
    if isinstance(expression, Eq):
        return Eq(_exact(expression.lhs), _exact(expression.rhs), evaluate=False)
    if not isinstance(expression, Expr | MatrixBase):
        return expression
    decimals = {number: Rational(str(number)) for number in expression.atoms(Float)}
    return expression.xreplace({_IMAGINARY_UNIT: I, **decimals})


def _as_set(expression: Any) -> Set:
    r"""The numbers that a part of a union names: 3, x=3, x<3, [1,2] or x \in [1,2]."""
    if isinstance(expression, Eq):
        expression = expression.rhs
    if isinstance(expression, Expr):
        return FiniteSet(expression)
    return expression if isinstance(expression, Set) else expression.as_set()


def equal_in_texts(solution: str, text: str) -> tuple[bool, str | None]:
    """Whether the answers that the library finds in a solution and in a text are equal, as `minerva_math` asks it.

    The second value is what it read in the text: an expression, characters that are none, or None for nothing.
    """
    gold, target = (list(parse(whole, parsing_timeout=None)) for whole in (solution, text))
    equal_answers = bool(verify(gold, target, timeout_seconds=None))
    try:
        return equal_answers, str(target[0])[:_LONGEST_READ] if target else None
    except ValueError:  # a number of more digits than Python writes; its characters are the last thing read
        return equal_answers, str(target[-1])[:_LONGEST_READ]


def equal(gold: str, answer: str) -> bool:
    """Whether two normal forms are equal: numbers by their exact values, all else by the library."""
    # The library's comparison is not symmetrical: it reads `x = 5` as 5 in an answer, and an inequality as an interval
    # in a right answer. Both directions count, but only an equation equals a right answer that is an equation.
    left, right = parsed(gold), parsed(answer)
    if all(isinstance(side, Expr) and side.is_number for side in (left, right)):
        return equal_numbers(left, right, is_rounded="." in gold or "." in answer)
    if _verified(left, right):
        return True
    if ("=" in answer or "=" not in gold) and _verified(right, left):
        return True
    return isinstance(left, Expr) and isinstance(right, Expr) and _equal_where_real(left, right)


def _equal_where_real(left: Expr, right: Expr) -> bool:
    """Whether two expressions are equal at those points of a list where each part of both is real."""
    letters = sorted(left.free_symbols | right.free_symbols, key=str)
    points = [
        {letter: sign * Rational(start + 11 * number, 7) for number, letter in enumerate(letters)}
        for start in (2, 16, 23)
        for sign in (1, -1)
    ]
    parts = [*preorder_traversal(left), *preorder_traversal(right)]
    real = [point for point in points if all(part.subs(point).evalf().is_real for part in parts)]
    values = [(left.subs(point).evalf(_DIGITS), right.subs(point).evalf(_DIGITS)) for point in real]
    return bool(values) and all(equal_numbers(one, other, is_rounded=False) for one, other in values)


def _verified(gold: Any, answer: Any) -> bool:
    return bool(verify(gold, answer, numeric_precision=_DIGITS, timeout_seconds=None))


def equal_numbers(left: Expr, right: Expr, is_rounded: bool) -> bool:
    """Whether two numbers are equal; a decimal may be rounded to six places of a number whose decimals have no end."""
    left, right = left.doit(), right.doit()
    difference = left - right
    if left == right or difference == 0:
        return True
    if difference.is_Rational and not is_rounded:
        return False
    distance, size = (abs(number.evalf(_DIGITS, maxn=2 * _DIGITS)) for number in (difference, left))
    if not size.is_finite:
        return False
    if distance <= _NOTHING * size:
        return True
    if not is_rounded or (_has_end(left) and _has_end(right)):
        return False
    return bool(distance <= _ROUNDING * min(1, 10 * size))


def _has_end(number: Expr) -> bool:
    return bool(number.is_Rational) and pow(10, int(number.q).bit_length(), int(number.q)) == 0


def main() -> None:
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    for line in sys.stdin:
        gold, answer, whole = json.loads(line)
        try:
            verdict: Any = (equal_in_texts if whole else equal)(gold, answer)
        except Exception:  # noqa: BLE001 - what the libraries cannot read or compare is not equal
            verdict = (False, None) if whole else False
        sys.stdout.write(json.dumps(verdict) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
