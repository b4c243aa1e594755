"""Recorded texts under other answer filters: what is scored, written, reported and refused."""

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.errors import ConfigError, DataError, StoreError
from refusion_eval.evaluation.loop import evaluate
from refusion_eval.lm_eval_plugin import hooks as task_hooks
from refusion_eval.lm_eval_plugin.filters import find_filter
from refusion_eval.results.compare import compare_runs
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.tables import summary, summary_table
from refusion_eval.runs.job import Detokenizer, doc_hash
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.scoring.filters import OURS
from refusion_eval.scoring.judge import judge_texts
from refusion_eval.scoring.rescore import canvas_text, rescore_command
from refusion_eval.store.manifest import Manifest
from refusion_eval.store.records import Sample, SampleKey, ScoreRow
from refusion_eval.store.run_store import Run, RunReader, RunStore
from refusion_eval.types import Trace

MANIFEST = Manifest(
    system="ReFusion", backbone="tiny", decoder="refusion", settings={}, checkpoint="embedded", tasks={}, seed=0,
    dtype="float32", device="cpu", attention="sdpa", package_version="1",
)  # fmt: skip


def documents(benchmark: str, data: Path | None = None) -> list[dict[str, Any]]:
    hook = getattr(task_hooks, f"{benchmark}{'' if data else '_mini'}_rows")
    return list(hook(data_dir=data)["test"])


def sample_of(task: str, benchmark: str, document: dict[str, Any], number: int, text: str, **more: Any) -> Sample:
    key = SampleKey(task, "1.0", doc_hash(document), "prompt", 0, "settings")
    item_id = BENCHMARKS[benchmark].id_of(document, number) if benchmark in BENCHMARKS else str(number)
    return Sample(key=key, benchmark=benchmark, item_id=item_id, text=text, **more)


def record(run_dir: Path, samples: Sequence[Sample], scores: Sequence[ScoreRow] = ()) -> Path:
    with RunStore.open(run_dir, MANIFEST) as store:
        for sample in samples:
            store.append(sample)
        store.append_scores(scores)
    return run_dir


def record_mini(run_dir: Path, benchmark: str, texts: Sequence[str], *, scored: bool = True) -> Path:
    """A run of one mini task whose first items got these texts, judged as a run judges them."""
    rows = documents(benchmark)[: len(texts)]
    pairs = list(enumerate(zip(rows, texts, strict=True)))
    samples = [sample_of(f"mini_{benchmark}", benchmark, row, number, text) for number, (row, text) in pairs]
    judged = judge_texts(BENCHMARKS[benchmark], list(zip(rows, texts, strict=True)), workers=1)
    scores = [
        ScoreRow(
            key=sample.key, item_id=sample.item_id, scorer="then", value=float(it.passed), extracted=it.extracted,
            verdict=it.verdict,
        )
        for sample, it in zip(samples, judged, strict=True)
    ]  # fmt: skip
    return record(run_dir, samples, scores if scored else ())


def rescore(run_dirs: Path | Sequence[Path], filter_name: str, **more: Any) -> tuple[int, str]:
    """Returns the number of unexpected verdicts and what was printed."""
    printed = io.StringIO()
    dirs = [run_dirs] if isinstance(run_dirs, Path) else run_dirs
    differing = rescore_command(
        dirs, find_filter(filter_name), console=Console(file=printed, width=200), workers=1, **more
    )
    return differing, printed.getvalue()


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def figures_of(task: str, printed: str) -> list[str]:
    """The cells behind task and system in the printed table."""
    (line,) = (line for line in printed.splitlines() if line.startswith(f"│ {task} "))
    return [cell.strip() for cell in line.split("│")[3:-1]]


def read_run(run_dir: Path) -> Run:
    with RunReader.open(run_dir) as reader:
        return reader.run


def contents(run_dir: Path) -> tuple[list[Sample], list[ScoreRow]]:
    with RunReader.open(run_dir) as run:
        return list(run.samples()), list(run.scores())


def gsm8k_texts(number: int) -> list[str]:
    """Right answers to the first mini items, as the prompt asks for them."""
    return [f"The answer is {BENCHMARKS['gsm8k'].gold(row)}." for row in documents("gsm8k")[:number]]


def test_ours_gives_what_a_real_run_recorded_and_changes_no_record(checkpoint: str, tmp_path: Path) -> None:
    short = {"pretrained": checkpoint, "run_dir": str(tmp_path / "run"), "gen_length": 32, "slot_size": 4, "warmup": 0}
    evaluate(parse_model_args({**short, "block_size": 32}), ["mini_gsm8k", "mini_mmlu_pro"], limit=3)
    before = contents(tmp_path / "run")
    differing, _ = rescore(tmp_path / "run", OURS)
    lines = rows_of(tmp_path / "run" / "rescored" / "ours.csv")
    assert differing == 0
    assert len(lines) == 6
    assert all(line["correct"] == line["recorded_correct"] != "" for line in lines)
    assert contents(tmp_path / "run") == before


def test_a_recorded_verdict_that_ours_does_not_give_is_reported(tmp_path: Path) -> None:
    record_mini(tmp_path, "gsm8k", gsm8k_texts(2))
    score = contents(tmp_path)[1][0]
    with RunStore.open(tmp_path, MANIFEST) as store:
        store.append_scores([replace(score, verdict="wrong", value=0.0)])
    differing, printed = rescore(tmp_path, OURS)
    assert differing == 1
    assert f"item {score.item_id} sample 0: now correct" in printed
    assert "recorded wrong" in printed


def test_flips_are_counted_each_way_and_written(tmp_path: Path) -> None:
    right = gsm8k_texts(3)
    # Behind the statement that counts here stands a number that lm-eval takes; the third has none but a wrong one.
    gold = right[1].removeprefix("The answer is ").rstrip(".")
    record_mini(tmp_path, "gsm8k", [f"{right[0]} I checked 7777 cases.", f"The answer is 7777, not {gold}", right[2]])
    _, printed = rescore(tmp_path, "flexible-extract")
    lines = {line["doc_id"]: line for line in rows_of(tmp_path / "rescored" / "flexible-extract.csv")}
    assert [lines[number]["correct"] for number in "012"] == ["0", "1", "1"]
    assert [lines[number]["recorded_correct"] for number in "012"] == ["1", "0", "1"]
    assert lines["0"]["extracted"] == "7777"
    number, recorded, rescored, to_right, to_wrong = figures_of("mini_gsm8k", printed)
    assert (number, to_right, to_wrong) == ("3", "1", "1")
    assert recorded == rescored
    assert re.fullmatch(r"66\.7 \[\d+\.\d, \d+\.\d\]", rescored)
    assert "synthetic look-alikes" in printed


def test_scores_by_a_filter_are_added_to_the_records_and_replace_only_their_own(tmp_path: Path) -> None:
    record_mini(tmp_path, "gsm8k", [*gsm8k_texts(1), "Not that, but 7777"])
    before = contents(tmp_path)
    processes = read_run(tmp_path).processes
    for _ in range(2):
        rescore(tmp_path, "flexible-extract")
    samples, scores = contents(tmp_path)
    assert (samples, scores[:2]) == before
    assert read_run(tmp_path).processes == processes
    assert [(score.metric, score.scorer.split()[0], score.value) for score in scores[2:]] == [
        ("accuracy by flexible-extract", "mini_gsm8k/flexible-extract", 1.0),
        ("accuracy by flexible-extract", "mini_gsm8k/flexible-extract", 0.0),
    ]
    figures = {figure.metric: figure for figure in run_measurements([tmp_path]) if figure.task == "mini_gsm8k"}
    assert (figures["accuracy by flexible-extract"].value, figures["accuracy"].value) == (50.0, 50.0)
    assert "flexible-extract %" in summary_table(summary(list(figures.values()))).columns


def test_two_rescored_runs_are_compared_by_the_filter(tmp_path: Path) -> None:
    right = gsm8k_texts(1)[0]
    runs = [
        record_mini(tmp_path / name, "gsm8k", [text])
        for name, text in {"one": right, "two": f"{right} I checked 7777 cases."}.items()
    ]
    with pytest.raises(StoreError, match="rescore both runs with --filter flexible-extract"):
        compare_runs(*runs, filter_name="flexible-extract")
    rescore(runs, "flexible-extract")
    assert compare_runs(*runs).tasks[0].accuracies == (100.0, 100.0)
    assert compare_runs(*runs, filter_name="flexible-extract").tasks[0].accuracies == (100.0, 0.0)


def test_a_run_that_is_being_written_is_rescored_and_its_records_stay(tmp_path: Path) -> None:
    record_mini(tmp_path, "gsm8k", gsm8k_texts(1))
    with RunStore.open(tmp_path, MANIFEST):
        _, printed = rescore(tmp_path, "flexible-extract")
    assert "table and compare will not show these scores" in printed
    assert "is already open for writing" in printed
    assert len(contents(tmp_path)[1]) == 1
    assert [line["correct"] for line in rows_of(tmp_path / "rescored" / "flexible-extract.csv")] == ["1"]


def test_programs_of_another_filter_are_judged_in_the_sandbox(tmp_path: Path) -> None:
    gold = [str(row["code"]) for row in documents("mbpp")[:2]]
    record_mini(tmp_path, "mbpp", [f"```\nx = 1\n```\nBetter:\n```python\n{gold[0]}\n```", gold[1]])
    rescore(tmp_path, "raw-continuation")
    rescore(tmp_path, "first-fenced-block")
    lines = [rows_of(tmp_path / "rescored" / f"{name}.csv") for name in ("raw-continuation", "first-fenced-block")]
    verdicts = [{line["doc_id"]: line["verdict"] for line in of_filter} for of_filter in lines]
    ids = [BENCHMARKS["mbpp"].id_of(row, number) for number, row in enumerate(documents("mbpp")[:2])]
    assert [[of_filter[key] for key in ids] for of_filter in verdicts] == [
        ["wrong", "correct"],
        ["correct", "no_answer"],
    ]
    assert {line["tier"] for line in lines[0]} <= {"A", "B", "C"}


def test_tasks_that_a_filter_does_not_apply_to_are_named(tmp_path: Path) -> None:
    record_mini(tmp_path, "gsm8k", gsm8k_texts(1))
    rows = [documents(name)[0] for name in ("math", "arc_challenge")]
    record(tmp_path, [sample_of("mini_math", "math", rows[0], 0, "x"), sample_of("other", "other", rows[1], 0, "x")])
    _, printed = rescore(tmp_path, "strict-match")
    assert "left out, as the filter does not apply: mini_math" in printed
    assert "left out, as it belongs to none of the benchmarks that can be scored here: other" in printed
    assert {line["task"] for line in rows_of(tmp_path / "rescored" / "strict-match.csv")} == {"mini_gsm8k"}


def test_a_run_without_verdicts_yet_is_scored_and_says_so(tmp_path: Path) -> None:
    record_mini(tmp_path, "gsm8k", gsm8k_texts(2), scored=False)
    failed = sample_of("mini_gsm8k", "gsm8k", documents("gsm8k")[2], 2, "", error="out of memory")
    record(tmp_path, [failed])
    differing, printed = rescore(tmp_path, OURS)
    assert differing == 0
    number, recorded, rescored, *_ = figures_of("mini_gsm8k", printed)
    assert (number, recorded) == ("2", "-")
    assert rescored.startswith("100.0")
    assert "1 of 3 samples failed and have no text; 2 of 3 samples have no recorded verdict" in printed


def test_documents_that_are_not_among_the_rows_are_left_out(tmp_path: Path) -> None:
    record_mini(tmp_path, "gsm8k", gsm8k_texts(1))
    record(tmp_path, [sample_of("mini_gsm8k", "gsm8k", {"question": "another?", "answer": "#### 1"}, 77, "1")])
    assert "1 of 2 samples are about documents that are not among the rows here" in rescore(tmp_path, OURS)[1]


def test_several_runs_and_a_folder_of_their_own(tmp_path: Path) -> None:
    runs = [record_mini(tmp_path / name, "gsm8k", gsm8k_texts(2)) for name in ("one", "two")]
    _, printed = rescore(runs, OURS, out=tmp_path / "out", tasks=["gsm8k"])
    assert all((tmp_path / "out" / name / "ours.csv").is_file() for name in ("one", "two"))
    assert not (tmp_path / "one" / "rescored").exists()
    assert "ReFusion (one)" in printed
    assert "ReFusion (two)" in printed


def test_what_cannot_be_rescored_is_refused(tmp_path: Path) -> None:
    run = record_mini(tmp_path / "run", "gsm8k", gsm8k_texts(1))
    row = documents("gsm8k")[0]
    failed = record(tmp_path / "failed", [sample_of("mini_gsm8k", "gsm8k", row, 0, "", error="out of memory")])
    twin = record_mini(tmp_path / "other" / "run", "gsm8k", gsm8k_texts(1))
    with pytest.raises(StoreError, match=r"holds no records .*name the directory of a run"):
        rescore(tmp_path, OURS)
    with pytest.raises(ConfigError, match=r"^unknown filter 'flexible-extrct'; did you mean flexible-extract\?"):
        rescore(run, "flexible-extrct")
    with pytest.raises(ConfigError, match=r"^unknown task 'mini_gsm9k'; did you mean mini_gsm8k\?"):
        rescore(run, OURS, tasks=["mini_gsm9k"])
    with pytest.raises(DataError, match="mini_gsm8k: no text is recorded: all 1 attempts failed"):
        rescore(failed, OURS)
    with pytest.raises(DataError, match="custom-extract has nothing to score: mini_gsm8k: the filter does not apply"):
        rescore(run, "custom-extract")
    with pytest.raises(ConfigError, match="two of the runs have folders of one name"):
        rescore([run, twin], OURS, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"filters_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(
        "def last_word(text, doc):\n    return text.split()[-1].strip('.') if text else None\n"
        "def number(text, doc):\n    return 5\n"
        "def question(text, doc):\n    return doc['question']\n"
        "def fails(text, doc):\n    raise KeyError('nope')\n"
        "table = {}\n"
    )
    monkeypatch.chdir(tmp_path)
    return name


def test_a_function_of_the_user_serves_as_filter(module: str, tmp_path: Path) -> None:
    run = record_mini(tmp_path / "run", "gsm8k", [*gsm8k_texts(1), "The answer is 1, or 2.", ""])
    rescore(run, f"{module}:last_word")
    lines = rows_of(run / "rescored" / f"{module}_last_word.csv")
    assert [line["verdict"] for line in lines] == ["correct", "wrong", "no_answer"]
    assert lines[1]["extracted"] == "2"


def test_what_is_wrong_with_a_user_s_function_is_said(module: str, tmp_path: Path) -> None:
    run = record_mini(tmp_path / "run", "gsm8k", gsm8k_texts(1))
    for name, message in {
        f"{module}:number": "it returned int; return text, or None",
        f"{module}:fails": "it failed on a text: KeyError: 'nope'",
        f"{module}:table": "table is not a function",
        f"{module}:absent": "cannot be imported",
        "no_such_module:f": r"cannot be imported \(ModuleNotFoundError",
    }.items():
        with pytest.raises(ConfigError, match=message):
            rescore(run, name)


QUESTION = "Which of these seven very long planets has more than eight quite distinct moons in total"


@pytest.fixture
def gpqa(tmp_path: Path) -> Path:
    """A data folder with one row of GPQA's form."""
    wrong = {f"Incorrect Answer {number}": f"choice {number}" for number in (1, 2, 3)}
    row = {"Record ID": "rec1", "Question": QUESTION, "Correct Answer": "choice 0", **wrong}
    (tmp_path / "data" / "gpqa").mkdir(parents=True)
    (tmp_path / "data" / "gpqa" / "train.jsonl").write_text(json.dumps(row))
    return tmp_path / "data"


def test_sealed_questions_are_scored_and_stay_sealed(module: str, gpqa: Path, tmp_path: Path) -> None:
    (document,) = documents("gpqa", gpqa)
    sample = sample_of("refusion_gpqa", "gpqa", document, 0, f"The answer is ({document['answer']}).")
    run = record(tmp_path / "run", [sample])
    rescore(run, "flexible-extract", data=gpqa)
    rescore(run, f"{module}:question", data=gpqa)
    with pytest.raises(DataError, match="hold no tokens"):
        rescore(run, "whole-canvas", data=gpqa)
    assert [line["correct"] for line in rows_of(run / "rescored" / "flexible-extract.csv")] == ["1"]
    written = "".join(path.read_text() for path in (run / "rescored").iterdir())
    assert "[withheld]" in written
    assert "long planets" not in written


def test_the_canvas_keeps_what_stands_behind_the_first_end_token() -> None:
    trace = Trace()
    trace.fix((2, 3), (9, 3))
    trace.fix((0, 1), (1, 2))
    sample = sample_of("t", "gsm8k", {}, 0, "ab", tokens=[1, 2, 9], num_tokens=3, trace=trace.to_json())
    detokenizer = Detokenizer(lambda tokens: "".join(" abc"[token] for token in tokens), {9: "<end>"})
    assert canvas_text(sample, detokenizer) == "abc"
    assert canvas_text(replace(sample, trace=None), detokenizer) is None
    assert canvas_text(replace(sample, tokens=None), detokenizer) is None


def test_a_canvas_is_scored_with_the_tokenizer_of_the_checkpoint(checkpoint: str, tmp_path: Path) -> None:
    short = {"pretrained": checkpoint, "run_dir": str(tmp_path), "gen_length": 16, "slot_size": 4, "warmup": 0}
    evaluate(parse_model_args({**short, "block_size": 16}), ["mini_gsm8k"], limit=2)
    rescore(tmp_path, "whole-canvas")
    assert len(rows_of(tmp_path / "rescored" / "whole-canvas.csv")) == 2


def test_other_scores_than_the_verdict_are_not_taken_for_it(tmp_path: Path) -> None:
    record_mini(tmp_path, "gsm8k", gsm8k_texts(1))
    score = contents(tmp_path)[1][0]
    with RunStore.open(tmp_path, MANIFEST) as store:
        store.append_scores([replace(score, metric="strict", value=0.0)])
    assert rescore(tmp_path, OURS)[0] == 0
    assert [line["recorded_correct"] for line in rows_of(tmp_path / "rescored" / "ours.csv")] == ["1"]


def test_texts_of_an_older_version_of_the_task_are_told(tmp_path: Path) -> None:
    run = record_mini(tmp_path / "old", "gsm8k", gsm8k_texts(1))
    version = BENCHMARKS["gsm8k"].prompts.version
    assert (
        f"recorded by version 1.0 of the task, whose rules may differ from those of {version}" in rescore(run, OURS)[1]
    )
    sample = contents(run)[0][0]
    same = replace(sample, key=replace(sample.key, task_version=version), process_id="")
    assert "recorded by version" not in rescore(record(tmp_path / "new", [same]), OURS)[1]
    # A run that goes on with a later version judges all its texts by that one, and keeps the earlier verdicts.
    score = contents(run)[1][0]
    with RunStore.open(run, MANIFEST) as store:
        store.append_scores([replace(score, scorer=f"gsm8k/last {version} 1.0.0")])
    assert "recorded by version" not in rescore(run, OURS)[1]
