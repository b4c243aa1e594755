"""Which prompts were sent, and which responses were cut short: in figures, tables and CSV files."""

from refusion_eval.benchmarks import OTHER, RELEASE
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.measurement import problems
from refusion_eval.results.results_file import read_csv, write_csv
from refusion_eval.results.tables import summary, summary_table
from tests.results.conftest import sample


def asked(number, prompts, **changes):
    suffix = "_release" if prompts == RELEASE else ""
    return sample(number, task=f"refusion_gsm8k{suffix}", benchmark="gsm8k", prompts=prompts, **changes)


def test_figures_of_several_prompts_must_not_stand_in_one_table(write_run):
    figures = [
        figure
        for name in ("ours", RELEASE)
        for figure in run_measurements([write_run(name, [asked(number, name) for number in range(3)], right={"0"})])
    ]
    assert {figure.prompts for figure in figures} == {"ours", RELEASE}
    assert any(
        "gsm8k was asked with several prompts (ours in ours, release in release)" in it for it in problems(figures)
    )


def test_a_mean_is_over_tasks_with_the_same_prompts(write_run):
    samples = [asked(number, prompts) for prompts in ("ours", RELEASE) for number in range(3)]
    assert not any(figure.is_mean for figure in run_measurements([write_run("run", samples, right={"0"})]))


def test_the_table_says_whose_prompts_were_sent_and_counts_what_was_cut_short(write_run):
    samples = [asked(number, RELEASE, stop="length" if number else "eos") for number in range(3)]
    text = summary_table(summary(run_measurements([write_run("run", samples, right={"0"})]))).markdown()
    assert "ReFusion [2 cut short]" in text
    assert "asked with the prompts of ReFusion's release" in text
    assert "may lack their answer" in text


def test_prompts_that_lm_eval_changed_are_marked(write_run):
    figures = run_measurements([write_run("run", [asked(number, OTHER) for number in range(3)], right={"0"})])
    assert "[other prompts]" in summary_table(summary(figures)).markdown()


def test_a_task_on_no_benchmark_has_no_other_prompts(write_run):
    samples = [sample(number, task="sums", prompts=OTHER) for number in range(3)]
    figures = run_measurements([write_run("run", samples, right={"0"})])
    assert "other prompts" not in summary_table(summary(figures)).markdown().lower()


def test_the_csv_has_both_columns_where_they_are_used_and_only_there(write_run, tmp_path):
    for name, stop, columns in ((RELEASE, "length", {"prompts", "num_cut"}), ("ours", "eos", set())):
        figures = run_measurements(
            [write_run(name, [asked(number, name, stop=stop) for number in range(3)], right={"0"})]
        )
        path = tmp_path / f"{name}.csv"
        write_csv(figures, path)
        assert {"prompts", "num_cut"} & set(path.read_text().splitlines()[0].split(",")) == columns
        again = read_csv(path)
        assert {(figure.prompts, figure.num_cut) for figure in again} == {
            (figure.prompts, figure.num_cut) for figure in figures
        }
