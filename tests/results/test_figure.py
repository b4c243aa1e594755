"""Figures: which systems measured ones belong to, and which must not stand side by side."""

import csv
import math
from dataclasses import replace

import pytest

from refusion_eval.errors import StoreError
from refusion_eval.results.csv_file import write_csv
from refusion_eval.results.figure import AVERAGE, by_key, problems, require_comparable
from refusion_eval.results.measured import measured_figures, run_figures
from refusion_eval.results.published import beside_published, published_figures, system_key
from refusion_eval.store.environment import Hardware
from tests.results.conftest import cell, sample


def test_a_published_figure_has_its_machine_and_no_interval():
    found = by_key(published_figures(["table1"]))["refusion", "gsm8k", "tps"]
    assert (found.value, found.unit, found.hardware, found.batch_size) == (81.24, "tokens/s", "A100", "1")
    assert found.origin == "published"
    assert not found.has_interval


@pytest.mark.parametrize(
    ("label", "backbone", "settings", "key"),
    [
        ("ReFusion", "Qwen3-8B", {}, "refusion"),
        ("ReFusion", "Qwen3-8B", {"recompute_kv": "true"}, "refusion+recompute_kv"),
        ("ReFusion", "Qwen3-8B", {"left_to_right": "true", "recompute_kv": "false"}, "refusion+left_to_right"),
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
    assert system_key(label, backbone, settings) == key


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
    write_csv(run_figures([run]), tmp_path / "results.csv")
    from_directory, from_csv = measured_figures([run]), measured_figures([tmp_path / "results.csv"])
    assert [one.metric for one in from_csv] == [one.metric for one in from_directory]
    for one, other in zip(from_csv, from_directory, strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-5)
        assert replace(one, value=0, ci_low=0, ci_high=0) == replace(other, value=0, ci_low=0, ci_high=0)
    accuracy = by_key(from_directory)["refusion", "gsm8k", "accuracy"]
    assert (accuracy.value, accuracy.n, accuracy.mini, accuracy.task_version) == (75.0, 4, True, "1")
    assert accuracy.complete


def test_a_file_of_an_earlier_version_still_opens(write_run, tmp_path):
    write_csv(run_figures([write_run("run", [sample(0), sample(1)])]), tmp_path / "now.csv")
    with (tmp_path / "now.csv").open(newline="") as now, (tmp_path / "old.csv").open("w", newline="") as old:
        rows = list(csv.DictReader(now))
        writer = csv.DictWriter(old, [name for name in rows[0] if name != "task_version"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    found = measured_figures([tmp_path / "old.csv"])
    assert found
    assert {one.task_version for one in found} == {""}


def test_a_half_written_run_is_marked_and_a_finished_one_is_not(write_run):
    whole = write_run("whole", [sample(0), sample(1)], expected={"mini_gsm8k": 2})
    half = write_run("half", [sample(0), sample(1)], expected={"mini_gsm8k": 5})
    fine, broken = sample(0), sample(1, error="out of memory", num_tokens=0)
    failed = write_run("failed", [fine, broken], scored=[fine])
    assert all(one.complete for one in measured_figures([whole]))
    found = measured_figures([half])
    assert found
    assert not any(one.complete for one in found)
    assert "half-written: 2 of 5 samples are there, run its command again" in found[0].notes
    assert not any(one.complete for one in measured_figures([failed]))


def test_the_mean_over_tasks_is_half_written_if_one_of_them_is(write_run):
    samples = [sample(0), sample(1), sample(0, task="mini_math"), sample(1, task="mini_math")]
    run = write_run("run", samples, expected={"mini_gsm8k": 2, "mini_math": 3})
    states = {one.benchmark: one.complete for one in measured_figures([run])}
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
    found = {one.metric for one in measured_figures([run])}
    assert "accuracy" in found
    assert not found & {"tps", "forwards_per_second", "decode_tps"}


def test_what_was_not_measured_is_no_figure(write_run):
    fine, broken = sample(0), sample(0, task="mini_math", error="out of memory", num_tokens=0, trace=None)
    found = measured_figures([write_run("run", [fine, broken], scored=[fine])])
    assert {one.benchmark for one in found} == {"gsm8k"}
    assert not any(math.isnan(one.value) for one in found)


def test_facts_come_back_from_a_file(write_run, tmp_path):
    samples = [sample(0), sample(1), sample(0, task="mini_math"), sample(1, task="mini_math")]
    run = write_run("run", samples, expected={"mini_math": 3}, scored=samples[:3])
    write_csv(run_figures([run]), tmp_path / "results.csv")
    names = ("finished", "scored", "isolated", "num_tasks", "complete", "is_mean", "mini", "notes")
    facts = [
        [[getattr(figure, name) for name in names] for figure in measured_figures([source])]
        for source in (run, tmp_path / "results.csv")
    ]
    assert facts[0] == facts[1]
    by_benchmark = {figure.benchmark: figure for figure in measured_figures([run])}
    scored = [by_benchmark[name].scored for name in ("gsm8k", "math", AVERAGE)]
    assert scored == [True, False, False]
    assert (by_benchmark["gsm8k"].finished, by_benchmark["math"].finished) == (True, False)
    assert by_benchmark[AVERAGE].num_tasks == 2


def test_a_variant_and_another_backbone_are_facts_of_a_figure():
    other = beside_published(cell("refusion+left_to_right", backbone="Qwen2.5-7B"))
    assert (other.base_system, other.variants, other.other_backbone) == ("refusion", ("left_to_right",), True)
    same = beside_published(cell("refusion+recompute_kv", backbone="Qwen3-8B"))
    assert (same.base_system, same.variants, same.other_backbone) == ("refusion", ("recompute_kv",), False)
