"""Accuracies of systems that were trained several times, with intervals over items and training seeds."""

from typing import NamedTuple

import pandas
import scipy.stats

from refusion_eval.metrics import Z_95, Interval, mean_of_intervals, paired_difference, scaled


class Estimate(NamedTuple):
    """A mean over items and training seeds: its value, its variance and their degrees of freedom, as shares."""

    value: float
    variance: float
    freedom: float
    n: int  # items

    def interval(self) -> Interval:
        """The 95 % interval in percent or points; `n` is the number of items."""
        half = scipy.stats.t.ppf(0.975, self.freedom) * self.variance**0.5
        return scaled(Interval(self.value, self.value - half, self.value + half, self.n), 100)

    def p_value(self) -> float:
        """The p value of a mean of 0, of two sides."""
        if not self.variance:
            return float(not self.value)
        return float(2 * scipy.stats.t.sf(abs(self.value) / self.variance**0.5, self.freedom))


def over_seeds(answers: pandas.DataFrame, system: str, reference: str | None = None) -> Estimate:
    """The accuracy of a system over all tasks, or its difference from a reference, over items and training seeds.

    Each seed is the mean over the tasks of one trained model. The variance over the items (of the mean over the seeds,
    paired with the reference) and those over the seeds add, with the degrees of freedom of Welch and Satterthwaite. Two
    systems of the same trained models are paired by seed. A system with one seed adds no variance over seeds.

    Args:
        answers: rows of `equal_start.csv`.
        system: its name.
        reference: name of the system that is subtracted; None for the accuracy itself.
    """
    names = [system] if reference is None else [system, reference]
    right = [
        answers[answers.system == name].pivot(index=["task", "item"], columns=["model", "seed"], values="right")
        for name in names
    ]
    is_paired = reference is not None and right[0].columns.equals(right[1].columns)
    seeds = [right[0] - right[1]] if is_paired else right
    of_items = [table.mean(axis=1) for table in right]
    before = of_items[1] if reference is not None else of_items[0] * 0
    pairs = pandas.DataFrame({"before": before, "after": of_items[0]}).dropna().groupby("task")
    mean = mean_of_intervals([paired_difference(part.before, part.after) for _, part in pairs])
    variances = [((mean.high - mean.low) / 2 / Z_95) ** 2]
    freedom = [float(mean.n - 1)]
    for table in seeds:
        means = table.groupby("task").mean().mean()
        if len(means) > 1:
            variances.append(means.var() / len(means))
            freedom.append(len(means) - 1.0)
    total = sum(variances)
    parts = sum(variance**2 / number for variance, number in zip(variances, freedom, strict=True))
    return Estimate(mean.value, total, total**2 / parts if parts else 1.0, mean.n)


def summary(answers: pandas.DataFrame, settings: pandas.DataFrame, reference: str) -> pandas.DataFrame:
    """A row for each system: its seeds, accuracy and difference from a reference, TPF, and trained and computed rows.

    Args:
        answers: rows of `equal_start.csv`.
        settings: rows of `equal_start_settings.csv`.
        reference: name of the system that is subtracted.
    """
    rows = []
    for system, found in answers.groupby("system", sort=False):
        accuracy, difference = (
            "" if of == system else f"{value.value:.1f} [{value.low:.1f}, {value.high:.1f}]"
            for of in (None, reference)
            for value in [over_seeds(answers, str(system), of).interval()]
        )
        totals = found[["tokens", "forwards", "rows"]].sum()
        rows.append(
            {
                "system": system,
                "seeds": found.seed.nunique(),
                "trained rows": round(settings[settings.system == system].trained_rows.mean()),
                "accuracy, %": accuracy,
                f"minus {reference}": difference,
                "TPF": round(totals.tokens / totals.forwards, 2),
                "rows a token": round(totals["rows"] / totals.tokens, 1),
            }
        )
    return pandas.DataFrame(rows)
