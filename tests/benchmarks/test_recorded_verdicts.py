"""Verdicts that publishers recorded on outputs of real models are reproduced on the sample in `tests/data`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.sandbox import probe
from refusion_eval.scoring.judge import Verdict, judge_texts

# Recorded as failed only because the publisher ran all programs in one process.
RECORDED_WRONGLY = {67, 170, 419, 598, 724, 798}


class Output(NamedTuple):
    """One text of a model, and what its publisher recorded."""

    model: str
    row: dict[str, Any]
    text: str
    recorded: Any


def outputs(data: Path, benchmark: str) -> Iterator[Output]:
    with (data / "verdicts" / f"{benchmark}.jsonl").open(encoding="utf-8") as lines:
        for item in map(json.loads, lines):
            for output in item["outputs"]:
                yield Output(output["model"], item["row"], output["text"], output["recorded"])


def judged(benchmark: str, sample: Sequence[Output], filter_name: str | None = None) -> list[Verdict]:
    items = [(output.row, output.text) for output in sample]
    return judge_texts(BENCHMARKS[benchmark], items, filter_name=filter_name)


@pytest.mark.parametrize("model", ["6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"])
@pytest.mark.parametrize("filter_name", ["last", "first"])
def test_gsm8k_verdicts_of_openai(shared: Path, model: str, filter_name: str) -> None:
    sample = [output for output in outputs(shared, "gsm8k") if output.model == model]
    assert len(sample) == 50
    verdicts = judged("gsm8k", sample, filter_name)
    assert [verdict.passed for verdict in verdicts] == [output.recorded for output in sample]


def test_mmlu_pro_letters_of_its_authors(shared: Path) -> None:
    sample = list(outputs(shared, "mmlu_pro"))
    assert len(sample) == 100
    verdicts = judged("mmlu_pro", sample, "first")
    assert [verdict.extracted for verdict in verdicts] == [output.recorded for output in sample]
    assert [verdict.passed for verdict in verdicts] == [output.recorded == output.row["answer"] for output in sample]


@pytest.mark.sandbox
@pytest.mark.parametrize(("benchmark", "recorded_wrongly"), [("humaneval", set()), ("mbpp", RECORDED_WRONGLY)])
def test_verdicts_on_programs(shared: Path, benchmark: str, recorded_wrongly: set[int]) -> None:
    if probe().tier == "D":
        pytest.skip("programs cannot be isolated here")
    sample = list(outputs(shared, benchmark))
    assert len(sample) == 60
    differing = {
        output.row["task_id"]
        for output, verdict in zip(sample, judged(benchmark, sample), strict=True)
        if verdict.passed != output.recorded
    }
    assert differing == recorded_wrongly
