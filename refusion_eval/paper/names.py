"""How tables and figures write what the records call otherwise."""

from collections.abc import Mapping

TASK_NAMES: Mapping[str, str] = {
    "mmlu_pro": "MMLU-Pro",
    "arc_challenge": "ARC-C",
    "gsm8k": "GSM8K",
    "math": "MATH",
    "gpqa": "GPQA",
    "humaneval": "HumanEval",
    "mbpp": "MBPP",
}
MINI_SENTENCE = "Mini tasks are synthetic look-alikes, not the real benchmarks, and compare with no published figure."


def task_name(task: str, mini: bool) -> str:
    """A benchmark as papers write it; its look-alike says so."""
    plain = task.removeprefix("mini_")
    return f"{'mini ' if mini else ''}{TASK_NAMES.get(plain, plain)}"
