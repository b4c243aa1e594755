"""An item of a run has one prompt, whatever the day and whatever has changed in the checkpoint."""

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from refusion_eval.errors import ConfigError, StoreError
from refusion_eval.evaluation.loop import evaluate
from refusion_eval.evaluation.rerun import rerun
from refusion_eval.results.facts import read_facts
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.store.run_store import RunReader, RunStore

TINY = Path(__file__).resolve().parents[1] / "data" / "parity" / "tiny"
DAY = "{{ strftime_now('%d %b %Y') }}"


@pytest.fixture
def dated(tmp_path):
    """A checkpoint whose chat template begins with the date."""
    folder = tmp_path / "dated"
    shutil.copytree(TINY, folder)
    template = folder / "chat_template.jinja"
    template.write_text(DAY + template.read_text())
    return folder


def run(folder, run_dir, limit=2, **more):
    given = {
        "pretrained": str(folder),
        "decoder": "autoregressive",
        "gen_length": 8,
        "warmup": 0,
        "run_dir": str(run_dir),
    }
    return evaluate(parse_model_args({**given, **more}), ["mini_gsm8k"], limit=limit)


def samples(run_dir):
    with RunReader.open(run_dir) as reader:
        return list(reader.samples())


@pytest.fixture
def on_islands(monkeypatch):
    """Sets the zone of the clock: the day of one is always over where the other's is not."""

    def at(zone):
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    yield at
    monkeypatch.undo()
    time.tzset()


def test_a_run_that_is_continued_on_another_day_keeps_its_date(dated, tmp_path, on_islands, caplog):
    on_islands("Pacific/Kiritimati")
    run(dated, tmp_path / "run")
    on_islands("Pacific/Pago_Pago")
    run(dated, tmp_path / "run", limit=3)
    assert "the chat template writes the date" in caplog.text
    assert len(samples(tmp_path / "run")) == 3
    run(dated, tmp_path / "other")
    both = {sample.key.prompt_hash for name in ("run", "other") for sample in samples(tmp_path / name)}
    assert len(both) == 5  # the other run has its own day


def test_a_run_is_made_again_with_its_own_date(dated, tmp_path, on_islands):
    on_islands("Pacific/Kiritimati")
    run(dated, tmp_path / "run")
    on_islands("Pacific/Pago_Pago")
    assert rerun(tmp_path / "run", tmp_path / "again").is_same


def test_the_date_is_an_argument_and_no_two_go_into_one_run(dated, tmp_path):
    run(dated, tmp_path / "run", prompt_time="2024-07-26")
    run(dated, tmp_path / "same", prompt_time="2024-07-26T18:00")
    keys = [{sample.key for sample in samples(tmp_path / name)} for name in ("run", "same")]
    assert keys[0] == keys[1]
    with pytest.raises(StoreError, match="has 2 of these items with another prompt, the first of them mini_gsm8k item"):
        run(dated, tmp_path / "run", prompt_time="2024-07-27")
    with pytest.raises(ConfigError, match="prompt_time='today' is not a date; write it as 2026-01-31"):
        run(dated, tmp_path / "third", prompt_time="today")


def test_another_template_is_refused_before_anything_is_decoded(tmp_path):
    folder = Path(shutil.copytree(TINY, tmp_path / "checkpoint"))
    run(folder, tmp_path / "run")
    template = folder / "chat_template.jinja"
    template.write_text("Hello. " + template.read_text())
    with pytest.raises(StoreError, match="with another prompt"):
        run(folder, tmp_path / "run", limit=4)
    assert len(samples(tmp_path / "run")) == 2


def test_a_tokenizer_that_adds_a_token_since_is_refused(tmp_path):
    folder = Path(shutil.copytree(TINY, tmp_path / "checkpoint"))
    run(folder, tmp_path / "run", chat_template="none")
    path = folder / "tokenizer.json"
    bos = {"id": "<|beginoftext|>", "type_id": 0}
    adding = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": bos}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
        "special_tokens": {bos["id"]: {"id": bos["id"], "ids": [298], "tokens": [bos["id"]]}},
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": adding}))
    with pytest.raises(StoreError, match=r"item \S+ had (\d+) tokens and has (\d+) now: the tokenizer changed"):
        run(folder, tmp_path / "run", limit=4, chat_template="none")


def test_no_figure_is_made_of_a_task_whose_item_has_two_prompts(tmp_path):
    run(TINY, tmp_path / "run")
    (sample, *_) = samples(tmp_path / "run")
    with RunReader.open(tmp_path / "run") as reader:
        manifest = reader.run.manifest
    with RunStore.open(tmp_path / "run", manifest) as store:
        store.append(replace(sample, key=replace(sample.key, prompt_hash="0" * 32), process_id=""))
    with pytest.raises(StoreError, match=r"mini_gsm8k item \S+ was asked with several prompts"):
        read_facts(tmp_path / "run")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            295,
            r"the tokenizer's EOS token <\|im_end\|> \(297\) is not among the EOS ids \[295\].* give eos_ids=295\+297",
        ),
        ([297, 12345], r"EOS ids \[12345\] lie beyond the vocabulary of 300 and are left out"),
        ([295, 297], ""),
    ],
)
def test_end_tokens_that_do_not_fit_are_said(tmp_path, caplog, entry, message):
    folder = Path(shutil.copytree(TINY, tmp_path / "checkpoint"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": entry}))
    run(folder, tmp_path / "run", limit=1)
    said = [record.getMessage() for record in caplog.records if "EOS" in record.getMessage()]
    assert len(said) == bool(message)
    assert all(re.search(message, sentence) for sentence in said)
