"""Records and scores of hand-made runs -> rows, CSV and summary."""

import csv
import io
import itertools
import math
from dataclasses import replace
from statistics import stdev

import pytest
from rich.console import Console

from refusion_eval.errors import StoreError
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.measurement import notes_of
from refusion_eval.results.metric_list import UNSTATED
from refusion_eval.results.results_file import read_csv, write_csv
from refusion_eval.results.tables import summary, summary_table
from refusion_eval.store.manifest import Hardware
from refusion_eval.store.records import STATED, ScoreRow
from refusion_eval.store.run_store import Run, RunStore

OTHER_MACHINE = Hardware(cpu="Faster CPU", cores=64, threads=64)


def score_of(sample, passed, **changes):
    fields = {"key": sample.key, "item_id": sample.item_id, "scorer": "test 1", "value": float(passed)}
    return ScoreRow(**{**fields, "extracted": str(passed), **changes})


@pytest.fixture
def write_run(tmp_path, make_manifest):
    """Writes samples and scores as one run and returns its directory."""

    def write(name, samples, scores=(), **changes):
        with RunStore.open(tmp_path / name, make_manifest(**changes)) as store:
            store.note(store.process_id, round=1)
            for sample in samples:
                store.append(sample)
            store.append_scores(list(scores))
        return tmp_path / name

    return write


@pytest.fixture
def two_systems(write_run, make_sample):
    """ReFusion twice as fast as its autoregressive backbone on ten items, right on six of them."""
    ours = [make_sample(i, num_tokens=20, tokens=None, num_forwards=5, seconds=0.5) for i in range(10)]
    base = [make_sample(i, num_tokens=20, tokens=None, num_forwards=20, seconds=1.0, trace=None) for i in range(10)]
    scores = [score_of(sample, number < 6) for number, sample in enumerate(ours)]
    return [
        write_run("refusion", ours, scores),
        write_run("ar", base, [score_of(s, True) for s in base], system="AR", decoder="autoregressive"),
    ]


def figures(rows, task="mini_gsm8k", run_id="refusion"):
    return {row.metric: row for row in rows if row.task == task and row.run_id == run_id}


def test_one_run_gives_every_metric_with_its_interval(two_systems):
    rows = figures(run_measurements(two_systems))
    expected = {
        "accuracy": 60.0,
        "extracted": 100.0,
        "tps": 40.0,
        "tps_mean": 40.0,
        "latency_mean": 0.5,
        "latency_p50": 0.5,
        "latency_p95": 0.5,
        "forwards_per_second": 10.0,
        "speedup": 2.0,
        "tpf": 4.0,
        "tpf_canvas": 0.4,
        "tokens_mean": 20.0,
        "tokens_no_eos_mean": 19.0,
        "tokens_canvas_mean": 2.0,
        "forwards_mean": 5.0,
        **dict.fromkeys(("cut", "collapsed", "empty", "repeating", "special_tokens", "other_script"), 0),
    }
    assert {metric: row.value for metric, row in rows.items()} == expected
    assert rows["accuracy"].ci_low < 60.0 < rows["accuracy"].ci_high
    assert (rows["tps"].n, rows["tps"].tokens, rows["tps"].forwards, rows["tps"].seconds) == (10, 200, 50, 5.0)
    assert rows["tps"].settings == {"tau_slot": "0.9", "slot_size": "4"}
    assert all(row.mini and "not the real benchmark" in row.note for row in rows.values())


def test_the_release_figure_is_there_when_every_trace_has_one(write_run, make_sample):
    trace = [
        ["forward", 0, "plan", 8, 0],
        ["select", 0, "slot", [0, 4], [0.9, 0.8], [0, 4]],
        ["forward", 1, "verify", 8, 4],
        ["fix", 1, [0, 1, 2, 3], [1, 1, 1, 1]],
    ]
    rows = figures(
        run_measurements([write_run("refusion", [make_sample(1, trace=trace), make_sample(2, trace=trace)])])
    )
    assert rows["tpf_release"].value == 2.0


def test_bandwidth_utilisation_needs_a_measured_roofline(write_run, make_sample):
    samples = [make_sample(item, seconds=1.0, trace=[["forward", 0, "plan", 1, 100]]) for item in (1, 2)]
    roofline = {"weight_bytes": 1e6, "cache_bytes_per_row": 1e4, "copy_bytes_per_second": 4e6}
    with_roofline = figures(run_measurements([write_run("refusion", samples, roofline=roofline)]))
    assert with_roofline["mbu"].value == 50.0


def test_a_continued_run_is_divided_by_the_bandwidth_of_each_process(write_run, make_sample):
    roofline = {"weight_bytes": 1e6, "cache_bytes_per_row": 0}
    trace = [["forward", 0, "plan", 1, 0]]
    for item, bandwidth in ((1, 2e6), (2, 4e6)):
        of_process = {"roofline": roofline | {"copy_bytes_per_second": bandwidth}}
        run_dir = write_run("refusion", [make_sample(item, seconds=1.0, trace=trace)], **of_process)
    assert figures(run_measurements([run_dir]))["mbu"].value == pytest.approx(100 * (0.5 + 0.25) / 2)


def test_errors_are_counted_and_never_scored_as_wrong(write_run, make_sample):
    good, bad = make_sample(1), make_sample(2, text="", error="out of memory")
    rows = figures(run_measurements([write_run("refusion", [good, bad], [score_of(good, True)])]))
    assert rows["accuracy"].value == 100.0
    assert rows["accuracy"].n == 1
    assert rows["accuracy"].errors == 1
    assert "1 samples failed and are in no figure" in rows["accuracy"].note


@pytest.mark.parametrize(("tier", "is_told"), [("A", False), ("none", True)])
def test_programs_without_isolation_are_told_in_csv_and_table(write_run, make_sample, tmp_path, tier, is_told):
    programs = [make_sample(item, task="mini_mbpp") for item in (1, 2)]
    others = [make_sample(item) for item in (1, 2)]
    scores = [score_of(programs[0], True, tier="A"), score_of(programs[1], True, tier=tier)]
    rows = run_measurements(
        [write_run("refusion", [*programs, *others], [*scores, *(score_of(s, True) for s in others)])]
    )
    told = {row.task for row in rows if "ran without isolation" in row.note}
    assert told == ({"mini_mbpp", "mean"} if is_told else set())
    write_csv(rows, tmp_path / "rows.csv")
    for source in (rows, read_csv(tmp_path / "rows.csv")):
        table = summary_table(summary(source))
        lines = {row.cells[0].text: row.cells[1].text for row in table.lines}
        assert lines["mini_mbpp"] == ("ReFusion [no isolation]" if is_told else "ReFusion")
        assert lines["mini_gsm8k"] == "ReFusion"
        assert ("No isolation: programs ran without" in table.markdown()) == is_told


def test_a_task_with_nothing_but_errors_still_has_a_row(write_run, make_sample):
    rows = run_measurements([write_run("refusion", [make_sample(1, text="", error="x")])])
    assert len(rows) == 1
    assert math.isnan(rows[0].value)
    assert rows[0].errors == 1


def test_samples_without_a_score_are_told(write_run, make_sample):
    samples = [make_sample(1), make_sample(2)]
    rows = figures(run_measurements([write_run("refusion", samples, [score_of(samples[0], True)])]))
    assert rows["accuracy"].n == 0
    assert math.isnan(rows["accuracy"].value)  # not that of the samples that happened to be judged
    assert "1 samples have no verdict" in rows["accuracy"].note


def test_a_sample_that_nothing_can_judge_is_wrong_and_named(write_run, make_sample):
    samples = [make_sample(1), make_sample(2)]
    scores = [score_of(samples[0], True), replace(score_of(samples[1], False), verdict="error")]
    rows = figures(run_measurements([write_run("refusion", samples, scores)]))
    assert (rows["accuracy"].value, rows["accuracy"].n) == (50.0, 2)
    assert f"no verdict was possible, which counts as wrong: {samples[1].item_id}" in rows["accuracy"].note


def test_the_later_of_two_scorers_counts_and_a_mixture_is_told(write_run, make_sample):
    samples = [make_sample(1), make_sample(2)]
    scores = [score_of(sample, False) for sample in samples] + [score_of(samples[0], True, scorer="test 2")]
    rows = figures(run_measurements([write_run("refusion", samples, scores)]))
    assert rows["accuracy"].value == 50.0
    assert "judged by 2 scorers (test 1, test 2)" in rows["accuracy"].note


def test_samples_have_their_mean_with_its_spread_pass_at_k_and_a_majority(write_run, make_sample):
    right = [(True, False, True, True), (False, False, True, False)]
    samples = [[make_sample(item, sample=number) for number in range(4)] for item in range(2)]
    scores = [score_of(samples[item][n], right[item][n], extracted=f"{n % 3}") for item in range(2) for n in range(4)]
    rows = run_measurements([write_run("refusion", [*samples[0], *samples[1]], scores)])
    of_samples = figures(rows)
    average = of_samples["avg@4"]
    assert (average.value, average.n, average.samples) == (50.0, 2, 8)
    assert average.interval == of_samples["accuracy"].interval
    assert (average.num_seeds, average.seed_sd) == (4, pytest.approx(stdev([50, 0, 100, 50])))
    assert (of_samples["accuracy"].num_seeds, of_samples["accuracy"].seed_sd) == (1, average.seed_sd)
    assert of_samples["pass@2"].value == pytest.approx((1.0 + 0.5) * 50)
    assert of_samples["pass@4"].value == 100.0
    assert of_samples["majority@4"].value == 50.0  # the second item's most frequent answer, 0, is wrong
    table = summary_table(summary(rows))
    assert [name for name in table.columns if "@" in name] == ["avg@4 %", "pass@2 %", "pass@4 %", "majority@4 %"]
    assert "50.0 \u00b1 40.8" in [cell.text for cell in table.lines[0].cells]
    assert "avg@n: the mean over n samples" in " ".join(table.notes)


def test_a_mean_over_tasks_has_the_spread_of_that_mean(write_run, make_sample):
    tasks = ("mini_gsm8k", "mini_mbpp")
    samples = [make_sample(item, task=task, sample=n) for task in tasks for item in range(2) for n in range(2)]
    scores = [score_of(one, one.key.sample == 0 or one.key.task == tasks[0]) for one in samples]
    mean = figures(run_measurements([write_run("refusion", samples, scores)]), "mean")["avg@2"]
    assert (mean.value, mean.num_seeds, mean.seed_sd) == (75.0, 2, pytest.approx(stdev([100, 50])))


def test_a_mean_over_tasks_with_other_numbers_of_samples_has_no_spread(write_run, make_sample):
    samples = [make_sample(1, task="mini_gsm8k", sample=n) for n in range(2)] + [make_sample(1, task="mini_mbpp")]
    scores = [score_of(one, one.key.sample == 0) for one in samples]
    mean = figures(run_measurements([write_run("refusion", samples, scores)]), "mean")["accuracy"]
    assert (mean.value, mean.seed_sd) == (75.0, 0.0)


def test_code_has_pass_at_k_and_other_tasks_a_majority(write_run, make_sample):
    code = [make_sample(1, task="mini_mbpp", sample=number) for number in range(5)]
    text = [make_sample(1, sample=number) for number in range(3)]
    scores = [score_of(sample, number == 0) for number, sample in enumerate(code)]
    scores += [score_of(sample, sample.key.sample > 0, extracted="a" if sample.key.sample else "b") for sample in text]
    rows = run_measurements([write_run("refusion", [*code, *text], scores)])
    of_code, of_text = figures(rows, "mini_mbpp"), figures(rows)
    assert (of_code["pass@1"].value, of_code["pass@2"].value, of_code["pass@5"].value) == (20.0, 40.0, 100.0)
    assert "majority@5" not in of_code
    assert of_text["majority@3"].value == 100.0
    assert of_text["accuracy"].value == pytest.approx(200 / 3)
    assert (of_text["accuracy"].n, of_text["accuracy"].samples) == (1, 3)


def test_a_metric_that_a_scorer_names_has_a_row_of_its_own(write_run, make_sample):
    samples = [make_sample(1), make_sample(2)]
    scores = [score_of(samples[0], True, metric="strict"), score_of(samples[1], False, metric="strict")]
    assert figures(run_measurements([write_run("refusion", samples, scores)]))["strict"].value == 50.0


def test_two_rules_of_one_task_stand_side_by_side_and_right_texts_without_an_answer_are_told(write_run, make_sample):
    samples = [make_sample(item, task="refusion_math_release", benchmark="math") for item in range(4)]
    scores = [score_of(sample, item < 3) for item, sample in enumerate(samples)]
    for item, sample in enumerate(samples):
        scores.append(score_of(sample, item < 1, metric=STATED, extracted=None if item == 2 else "2"))
    rows = run_measurements([write_run("refusion", samples, scores)])
    by_metric = figures(rows, "refusion_math_release")
    values = {name: by_metric[name].value for name in ("accuracy", STATED, UNSTATED)}
    assert values == {"accuracy": 75, STATED: 25, UNSTATED: 25}
    table = summary_table(summary(rows))
    assert "last %" in table.columns
    (note,) = table.notes
    assert (
        "Right by any formula, but without a box or a stated answer: ReFusion 25.0 % of refusion_math_release." in note
    )


def test_thoughts_have_figures_and_a_column_only_where_there_are_any(write_run, make_sample):
    plain = [make_sample(item) for item in range(2)]
    thinking = [
        make_sample(0, num_thought_tokens=1, cut_in_thought=False),
        make_sample(1, num_thought_tokens=3, cut_in_thought=True),
        *(make_sample(item) for item in (2, 3)),
    ]
    without = run_measurements([write_run("plain", plain)])
    assert not any("thought" in figure.metric or "answer_tokens" in figure.metric for figure in without)
    rows = run_measurements([write_run("refusion", thinking)])
    by_metric = figures(rows)
    assert by_metric["cut_in_thought"].value == 25
    assert by_metric["thought_tokens_mean"].value == 1
    assert by_metric["answer_tokens_mean"].value == 2
    assert "Cut in thought %" in summary_table(summary(rows)).columns
    assert "Cut in thought %" not in summary_table(summary(without)).columns


def test_batched_and_warm_up_samples_have_no_speed_but_count_otherwise(write_run, make_sample):
    samples = [make_sample(1, batch_size=8), make_sample(2, warm=False)]
    rows = figures(run_measurements([write_run("refusion", samples)]))
    assert "tps" not in rows
    assert rows["tpf"].n == 2
    assert rows["tpf"].batch_size == "1|8"
    assert "no speed" in rows["tpf"].note


def test_a_run_over_two_machines_has_no_speed_and_says_so(write_run, make_sample):
    write_run("refusion", [make_sample(1)])
    rows = figures(run_measurements([write_run("refusion", [make_sample(2)], hardware=OTHER_MACHINE)]))
    assert "tps" not in rows
    assert "2 different machines" in rows["tpf"].note
    assert "Faster CPU" in rows["tpf"].hardware


def test_no_speedup_between_machines_and_the_row_says_so(write_run, make_sample, two_systems):
    slow = write_run("slow", [make_sample(1)], decoder="autoregressive", hardware=OTHER_MACHINE)
    rows = figures(run_measurements([two_systems[0], slow]))
    assert "speedup" not in rows
    assert "different machines" in rows["tps"].note


def test_no_speedup_over_a_run_that_took_no_turns(two_systems, monkeypatch):
    turns = itertools.cycle((1, 2))
    monkeypatch.setattr(Run, "round", lambda run, _: next(turns) if run.run_id == "refusion" else 1)
    rows = figures(run_measurements(two_systems))
    assert "speedup" not in rows
    assert "no speedup over ar: one was timed in 1 rounds and the other in 2" in rows["tps"].note


def test_several_possible_baselines_must_be_named(two_systems, write_run, make_sample):
    retrained = write_run("sft", [make_sample(i, seconds=4.0) for i in range(12)], decoder="autoregressive")
    rows = figures(run_measurements([*two_systems, retrained]))
    assert "speedup" not in rows
    assert "(ar, sft); name one" in rows["tps"].note
    named = figures(run_measurements([*two_systems, retrained], baseline="sft"))
    assert named["speedup"].value == pytest.approx(40 / (3 / 4))
    assert "10 common items, 2 others left out" in named["speedup"].note
    with pytest.raises(StoreError, match="none of the runs"):
        run_measurements(two_systems, baseline="sft")


def test_another_dtype_is_no_baseline(two_systems, write_run, make_sample):
    half = write_run("half", [make_sample(1)], decoder="autoregressive", dtype="bfloat16")
    rows = figures(run_measurements([two_systems[0], half]))
    assert "speedup" not in rows
    assert "no autoregressive run of the same backbone, dtype, device" in rows["tps"].note
    named = figures(run_measurements([two_systems[0], half], baseline="half"))
    assert "dtype differ" in named["tps"].note


def test_a_speedup_says_where_the_kernels_of_attention_differ(two_systems, write_run, make_sample):
    samples = [make_sample(i, seconds=4.0) for i in range(10)]
    flash = write_run("flash", samples, decoder="autoregressive", attention="flash")
    rows = figures(run_measurements([two_systems[0], flash]))
    assert "attention by other kernels (sdpa against flash)" in rows["speedup"].note
    alone = figures(run_measurements([flash]), run_id="flash")
    assert "flash-attn computed causal forwards" in alone["tps"].note
    assert "kernels" not in figures(run_measurements(two_systems))["speedup"].note


def test_the_mean_weighs_tasks_equally_and_keeps_mini_apart(write_run, make_sample):
    samples = [make_sample(i) for i in range(4)] + [make_sample(i, task="mini_mbpp") for i in range(2)]
    samples += [make_sample(0, task="refusion_gsm8k")]
    scores = [score_of(sample, sample.key.task == "mini_mbpp") for sample in samples]
    rows = figures(run_measurements([write_run("refusion", samples, scores)]), "mean")
    assert rows["accuracy"].value == 50.0
    assert rows["accuracy"].n == 6
    assert rows["accuracy"].mini
    assert "unweighted mean over 2 tasks (mini_gsm8k, mini_mbpp)" in rows["accuracy"].note
    assert rows["tps"].settings["slot_size"] == "4"


def test_a_mean_of_tokens_per_forward_is_all_tokens_by_all_forwards(write_run, make_sample):
    sizes = [("mini_gsm8k", i, 60, 2 + i % 2) for i in range(8)] + [("mini_mbpp", i, 50, 25 + i) for i in range(6)]
    samples = [
        make_sample(number, task=task, num_tokens=num_tokens, tokens=None, num_forwards=num_forwards)
        for task, number, num_tokens, num_forwards in sizes
    ]
    rows = run_measurements([write_run("refusion", samples)])
    mean = figures(rows, "mean")["tpf"]
    assert mean.value == pytest.approx((8 * 60 + 6 * 50) / sum(sample.num_forwards for sample in samples))
    assert mean.ci_low < mean.value < mean.ci_high < 8
    assert mean.note.count("all tokens by all forwards of 2 tasks (mini_gsm8k, mini_mbpp)") == 1
    notes = notes_of(rows)
    assert "Mean TPF: all tokens of the tasks by all their forwards." in notes
    (least,) = [note for note in notes if "none takes fewer than 2 forwards" in note]
    assert "have 50 to 60 tokens" in least


def test_a_metric_that_a_task_lacks_has_no_mean(write_run, make_sample):
    samples = [make_sample(1), make_sample(1, task="mini_arc_challenge", batch_size=4)]
    rows = figures(run_measurements([write_run("refusion", samples)]), "mean")
    assert "tpf" in rows
    assert "tps" not in rows


def test_two_settings_of_one_task_are_two_groups_of_rows_without_a_mean(write_run, make_sample):
    first, other = make_sample(1), make_sample(1, settings={"tau_slot": 0.5})
    other = replace(other, key=replace(other.key, settings_hash="other"))
    rows = run_measurements([write_run("refusion", [first, other, make_sample(1, task="mini_mbpp")])])
    of_task = [row for row in rows if row.task == "mini_gsm8k" and row.metric == "tpf"]
    assert sorted(row.settings["tau_slot"] for row in of_task) == ["0.5", "0.9"]
    systems = [line.system for line in summary(rows) if line.task == "mini_gsm8k"]
    assert sorted(systems) == ["ReFusion (slot_size=4, tau_slot=0.9)", "ReFusion (tau_slot=0.5)"]
    assert not [row for row in rows if row.task == "mean"]


def test_equal_records_give_equal_bytes_in_whatever_order_they_came(tmp_path, write_run, make_sample, two_systems):
    first = [make_sample(i, seconds=0.1 * (i + 1)) for i in range(6)]
    written = []
    for order in (first, first[::-1]):
        run = write_run(f"{len(written)}/run", order, [score_of(sample, int(sample.item_id) % 2) for sample in order])
        write_csv(run_measurements([run, two_systems[1]]), tmp_path / f"{len(written)}.csv")
        written.append((tmp_path / f"{len(written)}.csv").read_bytes())
    assert written[0] == written[1]


def test_the_csv_has_the_documented_columns_in_order(tmp_path, two_systems):
    write_csv(run_measurements(two_systems), tmp_path / "table.csv")
    header = next(csv.reader((tmp_path / "table.csv").open()))
    start = "run_id,system,backbone,task,n,metric,value,ci_low,ci_high,unit,batch_size,dtype,device"
    assert ",".join(header).startswith(start)
    assert header[13:18] == ["setting_slot_size", "setting_tau_slot", "forwards", "tokens", "seconds"]


def test_rows_survive_the_csv(tmp_path, two_systems):
    rows = run_measurements(two_systems)
    write_csv(rows, tmp_path / "a.csv")
    write_csv(read_csv(tmp_path / "a.csv"), tmp_path / "b.csv")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    assert len(read_csv(tmp_path / "a.csv")) == len(rows)


def test_a_csv_of_another_kind_is_refused(tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        StoreError, match="is no file of results, a row lacks the columns run_id, system, backbone and 21 "
    ):
        read_csv(tmp_path / "other.csv")
    with pytest.raises(StoreError, match="cannot be read"):
        read_csv(tmp_path / "absent.csv")


def test_two_runs_of_one_name_are_refused(write_run, make_sample):
    paths = [write_run(f"{folder}/run", [make_sample(1)]) for folder in "ab"]
    with pytest.raises(StoreError, match="two run directories are called run"):
        run_measurements(paths)


def test_the_summary_has_one_line_a_task_and_system(two_systems):
    lines = summary(run_measurements(two_systems))
    assert [(line.system, line.measurement("accuracy").value, line.measurement("tps").value) for line in lines] == [
        ("AR", 100, 20),
        ("ReFusion", 60, 40),
    ]
    assert lines[0].measurement("speedup") is None
    assert lines[1].measurement("speedup").value == 2.0


def renderings(lines):
    """Terminal and Markdown, each as one line of text."""
    stream = io.StringIO()
    Console(file=stream, width=200).print(summary_table(lines).rich())
    return [" ".join(text.split()) for text in (stream.getvalue(), summary_table(lines).markdown())]


def test_both_renderings_say_mini_and_show_the_figures(two_systems):
    lines = summary(run_measurements(two_systems))
    for text in renderings(lines):
        assert "mini_gsm8k" in text
        assert "not the real benchmarks" in text
        assert "60.0 [" in text
        assert "2.00 [2.00, 2.00]" in text


def test_both_renderings_say_that_there_were_errors(write_run, make_sample):
    lines = summary(run_measurements([write_run("refusion", [make_sample(1), make_sample(2, text="", error="x")])]))
    for text in renderings(lines):
        assert "ReFusion [1 errors" in text
        assert "1 samples are errors and in no figure" in text


@pytest.mark.parametrize(
    ("letters", "told"), [("C" * 16 + "ABDABD", "16 of 22 are C"), ("C" * 15 + "ABDABDA", ""), ("C" * 9, "")]
)
def test_answers_of_which_most_are_one_letter_are_a_caution(write_run, make_sample, letters, told):
    samples = [make_sample(number, task="mini_gpqa") for number in range(len(letters))]
    scores = [score_of(one, letter == "A", extracted=letter) for one, letter in zip(samples, letters, strict=True)]
    figure = figures(run_measurements([write_run("guesses", samples, scores)]), "mini_gpqa", "guesses")["accuracy"]
    assert figure.one_answer == told
    assert ([one.amount for one in figure.cautions if one.kind == "one answer"] == [told]) == bool(told)


def test_answers_that_collapsed_are_counted_by_their_signs_and_are_a_caution(write_run, make_sample):
    fine = "He has 3 apples and buys 4. So he has 3 + 4 = 7 apples. The answer is 7."
    texts = [
        fine,
        fine,
        "",
        "Das Das Das " * 9,
        "The answer is 7.<|mask|>",
        "答案是 7。一共有七个苹果",
        "<think>Well</think>\n",
    ]
    samples = [make_sample(number, text=text, num_forwards=2) for number, text in enumerate(texts)]
    samples.append(make_sample(len(texts), text=fine, stop="length"))
    by_metric = figures(run_measurements([write_run("run", samples)]), "mini_gsm8k", "run")
    found = {name: by_metric[name].value for name in ("cut", "collapsed", "empty", "repeating", "special_tokens")}
    assert found == {"cut": 12.5, "collapsed": 62.5, "empty": 25, "repeating": 12.5, "special_tokens": 12.5}
    assert by_metric["other_script"].value == 12.5
    told = "5 of 8: 2 empty, 1 repeating, 1 with special tokens, 1 in another script"
    assert by_metric["tpf"].collapsed == told
    assert [one.label for one in by_metric["tpf"].cautions if one.kind == "collapsed"] == ["collapsed 5 of 8"]


def test_the_script_of_most_answers_is_the_one_that_was_asked_for(write_run, make_sample):
    samples = [make_sample(number, text="Ответ: семь яблок") for number in range(3)]
    samples.append(make_sample(3, text="答案是七个苹果"))
    assert figures(run_measurements([write_run("run", samples)]), "mini_gsm8k", "run")["other_script"].value == 25
