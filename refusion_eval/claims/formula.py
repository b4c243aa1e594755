"""A small language of formulas over cells, for claims as data.

    mean(tps('refusion') / tps('llada dream'))          mean of 14 ratios: 7 tasks, 2 systems
    score('refusion', 'humaneval') - max(score('llada dream', 'humaneval'))
    count(score('refusion') > score('llada dream'))

A metric's name picks cells: of one or more systems, on the seven benchmarks or those that are named. `score` is
accuracy, or pass@1 of a code task. Two picks are combined task by task; one system stands against each of several.
Numbers, `+ - * /`, comparisons, and `mean`, `gmean`, `median`, `min`, `max`, `sum`, `count` are all there is: a formula
is read as a syntax tree, and whatever else stands in it is refused, never run.

Intervals are propagated by simulation. Every cell with a 95% interval is drawn from a normal distribution with another
spread on either side, so that its 2.5 and 97.5 percentiles are the interval's bounds; the formula is computed on every
draw, and the percentiles of the results are its interval. Cells are drawn independently, which makes the interval of a
comparison on the same items too wide rather than too narrow, as such cells rise and fall together.
"""

import ast
import operator
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refusion_eval.errors import ConfigError, DataError
from refusion_eval.metrics.bootstrap import RESAMPLES, Bootstrap, Interval
from refusion_eval.results.figure import SCORES, TASKS, Figure, FigureKey

SCORE = "score"
_Z = 1.959964  # 97.5th percentile of the standard normal distribution

Values = NDArray[np.float64]  # [1 + RESAMPLES]: the value itself, then its draws
Picked = dict[tuple[str, str], Values]  # by system and task

_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
}
_FUNCTIONS: Mapping[str, Callable[[Values], Values]] = {
    "mean": lambda values: np.mean(values, axis=0),
    "gmean": lambda values: np.exp(np.mean(np.log(values), axis=0)),
    "median": lambda values: np.median(values, axis=0),
    "min": lambda values: np.min(values, axis=0),
    "max": lambda values: np.max(values, axis=0),
    "sum": lambda values: np.sum(values, axis=0),
    "count": lambda values: np.sum(values, axis=0),
}


class MissingCell(DataError):
    """A formula needs a figure that is not there.

    Attributes:
        places: where it could stand: (system, task, metric), one for each name of the metric.
    """

    def __init__(self, message: str, places: tuple[FigureKey, ...]) -> None:
        super().__init__(message)
        self.places = places


@dataclass(frozen=True)
class Evaluated:
    """What a formula gives.

    Attributes:
        interval: value and 95% interval; n is the number of cells. The bounds are NaN if no cell has an interval.
        cells: what it was computed from.
    """

    interval: Interval
    cells: tuple[Figure, ...]

    @property
    def fewest_items(self) -> int:
        """Benchmark items of the smallest cell; 0 if none says how many it has."""
        return min((cell.n for cell in self.cells), default=0)

    @property
    def fused(self) -> bool:
        """Whether any of them rests on fused forwards."""
        return any(cell.fused for cell in self.cells)


def evaluate(formula: str, cells: Mapping[FigureKey, Figure]) -> Evaluated:
    """Computes a formula.

    Args:
        formula: in the language above.
        cells: by (system, task, metric), as `grid` gives them.

    Raises:
        ConfigError: the formula is malformed, or its result is not one number.
        MissingCell: a cell is not there.
        DataError: the result is undefined, as a ratio to zero is.
    """
    evaluation = _Evaluation(formula, cells)
    result = evaluation.visit(evaluation.tree)
    if isinstance(result, dict):
        if len(result) != 1:
            raise ConfigError(f"formula {formula!r} gives {len(result)} numbers; average them with mean, gmean, ...")
        (result,) = result.values()
    if not np.isfinite(result[0]):
        raise DataError(f"formula {formula!r} is undefined on these cells ({result[0]})")
    used = tuple(evaluation.used.values())
    replicates = result[1:] if any(cell.has_interval for cell in used) else np.full(RESAMPLES, np.nan)
    return Evaluated(Bootstrap(float(result[0]), replicates, len(used)).interval(), used)


class _Evaluation:
    """One walk through a formula."""

    def __init__(self, formula: str, cells: Mapping[FigureKey, Figure]) -> None:
        self.formula = formula
        self.cells = cells
        self.used: dict[FigureKey, Figure] = {}
        try:
            self.tree: ast.expr = ast.parse(formula.strip(), mode="eval").body
        except SyntaxError as error:
            raise self._refusal(f"{error.msg} at column {error.offset}") from error

    def visit(self, node: ast.expr) -> Values | Picked:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return np.full(1 + RESAMPLES, float(number))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._combine(ast.Sub, np.zeros(1 + RESAMPLES), self.visit(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return self._combine(type(op), self.visit(left), self.visit(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
                return self._combine(type(op), self.visit(left), self.visit(right))
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return self._summary(name, arguments) if name in _FUNCTIONS else self._pick(name, arguments)
        raise self._refusal(f"{ast.unparse(node)} is not in the language of formulas")

    def _summary(self, name: str, arguments: list[ast.expr]) -> Values:
        if len(arguments) != 1:
            raise self._refusal(f"{name} takes one argument")
        inner = self.visit(arguments[0])
        with np.errstate(all="ignore"):
            return _FUNCTIONS[name](np.stack(list(inner.values()) if isinstance(inner, dict) else [inner]))

    def _pick(self, metric: str, arguments: list[ast.expr]) -> Picked:
        words = [one.value.split() for one in arguments if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        if len(words) != len(arguments) or len(words) not in (1, 2) or not all(words):
            raise self._refusal(
                f"{metric} takes systems and, if not all seven are meant, tasks: {metric}('A B', 'gsm8k')"
            )
        tasks = words[1] if len(words) == 2 else TASKS
        return {(system, task): self._values(system, task, metric) for system in words[0] for task in tasks}

    def _values(self, system: str, task: str, metric: str) -> Values:
        places = tuple((system, task, name) for name in (SCORES if metric == SCORE else (metric,)))
        place = next((place for place in places if place in self.cells), None)
        if place is None:
            raise MissingCell(f"there is no {metric} of {system} on {task}", places)
        self.used[place] = self.cells[place]
        return drawn(self.cells[place])

    def _combine(self, kind: type, left: Values | Picked, right: Values | Picked) -> Values | Picked:
        compute = _OPERATORS[kind]

        def apply(one: Values, other: Values) -> Values:
            with np.errstate(all="ignore"):
                return np.asarray(compute(one, other), dtype=np.float64)

        if not isinstance(left, dict):
            if not isinstance(right, dict):
                return apply(left, right)
            return {key: apply(left, values) for key, values in right.items()}
        if not isinstance(right, dict):
            return {key: apply(values, right) for key, values in left.items()}
        systems = [list(dict.fromkeys(system for system, _ in side)) for side in (left, right)]
        if {task for _, task in left} != {task for _, task in right}:
            raise self._refusal("the two sides of an operator have different tasks")
        if len(systems[0]) == 1:
            return {(system, task): apply(left[systems[0][0], task], right[system, task]) for system, task in right}
        if len(systems[1]) == 1:
            return {(system, task): apply(left[system, task], right[systems[1][0], task]) for system, task in left}
        if systems[0] == systems[1]:
            return {key: apply(left[key], right[key]) for key in left}
        raise self._refusal("the two sides of an operator have several, different systems")

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"formula {self.formula!r}: {why}")


def drawn(cell: Figure) -> Values:
    """A cell's value and its draws: constant without an interval; a score stays within 0 and 100, a speed above 0."""
    values = np.full(1 + RESAMPLES, float(cell.value))
    if cell.has_interval:
        identity = "|".join((cell.run_id, *cell.key))
        normal = np.random.default_rng(zlib.crc32(identity.encode())).standard_normal(RESAMPLES)
        spread = np.where(normal > 0, cell.ci_high - cell.value, cell.value - cell.ci_low) / _Z
        values[1:] += normal * spread
        if cell.value >= 0:
            np.clip(values, 0, 100 if cell.metric in SCORES else None, out=values)
    return values
