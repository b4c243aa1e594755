"""What the lm-eval task files call: rows, prompts, gold answers, and the scoring of a whole task at once.

Names follow the pattern `<benchmark>_<role>`: `gsm8k_rows`, `gsm8k_mini_rows`, `gsm8k_prompt`, `gsm8k_gold`,
`gsm8k_score`; `answer_metrics` and `code_metrics` serve all. lm-eval loses every text of a run if one of these raises
after generation, so scoring turns every failure into a value.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from refusion_eval.benchmarks.prompts import Row
from refusion_eval.benchmarks.rows import load_rows
from refusion_eval.benchmarks.sealing import seal
from refusion_eval.benchmarks.table import BENCHMARKS, Benchmark, check_gold
from refusion_eval.scoring.early import known_verdicts, sandbox_in_force
from refusion_eval.scoring.judge import ERROR, Judged, judge_texts

LOG = logging.getLogger(__name__)

Rows = Callable[..., Any]
Scored = list[list[dict[str, Any]]]


def _rows(benchmark: str, *, mini: bool = False) -> Rows:
    def rows(data_dir: str | Path | None = None, **_other: Any) -> Any:
        """Loads the rows as lm-eval wants them; called with the task's metadata and every model argument."""
        import datasets

        found = load_rows(benchmark, mini=mini, data_dir=data_dir)
        check_gold(BENCHMARKS[benchmark], found)
        if benchmark == "gpqa" and not mini:
            found = [_sealed(row) for row in found]
        return datasets.DatasetDict({"test": datasets.Dataset.from_list(found)})

    return rows


def _sealed(row: Row) -> dict[str, Any]:
    """Leaves a GPQA row its id, its answer and markers: lm-eval logs rows and prompts in full."""
    name = f"gpqa/{row['id']}"
    return {
        "id": row["id"],
        "question": seal(f"{name}/question", row["question"]),
        "choices": [seal(f"{name}/choice", choice) for choice in row["choices"]],
        "answer": row["answer"],
        "domain": row["domain"],
    }


def _prompt(benchmark: str) -> Callable[[Row], str]:
    def prompt(doc: Row) -> str:
        """The user turn."""
        return BENCHMARKS[benchmark].prompt(doc)

    return prompt


def _gold(benchmark: str) -> Callable[[Row], str]:
    def gold(doc: Row) -> str:
        """The right answer, for the log."""
        return BENCHMARKS[benchmark].gold(doc)

    return gold


def _score(benchmark: str) -> Callable[[Iterable[Sequence[str]], Iterable[Row]], Scored]:
    def score(resps: Iterable[Sequence[str]], docs: Iterable[Row]) -> Scored:
        """Scores all responses of a task."""
        return score_responses(benchmark, list(resps), list(docs))

    return score


def score_responses(benchmark: str, resps: Sequence[Sequence[str]], docs: Sequence[Row]) -> Scored:
    """Scores a task's responses and never raises.

    Args:
        benchmark: a key of `BENCHMARKS`.
        resps: for each document, its responses.
        docs: the documents, possibly a part of the task's.

    Returns:
        For each document, for each response: extracted, passed, verdict, reason; for code, tier (the isolation it ran
        under); and where the benchmark has a strict rule, strict (whether the answer in exactly the asked-for form is
        right).
    """
    bench = BENCHMARKS[benchmark]
    items = [(doc, text) for doc, texts in zip(docs, resps, strict=True) for text in texts]
    judged = iter(_judge_guarded(bench, items, None))
    has_strict = bench.kind in ("number", "choice")
    strict = iter(_judge_guarded(bench, items, "strict")) if has_strict else None
    scored: Scored = []
    for texts in resps:
        scored.append([])
        for _ in texts:
            one = next(judged)
            entry: dict[str, Any] = {
                "extracted": one.extracted,
                "passed": one.passed,
                "verdict": one.verdict,
                "reason": one.reason,
            }
            if one.tier:
                entry["tier"] = one.tier
            scored[-1].append(entry if strict is None else entry | {"strict": next(strict).passed})
    return scored


def _judge_guarded(bench: Benchmark, items: list[tuple[Row, str]], filter_name: str | None) -> list[Judged]:
    """Judges, or says of every item why that was not possible."""
    sandbox = sandbox_in_force()
    try:
        known = [None] * len(items) if filter_name else known_verdicts(bench.name, items, sandbox)
        left = [item for item, verdict in zip(items, known, strict=True) if verdict is None]
        judged = iter(judge_texts(bench, left, filter_name=filter_name, sandbox=sandbox))
        return [next(judged) if verdict is None else verdict for verdict in known]
    except Exception as problem:  # an exception that leaves a filter costs the run every text
        LOG.exception("%s is not scored; its texts can be scored later with `refusion-eval score`", bench.name)
        return [Judged(None, ERROR, f"{type(problem).__name__}: {problem}") for _ in items]


def answer_metrics(doc: Row, results: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """lm-eval's numbers for one document of an answer task, each a mean over the document's responses.

    Returns:
        `acc`, `extracted` (an answer was found), where it exists `strict` (right in exactly the asked-for form), and
        `scored`: below 1 where the judge itself failed; such responses are in no other number.
    """
    return _metrics("acc", results[0])


def code_metrics(doc: Row, results: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """lm-eval's numbers for one document of a code task.

    Returns:
        `pass@1`, `extracted` and `scored`, as in `answer_metrics`.
    """
    return _metrics("pass@1", results[0])


def _metrics(metric: str, responses: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    scored = [entry for entry in responses if entry["verdict"] != ERROR]
    numbers = {"scored": len(scored) / len(responses)}
    if scored:
        numbers[metric] = _share(entry["passed"] for entry in scored)
        numbers["extracted"] = _share(entry["extracted"] is not None for entry in scored)
        if "strict" in scored[0]:
            numbers["strict"] = _share(entry["strict"] for entry in scored)
    return numbers


def _share(flags: Iterable[bool]) -> float:
    values = [float(flag) for flag in flags]
    return sum(values) / len(values)


# The names that the task files use.

mmlu_pro_rows = _rows("mmlu_pro")
mmlu_pro_mini_rows = _rows("mmlu_pro", mini=True)
mmlu_pro_prompt = _prompt("mmlu_pro")
mmlu_pro_gold = _gold("mmlu_pro")
mmlu_pro_score = _score("mmlu_pro")

arc_challenge_rows = _rows("arc_challenge")
arc_challenge_mini_rows = _rows("arc_challenge", mini=True)
arc_challenge_prompt = _prompt("arc_challenge")
arc_challenge_gold = _gold("arc_challenge")
arc_challenge_score = _score("arc_challenge")

gsm8k_rows = _rows("gsm8k")
gsm8k_mini_rows = _rows("gsm8k", mini=True)
gsm8k_prompt = _prompt("gsm8k")
gsm8k_gold = _gold("gsm8k")
gsm8k_score = _score("gsm8k")

math_rows = _rows("math")
math_mini_rows = _rows("math", mini=True)
math_prompt = _prompt("math")
math_gold = _gold("math")
math_score = _score("math")

gpqa_rows = _rows("gpqa")
gpqa_mini_rows = _rows("gpqa", mini=True)
gpqa_prompt = _prompt("gpqa")
gpqa_gold = _gold("gpqa")
gpqa_score = _score("gpqa")

humaneval_rows = _rows("humaneval")
humaneval_mini_rows = _rows("humaneval", mini=True)
humaneval_prompt = _prompt("humaneval")
humaneval_gold = _gold("humaneval")
humaneval_score = _score("humaneval")

mbpp_rows = _rows("mbpp")
mbpp_mini_rows = _rows("mbpp", mini=True)
mbpp_prompt = _prompt("mbpp")
mbpp_gold = _gold("mbpp")
mbpp_score = _score("mbpp")
