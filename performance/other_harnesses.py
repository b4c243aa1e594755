"""What other harnesses say of the same model: this project, inspect_ai and lm-eval ask one served model the same items.

    python performance/other_harnesses.py http://127.0.0.1:8000 --model NAME --data DATA --out TABLE.md

Each asks the chat of the server for the same conversations, greedily, one after the other, and judges by its own rules:
this project by those of its benchmark, inspect_ai by `match(numeric=True)`, as its GSM8K does, lm-eval by the two
filters of its task `gsm8k`. inspect_ai and the package openai need an environment of their own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

GSM8K = "refusion_gsm8k_release"  # with the prompts of the release of ReFusion, zero-shot
_MOST_SHOWN = 3  # differences of a harness that are printed
# The metric and the filters of lm-eval's task gsm8k, for prompts that are there already.
_LM_EVAL_TASK: dict[str, object] = {
    "task": "same_items",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "#### {{target}}",
    "metric_list": [
        {
            "metric": "exact_match",
            "aggregation": "mean",
            "higher_is_better": True,
            "ignore_case": True,
            "ignore_punctuation": False,
            "regexes_to_ignore": [",", "\\$", "(?s).*#### ", "\\.$"],
        }
    ],
    "filter_list": [
        {
            "name": "strict-match",
            "filter": [{"function": "regex", "regex_pattern": "#### (\\-?[0-9\\.\\,]+)"}, {"function": "take_first"}],
        },
        {
            "name": "flexible-extract",
            "filter": [
                {
                    "function": "regex",
                    "group_select": -1,
                    "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)",
                },
                {"function": "take_first"},
            ],
        },
    ],
}
_INSPECT = """
import json, sys
from inspect_ai import Task, eval as measure
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import match
from inspect_ai.solver import generate
rows, url, model, most_tokens, folder = json.load(open(sys.argv[1])), *sys.argv[2:]
samples = [Sample(id=row["id"], input=row["prompt"], target=row["target"]) for row in rows]
config = GenerateConfig(temperature=0.0, max_tokens=int(most_tokens), max_connections=1)
served = get_model(f"openai-api/served/{model}", base_url=url + "/v1", api_key="none", config=config)
task = Task(dataset=samples, solver=generate(), scorer=match(numeric=True))
(log,) = measure(task, model=served, display="none", log_dir=folder)
judged = {}
for sample in log.samples:
    score = sample.scores["match"]
    judged[sample.id] = {"text": sample.output.completion, "answer": score.answer, "right": score.value == "C"}
print(json.dumps(judged))
"""


class Judged(NamedTuple):
    """What a harness got and said of an item."""

    text: str
    answer: str | None
    is_right: bool


class Asked(NamedTuple):
    """What all harnesses are asked for."""

    task: str
    url: str
    model: str
    most_tokens: int


def ours(asked: Asked, data: Path | None, limit: int, run_dir: Path) -> dict[str, Judged]:
    from refusion_eval.store.run_store import RunReader

    words = ["run", "--system", f"server:{asked.url}", "--server-api", "chat", "--served-model", asked.model]
    words += ["--tasks", asked.task, *(["--data", str(data)] if data else []), "--limit", str(limit), "--warmup", "0"]
    words += ["--run-dir", str(run_dir), "--set", f"gen_length={asked.most_tokens}"]
    subprocess.run([sys.executable, "-m", "refusion_eval", "--quiet", *words], check=True, stdout=subprocess.DEVNULL)
    with RunReader.open(run_dir) as reader:
        scores = reader.scores_by_sample()
        judged = {}
        for sample in reader.samples(traces=False):
            (verdict,) = (score for score in scores[sample.key].values() if score.metric == "passed")
            judged[sample.item_id] = Judged(sample.text, verdict.extracted, verdict.value > 0)
    return judged


def rows_of(name: str, data: Path | None, items: Sequence[str]) -> list[dict[str, str]]:
    """The items with the prompts that this project sends, and the numbers that are right."""
    from refusion_eval.evaluation.tasks import find_tasks

    (task,) = find_tasks([name])
    found = {item.id: item for item in task.items(data)}
    rows = []
    for item in items:
        turns, answer = found[item].turns, found[item].row["answer"]
        assert not turns.system
        rows.append({"id": item, "prompt": turns.user, "target": answer.partition("#### ")[2].replace(",", "")})
    return rows


def by_inspect(python: str, rows: Path, asked: Asked, folder: Path) -> dict[str, Judged]:
    words = [python, "-c", _INSPECT, str(rows), asked.url, asked.model, str(asked.most_tokens), str(folder)]
    told = subprocess.run(words, check=True, capture_output=True, text=True, cwd=folder).stdout
    judged = json.loads(told.splitlines()[-1])
    return {name: Judged(one["text"], one["answer"], one["right"]) for name, one in judged.items()}


def by_lm_eval(rows: Sequence[Mapping[str, str]], asked: Asked, folder: Path) -> dict[str, dict[str, Judged]]:
    """By the filter of lm-eval."""
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    generation = {"until": [], "do_sample": False, "temperature": 0.0, "max_gen_toks": asked.most_tokens}
    task = _LM_EVAL_TASK | {"dataset_kwargs": {"data_files": {"test": str(folder / "rows.json")}}}
    # JSON is YAML, too.
    (folder / "same_items.yaml").write_text(json.dumps(task | {"generation_kwargs": generation}), encoding="utf-8")
    arguments = f"base_url={asked.url}/v1/chat/completions,model={asked.model},num_concurrent=1"
    arguments += ",tokenized_requests=False"
    words = [sys.executable, "-m", "lm_eval", "--model", "local-chat-completions", "--model_args", arguments]
    words += ["--tasks", "same_items", "--include_path", str(folder), "--apply_chat_template", "--log_samples"]
    env = {**os.environ, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    done = subprocess.run(
        [*words, "--output_path", str(folder)], env=env, cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    judged: dict[str, dict[str, Judged]] = {}
    (path,) = folder.rglob("samples_same_items_*.jsonl")
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        one = Judged(line["resps"][0][0], str(line["filtered_resps"][0]), line["exact_match"] > 0)
        judged.setdefault(line["filter"], {})[line["doc"]["id"]] = one
    return judged


def table(judged: Mapping[str, Mapping[str, Judged]], rows: Sequence[Mapping[str, str]]) -> str:
    """Accuracies, and how texts and verdicts differ from those of the first harness."""
    first = next(iter(judged.values()))
    lines = ["| harness | right | same text | same verdict |", "|---|---|---|---|"]
    for name, items in judged.items():
        texts = sum(items[item].text.strip() == first[item].text.strip() for item in first)
        verdicts = sum(items[item].is_right == first[item].is_right for item in first)
        right = sum(one.is_right for one in items.values())
        lines.append(f"| {name} | {right} of {len(items)} | {texts} of {len(first)} | {verdicts} of {len(first)} |")
    lines += ["", "| item | right is | harness | verdict | reads | end of the text |", "|---|---|---|---|---|---|"]
    name_of_first = next(iter(judged))
    for name, items in judged.items():
        differ = [row for row in rows if items[row["id"]].is_right != first[row["id"]].is_right]
        for row in differ[:_MOST_SHOWN]:
            for who, one in ((name_of_first, first[row["id"]]), (name, items[row["id"]])):
                verdict = "right" if one.is_right else "wrong"
                cells = (row["id"], row["target"], who, verdict, str(one.answer)[:40], one.text[-60:])
                lines.append(f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |")
        if len(differ) > _MOST_SHOWN:
            lines.append(f"| {len(differ) - _MOST_SHOWN} more | | {name} | | | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="address of a server with chats")
    parser.add_argument("--task", default=GSM8K, help="GSM8K, or its look-alike mini_gsm8k")
    parser.add_argument("--data", type=Path, help="folder with the rows of gsm8k")
    parser.add_argument("--model", required=True, help="name of the model at the server")
    parser.add_argument("--inspect-python", help="of the environment of inspect_ai, which is else left out")
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--out", type=Path, help="file of the table")
    options = parser.parse_args()
    asked = Asked(options.task, options.url, options.model, options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        own = ours(asked, options.data, options.limit, place / "run")
        rows = rows_of(options.task, options.data, list(own))
        (place / "items.json").write_text(json.dumps(rows), encoding="utf-8")
        judged: dict[str, Mapping[str, Judged]] = {"this project": own}
        if options.inspect_python:
            items = by_inspect(options.inspect_python, place / "items.json", asked, place)
            judged["inspect_ai, match(numeric=True)"] = items
        by_filter = by_lm_eval(rows, asked, place)
        judged |= {f"lm-eval, {name}": items for name, items in by_filter.items()}
        text = table(judged, rows)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
