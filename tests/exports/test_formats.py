"""What other tools read of an export, and what no export holds."""

import json
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.errors import StoreError
from refusion_eval.exports import every_eval_ever, flat, hub, lm_eval
from refusion_eval.exports.source import read_exported
from refusion_eval.report.collect import Asked, collect
from refusion_eval.report.leaderboard import read_placed
from refusion_eval.results import data_frames
from refusion_eval.results.measured import read_measurements, run_measurements
from refusion_eval.store.records import STATED
from refusion_eval.store.run_store import RunReader
from tests.report import conftest as of_reports
from tests.report.conftest import LetterSources, NoSources, make_score, write_run

RUNNER = CliRunner()
SECRET = "photosynthesis quantum banana"


def make_sample(item, **changes):
    return of_reports.make_sample(item, **{"created": "2026-11-01T10:00:00.000+00:00", **changes})


def write_all(runs, out, sources=None):
    """Every format but JSON lines, by name: the files that it consists of."""
    sources = sources or LetterSources()
    return {
        "every-eval-ever": every_eval_ever.write(read_exported(runs, sources), out / "eee"),
        "lm-eval": lm_eval.write(read_exported(runs, sources), out / "lm_eval"),
        "hf": hub.write(read_exported(runs), out / "hf"),
        "csv": flat.write_csv_files(runs, out / "csv"),
        "parquet": flat.write_parquet_files(runs, out / "parquet"),
    }


def text_of(paths):
    """All that some files hold, as text; of Parquet its rows and the names of its columns."""
    return "\n".join(
        str(pyarrow.parquet.read_table(path).to_pydict()) if path.suffix == ".parquet" else path.read_text()
        for path in paths
    )


def loaded(paths):
    return [json.loads(path.read_text()) for path in paths if path.suffix == ".json"]


@pytest.fixture
def run(tmp_path):
    """Four items of eight that were asked for, of twenty; three are right, and a fifth failed."""
    samples = [
        make_sample(item, task="refusion_gsm8k", created=f"2026-11-0{item}T10:00:00.000+00:00") for item in "1234"
    ]
    samples.append(make_sample("5", task="refusion_gsm8k", error="it broke", trace=None, tokens=None, num_tokens=0))
    scores = [make_score(sample, float(sample.item_id != "2")) for sample in samples[:4]]
    extents = {"expected": {"refusion_gsm8k": 8}, "whole": {"refusion_gsm8k": 20}}
    return write_run(tmp_path / "run", samples, scores, **extents, tasks={"refusion_gsm8k": "1"})


def figures_of(run):
    return {entry.metric: entry.value for entry in run_measurements([run])}


def test_every_eval_ever_accepts_figures_and_samples_without_a_warning(run, tmp_path):
    reason = "needs every-eval-ever 0.3.0 (CONTRIBUTING.md says how to install it)"
    core = pytest.importorskip("every_eval_ever.validator.validation_core", reason=reason)
    mini = write_run(tmp_path / "mini", [make_sample("1", text="\ud800")], checkpoint="owner/name", decoder="llada")
    paths = every_eval_ever.write(read_exported([run, mini], LetterSources()), tmp_path / "eee")
    assert len(paths) == 4
    places = {path.relative_to(tmp_path / "eee").as_posix() for path in paths}
    for path in paths:
        place = path.relative_to(tmp_path / "eee").as_posix()
        report = core.validate_file(
            path,
            repo_path=place,
            available_files=places,
            read_repo_file=lambda name: (tmp_path / "eee" / name).read_text(),
            run_semantic_checks=True,
        )
        assert (report.errors, report.warnings) == ([], [])


def test_figures_of_every_eval_ever_are_read_back_as_those_of_the_table(run, tmp_path):
    paths = write_all([run], tmp_path)
    (file,) = (path for path in paths["every-eval-ever"] if path.suffix == ".json")
    for read in (read_measurements([file]), read_measurements([tmp_path / "csv" / "figures.csv"])):
        measured = run_measurements([run], hash_records=True)
        assert [(entry.metric, entry.unfinished, entry.limited, entry.records) for entry in read] == [
            (entry.metric, "4 of 8", "8 of 20", entry.records) for entry in measured
        ]
        assert [entry.value for entry in read] == [pytest.approx(entry.value, rel=1e-5) for entry in measured]
        assert read[0].settings == measured[0].settings
    (figures,) = loaded([file])
    scores = {result["evaluation_result_id"]: result["score_details"] for result in figures["evaluation_results"]}
    assert scores["accuracy"]["score"] == 75
    assert scores["tps"]["score"] == pytest.approx(figures_of(run)["tps"])


def test_a_json_file_of_another_origin_is_refused(tmp_path):
    other = tmp_path / "other.json"
    for content in ('{"results": {}}', "[]", '{"evaluation_results": [{"score_details": {"details": {"n": 1}}}]}'):
        other.write_text(content)
        with pytest.raises(StoreError, match="no export of this project"):
            read_measurements([other])


def test_lm_eval_reads_its_files_and_prints_the_same_numbers(run, tmp_path):
    from lm_eval.utils import get_file_task_name, get_results_filenames, get_sample_results_filenames, make_table

    paths = lm_eval.write(read_exported([run], LetterSources()), tmp_path)
    names = [str(path) for path in paths]
    results = json.loads(Path(*get_results_filenames(names)).read_text())
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in make_table(results).splitlines()[2:]]
    printed = {metric: (float(value), error) for *_, metric, _, value, _, error in cells}
    expected = figures_of(run)
    assert printed["acc"][0] == 0.75
    assert printed["acc"][1]
    assert all(printed[name][0] == pytest.approx(expected[name], abs=1e-4) for name in ("tps", "tpf", "latency_mean"))
    (samples,) = get_sample_results_filenames(names)
    assert get_file_task_name(Path(samples).name) == "refusion_gsm8k"
    lines = [json.loads(line) for line in Path(samples).read_text().splitlines()]
    assert [line["acc"] for line in lines] == [1, 0, 1, 1]
    assert lines[0]["resps"] == [["abce"]]
    assert lines[0]["arguments"]["gen_args_0"]["arg_0"] == "What comes next?"


def test_samples_of_an_item_share_a_document_of_lm_eval(tmp_path):
    samples = [make_sample("1", number=number) for number in range(3)]
    run = write_run(tmp_path / "run", samples, [make_score(one, float(one.key.sample == 0)) for one in samples])
    paths = lm_eval.write(read_exported([run], LetterSources()), tmp_path)
    (line,) = paths[1].read_text().splitlines()
    assert json.loads(line)["resps"] == [["abce"] * 3]
    assert json.loads(line)["acc"] == pytest.approx(1 / 3)
    assert loaded(paths)[0]["configs"]["mini_gsm8k"]["repeats"] == 3


def test_the_hub_reads_the_card_and_the_results_of_a_benchmark_that_it_ranks(run, tmp_path):
    card, results = hub.write(read_exported([run]), tmp_path)
    read = {entry.metric_type: entry for entry in ModelCard.load(card).data.eval_results}
    assert {name: entry.metric_value for name, entry in read.items()} == {
        name: value for name, value in figures_of(run).items() if name in hub.METRICS
    }
    assert (read["accuracy"].dataset_type, read["accuracy"].dataset_config) == ("openai/gsm8k", "main")
    assert read["accuracy"].metric_args["limited"] == "8 of 20"
    (entry,) = parse_eval_result_entries(yaml.safe_load(results.read_text()))
    assert (entry.dataset_id, entry.task_id, entry.value, entry.date) == ("openai/gsm8k", "gsm8k", 75, "2026-11-04")
    assert "limited: 8 of 20; unfinished: 4 of 8" in entry.notes


def test_the_hub_gets_no_result_of_a_look_alike(tmp_path):
    run = write_run(tmp_path / "run", [make_sample("1")])
    (card,) = hub.write(read_exported([run]), tmp_path)
    assert "not the real benchmark" in ModelCard.load(card).data.eval_results[0].dataset_name


def test_parquet_has_the_figures_and_samples_of_the_data_frames(run, tmp_path):
    figures, samples = flat.write_parquet_files([run], tmp_path)
    table = pyarrow.parquet.read_table(figures).to_pydict()
    assert dict(zip(table["metric"], table["value"], strict=True)) == figures_of(run)
    assert set(table["records"]) == {run_measurements([run], hash_records=True)[0].records}
    rows = pyarrow.parquet.read_table(samples).to_pylist()
    assert [(row["item_id"], row["passed"]) for row in rows] == [
        *(("1", True), ("2", False), ("3", True), ("4", True), ("5", None))
    ]


def test_every_format_says_that_a_run_is_limited_and_cut(run, tmp_path):
    for form, paths in write_all([run], tmp_path).items():
        text = text_of(paths)
        assert "8 of 20" in text, form
        assert "4 of 8" in text, form


def test_every_format_names_the_protocol(tmp_path):
    run = write_run(tmp_path / "run", [make_sample(item, protocol="mine@aaaaaaaaaaaa") for item in "12"])
    for form, paths in write_all([run], tmp_path).items():
        assert "mine@aaaaaaaaaaaa" in text_of(paths), form


def test_what_was_not_measured_is_absent_from_every_format(tmp_path):
    run = write_run(tmp_path / "run", [make_sample("1", batch_size=8), make_sample("2", batch_size=8)])
    paths = write_all([run], tmp_path)
    names = {result["evaluation_result_id"] for result in loaded(paths["every-eval-ever"])[0]["evaluation_results"]}
    assert "accuracy" in names
    assert not {"tps", "latency_mean"} & names
    (results,) = loaded(paths["lm-eval"])
    assert "tps,none" not in results["results"]["mini_gsm8k"]
    assert {entry.metric_type for entry in ModelCard.load(paths["hf"][0]).data.eval_results} == {"accuracy", "tpf"}
    for read in (flat.run_measurements([run]), read_measurements([tmp_path / "csv" / "figures.csv"])):
        assert not {"tps", "latency_mean"} & {entry.metric for entry in read}


@pytest.mark.parametrize("task", ["refusion_gpqa", "gpqa_main_zeroshot", "refusion_gpqa_diamond"])
def test_texts_of_gpqa_are_in_no_format(tmp_path, task):
    # Even if records and rows held them, which they do not.
    good = make_sample("rec1", task=task, text=SECRET)
    quoting = make_sample("rec2", task=task, text=SECRET)
    bad = make_sample("rec3", task=task, error=SECRET, trace=None, tokens=None, num_tokens=0)
    scores = [make_score(good, extracted="B", reason=SECRET), make_score(quoting, 0.0, extracted=SECRET)]
    scores.append(make_score(good, metric=STATED, extracted=SECRET, reason=SECRET))
    run = write_run(tmp_path / "run", [good, quoting, bad], scores, tasks={task: "1"})
    written = write_all([run], tmp_path / "out", LetterSources(Asked(SECRET, SECRET, SECRET)))
    lines = list(flat.json_lines([run]))
    text = text_of(path for paths in written.values() for path in paths) + "".join(lines)
    assert [word for word in SECRET.split() if word in text] == []
    assert [json.loads(line)["extracted"] for line in lines] == ["B", "[withheld]", None]
    assert not [path for path in (*written["every-eval-ever"], *written["lm-eval"]) if path.suffix == ".jsonl"]


def test_without_the_rows_of_a_benchmark_there_are_figures_and_no_samples(run, tmp_path):
    paths = write_all([run], tmp_path, NoSources())
    assert [path.suffix for path in (*paths["every-eval-ever"], *paths["lm-eval"])] == [".json", ".json"]
    assert "detailed_evaluation_results" not in loaded(paths["every-eval-ever"])[0]


def test_equal_records_give_equal_exports_and_other_records_another_hash(run, tmp_path):
    first, second = (write_all([run], tmp_path / name) for name in "ab")
    for form, paths in first.items():
        assert [path.name for path in paths] == [path.name for path in second[form]]
        assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in second[form]]
    sample = make_sample("1", task="refusion_gsm8k")
    right, wrong = (
        write_run(tmp_path / name, [sample], [make_score(sample, value)]) for name, value in (("r", 1.0), ("w", 0.0))
    )
    hashes = {entry.records for entry in run_measurements([right, wrong], hash_records=True) if entry.samples}
    assert len(hashes) == 2


def test_only_exports_and_the_leaderboard_wait_for_a_hash_of_the_records(run, tmp_path, monkeypatch):
    def hashed(reader):
        raise StoreError("the records are hashed")

    monkeypatch.setattr(RunReader, "digests", hashed)
    assert {entry.records for entry in run_measurements([run])} == {""}
    assert collect([run], NoSources()).index["cells"]
    for needing in (lambda: list(read_exported([run])), lambda: read_placed([run]), lambda: data_frames.figures([run])):
        with pytest.raises(StoreError, match="hashed"):
            needing()


def test_a_damaged_time_is_refused(tmp_path):
    run = write_run(tmp_path / "run", [make_sample("1", created="yesterday")])
    with pytest.raises(StoreError, match="the time of a sample of mini_gsm8k is damaged"):
        list(read_exported([run]))


def test_a_task_without_samples_is_left_out_and_one_under_two_settings_is_written_twice(tmp_path):
    samples = [make_sample("1"), make_sample("1", settings_hash="other", settings={"slot_size": 4})]
    run = write_run(tmp_path / "run", samples, tasks={"mini_gsm8k": "1", "mini_math": "1"})
    assert [task.settings for task in read_exported([run])] == [
        {"slot_size": "4"},
        {"slot_size": "2", "tau_slot": "0.6"},
    ]
    paths = write_all([run], tmp_path)
    assert len(loaded(paths["every-eval-ever"])) == 2
    assert set(loaded(paths["lm-eval"])[0]["results"]) == {"mini_gsm8k-other", "mini_gsm8k-settings"}


@pytest.mark.parametrize("form", ["every-eval-ever", "hf", "lm-eval", "csv", "parquet"])
def test_the_command_prints_the_files_of_a_format(tmp_path, form):
    run = write_run(tmp_path / "run", [make_sample("1")])
    (tmp_path / "out" / form).mkdir(parents=True)  # as if an export of that format alone lay there
    answer = RUNNER.invoke(app, ["export", str(run), "--format", form, "--out", str(tmp_path / "out")])
    assert answer.exit_code == 0
    files = [Path(line) for line in answer.stdout.splitlines()]
    assert files
    assert all(file.is_file() and file.is_relative_to(tmp_path / "out") for file in files)


@pytest.mark.parametrize(
    ("changes", "engine"),
    [
        ({}, ("refusion_eval", "0.1")),
        ({"decoder": "stock_generate", "versions": {"transformers": "5.1"}}, ("transformers", "5.1")),
        ({"arguments": {"backend": "transformers"}, "versions": {"transformers": "5.1"}}, ("transformers", "5.1")),
        ({"decoder": "server", "settings": {"server": {"name": "vLLM", "version": "0.9"}}}, ("vLLM", "0.9")),
    ],
)
def test_exports_name_the_engine_that_decoded(tmp_path, changes, engine):
    run = write_run(tmp_path / "run", [make_sample("1")], **changes)
    paths = write_all([run], tmp_path)
    (figures,) = loaded(paths["every-eval-ever"])
    told = figures["model_info"]["inference_engine"]
    assert (told["name"], told["version"]) == engine
    (results,) = loaded(paths["lm-eval"])
    name = "refusion" if engine[0] == "refusion_eval" else engine[0]
    assert (results["config"]["model"], results["model_source"]) == (name, name)


@pytest.mark.parametrize("task", ["refusion_hendrycks_math", "refusion_bbh", "refusion_mmlu_redux"])
def test_a_benchmark_of_several_configurations_names_none(tmp_path, task):
    benchmark = task.removeprefix("refusion_")
    run = write_run(tmp_path / "run", [make_sample("1", task=task, benchmark=benchmark)], tasks={task: "1"})
    paths = write_all([run], tmp_path)
    (card,) = (path for path in paths["hf"] if path.name == "README.md")
    assert {result.dataset_config for result in ModelCard.load(card).data.eval_results} == {None}
    (results,) = loaded(paths["lm-eval"])
    assert results["configs"][task]["dataset_name"] is None


def test_examples_before_questions_are_told_of_own_tasks_alone(tmp_path):
    samples = [make_sample("1"), make_sample("1", task="gsm8k_cot", benchmark="gsm8k_cot")]
    run = write_run(tmp_path / "run", samples, tasks={"mini_gsm8k": "1", "gsm8k_cot": "1"})
    (results,) = loaded(lm_eval.write(read_exported([run], LetterSources()), tmp_path / "lm_eval"))
    assert results["n-shot"] == {"mini_gsm8k": 0}
    assert {name: config["num_fewshot"] for name, config in results["configs"].items()} == {
        "mini_gsm8k": 0,
        "gsm8k_cot": None,
    }


def test_the_name_of_a_speed_on_the_hub_has_its_marks(tmp_path):
    samples = [make_sample("1")]
    extents = {"expected": {"mini_gsm8k": 1}, "whole": {"mini_gsm8k": 9}}
    run = write_run(tmp_path / "run", samples, load=8.0, **extents)
    hub.write(read_exported([run]), tmp_path / "hf")
    results = ModelCard.load(tmp_path / "hf" / "run" / "README.md").data.eval_results
    names = {result.metric_type: result.metric_name for result in results}
    assert names["tps"] == "tps, tokens/s, limited 1 of 9, 1 cut short, slowed, one round"
    assert names["accuracy"] == "accuracy, percent, limited 1 of 9, 1 cut short"
