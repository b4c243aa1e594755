"""Programs made of the reference solutions of HumanEval and MBPP, for the benchmark and for tests."""

import json
from pathlib import Path
from typing import Any

from refusion_eval.evaluate.sandbox.verdict import Program


def _rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def humaneval_programs(path: Path) -> list[Program]:
    """One program per row of HumanEval's JSON lines: prompt and canonical solution against the row's test."""
    return [
        Program(
            candidate=row["prompt"] + row["canonical_solution"],
            test=f"{row['test']}\ncheck({row['entry_point']})\n",
            helpers=row["prompt"],
        )
        for row in _rows(path)
    ]


def mbpp_programs(path: Path) -> list[Program]:
    """One program per row of MBPP's JSON lines (config full): reference code against setup code and asserts."""
    return [
        Program(candidate=row["code"], test="\n".join([row["test_setup_code"], *row["test_list"]]))
        for row in _rows(path)
    ]
