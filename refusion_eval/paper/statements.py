"""The statements of the paper that can be judged, and the rules that compare a number with a statement."""

import math
from dataclasses import dataclass, fields
from typing import Literal

from refusion_eval.errors import ConfigError
from refusion_eval.metrics import Interval
from refusion_eval.results.published import read_published

Reading = Literal["equal", "over", "above", ""]

_EPSILON = 1e-9  # 3.675 rounds to 3.68, whatever its binary representation


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One reading of one statement; a row of claims.csv."""

    id: str
    claim: str
    statement: str
    published: str  # number or text as the paper prints it
    value: str  # number that the formula has to give, with the printed digits; empty for none
    unit: str
    reading: Reading
    formula: str  # over figures, in words of mathematics, computed by `FORMULAS`; empty if no figures say it
    speedup: str  # two sides of a speed-up, `systems | systems`, of which every average is shown; empty for none
    artefacts: str  # tables and figures of the paper that the formula is about
    neutral: str  # result that supports neither side, for example 1 for a ratio; empty for none
    location: str  # where in the paper the statement stands
    note: str
    look: str  # without a formula, where this project shows what the statement is about; empty if nowhere

    def __post_init__(self) -> None:
        if self.formula and (self.reading not in ("equal", "over", "above") or not self.value):
            raise ConfigError(f"claims.csv: {self.id} has a formula and reading={self.reading!r}, value={self.value!r}")

    @property
    def resolution(self) -> float:
        """One unit of the last printed digit."""
        return float(10.0 ** -len(self.value.partition(".")[2]))

    def follows(self, value: float) -> bool:
        """Whether a number, rounded as the paper rounds, is the printed one."""
        stated, unit = float(self.value), self.resolution
        if self.reading == "equal":
            return abs(value - stated) <= unit / 2 + _EPSILON
        return stated <= value + _EPSILON < stated + unit if self.reading == "over" else value > stated

    def holds(self, measured: Interval) -> bool:
        """Whether a measured interval, or its value if it has no bounds, supports the claim."""
        low, high = measured.bounds
        stated = float(self.value)
        if self.reading == "equal":  # the interval contains a number that rounds to the printed one
            half = self.resolution / 2 + _EPSILON
            return low <= stated + half and high >= stated - half
        return low >= stated if self.reading == "over" else low > stated

    def leaves_open(self, measured: Interval) -> bool:
        """Whether a measurement is consistent with the claim but too imprecise to support it."""
        if math.isnan(measured.low) or math.isnan(measured.high):
            return False
        if self.reading == "equal":  # wider than the distance of the stated number from the neutral one
            distance = abs(float(self.value) - float(self.neutral or 0))
            return self.holds(measured) and measured.high - measured.low > distance
        return not self.holds(measured) and measured.high >= float(self.value)


def read_claims() -> list[Claim]:
    names = [field.name for field in fields(Claim)]
    return [Claim(**{name: row[name] for name in names}) for row in read_published("claims.csv")]  # type: ignore[arg-type]
