"""IFEval: prompts with instructions that a program can check, such as a number of words (arXiv 2311.07911)."""

import json

from refusion_eval.benchmarks import Benchmark, Extraction, Extractor, Prompts
from refusion_eval.benchmarks.rows import ID, TEXT, TEXTS, ColumnType, Row, Source
from refusion_eval.errors import DataError

_ARGUMENTS = ColumnType(
    lambda value: isinstance(value, list) and all(isinstance(arguments, dict) for arguments in value),
    "a list of objects, one for each instruction",
)


def _whole_text(rule: str) -> Extractor:
    return lambda text, _row: Extraction(text, rule)


def _gold(row: Row) -> str:
    if len(row["kwargs"]) != len(row["instruction_id_list"]):
        raise DataError(f"ifeval: {row['key']} needs as many kwargs as instructions")
    return json.dumps([True] * len(row["instruction_id_list"]))


def _no_text(_row: Row) -> str:
    raise DataError("ifeval has no right answers, only instructions; score texts of a model with --outputs FILE")


BENCHMARK = Benchmark(
    name="ifeval",
    title="IFEval",
    order=26,
    kind="instructions",
    source=Source(
        hub="google/IFEval",
        split="train",
        num_rows=541,
        columns={"key": ID, "prompt": TEXT, "instruction_id_list": TEXTS, "kwargs": _ARGUMENTS},
    ),
    gold=_gold,
    ours=Prompts(
        user=lambda row: str(row["prompt"]),
        gold_text=_no_text,
        filters={rule: _whole_text(rule) for rule in ("strict", "loose")},
        version="1.1",
    ),
    id_column="key",
    settings_of="gsm8k",
    gen_length=1280,  # as lm-eval's task: many prompts ask for several hundred words
)
