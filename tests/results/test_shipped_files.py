"""The CSV files of `results/`, whose numbers stand in documents."""

from pathlib import Path

import pandas
import pytest

RESULTS = Path(__file__).parents[2] / "results"
FILES = sorted(RESULTS.rglob("*.csv"))


def intervals(table: pandas.DataFrame) -> list[tuple[str, str, str]]:
    """The columns of estimates, and those of the bounds of their intervals."""
    found = []
    for low in (name for name in table.columns if name.endswith("low")):
        stem = low.removesuffix("low").removesuffix("ci_").strip(" _")
        known = (name for name in (stem, f"{stem}_value", "value", "jsd_mean", "accuracy") if name in table.columns)
        if value := next(known, None):
            found.append((value, low, f"{low.removesuffix('low')}high"))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(RESULTS)))
def test_no_interval_excludes_its_estimate(path: Path) -> None:
    table = pandas.read_csv(path, low_memory=False)
    for value, low, high in intervals(table):
        numbers = table[[value, low, high]].apply(pandas.to_numeric, errors="coerce").dropna()
        outside = numbers[(numbers[value] < numbers[low] - 1e-6) | (numbers[value] > numbers[high] + 1e-6)]
        assert outside.empty, f"{value}: {outside.to_dict('records')}"


def test_files_with_intervals_are_found() -> None:
    found = {str(path.relative_to(RESULTS)): len(intervals(pandas.read_csv(path, low_memory=False))) for path in FILES}
    assert sum(map(bool, found.values())) > 20
    assert found["embedded/artefacts/claims.csv"] == 2
