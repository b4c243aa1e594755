"""Claims: what the paper's own tables give, and what measured cells say."""

import csv
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from refusion_eval.benchmarks import BENCHMARKS, OTHER, OURS, RELEASE
from refusion_eval.cli import app
from refusion_eval.errors import ConfigError, StoreError
from refusion_eval.paper.claims import averages_table, claims_table
from refusion_eval.paper.judge import (
    AGREES,
    ARITHMETIC,
    DISAGREES,
    DOES_NOT_FOLLOW,
    NO_FORMULA,
    NOT_DECIDED,
    NOT_MEASURED,
    NOT_REPRODUCED,
    ONE_ROUND,
    OPEN,
    OTHER_GPU,
    OTHER_PROMPTS,
    REPRODUCED,
    Evidence,
    averages,
    judge,
    judge_all,
)
from refusion_eval.paper.statements import read_claims
from refusion_eval.results.measurement import TASKS
from refusion_eval.results.published import published_backbone
from tests.results.conftest import cell, sample

CLAIMS = {claim.id: claim for claim in read_claims()}
DIFFUSION = ("llada", "dream")


def measured(system, metric, values, **changes):
    """One cell a task over all of its items; the backbone is the published one."""
    fields = {"backbone": published_backbone(system), "prompts": RELEASE, "hardware": "1 x NVIDIA A100", **changes}
    return [
        cell(system, task, metric, value, **{"n": BENCHMARKS[task].source.num_rows, **fields})
        for task, value in values.items()
    ]


def same(value):
    return dict.fromkeys(TASKS, value)


def test_what_the_papers_own_tables_give():
    judged, _ = judge_all([])
    found = {one.claim.id: one for one in judged}
    values = {
        "P01": 33.525,
        "P02": 18.705,
        "P02-mean": 132.527,
        "P03": 2.326,
        "P04": 3.675,
        "P05": 78.66,
        "P06": 21.95,
        "P08": 1.404,
        "P09-score": 42,
        "P09-tps": 38,
        "P10": 16.46,
        "P11": 6.40,
        "P12": 1.900,
        "P13": 4.012,
        "P13-points": 2.229,
        "P14": 11.054,
        "P23-min": 1.158,
        "P23-max": 1.332,
        "P24-min": 0,
        "P24-max": 1.22,
        "P33": 1.661,
        "P34": 2.80,
        "P45-score": -21.31,
    }
    assert {name: found[name].on_published for name in values} == pytest.approx(values, abs=5e-4)
    wrong = {name for name, one in found.items() if one.verdict == DOES_NOT_FOLLOW}
    assert wrong == {"P02-mean", "P09-tps", "P13", "P45-score"}
    unjudged = {name for name, one in found.items() if one.verdict == NO_FORMULA}
    assert unjudged == {name for name, claim in CLAIMS.items() if not claim.formula}
    assert found["P39"].verdict == ARITHMETIC
    others = [one for name, one in found.items() if name not in {*wrong, *unjudged, "P39"}]
    assert all(one.verdict == NOT_MEASURED for one in others)


def test_a_statement_about_training_size_says_where_to_look():
    judged = judge(CLAIMS["P35"], Evidence([]))
    assert judged.verdict == NO_FORMULA
    assert "plot figure7" in judged.reason


@pytest.mark.parametrize("prompts", [OURS, OTHER])
def test_figures_with_other_prompts_say_nothing_about_a_claim(prompts):
    judged = judge(CLAIMS["P05"], Evidence(measured("refusion", "pass@1", {"humaneval": 10.0}, prompts=prompts)))
    assert (judged.verdict, judged.measured.interval.value) == (OTHER_PROMPTS, 10.0)
    assert judged.reason == f"{prompts} in refusion; the paper's are those of --prompts release"


def test_speed_of_another_gpu_says_nothing_about_a_claim_and_scores_do():
    elsewhere = {"hardware": "NVIDIA H200"}
    judged = judge(CLAIMS["P07"], Evidence(measured("refusion", "tps", {"mbpp": 300.0}, **elsewhere)))
    assert (judged.verdict, judged.measured.interval.value) == (OTHER_GPU, 300.0)
    score = Evidence(measured("refusion", "pass@1", {"humaneval": 78.66}, **elsewhere))
    assert judge(CLAIMS["P05"], score).verdict == REPRODUCED


def test_every_average_of_the_claimed_speedups():
    found = {(one.baseline, one.rule): one for one in averages(CLAIMS["P02"], Evidence([])) if one.tasks == "all seven"}
    values = {
        ("llada dream", "mean of ratios"): 132.527,
        ("llada dream", "geometric mean"): 18.705,
        ("llada dream", "median of ratios"): 18.98,
        ("llada dream", "total time"): 17.80,
        ("llada", "ratio of means"): 5.849,
        ("dream", "ratio of means"): 8.214,
        ("llada", "geometric mean"): 15.98,
        ("dream", "geometric mean"): 21.90,
    }
    assert {key: found[key].on_published for key in values} == pytest.approx(values, abs=5e-3)
    gives = {key for key, one in found.items() if one.gives_claim and key[0] == "llada dream"}
    assert gives == {("llada dream", "geometric mean"), ("llada dream", "median of ratios")}
    without = [one for one in averages(CLAIMS["P02"], Evidence([])) if one.tasks == "without arc_challenge"]
    by_rule = {one.rule: one.on_published for one in without if one.baseline == "llada dream"}
    assert by_rule["geometric mean"] == pytest.approx(10.1, abs=0.05)
    assert by_rule["mean of ratios"] == pytest.approx(19.4, abs=0.05)


@pytest.mark.parametrize(
    ("ours", "half_width", "verdict"),
    [(2.33, 0, REPRODUCED), (2.4, 0.2, REPRODUCED), (2.4, 0, NOT_REPRODUCED), (1.0, 0.1, NOT_REPRODUCED)],
)
def test_a_claim_is_judged_by_its_interval(ours, half_width, verdict):
    bounds = {"ci_low": ours - half_width, "ci_high": ours + half_width} if half_width else {}
    evidence = Evidence([*measured("refusion", "tps", same(ours), **bounds), *measured("qwen3", "tps", same(1.0))])
    judged = judge(CLAIMS["P03"], evidence)
    # Seven independent tasks: the interval of their mean is narrower than that of one.
    assert judged.measured.interval.value == pytest.approx(ours)
    assert judged.verdict == verdict
    if verdict == NOT_REPRODUCED:
        assert judged.reason.startswith("more" if ours > 2.33 else "less")


@pytest.mark.parametrize(
    ("name", "value", "bounds", "verdict"),
    [
        ("P05", 50.0, (0.0, 100.0), NOT_DECIDED),  # wider than the score itself
        ("P05", 76.0, (69.0, 82.0), REPRODUCED),
        ("P05", 60.0, (52.0, 68.0), NOT_REPRODUCED),
        ("P07", 90.0, (85.0, 95.0), REPRODUCED),
        ("P07", 100.0, (5.0, 195.0), NOT_DECIDED),
    ],
)
def test_an_interval_wider_than_the_claim_bears_nothing_out(name, value, bounds, verdict):
    metric, task = ("pass@1", "humaneval") if name == "P05" else ("tps", "mbpp")
    cells = measured("refusion", metric, {task: value}, ci_low=bounds[0], ci_high=bounds[1])
    judged = judge(CLAIMS[name], Evidence(cells))
    assert (judged.verdict, judged.measured.fewest_items) == (verdict, BENCHMARKS[task].source.num_rows)


def test_a_speedup_whose_interval_holds_the_stated_one_is_open():
    cells = [one for name in DIFFUSION for one in measured(name, "tps", same(1.0))]
    ours = measured("refusion", "tps", same(18.1), ci_low=15.0, ci_high=21.0)
    assert judge(CLAIMS["P02"], Evidence([*cells, *ours])).verdict == NOT_DECIDED


def test_fused_forwards_change_no_score_and_are_marked_on_mini_tasks():
    fused = {"settings": {"fuse": "null", "release_compatible": "false"}}
    score = measured("refusion", "pass@1", {"humaneval": 78.66}, **fused)
    assert judge(CLAIMS["P05"], Evidence(score)).verdict == REPRODUCED
    rounds = {"mini": True, "num_rounds": 2}
    cells = [cell("refusion", task, "tps", 3.0, n=200, **rounds, **fused) for task in TASKS]
    cells += [cell("autoregressive", task, "tps", 1.0, n=100, **rounds) for task in TASKS]
    judged = judge(CLAIMS["P03"], Evidence(cells))
    assert (judged.mini_verdict, judged.mini.fused, judged.mini.fewest_items) == (AGREES, True, 100)
    assert all(one.mini.fused == one.mini.is_defined for one in averages(CLAIMS["P03"], Evidence(cells)))


@pytest.mark.parametrize(("ratio", "verdict"), [(18.5, REPRODUCED), (40.0, REPRODUCED), (17.9, NOT_REPRODUCED)])
def test_over_means_at_least(ratio, verdict):
    cells = [one for name in DIFFUSION for one in measured(name, "tps", same(1.0))]
    assert judge(CLAIMS["P02"], Evidence([*cells, *measured("refusion", "tps", same(ratio))])).verdict == verdict


def test_other_models_half_written_runs_and_other_machines_are_no_evidence():
    ours, theirs = measured("refusion", "tps", same(2.33)), measured("qwen3", "tps", same(1.0))
    assert judge(CLAIMS["P03"], Evidence([*ours, *theirs])).verdict == REPRODUCED
    spoilt = {
        "is a refusion of tiny, not of Qwen3-8B": [replace(one, backbone="tiny") for one in ours],
        "refusion lacks samples": [replace(one, unfinished="1 of 2") for one in ours],
        "speeds from different machines": [replace(one, hardware="another") for one in ours],
        "there is no tps of refusion on mbpp": ours[:-1],
        "refusion has 2 of the 164 items of humaneval": [
            replace(one, n=2) if one.benchmark == "humaneval" else one for one in ours
        ],
        "refusion has fused forwards": [replace(one, settings={"fuse": "true"}) for one in ours],
    }
    for reason, cells in spoilt.items():
        judged = judge(CLAIMS["P03"], Evidence([*cells, *theirs]))
        assert judged.verdict == NOT_MEASURED
        assert not judged.measured.is_defined
        assert reason in judged.reason


@pytest.mark.parametrize(
    ("ours", "bounds", "verdict"),
    [(3.0, {}, AGREES), (0.5, {}, DISAGREES), (1.1, {"ci_low": 0.2, "ci_high": 2.0}, OPEN)],
)
def test_mini_tasks_say_no_more_than_a_direction(ours, bounds, verdict):
    rounds = {"mini": True, "backbone": "qwen3", "num_rounds": 3}
    cells = [cell("refusion", task, "tps", ours, **rounds, **bounds) for task in TASKS]
    for baseline in ("autoregressive", "autoregressive_sft"):  # for the published system, and for the retrained one
        cells += [cell(baseline, task, "tps", 1.0, **rounds) for task in TASKS]
    evidence = Evidence(cells)
    judged = judge(CLAIMS["P03"], evidence)
    assert (judged.verdict, judged.measured.is_defined, judged.mini_verdict) == (NOT_MEASURED, False, verdict)
    assert judged.mini.interval.value == pytest.approx(ours)
    assert judge(CLAIMS["P12"], evidence).mini.interval.value == pytest.approx(ours)
    assert not judge(CLAIMS["P07"], evidence).mini.is_defined


def test_no_ratio_is_computed_of_speeds_of_other_numbers_of_rounds():
    cells = [
        cell(system, task, "tps", value, mini=True, backbone="qwen3", num_rounds=rounds)
        for system, value, rounds in (("refusion", 2.0, 3), ("autoregressive", 1.0, 1))
        for task in TASKS
    ]
    mini = judge(CLAIMS["P03"], Evidence(cells)).mini
    assert not mini.is_defined
    assert "do not say that the systems took turns" in mini.reason


def test_a_direction_of_speed_takes_several_rounds_and_their_interval():
    def mini(system, value, run_id):
        return [cell(system, task, "tps", value, mini=True, backbone="qwen3", run_id=run_id) for task in TASKS]

    once = [*mini("refusion", 2.0, "a"), *mini("autoregressive", 1.0, "b")]
    assert judge(CLAIMS["P03"], Evidence(once)).mini_verdict == ONE_ROUND
    for second, verdict in ((2.2, AGREES), (0.1, OPEN)):
        rounds = [*once, *mini("refusion", second, "c"), *mini("autoregressive", 1.0, "d")]
        judged = judge(CLAIMS["P03"], Evidence(rounds))
        assert judged.mini.interval.value == pytest.approx(1 + second / 2)
        assert judged.mini_verdict == verdict


@pytest.mark.parametrize(("lost", "verdict"), [(14.5, DISAGREES), (0.0, OPEN), (-1.0, AGREES)])
def test_a_loss_contradicts_that_none_is_lost(lost, verdict):
    cells = [cell("refusion", task, "accuracy", 80.0, mini=True) for task in TASKS]
    cells += [cell("refusion+recompute_kv", task, "accuracy", 80.0 + lost, mini=True) for task in TASKS]
    assert judge(CLAIMS["P24-min"], Evidence(cells)).mini_verdict == verdict


def test_the_largest_of_equal_scores_that_vary_has_no_direction():
    bounds = {"ci_low": 75.0, "ci_high": 85.0, "mini": True}
    names = ("refusion", "refusion+recompute_kv")
    judged = judge(CLAIMS["P24-max"], Evidence([cell(s, t, "accuracy", 80.0, **bounds) for s in names for t in TASKS]))
    assert judged.mini.interval.low < judged.mini.interval.value == 0 < judged.mini.interval.high
    assert judged.mini_verdict == OPEN


def test_a_claim_that_its_table_contradicts_stays_so_whatever_is_measured():
    cells = [one for name in DIFFUSION for one in measured(name, "tps", same(1.0))]
    judged = judge(CLAIMS["P02-mean"], Evidence([*cells, *measured("refusion", "tps", same(18.2))]))
    assert judged.verdict == DOES_NOT_FOLLOW
    assert judged.measured.interval.value == pytest.approx(18.2)


def test_two_runs_of_one_system_are_refused():
    with pytest.raises(StoreError, match="is there twice"):
        Evidence([cell(run_id=name, backbone="Qwen3-8B", n=BENCHMARKS["gsm8k"].source.num_rows) for name in "ab"])


def test_a_formula_needs_a_reading():
    with pytest.raises(ConfigError, match="P03"):
        replace(CLAIMS["P03"], reading="roughly")


def test_the_command_prints_and_writes_everything(write_run, tmp_path):
    samples = [sample(number, task=f"mini_{task}") for task in TASKS for number in range(3)]
    slow = [replace(one, seconds=1.0) for one in samples]
    runs = [
        write_run("ours", samples, right={"0", "1", "2"}),
        write_run("base", slow, right={"0"}, system="AR", decoder="autoregressive"),
    ]
    result = CliRunner().invoke(app, ["claims", *map(str, runs), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "132.5" in result.output
    with (tmp_path / "out" / "claims.csv").open(newline="") as stream:
        rows = {row["id"]: row for row in csv.DictReader(stream)}
    assert rows.keys() == CLAIMS.keys()
    assert (rows["P03"]["verdict"], rows["P03"]["mini_value"], rows["P03"]["mini_verdict"]) == (
        NOT_MEASURED,
        "2",
        ONE_ROUND,
    )
    assert rows["P03"]["measured_value"] == ""
    with (tmp_path / "out" / "averages.csv").open(newline="") as stream:
        times = [row for row in csv.DictReader(stream) if (row["id"], row["rule"]) == ("P03", "total time")]
    assert [row["mini_value"] for row in times] == ["2", "2"]
    text = (tmp_path / "out" / "claims.md").read_text()
    assert "geometric mean" in text
    assert "look-alikes" in text
    assert (rows["P03"]["mini_items"], rows["P03"]["mini_fused"]) == ("3", "no")
    assert f"Statements with {NO_FORMULA}" in text
    assert rows["P35"]["look"] in text


@pytest.mark.parametrize("width", [80, 110])
def test_on_a_narrow_terminal_no_word_is_broken(width):
    judged, averages = judge_all([])
    whole = "".join(table.markdown() for table in (claims_table(judged), averages_table(averages)))
    known = set(re.split(r"[\s|+]+", whole.replace("*", "")))
    lines = CliRunner().invoke(app, ["claims"], env={"COLUMNS": str(width)}).output.splitlines()
    assert max(map(len, lines)) <= width
    words = {word for line in lines if line[:1] in "│┃" for word in re.split(r"[\s│┃+*]+", line) if word}
    assert words - known <= {"Published"}


def test_the_command_needs_no_results():
    result = CliRunner().invoke(app, ["claims"], env={"COLUMNS": "140"})
    assert result.exit_code == 0
    assert "18.71 *" in result.output
    assert "no worse by more than 2 points" in " ".join(result.output.split())


def test_the_command_says_the_margin_of_sweet_spots(tmp_path):
    result = CliRunner().invoke(app, ["claims", "--margin", "0.5", "--out", str(tmp_path)], env={"COLUMNS": "140"})
    for text in (result.output, (tmp_path / "claims.md").read_text()):
        assert "no worse by more than 0.5 points" in " ".join(text.split())
