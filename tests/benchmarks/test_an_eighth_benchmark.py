"""A benchmark is one Python file and one task file: everything else finds it by itself."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from refusion_eval.benchmarks.rows import DATA_VARIABLE
from refusion_eval.paths import tasks_path
from refusion_eval.store.run_store import RunReader

PACKAGE = Path(__file__).parents[2] / "refusion_eval"

BENCHMARK = '''
"""Toy sums."""

from refusion_eval.benchmarks import Benchmark, Prompts
from refusion_eval.benchmarks.extract import answers
from refusion_eval.benchmarks.rows import ID, TEXT, Source

BENCHMARK = Benchmark(
    name="toy",
    title="Toy",
    kind="number",
    source=Source(hub="nobody/toy", split="test", num_rows=2, columns={"id": ID, "sum": TEXT, "total": TEXT}),
    gold=lambda row: row["total"],
    ours=Prompts(
        user=lambda row: f"What is {row['sum']}? End with: The answer is <number>.",
        gold_text=lambda row: f"The answer is {row['total']}.",
        filters={
            "last": lambda text, _: answers.last_number_stated(text),
            "strict": lambda text, _: answers.strict_number(text),
        },
    ),
    id_column="id",
)
'''

TASK = """
include: ../_answer_task_yaml
task: refusion_toy
custom_dataset: !function refusion_eval.lm_eval_plugin.hooks.toy_rows
doc_to_text: !function refusion_eval.lm_eval_plugin.hooks.toy_prompt
doc_to_target: !function refusion_eval.lm_eval_plugin.hooks.toy_gold
filter_list:
  - name: last
    filter:
      - function: custom
        filter_fn: !function refusion_eval.lm_eval_plugin.hooks.toy_score
metadata:
  version: 1.0
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project to which the two files were added, with two rows in its folder `data`."""
    folder = tmp_path_factory.mktemp("project")
    # With its caches, which hold the forward that is compiled for this processor: compiling takes half a minute. What
    # another process is writing there has a name of its own for the moment.
    ignored = shutil.ignore_patterns("embedded", "*.pyc.*", "*.tmp.*")
    shutil.copytree(PACKAGE, folder / "refusion_eval", ignore=ignored)
    shutil.copytree(PACKAGE / "embedded", folder / "refusion_eval" / "embedded", copy_function=os.symlink)
    shutil.copytree(tasks_path(), folder / "tasks")
    shutil.copytree(PACKAGE.parent / "results" / "published", folder / "results" / "published")
    (folder / "refusion_eval" / "benchmarks" / "toy.py").write_text(BENCHMARK)
    (folder / "tasks" / "toy").mkdir()
    (folder / "tasks" / "toy" / "refusion_toy.yaml").write_text(TASK)
    (folder / "data" / "toy").mkdir(parents=True)
    rows = [{"id": "a", "sum": "1 + 1", "total": "2"}, {"id": "b", "sum": "2 + 3", "total": "5"}]
    (folder / "data" / "toy" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(copy: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "refusion_eval", *arguments, "--data", str(copy / "data")],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_it_is_decoded_judged_and_shown_in_the_table(copy: Path) -> None:
    short = ["--set", "gen_length=8", "--set", "slot_size=4", "--set", "block_size=8", "--warmup", "0"]
    model = ["--model", str(PACKAGE / "embedded" / "refusion"), "--run-dir", str(copy / "run")]
    printed = run(copy, "run", *model, *short, "--tasks", "toy")
    assert "refusion_toy" in printed
    with RunReader.open(copy / "run") as reader:
        samples, scores = list(reader.samples()), list(reader.scores())
    assert [(sample.key.task, sample.benchmark, sample.item_id) for sample in samples] == [
        ("refusion_toy", "toy", "a"),
        ("refusion_toy", "toy", "b"),
    ]
    assert sorted((score.item_id, score.metric) for score in scores) == [
        (item, metric) for item in "ab" for metric in ("passed", "strict")
    ]


def test_the_papers_seven_and_the_mini_tasks_stay_what_they_are(copy: Path) -> None:
    code = """
from refusion_eval.evaluation.tasks import find_tasks
from refusion_eval.results.measurement import TASKS
newer = [task.name for task in find_tasks(["refusion_suite_2026"])]
print(len(TASKS), len(find_tasks(["mini_suite"])), len(find_tasks(["refusion_suite"])), newer[-1])
"""
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["7", "8", "7", "refusion_toy"], done.stderr


def test_lm_eval_reads_its_task_file(copy: Path) -> None:
    code = """
from lm_eval.tasks import TaskManager, get_task_dict
task = get_task_dict(["refusion_toy"], TaskManager(include_path="tasks", include_defaults=False))["refusion_toy"]
print([task.doc_to_text(row) for row in task.test_docs()], task.VERSION)
"""
    environment = {**os.environ, "PYTHONPATH": str(copy), DATA_VARIABLE: str(copy / "data")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert "What is 1 + 1? End with: The answer is <number>." in done.stdout, done.stderr
    assert done.stdout.rstrip().endswith("1.0")


def test_its_own_answers_are_right(copy: Path) -> None:
    assert "toy (filter last): acc 100.00%" in run(copy, "score", "--task", "toy", "--outputs", "gold")
    with (copy / "toy.gold.csv").open(newline="") as file:
        assert [(line["id"], line["extracted"], line["passed"]) for line in csv.DictReader(file)] == [
            ("a", "2", "1"),
            ("b", "5", "1"),
        ]
