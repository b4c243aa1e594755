"""HumanEval-Infilling: names say the rule of the length, programs are joined as published, gold answers are right."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from refusion_eval.benchmarks import BENCHMARKS, PUBLISHED, SUITES, find_task, get_task
from refusion_eval.cli import app
from refusion_eval.errors import ConfigError, DataError
from refusion_eval.evaluation.loop import evaluate
from refusion_eval.paths import embedded_path
from refusion_eval.results.measured import run_measurements
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.scoring.score import score_texts
from refusion_eval.store.run_store import RunReader

SETS = {"single_line": 1033, "multi_line": 5815, "random_span": 1640, "random_span_light": 164}
NAME = "humaneval_infilling_single_line"
TEST = "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n"
ROWS = [
    {
        "task_id": f"SingleLineInfilling/HumanEval/0/L{number}",
        "entry_point": "add",
        "prompt": prompt,
        "canonical_solution": gold,
        "suffix": suffix,
        "test": TEST,
    }
    for number, (prompt, gold, suffix) in enumerate(
        [
            ("def add(a, b):\n", "    total = a + b\n", "    return total\n"),
            ("def add(a, b):\n    total = a + b\n", "    return total\n", ""),
        ]
    )
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A folder with two invented items, of which the last has a blank suffix."""
    folder = tmp_path / "data" / "humaneval_infilling"
    folder.mkdir(parents=True)
    (folder / "HumanEval-SingleLineInfilling.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder.parent


EMPTY_IS_RIGHT = [f"SingleLineInfilling/HumanEval/{place}" for place in ("33/L0", "68/L0", "99/L3", "105/L7", "127/L8")]


@pytest.fixture(scope="module")
def data(reference_data: Path) -> Path:
    return reference_data / "benchmarks"


@pytest.mark.parametrize(
    ("name", "title"),
    [
        (f"{NAME}_oracle", "HumanEval-Infilling single-line, oracle length"),
        ("humaneval_infilling_multi_line_fixed_32", "HumanEval-Infilling multi-line, 32 tokens"),
        (
            "humaneval_infilling_multi_line_open_64",
            "HumanEval-Infilling multi-line, length found by the system, at most 64 tokens",
        ),
        (
            f"{NAME}_oracle_wrong_suffix_inner",
            "HumanEval-Infilling single-line, oracle length, suffix of another function, suffix not blank",
        ),
        (
            "humaneval_infilling_random_span_light_upto_64_prefix_only_last",
            "HumanEval-Infilling random-span-light, up to 64 tokens, prefix only, suffix blank",
        ),
    ],
)
def test_a_name_says_the_set_and_the_rule_of_the_length(name: str, title: str):
    task = get_task(name)
    assert (task.name, task.benchmark.title) == (f"refusion_{name}", title)
    assert find_task(task.name) == task
    assert task.benchmark.metric == "pass@1"


@pytest.mark.parametrize("name", [NAME, f"{NAME}_fixed", f"{NAME}_fixed_0", f"{NAME}_open_1", f"{NAME}_oracle_first"])
def test_no_set_is_asked_without_a_rule(name: str):
    with pytest.raises(ConfigError, match="unknown task"):
        get_task(name)


def test_infilling_is_in_no_suite_because_few_decoders_infill():
    assert not [one.name for suite in SUITES.values() for one in suite if one.ours.gap]
    assert not [name for name in PUBLISHED if name.startswith("humaneval_infilling")]


def test_the_parts_of_a_set_are_the_whole(rows: Path):
    ids = {part: [item.id for item in get_task(f"{NAME}_oracle{part}").items(rows)] for part in ("", "_inner", "_last")}
    assert (ids["_inner"], ids["_last"]) == ([ROWS[0]["task_id"]], [ROWS[1]["task_id"]])
    assert ids[""] == ids["_inner"] + ids["_last"]


def test_a_program_is_prefix_text_and_suffix_and_nothing_is_trimmed():
    benchmark, text = BENCHMARKS[f"{NAME}_oracle"], "  \n\tx = 1 <|im_end|>\r\n\n"
    found = benchmark.extract(text, ROWS[0])
    assert found.answer == f"{ROWS[0]['prompt']}{text}{ROWS[0]['suffix']}"
    assert benchmark.test is not None
    assert benchmark.test(ROWS[0]).test == f"{TEST}\ncheck(add)\n"


@pytest.mark.parametrize("answer", ["canonical_solution", "empty"])
def test_gold_answers_are_right_and_empty_ones_are_not(answer: str):
    texts = {row["task_id"]: [row.get(answer, "")] for row in ROWS}
    scores = score_texts(BENCHMARKS[f"{NAME}_oracle"], ROWS, texts)
    assert [score.value for score in scores] == [answer == "canonical_solution"] * 2


def test_a_wrong_suffix_is_that_of_another_function_half_a_set_further(tmp_path: Path):
    given = [("f", "1\n"), ("f", ""), ("g", "2\n"), ("g", " \n"), ("h", "1\n"), ("h", "3\n")]
    rows = [
        {**ROWS[0], "task_id": f"{number}", "entry_point": name, "suffix": suffix}
        for number, (name, suffix) in enumerate(given)
    ]
    path = tmp_path / "humaneval_infilling" / "HumanEval-SingleLineInfilling.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    items = get_task(f"{NAME}_fixed_4_wrong_suffix").items(tmp_path)
    # Of 0: 3 is blank, 4 has the same suffix. Of 2: 5 will do. Of 3: so does 0. Of 4: 1 is blank, 2 will do.
    assert [item.turns.behind for item in items] == ["3\n", "1\n", "3\n", "1\n", "2\n", "2\n"]
    assert [item.id for item in get_task(f"{NAME}_fixed_4_wrong_suffix_last").items(tmp_path)] == ["1", "3"]
    benchmark = get_task(f"{NAME}_fixed_4_wrong_suffix").benchmark
    assert benchmark.extract("x", items[0].row).answer == f"{ROWS[0]['prompt']}x1\n"
    assert score_texts(benchmark, ROWS, {ROWS[0]["task_id"]: [ROWS[0]["canonical_solution"]]})[0].value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    with pytest.raises(DataError, match="item 0: no other function has a suffix"):
        get_task(f"{NAME}_fixed_4_wrong_suffix").items(tmp_path)


@pytest.mark.golden
@pytest.mark.parametrize("of_set", SETS)
def test_every_item_has_a_wrong_suffix_of_its_own_set(data: Path, of_set: str):
    rows = get_task(f"humaneval_infilling_{of_set}_oracle_wrong_suffix").rows(data)
    assert all(row["wrong_suffix"].strip() and row["wrong_suffix"] != row["suffix"] for row in rows)
    assert len({row["wrong_suffix"] for row in rows}) > 0.6 * len({row["suffix"] for row in rows})


@pytest.mark.golden
@pytest.mark.parametrize("of_set", SETS)
def test_the_gold_answers_of_some_items_are_right(data: Path, of_set: str):
    benchmark = BENCHMARKS[f"humaneval_infilling_{of_set}_oracle"]
    rows = get_task(benchmark.name).rows(data)
    assert len(rows) == SETS[of_set] == benchmark.source.num_rows
    some = rows[:: len(rows) // 8]
    scores = score_texts(benchmark, some, {row["task_id"]: [benchmark.prompts.gold_text(row)] for row in some})
    assert [score.item_id for score in scores if not score.value] == []


@pytest.mark.golden
@pytest.mark.slow
@pytest.mark.parametrize("of_set", SETS)
def test_gold_answers_all_over_a_set_are_right(data: Path, of_set: str):
    """`score --outputs gold` judges all of them, which takes ten minutes."""
    benchmark = BENCHMARKS[f"humaneval_infilling_{of_set}_oracle"]
    rows = get_task(benchmark.name).rows(data)
    rows = rows[:: len(rows) // 80]
    scores = score_texts(benchmark, rows, {row["task_id"]: [benchmark.prompts.gold_text(row)] for row in rows})
    assert [score.item_id for score in scores if not score.value] == []


@pytest.mark.golden
@pytest.mark.slow
def test_an_empty_completion_is_right_where_a_line_is_not_needed(data: Path):
    """Of all 1,033 single lines 27 are such; these are the ones among every tenth."""
    rows = get_task(f"{NAME}_oracle").rows(data)[::10]
    scores = score_texts(BENCHMARKS[f"{NAME}_oracle"], rows, {row["task_id"]: [""] for row in rows})
    assert [score.item_id for score in scores if score.value] == EMPTY_IS_RIGHT


@pytest.mark.golden
def test_164_of_the_single_lines_have_a_blank_suffix(data: Path):
    assert len(get_task(f"{NAME}_oracle_last").rows(data)) == 164
    assert len(get_task(f"{NAME}_oracle_inner").rows(data)) == 869


def evaluated(rows: Path, run_dir: Path, task: str, **more: Any) -> list[Any]:
    """The samples of a run of the embedded model on the invented items."""
    given = {"pretrained": "embedded", "data_dir": str(rows), "run_dir": str(run_dir), "warmup": 0, **more}
    assert evaluate(parse_model_args(given), [f"refusion_{task}"], sandbox="none").is_complete
    with RunReader.open(run_dir) as run:
        return list(run.samples())


@pytest.mark.parametrize("decoder", ["refusion", "llada"])
def test_a_run_decodes_as_many_tokens_as_the_rule_says_and_records_the_rule(rows: Path, tmp_path: Path, decoder: str):
    small = {"slot_size": 4, "block_size": 8} if decoder == "refusion" else {}
    for rule in ("oracle", "fixed_9", "upto_9", "open_9", "oracle_prefix_only"):
        samples = evaluated(rows, tmp_path / rule, f"{NAME}_{rule}", decoder=decoder, batch_size=2, **small)
        assert {sample.key.task for sample in samples} == {f"refusion_{NAME}_{rule}"}
        lengths = [len(sample.tokens) for sample in samples]
        assert {sample.stop for sample in samples} <= ({"gap", "eos"} if rule in ("upto_9", "open_9") else {"gap"})
        if rule.startswith("oracle"):
            tokenizer = load_tokenizer()
            assert lengths == [len(tokenizer.encode(row["canonical_solution"])) for row in ROWS]
        elif rule == "fixed_9":
            assert lengths == [9, 9]
        else:
            assert max(lengths) <= 9
            assert all(sample.settings["eos_ids"] for sample in samples)
            num_searched = [sum(row[:3:2] == ["forward", "search"] for row in sample.trace) for sample in samples]
            assert all((number >= 5) == (rule == "open_9") for number in num_searched)
            assert all(sample.num_forwards > number for sample, number in zip(samples, num_searched, strict=True))
    figures = run_measurements([tmp_path / "oracle"])
    assert [(one.value, one.num_cut) for one in figures if one.metric == "cut"] == [(0, 0)]
    (figure,) = (one for one in figures if one.metric == "pass@1")
    assert figure.task == f"refusion_{NAME}_oracle"


def load_tokenizer() -> Any:
    from refusion_eval.api import load_model

    return load_model("embedded", device="cpu").tokenizer


def test_dreamon_finds_the_length_itself_between_the_ends_of_the_text(rows: Path, tmp_path: Path):
    folder = tmp_path / "dreamon"
    shutil.copytree(embedded_path("llada"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"decoders": ["dream"], "expand_token_id": 1833}))
    given = {"pretrained": str(folder), "decoder": "dream", "schedule": "dreamon", "alg": "entropy"}
    samples = evaluated(rows, tmp_path / "run", f"{NAME}_open_9", **given)
    tokenizer = load_tokenizer()
    for sample, row in zip(samples, ROWS, strict=True):
        assert (sample.settings["expand_id"], sample.stop) == (1833, "gap")
        num_known = len(tokenizer.encode(row["prompt"], plain=True)) + len(tokenizer.encode(row["suffix"]))
        assert sample.prompt_num_tokens == num_known + 9 + 2  # the longest gap, BOS and EOS
        kinds = {(event[2], event[3]) for event in sample.trace if event[0] == "forward"}
        assert {kind for kind, _ in kinds} == {"denoise"}  # no length is searched before
        assert max(num_rows for _, num_rows in kinds) <= num_known + 9 + 2
        assert sample.trace[0][3] == num_known + 8 + 2


def test_a_decoder_that_sees_no_later_text_is_refused_before_anything_is_decoded(rows: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"decoder=bd3lm does not infill: .* they see no later text"):
        evaluated(rows, tmp_path / "run", f"{NAME}_oracle", decoder="bd3lm")
    with pytest.raises(ConfigError, match="decode the prefix alone, as tasks with _prefix_only"):
        evaluated(rows, tmp_path / "other", f"{NAME}_oracle", decoder="autoregressive")
    samples = evaluated(rows, tmp_path / "control", f"{NAME}_fixed_4_prefix_only", decoder="autoregressive")
    assert max(len(sample.tokens) for sample in samples) <= 4


def test_check_prints_a_prompt_with_its_gap(rows: Path):
    arguments = ["check", "--model", "embedded", "--tasks", f"refusion_{NAME}_fixed_5", "--data", str(rows), "--json"]
    (prompt,) = json.loads(CliRunner().invoke(app, arguments).stdout)["prompts"].values()
    assert prompt["text"] == f"{ROWS[0]['prompt']}<gap>{ROWS[0]['suffix']}"
    tokenizer = load_tokenizer()
    texts = (tokenizer.encode(ROWS[0]["prompt"], plain=True), tokenizer.encode(ROWS[0]["suffix"]))
    assert prompt["num_tokens"] == sum(map(len, texts)) + 5
