"""The prompts of the public release, as lm-eval renders its task files, and its rules for answers."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from refusion_eval.benchmarks import BENCHMARKS, RELEASED, Extraction, Task, get_task
from refusion_eval.benchmarks.extract import release
from refusion_eval.benchmarks.rows import json_lines
from refusion_eval.lm_eval_plugin import filters
from refusion_eval.sandbox import probe
from refusion_eval.scoring.judge import Verdict, judge_texts

STORED = Path(__file__).parents[1] / "data" / "release_prompts" / "prompts.jsonl"

# SHA-256 of the turns of all rows, rendered by lm-eval 0.4.13 from the release's own task files.
DIGESTS = {
    "mmlu_pro": "0810539189d816b1",
    "arc_challenge": "2203b46107dbd41c",
    "gsm8k": "fa80d392328628a2",
    "math": "5124702f019d2338",
    "humaneval": "39446c1e46b30f8a",
    "mbpp": "12e59a1f443aa3c9",
}


def stored() -> dict[str, dict[str, Any]]:
    return {line["benchmark"]: line for line in map(json.loads, STORED.read_text(encoding="utf-8").splitlines())}


@pytest.mark.parametrize("name", RELEASED)
def test_every_prompt_is_the_stored_text(name: str) -> None:
    line, benchmark = stored()[name], RELEASED[name]
    normalise = benchmark.prompts.normalise
    row = normalise(line["row"], line["number"]) if normalise else line["row"]
    assert benchmark.turns(row)[:3] == tuple(line[part] for part in ("user", "system", "opened"))
    assert list(benchmark.prompts.stop_strings) == line["stop_strings"]


@pytest.mark.parametrize("name", DIGESTS)
def test_every_prompt_of_the_real_rows_is_what_lm_eval_renders(reference_data: Path, name: str) -> None:
    digest = hashlib.sha256()
    for row in Task(RELEASED[name]).rows(reference_data / "benchmarks"):
        user, system, opened, *_ = RELEASED[name].turns(row)
        digest.update(json.dumps([user, system, opened]).encode())
    assert digest.hexdigest().startswith(DIGESTS[name])


def test_both_prompts_ask_the_same_questions_for_the_same_answers(reference_data: Path) -> None:
    for name in ("gsm8k", "mmlu_pro", "arc_challenge"):
        ours, released = (
            get_task(task).rows(reference_data / "benchmarks") for task in (name, f"refusion_{name}_release")
        )
        assert ours == released
        assert list(map(BENCHMARKS[name].gold, ours)) == list(map(RELEASED[name].gold, released))


def test_choices_of_gpqa_are_shuffled_row_by_row_and_cut_as_in_the_release() -> None:
    row = stored()["gpqa"]["row"]
    letters = {"w  w": "1", "x. x": "2", "y": "3", "z": "r"}
    normalise = RELEASED["gpqa"].prompts.normalise
    assert normalise is not None
    shown = [normalise(row, number) for number in range(3)]
    assert ["".join(letters[choice] for choice in each["choices"]) for each in shown] == ["312r", "12r3", "132r"]
    assert [each["answer"] for each in shown] == ["D", "C", "D"]


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("gsm8k", "3 and 4 make $1,234.", "$1,234."),
        ("gsm8k", "The answer is 5", "5"),
        ("gsm8k", "none", None),
        ("mmlu_pro", "the answer is (B). No, the answer is (C).", "B"),
        ("mmlu_pro", "<think>the answer is (B)</think>", "B"),  # the release leaves thinking blocks in the text
        ("arc_challenge", " c.\n", "C"),
        ("arc_challenge", " [B] salt", "B SALT"),
        ("gpqa", "(A) or rather (B)", "B"),
        ("gpqa", "Answer: C", "C"),
        ("gpqa", "C", None),
        ("mbpp", "def f():\n    return 1", "def f():\n    return 1"),
        ("mbpp", "Here:\n```python\ndef f():\n    return 1\n```\nbye", "def f():\n    return 1"),
        ("math", "so ```python\n2\n``` is", "2"),
    ],
)
def test_answers_are_found_as_the_release_finds_them(name: str, text: str, answer: str | None) -> None:
    assert RELEASED[name].extract(text, {"options": list("abcde")}).answer == answer


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [("gsm8k", "The answer is 5", None), ("gsm8k", "The answer is 15", "1"), ("gpqa", "The answer is (B).", "B")],
)
def test_the_strict_rules_want_one_more_character(name: str, text: str, answer: str | None) -> None:
    assert RELEASED[name].extract(text, {}, "strict").answer == answer


def test_numbers_are_compared_as_texts() -> None:
    row = {"question": "q", "answer": "#### 1,200"}
    verdicts = judge_texts(RELEASED["gsm8k"], [(row, "$1,200."), (row, "so 1200.0")])
    assert [verdict.passed for verdict in verdicts] == [True, False]
    assert judge_texts(BENCHMARKS["gsm8k"], [(row, "so 1200.0")])[0].passed


def test_math_verify_reads_solution_and_response_by_itself() -> None:
    row = {"problem": "p", "solution": "It is $\\boxed{\\frac12}$."}
    texts = ["Hence $x = 0.5$ holds.", "Hence $x = 5$ holds.", "Nothing.", "pa.a 1/2", "\\boxed{0.5}"]
    verdicts = judge_texts(RELEASED["math"], [(row, text) for text in texts], workers=1)
    assert [verdict.passed for verdict in verdicts] == [True, False, False, True, True]
    # What was read is recorded, and the reason warns where the text has no answer in a form that one asks for.
    assert [verdict.extracted for verdict in verdicts[2:]] == [None, "1/2", "1/2"]
    assert verdicts[2].reason.startswith("math-verify read nothing in the whole text; expected \\frac12: not equal;")
    assert "math-verify read 1/2 in the whole text; expected \\frac12: equal by math-verify" in verdicts[3].reason
    warned = [
        verdict.reason.endswith("warning: the text has neither a box nor a stated answer") for verdict in verdicts
    ]
    assert warned == [True, True, True, True, False]


FUNCTION = {"prompt": 'import math\n\ndef one(x):\n    """Returns 1."""\n', "entry_point": "one"}


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("def one(x):\n    return two(x)\n\ndef two(x):\n    return 1\n\ndef three():\n    return 3\n```\nIt is easy.",
         "import math\ndef one(x):\n    return two(x)\ndef two(x):\n    return 1"),
        ("    return 1", 'import math\ndef one(x):\n    """Returns 1."""\n    return 1'),
        ("Sure:\n```python\ndef one(x):\n    return 1\n```", "import math\ndef one(x):\n    return 1"),
        ("def one(x):\n    return helper(x).name\n\ndef helper(x):\n    return x",
         "import math\ndef one(x):\n    return helper(x).name"),  # of a(b).c only c counts as a name
        ("def one(x):\n    print(x)", "import math"),  # without a return it is no definition
        ("def one(x):\n    return 1\nfor", "import math\ndef one(x):\n    return 1"),
        ("K = 2\ndef one(x):\n    return K", "import math\nK = 2\ndef one(x):\n    return K"),
    ],
)  # fmt: skip
def test_programs_are_reduced_to_what_the_function_needs(text: str, program: str) -> None:
    assert RELEASED["humaneval"].extract(text, FUNCTION).answer == program


@pytest.mark.parametrize("text", ["", "(" * 5000, "```", "x = " + "-" * 3000 + "1", "def one(x):\n" * 400])
def test_a_hostile_program_is_read_in_seconds(text: str) -> None:
    assert isinstance(RELEASED["humaneval"].extract(text, FUNCTION), Extraction)


def test_recorded_solutions_give_the_answers_that_lm_eval_finds(reference_data: Path) -> None:
    outputs = [line for _, line in json_lines(reference_data / "outputs" / "gsm8k_openai_solutions.jsonl.gz")]
    texts = [output["solution"] for line in outputs for output in line["outputs"].values()]
    items: list[tuple[dict[str, Any], str]] = [({}, text.replace("A:", "The answer is")) for text in texts]
    rules = {"flexible-extract": release.last_number, "strict-match": release.strict_number}
    for name, rule in rules.items():
        found = filters.find("gsm8k/gsm8k-cot.yaml", name, items)
        assert [rule(text, row).answer for row, text in items] == [extraction.answer for extraction in found]


def test_recorded_letters_are_found(reference_data: Path) -> None:
    rows = {row["question_id"]: row for row in Task(RELEASED["mmlu_pro"]).rows(reference_data / "benchmarks")}
    outputs = [line for _, line in json_lines(reference_data / "outputs" / "mmlu_pro_llama-3-8b.jsonl.gz")]
    found = [RELEASED["mmlu_pro"].extract(line["model_output"], rows[line["question_id"]]) for line in outputs]
    assert [extraction.answer for extraction in found] == [line["pred"] for line in outputs]


def judged(data: Path, name: str, file: str) -> list[tuple[dict[str, Any], Verdict]]:
    rows = {row["task_id"]: row for row in Task(RELEASED[name]).rows(data / "benchmarks")}
    outputs = [line for _, line in json_lines(data / "outputs" / file)]
    known = [line for line in outputs if line["task_id"] in rows]
    return list(
        zip(known, judge_texts(RELEASED[name], [(rows[it["task_id"]], it["solution"]) for it in known]), strict=True)
    )


@pytest.mark.sandbox
def test_recorded_programs_get_their_published_verdicts(reference_data: Path) -> None:
    if probe().tier == "D":
        pytest.skip("programs cannot be isolated here")
    verdicts = judged(reference_data, "humaneval", "humaneval_gpt-4_body_only.jsonl.gz")
    assert [verdict.passed for _, verdict in verdicts] == [line["is_solved"] for line, _ in verdicts]
