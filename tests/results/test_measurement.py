"""Figures: which systems measured ones belong to, and which must not stand side by side."""

import csv
import math
from collections import Counter
from dataclasses import replace

import pytest

from refusion_eval.errors import StoreError
from refusion_eval.paper.statements import read_claims
from refusion_eval.results.measured import read_measurements, run_measurements
from refusion_eval.results.measurement import AVERAGE, TASKS, by_key, problems, require_comparable
from refusion_eval.results.published import (
    beside_published,
    published_measurements,
    published_path,
    read_published,
    system_key,
)
from refusion_eval.results.results_file import write_csv
from refusion_eval.results.tables import summary, summary_table
from refusion_eval.runs.systems import published_systems
from refusion_eval.store.manifest import Hardware
from tests.results.conftest import cell, sample


def test_a_published_figure_has_its_machine_and_no_interval():
    found = by_key(published_measurements(["table1"]))["refusion", "gsm8k", "tps"]
    assert (found.value, found.unit, found.hardware, found.batch_size) == (81.24, "tokens/s", "A100", "1")
    assert found.origin == "published"
    assert not found.has_interval


@pytest.mark.parametrize(
    ("label", "backbone", "settings", "key"),
    [
        ("ReFusion", "Qwen3-8B", {}, "refusion"),
        ("ReFusion", "Qwen3-8B", {"recompute_kv": "true"}, "refusion+recompute_kv"),
        ("ReFusion", "Qwen3-8B", {"serial": "true", "recompute_kv": "false"}, "refusion+left_to_right"),
        ("ReFusion", "Qwen3-8B", {"order": "left_to_right"}, "refusion+slots_in_order"),
        ("ReFusion", "Qwen3-8B", {"order": "random"}, "refusion+slots_at_random"),
        ("ReFusion (Retrained)", "Qwen3-8B", {}, "refusion+retrained"),
        ("AR", "Qwen3-8B", {}, "qwen3"),
        ("AR (generate)", "Qwen3-8B", {}, "qwen3+generate"),
        ("Qwen3-8B (generate)", "Qwen3-8B", {}, "qwen3+generate"),
        ("AR", "qwen3", {}, "autoregressive"),
        ("LLaDA", "LLaDA-8B", {}, "llada"),
        ("LLaDA-8B-Instruct (paper_implied)", "LLaDA-8B", {}, "llada"),
        ("BD3-LM", "mine", {}, "bd3lm"),
        ("My own", "mine", {}, "My own"),
    ],
)
def test_a_run_is_taken_for_the_system_whose_name_it_has(label, backbone, settings, key):
    assert system_key(label, backbone, settings, loop=key.partition("+generate")[1][1:]) == key


def test_a_system_of_another_backbone_is_one_of_its_own_on_a_benchmark():
    assert beside_published(cell(backbone="Qwen3-8B")).system == "refusion"
    assert beside_published(cell("refusion+left_to_right", backbone="Qwen3-8B")).system == "refusion+left_to_right"
    assert beside_published(cell(backbone="embedded", mini=True)).system == "refusion"
    other = beside_published(cell(backbone="Qwen2.5-7B"))
    assert (other.system, other.label.endswith(" on Qwen2.5-7B")) == ("refusion on Qwen2.5-7B", True)
    assert beside_published(cell("qwen3+generate", backbone="")).system == "qwen3+generate on an unnamed model"
    assert beside_published(cell("My own", backbone="mine")).system == "My own"


def test_directories_and_their_csv_give_the_same_figures(write_run, tmp_path):
    run = write_run("run", [sample(i) for i in range(4)], right={"0", "1", "2"})
    write_csv(run_measurements([run]), tmp_path / "results.csv")
    from_directory, from_csv = read_measurements([run]), read_measurements([tmp_path / "results.csv"])
    assert [one.metric for one in from_csv] == [one.metric for one in from_directory]
    for one, other in zip(from_csv, from_directory, strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-5)
        assert replace(one, value=0, ci_low=0, ci_high=0) == replace(other, value=0, ci_low=0, ci_high=0)
    accuracy = by_key(from_directory)["refusion", "gsm8k", "accuracy"]
    assert (accuracy.value, accuracy.n, accuracy.mini, accuracy.task_version) == (75.0, 4, True, "1")
    assert accuracy.complete


def test_a_half_written_run_is_marked_and_a_finished_one_is_not(write_run):
    whole = write_run("whole", [sample(0), sample(1)], expected={"mini_gsm8k": 2})
    half = write_run("half", [sample(0), sample(1)], expected={"mini_gsm8k": 5})
    fine, broken = sample(0), sample(1, error="out of memory", num_tokens=0)
    failed = write_run("failed", [fine, broken], scored=[fine])
    assert all(one.complete for one in read_measurements([whole]))
    found = read_measurements([half])
    assert found
    assert not any(one.complete for one in found)
    assert "2 of 5 samples: the run ended early or is still going" in found[0].note
    assert not any(one.complete for one in read_measurements([failed]))


def test_the_mean_over_tasks_is_half_written_if_one_of_them_is(write_run):
    samples = [sample(0), sample(1), sample(0, task="mini_math"), sample(1, task="mini_math")]
    run = write_run("run", samples, expected={"mini_gsm8k": 2, "mini_math": 3})
    states = {one.benchmark: one.complete for one in read_measurements([run])}
    assert states == {"gsm8k": True, "math": False, AVERAGE: False}


def test_one_key_has_one_figure():
    with pytest.raises(StoreError, match="refusion gsm8k tps is there twice \\(a and b\\)"):
        by_key([cell(run_id="b"), cell(run_id="a")])


def test_two_machines_two_versions_and_mini_beside_real_are_named():
    fine = [cell(), cell("qwen3"), cell("qwen3", metric="accuracy", hardware="another machine")]
    assert problems(fine) == []
    (machines,) = problems([cell(), cell("qwen3", hardware="another machine")])
    assert "another machine in qwen3, one machine in refusion" in machines
    (versions,) = problems([cell(task_version="1"), cell("qwen3", task_version="2")])
    assert versions == "gsm8k is there in several versions (1 in refusion, 2 in qwen3); run all systems on one"
    (mini,) = problems([cell(), cell("qwen3", mini=True)])
    assert "mini look-alike" in mini
    with pytest.raises(StoreError, match="several versions"):
        require_comparable([cell(task_version="1"), cell("qwen3", task_version="2")])


@pytest.mark.parametrize(
    ("settings", "fused"),
    [
        ({}, False),  # a decoder that cannot
        ({"fuse": "true", "release_compatible": "true"}, True),
        ({"fuse": "null", "release_compatible": "false"}, True),
        ({"fuse": "null", "release_compatible": "true"}, False),
        ({"fuse": "false", "release_compatible": "false"}, False),
        ({"fuse": "varies"}, True),
    ],
)
def test_fused_forwards_are_told_from_the_settings(settings, fused):
    assert cell(settings=settings).fused == cell(metric="tpf", settings=settings).fused == fused
    assert not cell(metric="accuracy", settings=settings).fused


def test_published_speed_is_no_other_machine():
    assert problems([cell(), cell("qwen3", origin="published", hardware="A100", task_version="")]) == []


def test_a_run_on_two_machines_has_no_speed(write_run, tmp_path):
    run = write_run("run", [sample(0), sample(1)], hardware=Hardware(cpu="a"))
    write_run("run", [sample(2), sample(3)], hardware=Hardware(cpu="b"))
    found = {one.metric for one in read_measurements([run])}
    assert "accuracy" in found
    assert not found & {"tps", "forwards_per_second", "decode_tps"}


def test_what_was_not_measured_is_no_figure(write_run):
    fine, broken = sample(0), sample(0, task="mini_math", error="out of memory", num_tokens=0, trace=None)
    found = read_measurements([write_run("run", [fine, broken], scored=[fine])])
    assert {one.benchmark for one in found} == {"gsm8k"}
    assert not any(math.isnan(one.value) for one in found)


def test_facts_come_back_from_the_columns_of_a_file(write_run, tmp_path):
    samples = [sample(0), sample(1), sample(0, task="mini_math"), sample(1, task="mini_math")]
    run = write_run("run", samples, expected={"mini_math": 3}, scored=samples[:3])
    write_csv(run_measurements([run]), tmp_path / "results.csv")
    with (tmp_path / "results.csv").open(newline="") as stream:
        rows = [row | {"note": "reworded"} for row in csv.DictReader(stream)]
    with (tmp_path / "results.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    names = ("finished", "scored", "isolated", "num_tasks", "complete", "is_mean", "mini")
    facts = [
        [[getattr(figure, name) for name in names] for figure in read_measurements([source])]
        for source in (run, tmp_path / "results.csv")
    ]
    assert facts[0] == facts[1]
    by_benchmark = {figure.benchmark: figure for figure in read_measurements([run])}
    scored = [by_benchmark[name].scored for name in ("gsm8k", "math", AVERAGE)]
    assert scored == [True, False, False]
    assert (by_benchmark["gsm8k"].finished, by_benchmark["math"].finished) == (True, False)
    assert by_benchmark[AVERAGE].num_tasks == 2


def test_a_variant_and_another_backbone_are_facts_of_a_figure():
    other = beside_published(cell("refusion+left_to_right", backbone="Qwen2.5-7B"))
    assert (other.base_system, other.variants) == ("refusion", ("left_to_right",))
    same = beside_published(cell("refusion+recompute_kv", backbone="Qwen3-8B"))
    assert (same.base_system, same.variants) == ("refusion", ("recompute_kv",))


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
    table1 = by_key(published_measurements(["table1"]))
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
    cells = by_key(published_measurements([artefact]))
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
        assert len(by_key(published_measurements([artefact]))) == len(ours(artefact))
    defects = {row["defect"] for row in read_published("published.csv")} - {""}
    readme = (published_path() / "README.md").read_text(encoding="utf-8")
    assert all(f"**{defect}**" in readme for defect in defects)


def test_sources_name_every_artefact():
    artefacts = Counter(row["artefact"] for row in read_published("published.csv"))
    assert artefacts.keys() <= {row["artefact"] for row in read_published("sources.csv")}


def test_the_loop_of_transformers_comes_back_from_a_file(tmp_path):
    write_csv([cell("qwen3+generate", label="AR", backbone="Qwen3-8B")], tmp_path / "results.csv")
    (found,) = read_measurements([tmp_path / "results.csv"])
    assert (found.system, found.generate) == ("qwen3+generate", True)


def test_what_slowed_a_run_comes_back_from_a_file(tmp_path):
    write_csv([cell(slowed_by="busy machine|8 threads"), cell(metric="tpf")], tmp_path / "results.csv")
    found = read_measurements([tmp_path / "results.csv"])
    assert [one.slowed_by for one in found] == ["busy machine|8 threads", ""]
    assert "Speed is lower than need be: 8 threads, busy machine." in summary_table(summary(found)).caption


@pytest.mark.parametrize(("label", "key"), [("LLaDA", "llada"), ("Dream", "dream")])
def test_a_system_of_an_unknown_backbone_is_no_published_one_without_numbers(label, key):
    assert system_key(label, "", {}, loop="") == key
