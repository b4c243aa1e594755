"""Verdicts of this project beside those of other tools: `python performance/extraction.py DATA OUTPUTS CASES`.

DATA holds the benchmarks' rows, OUTPUTS recorded outputs of public models with their publishers' verdicts, and CASES
files of texts with the verdict that is right. The other rules are written here from their published definitions
(OpenCompass, EvalPlus, lm-eval's BBH) or called from the installed libraries (lm-eval, math-verify). One table says how
often each rule agrees with this project and with the right verdict. With `--draw`, 60 outputs on which a rule and this
project differ are drawn with a seed, to be judged by a reader.
"""

import csv
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from command import run_script, show_progress
from lm_eval.tasks.hendrycks_math.utils import is_equiv, last_boxed_only_string, remove_boxed
from math_verify import ExprExtractionConfig, LatexExtractionConfig, StringExtractionConfig, parse, verify

from refusion_eval.benchmarks import BENCHMARKS, LETTERS, Extraction, Row, get_task
from refusion_eval.benchmarks.extract import release
from refusion_eval.benchmarks.extract.programs import NO_CODE
from refusion_eval.benchmarks.rows import json_lines
from refusion_eval.lm_eval_plugin.filters import FILTERS
from refusion_eval.scoring.judge import judge_extractions

RESULTS = Path(__file__).resolve().parents[1] / "results" / "embedded"
NUM_JUDGED = 60
COLUMNS = ("texts", "benchmark", "id", "rule", "expected", "text", "ours", "other")

# How each row of CASES that names its task only is asked: as its files define them.
PROMPT = "def twice_plus(x: int, y: int) -> int:\n    "
PROMPT += '"""Return twice x, plus y.\n    >>> twice_plus(2, 3)\n    7\n    """\n'
TESTS = ["assert twice_plus(2, 3) == 7", "assert twice_plus(0, 0) == 0", "assert twice_plus(-4, 1) == -7"]


class Item(NamedTuple):
    """One text: where it is from, what it answers, and whether it is right (None where that is not clear)."""

    texts: str
    benchmark: str
    id: str
    row: Row
    text: str
    is_right: bool | None


def outputs(data: Path, folder: Path) -> Iterator[Item]:
    """The recorded outputs; of a text that runs on into another question, the part before it."""
    rows = {name: get_task(name).rows(data) for name in ("gsm8k", "mmlu_pro", "humaneval")}
    for _, line in json_lines(folder / "gsm8k_openai_solutions.jsonl.gz"):
        for model, output in line["outputs"].items():
            row = rows["gsm8k"][line["idx"]]
            yield Item("outputs", "gsm8k", f"{model}/{line['idx']}", row, output["solution"], output["is_correct"])
    asked = {row["question_id"]: row for row in rows["mmlu_pro"]}
    for _, line in json_lines(folder / "mmlu_pro_llama-3-8b.jsonl.gz"):
        row, text = asked[line["question_id"]], line["model_output"].split("Question:")[0]
        yield Item("outputs", "mmlu_pro", str(line["question_id"]), row, text, line["pred"] == row["answer"])
    asked = {row["task_id"]: row for row in rows["humaneval"]}
    for _, line in json_lines(folder / "humaneval_gpt-4_body_only.jsonl.gz"):
        yield Item("outputs", "humaneval", line["task_id"], asked[line["task_id"]], line["solution"], line["is_solved"])
    for _, line in json_lines(folder / "mbpp_gpt-4_run1.jsonl.gz"):  # with tests of their own
        name = line["entry_point"]
        row = {"text": "", "code": "", "test_list": [f"{line['test']}\ncheck({name})"], "entry_point": name}
        yield Item("outputs", "mbpp", str(line["task_id"]), row, line["solution"], line["is_solved"])


def cases(folder: Path) -> Iterator[Item]:
    for path in sorted(folder.glob("cases*.jsonl")):
        for _, line in json_lines(path):
            name = line.get("task") or line.get("benchmark")
            if name in ("gsm8k", "math", "mmlu_pro", "humaneval", "mbpp", "bbh"):
                row = line.get("row") or _row(name, line["gold"])
                is_right = {"correct": True, "wrong": False}.get(line["right"])
                yield Item("cases", name, line["id"], row, line["text"], is_right)


def _row(name: str, gold: str) -> dict[str, Any]:
    if name == "gsm8k":
        return {"question": "How many?", "answer": f"#### {gold}"}
    if name == "math":
        return {"problem": "Find it.", "solution": f"It is $\\boxed{{{gold}}}$."}
    if name == "mmlu_pro":
        return {"question": "Which?", "options": [f"option {number}" for number in range(10)], "answer": gold}
    if name == "humaneval":
        test = "def check(twice_plus):\n" + "".join(f"    {one}\n" for one in TESTS)
        return {
            "prompt": PROMPT,
            "canonical_solution": "    return 2 * x + y\n",
            "test": test,
            "entry_point": "twice_plus",
        }
    return {"text": "Twice x, plus y.", "code": "", "test_list": TESTS[:2], "test_setup_code": ""}


# --- The other rules: (row, text) -> the answer as text, or for math-verify the verdict ---


def math_verify(item: Item, gold: str) -> bool:
    """The library alone: what it finds in the whole text against the right answer."""
    if item.benchmark == "mmlu_pro":
        configs: Any = [StringExtractionConfig(strings=tuple(LETTERS[:10]))]
    else:
        configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    right = parse(gold if item.benchmark == "mmlu_pro" else f"${gold}$", configs, parsing_timeout=None)
    return bool(verify(right, parse(item.text, configs, parsing_timeout=None), timeout_seconds=None))


def lm_eval_bbh(item: Item, gold: str) -> bool:
    """The filter of `bbh_cot_fewshot` (version 4.0): the first match, but for the last character of its line."""
    found = re.findall(r"(?<=the answer is )(.*)(?=.)", item.text)
    return bool(found) and found[0].strip() == gold


# The English patterns of `first_option_postprocess`, in its order: of the first one that the text has anywhere, the
# letter (of one that holds more than a letter, the first choice that is in it).
_LETTER = r"(?:\*\*)?([A-J])"
OPENCOMPASS_LETTERS = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"[\s,:]([A-J])[,.]?$",
        r"(?i:answer)\s*:\s*([A-J])",
        rf"[Tt]he answer is:?\s+\(?{_LETTER}",
        r"[Tt]he answer is option:?\s+\(?([A-J])",
        r"[Tt]he correct answer is:?\s+\(?([A-J])",
        r"[Tt]he correct answer is option:?\s+\(?([A-J])",
        r"[Tt]he correct (?:answer|option|answer option) is:?.*?boxed{([A-J])}",
        r"[Tt]he answer to the question is:?\s+\(?([A-J])",
        r"(?:\s|^)([A-J])[\s:,.$]",
        r"1.\s?(.*?)$",
        r"([A-J]):",
        r"([A-J])",
    )
]


def opencompass(item: Item, gold: str) -> bool:
    """`gsm8k_postprocess`, `math_postprocess_v2`, `first_option_postprocess` and BBH's two rules.

    They were compared with the sources of open-compass/opencompass. Of its normal form for a statement without a box
    the list of units is left out.
    """
    text = item.text
    if item.benchmark == "gsm8k":
        numbers = re.findall(r"-?\d+\.\d+|-?\d+", text.split("Question:")[0])
        return bool(numbers) and abs(float(numbers[-1]) - int(gold.replace(",", ""))) < 1e-6
    if item.benchmark == "math":
        boxed = last_boxed_only_string(text)
        return is_equiv(remove_boxed(boxed) if boxed else _opencompass_statement(text), gold)
    if item.benchmark == "mmlu_pro":
        found = next((match[1] for pattern in OPENCOMPASS_LETTERS if (match := pattern.search(text.strip()))), "")
        return next((letter for letter in LETTERS[:10] if letter in found), None) == gold
    found = text.split("answer is ")[1].strip() if "answer is " in text else text
    if re.fullmatch(r"\([A-R]\)", gold):
        letter = re.search(r"\(([A-Z])\)*", found) or re.search(r"([A-Z])", found)
        return letter is not None and f"({letter[1]})" == gold
    line = found.split("\n")[0].strip().removesuffix(".").strip()
    bold = re.search(r"\*\*(.*?)\*\*", line)
    return (bold[1] if bold else line) == gold


def _opencompass_statement(text: str) -> str:
    """Of the first part between points that states an answer, else of the first part, the formula without blanks."""
    parts = text.split(".")
    stated = next((part for part in parts if re.search("final answer|answer is", part.lower())), parts[0])
    plain = re.split("answeris:?", stated.replace(" ", "").replace("\n", ""))[-1]
    return (re.findall(r"\$(.*?)\$", plain) or [plain])[-1].replace("$", "")


def evalplus(item: Item) -> Extraction:
    """`sanitize`: the longest run of lines that parses, reduced to what the function asked for needs."""
    name = item.row.get("entry_point") or re.findall(r"assert (\w+)\(", item.row["test_list"][0])[0]
    is_body = "prompt" in item.row and not re.search(rf"def {name}\b", item.text)  # it completes the prompt
    code = release.function_after_prompt(
        item.text, {"prompt": item.row["prompt"] if is_body else "", "entry_point": name}
    ).answer
    return Extraction(code, "sanitize") if code and name in code else NO_CODE


def lm_eval(items: list[Item]) -> list[bool]:
    """The filter of lm-eval's own task, with its comparison."""
    name = items[0].benchmark
    rule = FILTERS[LM_EVAL[name]].rules[name]
    extracted = rule.find([(item.row, item.text) for item in items])
    if name in ("humaneval", "mbpp"):  # its two tasks: an answer in a fence, or one that continues the prompt
        raw = FILTERS["raw-continuation"].rules[name].find([(item.row, item.text) for item in items])
        extracted = [one if one.answer else other for one, other in zip(extracted, raw, strict=True)]
    verdicts = judge_extractions(BENCHMARKS[name], [item.row for item in items], extracted, is_right=rule.is_right)
    return [verdict.passed for verdict in verdicts]


LM_EVAL = {"gsm8k": "flexible-extract", "math": "minerva-statement", "mmlu_pro": "custom-extract",
           "humaneval": "first-fenced-block", "mbpp": "first-fenced-block"}  # fmt: skip


def by_text(rule: Callable[[Item, str], bool]) -> Callable[[list[Item]], list[bool]]:
    def judged(items: list[Item]) -> list[bool]:
        verdicts = []
        for item in items:
            try:
                verdicts.append(rule(item, BENCHMARKS[item.benchmark].gold(item.row)))
            except Exception:  # noqa: BLE001 - a rule that fails on a text does not count it as right
                verdicts.append(False)
        return verdicts

    return judged


def by_program(items: list[Item]) -> list[bool]:
    rows, extracted = [item.row for item in items], [evalplus(item) for item in items]
    return [verdict.passed for verdict in judge_extractions(BENCHMARKS[items[0].benchmark], rows, extracted)]


def ours(items: list[Item]) -> list[bool]:
    benchmark = BENCHMARKS[items[0].benchmark]
    extracted = [benchmark.extract(item.text, item.row) for item in items]
    return [verdict.passed for verdict in judge_extractions(benchmark, [item.row for item in items], extracted)]


RULES: Mapping[str, tuple[tuple[str, ...], Callable[[list[Item]], list[bool]]]] = {
    "ours": (tuple(BENCHMARKS), ours),
    "math-verify": (("gsm8k", "math", "mmlu_pro"), by_text(math_verify)),
    "lm-eval": (tuple(LM_EVAL), lm_eval),
    "lm-eval BBH": (("bbh",), by_text(lm_eval_bbh)),
    "OpenCompass": (("gsm8k", "math", "mmlu_pro", "bbh"), by_text(opencompass)),
    "EvalPlus": (("humaneval", "mbpp"), by_program),
}


def compare(
    data: Annotated[Path, typer.Argument(help="Folder with the benchmarks' rows.")],
    outputs_folder: Annotated[Path, typer.Argument(metavar="OUTPUTS", help="Folder with recorded outputs.")],
    cases_folder: Annotated[Path, typer.Argument(metavar="CASES", help="Folder with cases*.jsonl.")],
    seed: Annotated[int, typer.Option(help="Seed of the texts that are drawn to be judged by hand.")] = 0,
    draw: Annotated[Path | None, typer.Option(help="Write the drawn texts to this CSV file.")] = None,
) -> None:
    """Compares the rules, writes the table of agreements, and draws texts on which they differ."""
    groups: dict[tuple[str, str], list[Item]] = {}
    for item in [*outputs(data, outputs_folder), *cases(cases_folder)]:
        groups.setdefault((item.texts, item.benchmark), []).append(item)
    table: list[dict[str, Any]] = []
    differing: dict[tuple[str, str, str], list[tuple[Item, str, bool, bool]]] = {}
    for (texts, benchmark), items in groups.items():
        right = ours(items)
        for name, (benchmarks, rule) in RULES.items():
            if benchmark in benchmarks:
                verdicts = right if rule is ours else rule(items)
                known = [(item.is_right, verdict) for item, verdict in zip(items, verdicts, strict=True)
                         if item.is_right is not None]  # fmt: skip
                table.append({
                    "texts": texts, "benchmark": benchmark, "rule": name.removesuffix(" BBH"), "num_texts": len(items),
                    "agree_with_ours": sum(map(bool.__eq__, right, verdicts)),
                    "num_known": len(known), "agree_with_right": sum(a == b for a, b in known),
                })  # fmt: skip
                show_progress(str(table[-1]))
                others = zip(items, right, verdicts, strict=True)
                found = [(item, name.removesuffix(" BBH"), own, other) for item, own, other in others if own != other]
                if found and texts == "outputs":
                    differing[texts, benchmark, name] = found
    with (RESULTS / "extraction.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, table[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    if draw is not None:
        _write_drawn(draw, differing, random.Random(seed))


def _write_drawn(path: Path, differing: Mapping[Any, list[Any]], generator: random.Random) -> None:
    """As many texts of each group as there are, in turns, up to `NUM_JUDGED`."""
    shuffled = [generator.sample(group, len(group)) for _, group in sorted(differing.items())]
    turns = [group[turn] for turn in range(max(map(len, shuffled))) for group in shuffled if turn < len(group)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for item, rule, own, other in turns[:NUM_JUDGED]:
            expected = BENCHMARKS[item.benchmark].gold(item.row) if item.benchmark not in ("humaneval", "mbpp") else ""
            writer.writerow((item.texts, item.benchmark, item.id, rule, expected, json.dumps(item.text), own, other))


if __name__ == "__main__":
    run_script(compare)
