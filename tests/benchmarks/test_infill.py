"""The synthetic gaps that only their suffix settles (`refusion_eval.benchmarks.infill`)."""

import json
import re

import pytest
from typer.testing import CliRunner

from miniature.data import drill_pairs, gapped_text
from miniature.family import EQUAL_START
from refusion_eval.benchmarks import BENCHMARKS, PUBLISHED, Task, find_task
from refusion_eval.cli import app
from refusion_eval.decoders.gap_length import HOLE
from refusion_eval.errors import ConfigError
from refusion_eval.evaluation.loop import job_of
from refusion_eval.evaluation.tasks import find_tasks, task_names
from refusion_eval.paths import tasks_path
from refusion_eval.results.measured import run_measurements
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.system import System
from refusion_eval.scoring.judge import judge_texts

KINDS = ("math", "program", "text")


def task(name: str) -> Task:
    (found,) = find_tasks([f"mini_infill_{name}"])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_generator_gives_the_committed_file_byte_for_byte(kind: str) -> None:
    assert (tasks_path() / "mini" / f"infill_{kind}" / "test.jsonl").read_text() == gapped_text(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("control", ["", "_prefix_only", "_wrong_suffix"])
def test_gold_is_right_and_the_text_of_another_gap_is_not(kind: str, control: str) -> None:
    benchmark, rows = task(kind + control).benchmark, task(kind + control).rows()
    assert len(rows) == 100
    golds = [benchmark.prompts.gold_text(row) for row in rows]
    assert all(verdict.passed for verdict in judge_texts(benchmark, list(zip(rows, golds, strict=True))))
    others = [(row, golds[number - 3]) for number, row in enumerate(rows) if golds[number - 3] != golds[number]]
    assert sum(verdict.passed for verdict in judge_texts(benchmark, others)) <= 6
    assert not any(verdict.passed for verdict in judge_texts(benchmark, [(row, "") for row in rows]))


def test_any_chain_that_fits_is_right() -> None:
    row = {"query": "", "prefix": "27+10=37.", "middle": " 37-23=14.", "suffix": " 14*5=70. The answer is 70."}
    texts = {" 37-20=17. 17-3=14.": True, " 28/2=14.": False, " 37-23=14. So": False, " 37-22=14.": False, "": False}
    texts |= {f" 37-{'1' * 5000}=14.": False, f" 37/{'1' * 400}=14.": False, " 37/0=14.": False}
    verdicts = judge_texts(BENCHMARKS["infill_math"], [(row, text) for text in texts])
    assert [verdict.passed for verdict in verdicts] == list(texts.values())


def test_a_gap_cannot_change_the_asserts_behind_it() -> None:
    row = task("program").rows()[0]
    text = f"{row['middle']}\n    return 0\n\nassert True\n```\n"
    (verdict,) = judge_texts(BENCHMARKS["infill_program"], [(row, text)])
    assert not verdict.passed


def test_the_tasks_are_synthetic_alone_and_in_no_suite() -> None:
    assert find_task("mini_infill_math_prefix_only") == task("math_prefix_only")
    assert "infill_math" not in PUBLISHED
    assert not any("infill" in one.name for one in find_tasks(["mini_suite"]))


@pytest.mark.parametrize(("control", "behind"), [("", "own"), ("_prefix_only", ""), ("_wrong_suffix", "other")])
def test_the_response_of_a_conversation_has_the_gap(control: str, behind: str) -> None:
    asked = task(f"text{control}")
    system = System(parse_model_args({"pretrained": "embedded", "decoder": "refusion"}))
    items, tokenizer = asked.items(), system.files.tokenizer
    job = job_of(system, asked, items[3], "1.0", 0)
    row = items[3].row
    holes = job.prompt_ids.count(HOLE)
    assert holes == len(tokenizer.encode(row["middle"]))
    first = job.prompt_ids.index(HOLE)
    opened = [{"role": "user", "content": row["query"]}, {"role": "assistant", "content": row["prefix"]}]
    rendered = system.render(opened, add_generation_prompt=False)
    assert job.prompt_ids[:first] == tokenizer.encode(rendered, plain=False)
    suffix = {"own": row["suffix"], "other": row.get("wrong_suffix"), "": ""}[behind]
    end = list(system.checkpoint_settings["eos_ids"][:1]) if suffix else []
    assert job.prompt_ids[first + holes :] == [*tokenizer.encode(suffix), *end]
    assert job.prompt == f"{rendered}<gap>{suffix}"
    json.dumps(job.prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_suffix_is_of_the_same_grade_and_another_one(kind: str) -> None:
    rows = task(f"{kind}_wrong_suffix").rows()
    by_suffix = {row["suffix"]: row for row in rows}
    assert all(by_suffix[row["wrong_suffix"]]["grade"] == row["grade"] for row in rows)
    assert not any(row["wrong_suffix"] == row["suffix"] for row in rows)
    if kind != "text":  # the right text of a gap does not fit the suffix that is shown
        shown = [({**row, "suffix": row["wrong_suffix"]}, row["middle"]) for row in rows]
        verdicts = judge_texts(BENCHMARKS[f"infill_{kind}"], shown)
        assert sum(verdict.passed for verdict in verdicts) <= 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_a_text_have_the_tokens_of_the_whole(kind: str) -> None:
    tokenizer = System(parse_model_args({"pretrained": "embedded", "decoder": "refusion"})).files.tokenizer
    for row in task(kind).rows():
        parts = [row["prefix"], row["middle"], row["suffix"]]
        assert [token for part in parts for token in tokenizer.encode(part)] == tokenizer.encode("".join(parts))


@pytest.mark.parametrize("kind", KINDS)
def test_training_texts_are_no_test_items_in_disguise(kind: str) -> None:
    def facts(text: str) -> str:
        if kind == "program":
            body = re.sub(r"\b[nxk]\b", "p", re.search(r"return (.+)", text)[1])
            return f"{body} {sorted(re.findall(r'assert [a-z]+.([0-9]+)', text))}"
        return " ".join(sorted(re.findall(r"The (?!answer)\w+ is \w+", text))) or text

    tested = {facts("".join(row[part] for part in ("prefix", "middle", "suffix"))) for row in task(kind).rows()}
    trained = {facts(text) for _, text in drill_pairs(f"gap_{kind}", seed=2516, count=4000, family=EQUAL_START)}
    assert tested.isdisjoint(trained)


def test_plain_names_are_the_tasks_and_go_with_no_rows_of_others(tmp_path) -> None:
    assert task_names(["infill_text_wrong_suffix"], "embedded") == ["mini_infill_text_wrong_suffix"]
    with pytest.raises(ConfigError, match="infill_math means synthetic mini tasks, which do not read --data"):
        task_names(["infill_math"], "embedded", data=tmp_path)


def test_controls_are_in_no_mean_and_runs_are_rescored(tmp_path) -> None:
    names = ["mini_infill_text", "mini_infill_text_prefix_only", "mini_infill_math", "mini_gsm8k"]
    run_dir = str(tmp_path / "run")
    words = ["run", "--model", "embedded", "--decoder", "refusion", "--tasks", ",".join(names), "--limit", "1"]
    done = CliRunner().invoke(app, [*words, "--run-dir", run_dir, "--batch-size", "4"])
    assert done.exit_code == 0, done.output
    means = [one for one in run_measurements([run_dir]) if one.is_mean and one.metric.startswith("acc")]
    assert [one.num_tasks for one in means] == [3]
    assert CliRunner().invoke(app, ["rescore", run_dir]).exit_code == 0
