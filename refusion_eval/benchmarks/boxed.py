"""This project's prompt of the benchmarks whose answers stand in a box, with its extraction rules."""

from collections.abc import Callable

from refusion_eval.benchmarks import Prompts
from refusion_eval.benchmarks.extract import formulas
from refusion_eval.benchmarks.rows import Row


def boxed_prompts(gold_text: Callable[[Row], str], problem: str = "problem") -> Prompts:
    """The prompts; `problem` names the column of the question."""
    return Prompts(
        user=lambda row: f"{row[problem].strip()}\n\nSolve this step by step. Put the final answer in \\boxed{{}}.",
        gold_text=gold_text,
        filters={
            "last": lambda text, _: formulas.last_box_or_statement(text),
            "first": lambda text, _: formulas.box(text, last=False),
            "strict": lambda text, _: formulas.box(text),
        },
        version="1.4",
    )
