"""The paper's claims as data: one reading of one statement a row of claims.csv."""

import math
from dataclasses import dataclass, fields
from typing import Literal

from refusion_eval.errors import ConfigError
from refusion_eval.metrics.bootstrap import Interval
from refusion_eval.results.published import read_published

Reading = Literal["equal", "over", "above", ""]

_EPSILON = 1e-9  # 3.675 is 3.68 to two digits, however it is represented


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One reading of one statement; a row of claims.csv.

    Attributes:
        id: of the reading.
        claim: of the statement.
        statement: what is claimed.
        published: as printed.
        value: the number in it that the formula is to give, with the printed digits; empty for none.
        unit: of it.
        reading: `equal` at the printed digits, `over` (rounded down, or more), `above`.
        formula: over cells; empty where no cells say it.
        speedup: two sides of a speed-up, `systems | systems`, whose averages are all of interest; else empty.
        artefacts: whose cells the formula is about.
        neutral: the result that says neither yes nor no, as 1 of a ratio; empty for none.
        location: where in the paper.
        note: what a recomputation found.
        look: without a formula, where this project shows what the statement is about; empty if it does nowhere.
    """

    id: str
    claim: str
    statement: str
    published: str
    value: str
    unit: str
    reading: Reading
    formula: str
    speedup: str
    artefacts: str
    neutral: str
    location: str
    note: str
    look: str

    def __post_init__(self) -> None:
        if self.formula and (self.reading not in ("equal", "over", "above") or not self.value):
            raise ConfigError(f"claims.csv: {self.id} has a formula and reading={self.reading!r}, value={self.value!r}")

    @property
    def size(self) -> float:
        """What the claim is about: how far the stated number lies from the neutral one, or from 0 if there is none."""
        return abs(float(self.value) - float(self.neutral or 0))

    @property
    def resolution(self) -> float:
        """One unit of the last printed digit."""
        return float(10.0 ** -len(self.value.partition(".")[2]))

    def follows(self, value: float) -> bool:
        """Whether a number is what is printed."""
        stated, unit = float(self.value), self.resolution
        if self.reading == "equal":
            return abs(value - stated) <= unit / 2 + _EPSILON
        return stated <= value + _EPSILON < stated + unit if self.reading == "over" else value > stated

    def holds(self, measured: Interval) -> bool:
        """Whether a measurement bears the claim out: its interval, or its value alone if it has none.

        `equal`: it meets what rounds to the printed number. `over` and `above`: all of it lies there.
        """
        low = measured.value if math.isnan(measured.low) else measured.low
        high = measured.value if math.isnan(measured.high) else measured.high
        stated = float(self.value)
        if self.reading == "equal":
            half = self.resolution / 2 + _EPSILON
            return low <= stated + half and high >= stated - half
        return low >= stated if self.reading == "over" else low > stated

    def leaves_open(self, measured: Interval) -> bool:
        """Whether a measurement is too imprecise to say: it meets the claim, and much else.

        `equal`: it meets what rounds to the printed number, but is wider than what the claim is about. `over` and
        `above`: the stated number lies in it.
        """
        if math.isnan(measured.low) or math.isnan(measured.high):
            return False
        if self.reading == "equal":
            return self.holds(measured) and measured.high - measured.low > self.size
        return not self.holds(measured) and measured.high >= float(self.value)


def read_claims() -> list[Claim]:
    """The claims in the order of the paper.

    Raises:
        ConfigError: a row contradicts itself.
    """
    names = [one.name for one in fields(Claim)]
    return [Claim(**{name: row[name] for name in names}) for row in read_published("claims.csv")]  # type: ignore[arg-type]
