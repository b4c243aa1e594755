"""results/published: one schema, and no value lost or changed on the way into it."""

import csv
from collections import Counter

import pytest

from refusion_eval.claims.statements import read_claims
from refusion_eval.results.figure import AVERAGE, TASKS, by_key
from refusion_eval.results.published import published_figures, published_path, read_published
from refusion_eval.runs.published import published_systems

TASK = dict(
    zip(("MMLU-Pro", "ARC-C", "GSM8K", "MATH", "GPQA", "HumanEval", "MBPP", "Avg."), (*TASKS, AVERAGE), strict=True)
)
TASK |= {"GPQA Diamond": "gpqa_diamond", "ARC": "arc"}
METRIC = {"mean_generated_tokens": "tokens_mean", "mean_latency": "latency_mean"}
LONG = {
    "table1": "table1",
    "table2": "table2",
    "table2_v2": "table2_v2",
    "table3": "table3",
    "table4": "table4",
    "table7_v2": "table7_v2_certainty",
    "table9_v2": "table9_v2_length_latency",
}


@pytest.fixture
def original(reference_data):
    """Reads one of the files that ours were made from."""

    def read(name):
        with (reference_data / "published" / f"{name}.csv").open(encoding="utf-8", newline="") as stream:
            return list(csv.DictReader(stream))

    return read


def ours(artefact):
    return [row for row in read_published("published.csv") if row["artefact"] == artefact]


@pytest.mark.parametrize("artefact", LONG)
def test_every_printed_value_is_there_with_its_digits(original, artefact):
    expected = [
        (row["system"], TASK[row["benchmark"]], METRIC.get(row["metric"], row["metric"]), row["value"], row["unit"])
        for row in original(LONG[artefact])
    ]
    found = [tuple(row[name] for name in ("label", "task", "metric", "value", "unit")) for row in ours(artefact)]
    assert expected
    assert found == expected


def test_figure_1_table_7_and_the_leaderboard_are_there(original):
    figure1 = {(row["label"], row["metric"]): row["value"] for row in ours("figure1")}
    columns = {"delta_tps": "delta_tps", "delta_pass@1": "delta_pass1", "tps": "tps", "pass@1": "pass1"}
    for row in original("figure1_digitised"):
        assert {m: figure1.pop((row["point"], m)) for m in columns} == {m: row[c] for m, c in columns.items()}
    assert not figure1
    table7 = {(row["label"], row["task"]): row for row in ours("table7")}
    for row in original("table7"):
        assert table7.pop((row["system"], "overall"))["value"] == row["tps"]
        for task in ("humaneval", "mbpp"):
            found = table7.pop((row["system"], task))
            assert found["value"] == row[f"{task}_pass1"]
            parts = [
                f"{key}={row[key]}" for key in ("total_params", "activated_params", "system_optimization") if row[key]
            ]
            assert all(part in found["settings"] for part in (*parts, f"shots={row[f'{task}_shots']}", row["category"]))
    assert not table7
    wizwand = ours("wizwand")
    for number, row in enumerate(original("wizwand")):
        figures = wizwand[3 * number : 3 * number + 3]
        assert [one["value"] for one in figures] == [row["result"], row["rank"], row["rank_later_snapshot"]]
        assert {one["task"] for one in figures} == {TASK[row["dataset"]]}
        assert all(f"in_paper={row['in_paper']}" in one["settings"] for one in figures if row["in_paper"])


def test_cross_checks_keep_the_other_value_and_ours_is_table_1(original):
    table1 = by_key(published_figures(["table1"]))
    labels = {row["label"]: row["system"] for row in ours("table1")}
    rows = original("baseline_crosscheck")
    assert len(rows) == len(ours("crosscheck"))
    for row, found in zip(rows, ours("crosscheck"), strict=True):
        assert (found["value"], found["location"]) == (row["other_value"], row["other_source"])
        paper = table1[labels[row["system"]], TASK[row["benchmark"]], row["metric"]].value
        assert paper == float(row["paper_value"])
        assert float(row["other_value"]) - paper == pytest.approx(float(row["difference"]))


def test_settings_axes_and_designs_are_there(original):
    rows = read_published("hyperparameters.csv")
    names = {"block_size_implied": "block_size", "slot_threshold": "tau_slot", "token_threshold": "tau_token"}
    for artefact, name in (("table6", "table6_hyperparameters"), ("release", "public_eval_settings")):
        found = [row for row in rows if row["artefact"] == artefact]
        for one, other in zip(original(name), found, strict=True):
            expected = {names.get(key, key): value for key, value in one.items()} | {"task": TASK[one["task"]]}
            assert expected.items() <= other.items()
    for one, other in zip(original("figure_axes"), read_published("figure_axes.csv"), strict=True):
        assert {key: one[key] for key in ("panel", "axis", "label", "ticks", "note")}.items() <= other.items()
        assert one["figure_v1"] in other["location"]
        assert one["figure_v2"] in other["location"]
    for one, other in zip(original("table5"), read_published("designs.csv"), strict=True):
        assert {key: value for key, value in one.items() if key != "model"}.items() <= other.items()
        assert one["model"] == other["label"]


def test_every_stated_number_is_a_claim(original):
    claims = {}
    for claim in read_claims():
        claims.setdefault(claim.claim, []).append(claim)
    for row in original("prose_claims"):
        readings = claims.pop(row["claim_id"])
        assert {(one.published, one.location) for one in readings} == {(row["value"], row["where"])}
    assert not claims


@pytest.mark.parametrize("artefact", ["table1", "table2", "table2_v2", "table3"])
def test_printed_averages_are_the_means_of_the_seven_cells(artefact):
    cells = by_key(published_figures([artefact]))
    averages = {place: cell for place, cell in cells.items() if place[1] == AVERAGE}
    assert averages
    for (system, _, metric), average in averages.items():
        names = ("tps",) if metric == "tps" else ("accuracy", "pass@1")
        values = [
            cell.value for (one, task, name), cell in cells.items() if one == system and task in TASKS and name in names
        ]
        assert len(values) == len(TASKS)
        assert sum(values) / len(TASKS) == pytest.approx(average.value, abs=0.005 + 1e-9)


def test_keys_are_those_of_the_systems_table_and_places_are_unique():
    table1 = ours("table1")
    assert {row["system"] for row in table1} <= published_systems().keys()
    assert {row["label"] for row in table1} <= {system.label for system in published_systems().values()}
    for artefact in (
        "table1",
        "table2",
        "table2_v2",
        "table3",
        "table4",
        "table7",
        "table7_v2",
        "table9_v2",
        "figure1",
    ):
        assert len(by_key(published_figures([artefact]))) == len(ours(artefact))
    defects = {row["defect"] for row in read_published("published.csv")} - {""}
    readme = (published_path() / "README.md").read_text(encoding="utf-8")
    assert all(f"**{defect}**" in readme for defect in defects)


def test_sources_name_every_artefact():
    artefacts = Counter(row["artefact"] for row in read_published("published.csv"))
    assert artefacts.keys() <= {row["artefact"] for row in read_published("sources.csv")}
