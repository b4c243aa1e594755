"""Accuracies of systems that were trained several times, with intervals over items and training seeds."""

import pandas
import scipy.stats

from refusion_eval.metrics import Z_95, Interval, mean_of_intervals, paired_difference, scaled


def over_seeds(answers: pandas.DataFrame, system: str, reference: str | None = None) -> Interval:
    """The accuracy of a system over all tasks, or its difference from a reference, over items and training seeds.

    Each seed is the mean over the tasks of one trained model. The variance over the items (of the mean over the seeds,
    paired with the reference) and those over the seeds add, with the degrees of freedom of Welch and Satterthwaite. Two
    systems of the same trained models are paired by seed. With one seed the interval is over the items alone.

    Args:
        answers: rows of `equal_start.csv`.
        system: its name.
        reference: name of the system that is subtracted; None for the accuracy itself.

    Returns:
        Percent or points; `n` is the number of items.
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
    half = scipy.stats.t.ppf(0.975, total**2 / parts) * total**0.5 if parts else 0.0
    return scaled(Interval(mean.value, mean.value - half, mean.value + half, mean.n), 100)
