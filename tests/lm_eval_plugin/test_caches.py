"""lm-eval's two caches serve no text of other settings, of another checkpoint or of another sample."""

import json
import shutil
from pathlib import Path

import datasets
import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from refusion_eval.engine.engine import Engine
from refusion_eval.paths import embedded_path, tasks_path
from refusion_eval.runs.system import System

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/test.jsonl}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
output_type: {output_type}
{more}
metadata: {{version: 1.0}}
"""
GENERATED = 'metric_list: [{metric: exact_match}]\ngeneration_kwargs: {until: ["zzz"]}'
CHOSEN = 'doc_to_choice: ["1", "2"]\nmetric_list: [{metric: acc}]'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("lm_eval.caching.cache.PATH", str(tmp_path / "requests"))
    rows = [{"question": f"What is {n} plus 1?", "answer": 0} for n in range(2)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    return tmp_path


@pytest.fixture
def run(folder, monkeypatch):
    """Evaluates with the cache of responses; returns lm-eval's results and the number of decoded requests."""
    decoded = []
    original = Engine.run

    def counted(self, *args, **kwargs):
        decoded.append(args)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "run", counted)

    def evaluate(more=GENERATED, *, output_type="generate_until", checkpoint="embedded", settings="", **options):
        decoded.clear()
        (folder / "tasks" / "sums.yaml").write_text(TASK.format(folder=folder, output_type=output_type, more=more))
        results = lm_eval.simple_evaluate(
            "refusion",
            model_args=f"pretrained={checkpoint},warmup=0,fuse=False,gen_length=16,slot_size=8,block_size=8{settings}",
            tasks=["sums"],
            task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
            bootstrap_iters=0,
            **{"use_cache": str(folder / "kept"), **options},
        )
        return results, len(decoded)

    return evaluate


def responses(results):
    return [logged["resps"] for logged in results["samples"]["sums"]]


def test_the_cache_of_responses_serves_the_same_system(run):
    first, num_first = run()
    again, num_again = run()
    assert (num_first, num_again) == (2, 0)
    assert responses(again) == responses(first)


def test_the_cache_of_responses_serves_no_other_settings(run):
    run()
    for settings in ("tau_slot=0.5", "add_bos_token=True", "dtype=bfloat16", "slot_size=4"):
        assert run(settings=f",{settings}")[1] == 2, settings


def test_the_cache_of_responses_serves_no_other_weights_at_the_same_place(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(embedded_path("refusion"), copy)
    run(checkpoint=copy)
    weights = copy / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-2:] = b"\0\0"
    weights.write_bytes(changed)
    assert run(checkpoint=copy)[1] == 2
    tokenizer = copy / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"eos_token": "<|endoftext|>"}))
    assert run(checkpoint=copy)[1] == 2


def test_several_samples_of_an_item_stay_apart_in_the_cache(run):
    drawn = f"{GENERATED}\nrepeats: 3"
    first, _ = run(drawn, settings=",temperature=1.5")
    again, num = run(drawn, settings=",temperature=1.5")
    assert num == 0
    assert responses(again) == responses(first)
    assert any(len(set(texts)) > 1 for (texts,) in responses(first))


def test_the_cache_of_responses_keeps_log_likelihoods_of_one_checkpoint(run, monkeypatch):
    scored = []
    original = System.score

    def score(self, parts):
        scored.extend(pair for part in parts for pair in part)
        return original(self, parts)

    monkeypatch.setattr(System, "score", score)
    chosen = {"more": CHOSEN, "output_type": "multiple_choice"}
    first, _ = run(**chosen)
    assert len(scored) == 4
    again, _ = run(**chosen)
    assert len(scored) == 4
    assert responses(again) == responses(first)
    run(**chosen, settings=",dtype=bfloat16")
    assert len(scored) == 8


def test_the_cache_of_requests_changes_no_setting_and_says_that_it_is_not_used(run, caplog):
    for gen_length in (8, 16):
        results, _ = run(use_cache=None, cache_requests=True, gen_kwargs={"tau_token": 0.5, "slot_size": gen_length})
        (logged, *_) = results["samples"]["sums"]
        assert logged["arguments"][0][1]["slot_size"] == gen_length
    assert "cache of requests (--cache_requests) is not used" in caplog.text


def test_own_tasks_have_no_texts_in_the_cache_of_requests(folder, tmp_path):
    lm_eval.simple_evaluate(
        "refusion",
        model_args="pretrained=embedded,warmup=0,gen_length=16",
        tasks=["mini_gsm8k"],
        task_manager=TaskManager(include_path=str(tasks_path()), include_defaults=False),
        limit=1,
        cache_requests=True,
    )
    assert not Path(tmp_path / "requests").exists()
