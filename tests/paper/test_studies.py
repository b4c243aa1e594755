"""Sweeps, locality files and decodings with the settings of the case study, as the claims read them."""

import math
from dataclasses import replace

import pytest

from refusion_eval.benchmarks import BENCHMARKS, RELEASE
from refusion_eval.errors import DataError
from refusion_eval.paper.claims import claims_cells, claims_table
from refusion_eval.paper.formulas import Reader
from refusion_eval.paper.judge import AGREES, NOT_DECIDED, OPEN, REPRODUCED, Evidence, judge
from refusion_eval.paper.statements import read_claims
from refusion_eval.paper.studies import CASE_STUDY, CHOSEN, GRADED, case_study_measurements, sort_sources
from refusion_eval.results.measurement import by_key
from refusion_eval.types import Trace
from tests.paper.conftest import write_sweep
from tests.results.conftest import sample

CLAIMS = {claim.id: claim for claim in read_claims()}


def test_a_sweep_is_judged_point_by_point(tmp_path):
    folder = write_sweep(tmp_path / "sweep", "tau_slot", [0.5, 0.7, 0.9], operating=0.5)
    results, figures = sort_sources([folder])
    assert results == []
    systems = {figure.system for figure in figures if figure.metric == "tps"}
    assert systems == {"autoregressive@tau_slot", *(f"refusion@tau_slot={value}" for value in (0.5, 0.7, 0.9))}
    judged = judge(CLAIMS["P15"], Evidence([replace(figure, num_rounds=2) for figure in figures]))
    # Every point is faster, and its score is 0 to 2 points above the baseline's, with bounds 1.4 points away.
    assert judged.mini.interval.value == 100
    assert judge(CLAIMS["P20"], Evidence(figures)).mini.interval.value == pytest.approx(1)


@pytest.mark.parametrize(
    ("half_width", "verdict", "interval"),
    [(0.5, AGREES, (100, 100)), (3.0, OPEN, (0, 100)), (200.0, OPEN, (0, 100))],
)
def test_a_sweet_spot_is_open_where_the_data_do_not_decide(tmp_path, half_width, verdict, interval):
    _, figures = sort_sources([write_sweep(tmp_path / "sweep", "tau_slot", [0.5, 0.7, 0.9], operating=0.5)])
    wide = [
        replace(one, num_rounds=2, ci_low=one.value - half_width, ci_high=one.value + half_width)
        if one.metric == "pass@1"
        else replace(one, num_rounds=2)
        for one in figures
    ]
    judged = judge(CLAIMS["P15"], Evidence(wide))
    assert judged.mini_verdict == verdict
    assert (judged.mini.interval.low, judged.mini.interval.high) == interval


@pytest.mark.parametrize(
    ("further", "text"),
    [
        (70.0, "against AR, and 0 % against each of AR, AR-SFT."),
        (51.0, "against AR, and 66.7 % (at most 100 %) against each of AR, AR-SFT."),
        (None, "against AR, and no further autoregressive run was measured beside them."),
    ],
)
def test_a_sweet_spot_names_its_share_against_every_autoregressive_run(tmp_path, further, text):
    folder = write_sweep(tmp_path / "sweep", "tau_slot", [0.5, 0.7, 0.9], operating=0.5, further=further)
    _, figures = sort_sources([folder])
    judged = judge(CLAIMS["P15"], Evidence([replace(figure, num_rounds=2) for figure in figures]))
    assert (judged.mini.interval.value, judged.mini_verdict) == (100, AGREES)  # the claim is about the backbone
    swept = "of the swept values of tau_slot from 0.5 to 1, the paper's range,"
    assert judged.beside == f"On mini MBPP 100 % {swept} are shown to be in the sweet spot {text}"
    chosen = [replace(figure, num_rounds=2, benchmark=GRADED) for figure in figures]
    assert judge(CLAIMS["P15"], Evidence(chosen)).beside.endswith(CHOSEN)
    assert f"P15: {judged.beside}" in claims_table([judged]).markdown()
    (row,) = claims_cells([judged])[1]
    assert any(str(value).endswith(judged.beside) for value in row)


def test_autoregressive_runs_of_one_label_are_all_beside_a_sweet_spot(tmp_path):
    folder = write_sweep(tmp_path / "sweep", "tau_slot", [0.5, 0.7, 0.9], operating=0.5, further=70.0)
    _, figures = sort_sources([folder])
    alike = [replace(one, num_rounds=2, label="AR" if one.label == "AR-SFT" else one.label) for one in figures]
    assert judge(CLAIMS["P15"], Evidence(alike)).beside.endswith("against AR, and 0 % against each of AR.")


def test_a_sweet_spot_on_the_benchmark_itself_has_the_verdict_not_decided(tmp_path):
    folder = write_sweep(tmp_path / "sweep", "tau_slot", [0.5, 0.7, 0.9], operating=0.5)
    _, figures = sort_sources([folder])
    fields = {"mini": False, "prompts": RELEASE, "n": BENCHMARKS["mbpp"].source.num_rows, "hardware": "NVIDIA A100"}
    roles = {"ReFusion": ("refusion", "Qwen3-8B"), "AR": ("qwen3", "Qwen3-8B")}
    verdicts = []
    for half_width in (0.5, 3.0):
        real = []
        for one in figures:
            system, backbone = roles[one.label]
            bounds = {"ci_low": one.value - half_width, "ci_high": one.value + half_width}
            name = f"{system}@{one.system.partition('@')[2]}"
            real.append(replace(one, system=name, backbone=backbone, **fields, **bounds))
        verdicts.append(judge(CLAIMS["P15"], Evidence(real)).verdict)
    assert verdicts == [REPRODUCED, NOT_DECIDED]


def test_a_point_whose_setting_is_off_is_the_last(tmp_path):
    folder = write_sweep(tmp_path / "sweep", "threshold", [0.5, 0.7], operating=0.5)
    for path in folder.iterdir():
        path.write_text(path.read_text().replace("threshold=0.7", "threshold=null"))
    _, figures = sort_sources([folder])
    points = Reader(by_key(figures)).points("refusion", metric="tps")
    assert [value for _, value, _ in points] == [0.5, math.inf]


def test_a_locality_file_is_recognised_by_its_columns(tmp_path):
    path = tmp_path / "locality.csv"
    path.write_text(
        "model,decoder,dataset,mini,masking_ratio,distance,n_pairs,n_responses,jsd_mean,ci_low,ci_high\n"
        + "".join(
            f"m,llada,mini_gsm8k,yes,{ratio},{distance},10,5,{value},{value},{value}\n"
            for ratio, near in ((0.2, 0.8), (0.8, 0.4))
            for distance, value in ((-1, near), (2, near), (20, 0.1), (-20, 0.1), (5, 9.0))
        )
        + "m,llada,mini_gsm8k,yes,0.2,21,1,1,0.9,,\n"  # of one response
    )
    results, figures = sort_sources([path])
    assert (results, len(figures)) == ([], 4)
    judged = judge(CLAIMS["P43"], Evidence(figures))
    assert judged.mini.interval.value == pytest.approx(0.693147)


def test_slots_and_tokens_of_the_case_study_are_counted_in_traces(write_run):
    trace = Trace()
    trace.forward("plan", 8, 0)
    trace.select("slot", [0, 4], [0.9, 0.8], [0, 4])
    trace.forward("verify", 8, 0)
    trace.fix([0, 1, 2, 4], [1, 1, 1, 1])
    recorded = sample(0, settings=dict(CASE_STUDY), trace=trace.to_json())
    figures = list(case_study_measurements(write_run("run", [recorded, sample(1)])))
    assert {figure.metric: figure.value for figure in figures} == {
        "most_slots_together": 2,
        "most_tokens_of_a_slot": 3,
    }


def test_a_damaged_sweep_is_named(tmp_path):
    folder = write_sweep(tmp_path / "sweep", "tau_slot", [0.5, 0.7], operating=0.5)
    (folder / "points.csv").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"points\.csv cannot be read"):
        sort_sources([folder])
