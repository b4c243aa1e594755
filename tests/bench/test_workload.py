"""The speed of systems on prompts of given lengths and on conversations, which have no right answers."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from refusion_eval.bench.contestants import systems_named, systems_on
from refusion_eval.bench.prompts import Prompt, Workload, long_prompts, parse_lengths, speed_bench
from refusion_eval.bench.workload import Answer, figures_of, measure, table
from refusion_eval.cli import app
from refusion_eval.errors import ConfigError, DataError, MissingRowsError
from refusion_eval.paths import embedded_path
from tests.server.peers import Peer, serving, stream

SETTINGS = {"gen_length": 16, "slot_size": 4, "block_size": 16}
ROW = {
    "question_id": "q1",
    "category": "coding",
    "sub_category": "python",
    "turns": ["Add 3 and 4.", "Now double it."],
    "source": "made",
    "src_id": "1",
    "difficulty": "easy",
    "multiturn": True,
}


@pytest.fixture(scope="module")
def systems():
    return systems_on(str(embedded_path("refusion")), SETTINGS, {"device": "cpu", "dtype": "float32"})


def test_lengths_are_numbers_of_tokens_in_rising_order():
    assert parse_lengths("4k, 128,1K,128") == [128, 1024, 4096]
    for wrong in ("", "0", "4m", "1.5k", "128,,256", "-1"):
        with pytest.raises(ConfigError, match="--prompt-lengths"):
            parse_lengths(wrong)


def test_generated_prompts_state_their_entropy_and_differ():
    load = long_prompts([64, 256], 3, None)
    assert load.generated
    assert "bits a word" in load.source
    assert [prompt.group for prompt in load.prompts] == ["64"] * 3 + ["256"] * 3
    assert len({prompt.turns[0] for prompt in load.prompts}) == 3


def test_prompts_of_rows_are_real_questions_and_each_begins_with_another(tmp_path):
    rows = [{"question": f"How many are {n} and {n}? " + "Think. " * 40, "answer": f"#### {2 * n}"} for n in range(9)]
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    load = long_prompts([64], 3, tmp_path)
    assert not load.generated
    assert [prompt.turns[0][:18] for prompt in load.prompts] == [f"How many are {n} and" for n in (0, 3, 6)]
    with pytest.raises(DataError, match="too few for 1,024 tokens"):
        long_prompts([1024], 1, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has rows of none of gsm8k"):
        long_prompts([64], 1, tmp_path / "empty")


def test_systems_take_turns_and_figures_are_sums_over_sums(systems):
    assert list(systems) == ["refusion", "refusion, fused", "autoregressive"]
    conditions, answers = measure(systems, long_prompts([64, 256], 2, None), num_rounds=2)
    order = [(answer.round, answer.group, answer.system) for answer in answers]
    assert order == [
        (turn, group, name) for turn in (0, 1) for group in ("64", "256") for name in systems for _ in "ab"
    ]
    assert all(abs(answer.prompt_tokens - int(answer.group)) <= 3 for answer in answers)
    assert all(0 < answer.first_seconds < answer.seconds and answer.peak_bytes > 2**20 for answer in answers)
    figure = next(one for one in figures_of(answers) if (one.group, one.system) == ("256", "autoregressive"))
    own = [answer for answer in answers if (answer.group, answer.system) == ("256", "autoregressive")]
    assert figure.tpf[0] == 1
    assert figure.num_answers == 4
    assert figure.decode_tps[0] == pytest.approx(
        sum(one.later_tokens for one in own) / sum(one.seconds - one.first_seconds for one in own)
    )
    assert all(one.rows == one.prompt_tokens + one.forwards - 1 for one in own)  # each later forward has one row
    shown = table(conditions, figures_of(answers))
    assert "The text was generated" in shown
    assert "accuracy" not in shown.lower()
    assert conditions["num_rounds"] == 2


def test_a_prompt_that_does_not_fit_is_named_and_nothing_else_is_lost(systems):
    conditions, answers = measure(systems, long_prompts([64, 4096], 1, None), num_rounds=1)
    assert [answer.error is None for answer in answers] == [True] * 3 + [False] * 3
    assert "not measured: " in table(conditions, figures_of(answers)).splitlines()[4]


@pytest.mark.parametrize("left", ["", "\n", '\n{"systems": {"a'])
def test_an_interrupted_measurement_goes_on_where_it_ended(systems, tmp_path, left):
    load, path = long_prompts([64, 128], 1, None), tmp_path / "answers"

    def stop(text):
        if text.startswith("round 1 of 2, 128"):
            raise KeyboardInterrupt

    path.write_text(left)  # as a measurement leaves it that found the disk full
    with pytest.raises(KeyboardInterrupt):
        measure(systems, load, num_rounds=2, path=path, progress=stop)
    before = path.read_text()
    assert before.count('"group": "64"') == 3
    path.write_text(f'{before}\n{{"system": "refu')  # a line that a killed process left
    _, answers = measure(systems, load, num_rounds=2, path=path)
    assert path.read_text().startswith(before)
    assert len(answers) == len({answer.key for answer in answers}) == 12
    assert measure(systems, load, num_rounds=2, path=path)[1] == answers
    with pytest.raises(ConfigError, match="was measured under other num_rounds; name another file"):
        measure(systems, load, num_rounds=3, path=path)
    with pytest.raises(ConfigError, match="was measured under other asked; name another file"):
        measure(systems, long_prompts([64, 96], 1, None), num_rounds=2, path=path)


def test_a_conversation_that_was_interrupted_counts_once(systems, tmp_path):
    load, path = (
        Workload([Prompt("g", "0", ["Add.", "Again."]), Prompt("g", "1", ["Add.", "Again."])], "made"),
        tmp_path / "a",
    )
    only = {"autoregressive": systems["autoregressive"]}
    measure(only, load, num_rounds=1, path=path)
    path.write_text("\n".join(path.read_text().split("\n")[:-2]))  # ended before the last turn of the second one
    for _ in range(2):
        assert [(one.prompt, one.turn) for one in measure(only, load, num_rounds=1, path=path)[1]] == [
            ("0", 0), ("0", 1), ("1", 0), ("1", 1),
        ]  # fmt: skip


def test_an_interval_is_by_prompt_however_many_rounds_there_are():
    answers = [
        Answer("a", "g", str(prompt), 0, turn, 5, 0, tokens, 2.0, 1.0, tokens - 1, 4)
        for turn in range(9)
        for prompt, tokens in enumerate((4, 8, 16, 32))
    ]
    one, nine = (figures_of([answer for answer in answers if answer.round < most])[0] for most in (1, 9))
    assert one.tpf == nine.tpf
    assert one.tpf[1] < one.tpf[0] < one.tpf[2]


def test_systems_by_name_keep_their_own_settings_and_masked_models_are_measured_alone():
    (system,) = systems_named(["wedlm"], "embedded", {}, {}).values()
    assert system.args.pretrained == "embedded"
    assert not system.args.settings
    assert list(systems_on("embedded:llada", SETTINGS, {"device": "cpu"})) == ["llada"]


def test_a_conversation_has_the_systems_own_answers_between_its_turns(systems, tmp_path):
    (tmp_path / "speed_bench").mkdir()
    file = tmp_path / "speed_bench" / "qualitative.jsonl"
    single = ROW | {"question_id": "q2", "turns": ["Add 3 and 4."], "multiturn": False, "difficulty": ""}
    file.write_text(f"{json.dumps(ROW)}\n{json.dumps(single)}\n{json.dumps(ROW | {'question_id': 'q3'})}\n")
    load = speed_bench("qualitative", tmp_path, 1)
    assert [(prompt.group, prompt.name) for prompt in load.prompts] == [("coding, easy", "q1"), ("coding", "q2")]
    only = {"autoregressive": systems["autoregressive"]}
    _, answers = measure(only, load, num_rounds=1)
    first, second, lone = answers
    assert (first.turn, second.turn, lone.turn) == (0, 1, 0)
    assert first.prompt_tokens == lone.prompt_tokens
    assert second.prompt_tokens > first.prompt_tokens + first.tokens
    with pytest.raises(MissingRowsError, match="throughput_1k"):
        speed_bench("throughput_1k", tmp_path, None)
    unfetched = ROW | {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"]}
    file.write_text(json.dumps(unfetched))
    with pytest.raises(DataError, match="its text was not fetched from made"):
        speed_bench("qualitative", tmp_path, None)
    file.write_text(json.dumps(ROW | {"difficulty": None, "sub_category": None}))
    assert speed_bench("qualitative", tmp_path, None).prompts[0].group == "coding"
    with pytest.raises(ConfigError, match="SPEED-Bench has no split 'test'"):
        speed_bench("test", tmp_path, None)


def test_a_server_has_its_first_byte_and_no_forwards():
    with serving(Peer(lambda number, body: stream(number, ("4", (7,)), (" and", (8,))))) as peer:
        named = systems_named([f"server:{peer.url}"], "", {"gen_length": 16}, {})
        load = Workload([Prompt("short", "0", ["Add.", "Again."])], "made")
        _, answers = measure(named, load, num_rounds=1)
    assert [answer.error for answer in answers] == [None, None]
    assert all(0 < answer.first_seconds <= answer.seconds for answer in answers)
    (figure,) = figures_of(answers)
    assert (figure.forwards, figure.rows, figure.tpf, figure.peak_bytes) == (None, None, None, None)
    assert "Add.\n\n4 and\n\nAgain." in peer.bodies[-1]["prompt"]
    begins = [body["prompt"].partition(":")[0] for body in peer.bodies if "Add." in body["prompt"]]
    assert dict.fromkeys(begins) == dict.fromkeys(["short, 0, -1", "short, 0, 0"])  # of the warm-up and the round
    assert (figure.decode_tps, figure.tps is None) == (None, False)  # its first bytes may be those of several tokens


def test_a_server_is_not_told_to_ignore_end_tokens():
    words = ["bench", "--prompt-lengths", "32", "--system", "server:http://127.0.0.1:1", "--model", "tiny"]
    with pytest.raises(ConfigError, match="--ignore-eos is for this project's engine, and not for loop=server"):
        CliRunner().invoke(app, [*words, "--ignore-eos"], catch_exceptions=False)


def test_answers_that_end_with_the_first_forward_have_no_speed_after_it():
    (figure,) = figures_of([Answer("a", "g", "0", 0, 0, 5, 0, 1, 1.0001, 1.0, 0, 1, 5, 0, None, 2**20)])
    assert figure.decode_tps is None
    assert figure.first_seconds[0] == 1


def test_a_figure_that_one_answer_does_not_tell_is_left_out():
    answer = Answer("a", "g", "0", 0, 0, 5, 0, 10, 2.0, 1.0, 9, 5, 20, 30, 4.0, 2**20)
    (figure,) = figures_of([answer, replace(answer, prompt="1", forwards=None, joules=None)])
    assert (figure.tpf, figure.forwards, figure.joules_a_token) == (None, None, None)
    assert figure.decode_tps[0] == 9


def test_the_command_prints_a_table_and_its_file_is_drawn(tmp_path, monkeypatch):
    words = [
        "bench",
        "--prompt-lengths",
        "32",
        "--prompts",
        "1",
        "--rounds",
        "1",
        "--gen-length",
        "8",
        "--device",
        "cpu",
    ]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "x.json")], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.startswith("prompts")
    stored = json.loads((tmp_path / "x.json").read_text())
    assert [figure["system"] for figure in stored["figures"]] == ["refusion", "refusion, fused", "autoregressive"]
    assert (tmp_path / "x.json.answers").read_text().count('"group": "32"') == 3
    endless = [*words, "--ignore-eos", "--out", str(tmp_path / "y.json")]
    done = CliRunner().invoke(app, endless, catch_exceptions=False)
    assert "End tokens ended no answer" in done.stdout
    assert (tmp_path / "y.json.answers").read_text().count('"tokens": 8,') == 3
    monkeypatch.setattr(sys, "argv", ["prompt_lengths.py", str(tmp_path / "x.json"), "--out", str(tmp_path / "x.png")])
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "plots" / "prompt_lengths.py"), run_name="__main__")
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert "The text was generated" in (tmp_path / "x.txt").read_text()
    with pytest.raises(ConfigError, match="give one of them"):
        CliRunner().invoke(app, [*words, "--suite", "speed"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="--system is for --prompt-lengths and --suite"):
        CliRunner().invoke(app, ["bench", "--system", "wedlm"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="--ignore-eos is for --prompt-lengths and --suite"):
        CliRunner().invoke(app, ["bench", "--ignore-eos"], catch_exceptions=False)
    for unused in ("--profile", "--no-baseline", "--split=throughput_1k"):
        with pytest.raises(ConfigError, match="would change nothing here"):
            CliRunner().invoke(app, [*words, unused], catch_exceptions=False)
    with pytest.raises(ConfigError, match="take 8B-inflated"):
        CliRunner().invoke(app, [*words, "--model", "8B"], catch_exceptions=False)
