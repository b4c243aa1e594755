"""Runs against a server: what a record and a table hold, and what becomes of a run that meets faults."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import lm_eval
import pytest
from lm_eval.tasks import TaskManager
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.errors import ConfigError
from refusion_eval.models.tokenizer import Tokenizer
from refusion_eval.paths import embedded_path, tasks_path
from refusion_eval.protocol.spec import read_protocol
from refusion_eval.results.cautions import Conditions, sentences
from refusion_eval.results.compare import compare_runs
from refusion_eval.results.concurrency import load_points
from refusion_eval.results.data_frames import load
from refusion_eval.results.facts import read_facts
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.measurement import by_key
from refusion_eval.results.results_file import read_csv, write_csv
from refusion_eval.results.seeds import means_over_seeds
from refusion_eval.results.tables import speed_rows, speed_table, summary, summary_table
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.server import _NoTokenizer
from refusion_eval.runs.server_facts import forwards
from refusion_eval.store.records import REFUSED
from refusion_eval.store.run_store import RunReader
from tests.server import peers
from tests.server.peers import Peer, serving, status, stream

pytest.importorskip("tenacity", reason="needs the extra `server`")

MODEL = "embedded:autoregressive_sft"
TOKENIZER = Tokenizer(embedded_path("autoregressive_sft"))
END = 1834
KEY = "sk-0123456789abcdef"
ANSWER = "2 + 2 = 4.\nThe answer is 4."
IDS = (*TOKENIZER.encode(ANSWER), END)


def answer(number, body, **more):
    return stream(number, (ANSWER, IDS), **more)


def command(peer, run_dir, *more, model=MODEL, tasks="mini_gsm8k", limit=3):
    words = ["run", "--system", "server", "--base-url", peer.url, "--tasks", tasks, "--limit", str(limit)]
    words += ["--model", model] if model else []
    return [*words, "--run-dir", str(run_dir), "--patience", "0", "--timeout", "0.5", "--warmup", "0", *more]


def run(peer, run_dir, *more, **options):
    return CliRunner().invoke(app, command(peer, run_dir, *more, **options))


def samples(run_dir):
    with RunReader.open(run_dir) as reader:
        return list(reader.samples())


def text_of(table):
    return table.markdown()


def test_a_server_takes_no_budget_of_thoughts_and_is_asked_nothing(tmp_path):
    with serving(Peer(answer)) as peer:
        result = run(peer, tmp_path / "a", "--thought-budget", "4")
    assert result.exit_code == 1
    assert "thought_budget=4 is for this project's own engine, and a server ends no thoughts" in str(result.exception)
    assert peer.bodies == []


def test_a_record_holds_what_the_server_told_and_tables_keep_its_speed_apart(tmp_path):
    timings = {"prompt_ms": 1, "predicted_ms": 3, "draft_n": 6, "draft_n_accepted": 4}
    with serving(Peer(lambda number, body: answer(number, body, timings=timings))) as peer:
        result = run(peer, tmp_path / "a", "--warmup", "1")
    assert result.exit_code == 0, result.output
    assert len(peer.bodies) == 4  # one of them is the warm-up
    for sample in samples(tmp_path / "a"):
        assert (sample.text, sample.tokens, sample.stop) == (ANSWER, list(IDS), "eos")
        assert (sample.num_forwards, sample.trace) == (len(IDS) - 4, None)
        assert (sample.server["tokens"], sample.server["prompt"]) == ("ids", "ids")
        assert 0 <= sample.server["first_byte_seconds"] <= sample.seconds
    figures = {figure.metric: figure for figure in run_measurements([tmp_path / "a"])}
    assert "tps" not in figures
    assert figures["server_own_tps"].value == pytest.approx(len(IDS) / 0.004)
    assert figures["tpf"].value == pytest.approx(len(IDS) / (len(IDS) - 4))
    shown = summary_table(summary(figures.values()))
    assert "Server TPS" in shown.columns
    assert "Own TPS" in speed_table(speed_rows(list(figures.values()))).columns
    assert "vLLM" in figures["server_tps"].hardware


def test_a_prompt_is_our_rendered_text_and_every_sampling_field_is_sent(tmp_path):
    with serving(Peer(answer)) as peer:
        assert run(peer, tmp_path / "a", limit=1).exit_code == 0
    body = peer.bodies[0]
    rendered = TOKENIZER.decode(body["prompt"], skip_special_tokens=False)
    assert rendered.startswith("<|im_start|>user\n")
    assert rendered.endswith("<|im_start|>assistant\n")
    sent = {"max_tokens": 96, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    sent |= {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "cache_prompt": False}
    assert {name: body[name] for name in sent} == sent
    assert "n" not in body


def test_without_accepted_drafts_tpf_is_empty_and_the_table_says_why(tmp_path):
    with serving(Peer(answer)) as peer:
        assert run(peer, tmp_path / "a").exit_code == 0
    figures = run_measurements([tmp_path / "a"])
    assert "tpf" not in {figure.metric for figure in figures}
    assert {sample.num_forwards for sample in samples(tmp_path / "a")} == {0}
    assert "TPF is empty where vLLM tells no forwards" in text_of(summary_table(summary(figures)))
    # What was not measured is absent, in frames and files too, and not 0.
    assert {figure.forwards for figure in figures} == {None}
    assert load(tmp_path / "a")["forwards"].isna().all()
    write_csv(figures, tmp_path / "figures.csv")
    assert {figure.forwards for figure in read_csv(tmp_path / "figures.csv")} == {None}


def test_a_diffusion_model_of_a_server_has_no_tpf_whatever_the_server_calls_accepted(tmp_path):
    metrics = {"speculative_decoding": {"num_accepted_draft_tokens": 4}}
    with serving(Peer(lambda number, body: answer(number, body, metrics=metrics))) as peer:
        words = ["--system", "diffusion_gemma", "--model", MODEL]
        assert run(peer, tmp_path / "a", *words, model="", limit=1).exit_code == 0
    (sample,) = samples(tmp_path / "a")
    assert (sample.num_forwards, sample.server["accepted_tokens"]) == (0, 4)


@pytest.mark.parametrize(
    ("told", "name", "wanted"),
    [
        ({"completion_tokens": 300, "accepted_tokens": 79}, "vLLM", 221),
        ({"completion_tokens": 44}, "llama.cpp", 44),
        ({"completion_tokens": 44, "num_spec_steps": 2}, "vLLM", 0),
        ({"accepted_tokens": 3}, "llama.cpp", 0),
    ],
)
def test_forwards_are_tokens_minus_accepted_drafts_where_both_are_told(told, name, wanted):
    assert forwards(told, diffusion=False, drafts_are_told=name == "llama.cpp") == wanted


def test_the_kept_text_is_counted_here_where_the_server_gives_no_ids(tmp_path):
    # The stop text stays in the answer, as in `transformers serve`, and in the server's count.
    def told(number, body):
        return stream(number, (f"{ANSWER}Q: next", ()), usage={"prompt_tokens": 1, "completion_tokens": 90})

    with serving(Peer(told)) as peer:
        assert run(peer, tmp_path / "a", limit=1).exit_code == 0
    (sample,) = samples(tmp_path / "a")
    assert sample.tokens is None
    assert sample.server["tokens"] == "tokenizer"
    assert sample.num_tokens == len(TOKENIZER.encode(f"{ANSWER}Q: next")) + 1  # with the end token
    assert "it read other numbers of prompt tokens" in "".join(read_facts(tmp_path / "a").tasks[0].server_notes)


def test_without_a_tokenizer_the_server_s_usage_counts_and_the_prompt_is_text(tmp_path):
    def told(number, body):
        return stream(number, (ANSWER, ()), usage={"completion_tokens": len(IDS)})

    with serving(Peer(told)) as peer:
        assert run(peer, tmp_path / "a", model="", limit=1).exit_code == 0
    (sample,) = samples(tmp_path / "a")
    assert isinstance(peer.bodies[0]["prompt"], str)
    assert (sample.num_tokens, sample.text, sample.server["tokens"]) == (len(IDS), ANSWER, "usage")
    # Nobody knows whether the server's count holds the EOS.
    assert "tokens_no_eos_mean" not in {figure.metric for figure in run_measurements([tmp_path / "a"])}


def test_without_a_tokenizer_row_and_record_say_that_no_template_was_applied_and_whose_tokens_count(tmp_path):
    # Also where the server gives the ids of its tokens, as llama.cpp and vLLM do.
    with serving(Peer(answer)) as peer:
        assert run(peer, tmp_path / "a", "--warmup", "1", model="", limit=1).exit_code == 0
        assert run(peer, tmp_path / "b", limit=1).exit_code == 0
    (sample,) = samples(tmp_path / "a")
    assert (sample.server["template"], sample.server["tokens"], sample.num_tokens) == ("none", "usage", len(IDS))
    assert "template" not in samples(tmp_path / "b")[0].server
    figures = run_measurements([tmp_path / "a"])
    for table in (summary_table(summary(figures)), speed_table(speed_rows(figures))):
        assert "no chat template, tokens by server usage" in text_of(table)
        assert "without --model no chat template was applied" in text_of(table)
    assert "chat template" not in text_of(summary_table(summary(run_measurements([tmp_path / "b"]))))


def test_a_content_filter_is_a_reason_of_its_own(tmp_path):
    with serving(Peer(lambda number, body: answer(number, body, finish="content_filter"))) as peer:
        assert run(peer, tmp_path / "a", limit=1).exit_code == 0
    assert samples(tmp_path / "a")[0].stop == "content_filter"
    figures = run_measurements([tmp_path / "a"])
    assert {figure.num_cut for figure in figures} == {0}
    assert "its content filter ended some answers" in text_of(summary_table(summary(figures)))


def test_attempts_in_the_records_are_those_really_made(tmp_path):
    busy = status(503, Retry_After="0")
    with serving(Peer(answer, faults=[None, busy, None, busy, busy])) as peer:
        assert run(peer, tmp_path / "a").exit_code == 3
        assert run(peer, tmp_path / "a").exit_code == 0
    with sqlite3.connect(tmp_path / "a" / "records.sqlite") as connection:
        counted = connection.execute("SELECT attempts, body FROM samples").fetchall()
    assert sorted(number for number, _ in counted) == [1, 2, 3]  # the last one in two calls of the command
    assert sum(number for number, _ in counted) == len(peer.bodies)
    assert sorted(json.loads(body)["server"]["attempts"] for _, body in counted) == [1, 1, 2]


def test_a_prompt_that_is_too_long_is_an_error_of_its_item_alone(tmp_path):
    message = "request (2800 tokens) exceeds the available context size (2048 tokens)"
    with serving(Peer(answer, faults=[None, status(400, message)])) as peer:
        result = run(peer, tmp_path / "a")
    assert result.exit_code == 3
    assert "2800" in result.output
    assert "2048" in result.output
    assert sorted(sample.stop for sample in samples(tmp_path / "a")) == ["eos", "eos", REFUSED]


def test_after_faults_the_same_command_asks_only_for_what_has_no_record(tmp_path):
    with serving(Peer(answer, faults=[None, *[status(503, Retry_After="0")] * 3])) as peer:
        assert run(peer, tmp_path / "a").exit_code == 3
        asked = len(peer.bodies)
        assert run(peer, tmp_path / "a").exit_code == 0
        assert run(peer, tmp_path / "a").exit_code == 0
    assert len(peer.bodies) == asked + 1
    assert [sample.error for sample in samples(tmp_path / "a")] == [None] * 3


def test_without_a_warm_up_only_the_first_answer_of_the_settings_is_cold_as_in_this_engine(tmp_path):
    with serving(Peer(answer)) as peer:
        assert run(peer, tmp_path / "a").exit_code == 0
    here = ["run", "--model", MODEL, "--decoder", "autoregressive", "--tasks", "mini_gsm8k", "--limit", "3"]
    assert CliRunner().invoke(app, [*here, "--warmup", "0", "--run-dir", str(tmp_path / "b")]).exit_code == 0
    for name in "ab":
        assert [sample.warm for sample in samples(tmp_path / name)] == [False, True, True]


def test_a_warm_up_that_fails_is_an_error_of_its_item_and_the_next_item_is_warmed_up(tmp_path):
    with serving(Peer(answer, faults=[status(503, Retry_After="0")] * 2)) as peer:
        assert run(peer, tmp_path / "a", "--warmup", "1").exit_code == 3
    first, *others = samples(tmp_path / "a")
    assert (first.error is None, first.server["attempts"]) == (False, 2)
    assert [sample.warm for sample in others] == [True, True]
    assert len(peer.bodies) == 2 + 1 + 2


def test_a_server_that_stays_away_ends_the_run_in_one_line_and_the_same_command_continues(tmp_path):
    with serving(Peer(answer, faults=[None, *[status(503, Retry_After="0")] * 10])) as peer:
        result = run(peer, tmp_path / "a", limit=9)
        assert len(peer.bodies) == 11
        assert result.exit_code == 1
        (line,) = str(result.exception).splitlines()
        assert "5 items in a row failed for one reason" in line
        assert f"{peer.url}: the server answers 503" in line
        assert "1 of 9 samples are recorded" in line
        assert run(peer, tmp_path / "a", limit=9).exit_code == 0
    assert len(peer.bodies) == 11 + 8


def test_a_server_that_starts_again_at_its_address_continues_the_run(tmp_path):
    port = 0
    for limit in (1, 2):
        with serving(Peer(answer), port) as peer:
            assert run(peer, tmp_path / "a", limit=limit).exit_code == 0
        port = int(peer.url.rpartition(":")[2])
    assert len(peer.bodies) == 1


def test_a_server_at_another_address_is_refused_in_a_line_with_both(tmp_path):
    with serving(Peer(answer)) as one, serving(Peer(answer)) as other:
        assert run(one, tmp_path / "a").exit_code == 0
        result = run(other, tmp_path / "a")
    assert result.exit_code == 1
    (line,) = str(result.exception).splitlines()
    assert f'recorded "{one.url[7:]}", now "{other.url[7:]}"' in line
    assert "--run-dir DIR" in line
    assert other.bodies == []


def test_a_run_has_a_folder_for_each_address_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving(Peer(answer)) as one, serving(Peer(answer)) as other:
        for peer in (one, other):
            words = command(peer, "unused", limit=1)
            place = words.index("--run-dir")
            assert CliRunner().invoke(app, words[:place] + words[place + 2 :]).exit_code == 0
    names = {path.name for path in (tmp_path / "results" / "runs").iterdir()}
    assert names == {
        f"{MODEL.replace(':', '-')}-server-127.0.0.1-{peer.url.rpartition(':')[2]}" for peer in (one, other)
    }


def test_a_named_server_is_the_same_one_at_another_port_and_each_process_says_where_it_was(tmp_path):
    named, urls = ("--server-name", "staging", "--warmup", "1"), []
    for limit in (1, 2):
        with serving(Peer(answer)) as peer:
            assert run(peer, tmp_path / "a", *named, limit=limit).exit_code == 0
            assert run(peer, tmp_path / f"b{limit}", *named, limit=2).exit_code == 0
            urls.append(peer.url)
            assert "settings.server.server_name: recorded" in str(run(peer, tmp_path / "a", limit=2).exception)
    with RunReader.open(tmp_path / "a") as reader:
        assert reader.run.manifest.system == "server staging"
        assert [process["before"]["address"] for process in reader.run.processes.values()] == urls
    figures = run_measurements([tmp_path / "a", tmp_path / "b2"])
    assert {figure.hardware for figure in figures} == {"server staging"}
    for name in ("a", "b2"):
        (task,) = compare_runs(tmp_path / "b1", tmp_path / name).tasks
        assert task.no_speed.startswith("the two were not measured in turns")  # and not: on different machines


def test_a_name_of_a_server_stands_in_the_folders_of_runs_and_suites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--base-url", "http://127.0.0.1:1", "--server-name", "staging"]
    done = CliRunner().invoke(app, ["suite", "--system", "server", *words, "--limit", "1", "--dry-run"])
    (line,) = [line for line in done.stdout.splitlines() if " run --run-dir " in line]
    assert "/server-staging-paper_implied " in line
    assert "--server-name staging" in line
    with serving(Peer(answer)) as peer:
        place = [*words[:1], peer.url, *words[2:]]
        done = CliRunner().invoke(app, ["run", "--system", "server", *place, "--tasks", "mini_gsm8k", "--limit", "1"])
    assert done.exit_code == 0
    assert [path.name for path in (tmp_path / "results" / "runs").iterdir()] == ["none-server-staging"]
    both = ["suite", "--system", "server:http://127.0.0.1:1,server:http://127.0.0.1:2", *words[2:], "--dry-run"]
    assert "names one server, and --system has 2" in CliRunner().invoke(app, both).output


def test_a_name_of_a_server_is_no_part_of_a_protocol_and_may_stand_in_its_file(tmp_path):
    hashes = set()
    for more in ("", ", server_name: staging"):
        arguments = f"{{decoder: server, base_url: 'http://127.0.0.1:1', pretrained: '{MODEL}'{more}}}"
        file = tmp_path / "p.yaml"
        file.write_text(f"tasks: [mini_gsm8k]\nsystems:\n  peer:\n    arguments: {arguments}\n")
        hashes.add(read_protocol(str(file)).hash)
    assert len(hashes) == 1


def test_two_ports_of_one_machine_are_two_systems(tmp_path):
    with serving(Peer(answer)) as one, serving(Peer(answer)) as other:
        for name, peer in {"a": one, "b": other}.items():
            assert run(peer, tmp_path / name, limit=1).exit_code == 0
    figures = run_measurements([tmp_path / "a", tmp_path / "b"])
    assert len(by_key(figures)) == len(figures)
    assert {figure.label for figure in figures} == {f"server {peer.url[7:]}" for peer in (one, other)}


def test_another_model_or_version_of_the_server_is_another_run(tmp_path):
    with serving(Peer(answer)) as peer:
        assert run(peer, tmp_path / "a").exit_code == 0
        peer.facts = {**peer.facts, "/version": {"version": "9"}}
        result = run(peer, tmp_path / "a")
    assert result.exit_code == 1
    assert "settings.server.version" in str(result.exception)


def test_a_record_does_not_choose_the_address_that_a_repetition_contacts(tmp_path):
    with serving(Peer(answer)) as peer:
        assert run(peer, tmp_path / "a", limit=1).exit_code == 0
        result = CliRunner().invoke(app, ["rerun", str(tmp_path / "a")])
    assert result.exit_code == 1
    assert "base_url" in str(result.exception)
    assert len(peer.bodies) == 1


def test_settings_and_counters_are_noted_before_and_after(tmp_path):
    facts = {**Peer().facts, "/metrics": "vllm:steps_total 5\n", "/props": {"total_slots": 2}}
    with serving(Peer(answer, facts=facts)) as peer:
        assert run(peer, tmp_path / "a", limit=1).exit_code == 0
    with RunReader.open(tmp_path / "a") as reader:
        (process,) = reader.run.processes.values()
    for when in ("before", "after"):
        assert process[when] == {
            "address": peer.url,
            "settings": {"total_slots": 2},
            "counters": {"vllm:steps_total": 5.0},
        }


def test_so_many_requests_are_in_flight_as_the_batch_size_says(tmp_path):
    state = {"now": 0, "most": 0}
    lock = threading.Lock()
    both = threading.Barrier(2)

    def slow(handler, content):
        with lock:
            state["now"] += 1
            state["most"] = max(state["most"], state["now"])
        both.wait(timeout=5)
        peers.send(handler, content, **peers.EVENTS)
        with lock:
            state["now"] -= 1

    with serving(Peer(answer, faults=[slow] * 4)) as peer:
        assert run(peer, tmp_path / "a", "--batch-size", "2", "--timeout", "9", limit=4).exit_code == 0
    assert state["most"] == 2
    assert {sample.batch_size for sample in samples(tmp_path / "a")} == {2}


def test_concurrency_makes_a_run_for_each_number_and_tables_of_throughput(tmp_path):
    with serving(Peer(answer)) as peer:
        result = run(peer, tmp_path / "a", "--concurrency", "1,2,2", limit=4)
        told = json.loads(run(peer, tmp_path / "a", "--concurrency", "1,2", "--json", limit=4).stdout)
    assert result.exit_code == 0, result.output
    assert [Path(run_dir).name for run_dir in told["runs"]] == ["a-c1", "a-c2"]
    assert all(figures[0]["metric"] == "accuracy" for figures in told["runs"].values())
    assert [point["concurrency"] for point in told["load"]] == [1, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"a-c1", "a-c2"}
    assert [{sample.batch_size for sample in samples(tmp_path / f"a-c{n}")} for n in (1, 2)] == [{1}, {2}]
    assert "Several requests at once, on server vLLM" in result.output
    both = [str(tmp_path / f"a-c{n}") for n in (1, 2)]
    points = json.loads(CliRunner().invoke(app, ["speed", *both, "--concurrency", "--json"]).stdout)
    assert [point["concurrency"] for point in points] == [1, 2]


def test_where_threads_device_and_dtype_are_given_the_speed_stands_beside_ours(tmp_path):
    with serving(Peer(answer)) as peer:
        known = ("--server-threads", "1", "--device", "cpu", "--dtype", "float32", "--warmup", "1")
        assert run(peer, tmp_path / "a", *known).exit_code == 0
    metrics = {figure.metric for figure in run_measurements([tmp_path / "a"])}
    assert "tps" in metrics
    assert "server_tps" not in metrics


def test_the_kernels_of_a_server_are_not_known_so_no_note_compares_them():
    of_both = [Conditions(is_speed=True, num_rounds=2, attention=name) for name in ("native", "server")]
    assert not any("kernels" in sentence for sentence in sentences(of_both))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "base_url=None is no address"),
        ({"base_url": "ftp://h"}, "is no address"),
        ({"base_url": "http://[::1"}, "is no address"),
        ({"base_url": "http://h:port"}, "is no address"),
        ({"base_url": "http://h:99999"}, "is no address"),
        ({"base_url": "http://user:pw@h"}, "more than an address"),
        ({"base_url": "http://h", "server_threads": 1}, "needs device and dtype"),
        ({"base_url": "http://h", "engine": "ray"}, "engine=local only"),
        ({"base_url": "http://h", "chat_template": "a.jinja"}, "tokenizer"),
        ({"decoder": "refusion", "pretrained": "x", "served_model": "m"}, "for a server only"),
        ({"decoder": "refusion", "pretrained": "x", "server_name": "m"}, "for a server only"),
        ({"decoder": "refusion", "pretrained": "x", "patience": 0}, "for a server only"),
        ({"base_url": "http://h", "server_name": "a/b"}, "becomes part of the name of a folder"),
        ({"base_url": "http://h", "batch_size": "auto"}, "give a server a number"),
    ],
)
def test_arguments_of_servers_that_fit_nothing_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        parse_model_args({"decoder": "server", **arguments})


def test_check_prints_what_a_server_tells_of_itself():
    with serving(Peer(facts={**Peer().facts, "/props": {"total_slots": 2}})) as peer:
        words = ["check", "--system", f"server:{peer.url}"]
        choices = ((), ("--json",), ("--model", MODEL))
        shown, as_json, with_files = (CliRunner().invoke(app, [*words, *more]).stdout for more in choices)
    lines = ("vLLM serves the model m", "total_slots=2", "asked by /v1/completions")
    assert shown == with_files == "".join(f"{peer.url}: {line}\n" for line in lines)
    told = {"name": "vLLM", "version": "", "model": "m", "settings": {"total_slots": 2}, "api": "completions"}
    assert json.loads(as_json) == told


def test_check_gives_a_server_two_attempts():
    with serving(Peer(facts={"/v1/models": (503, {}, b"starting")})) as peer:
        result = CliRunner().invoke(app, ["check", "--system", f"server:{peer.url}"])
    assert str(result.exception) == f"{peer.url}: the server answers 503: starting (2 attempts)"
    assert len(peer.paths) == 2


def test_check_says_in_one_line_that_no_server_is_there(tmp_path):
    with serving(Peer()) as peer:
        pass
    words = [sys.executable, "-m", "refusion_eval", "--quiet", "check", "--system", f"server:{peer.url}"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(rf"error: {peer.url}: .*refused.* \(2 attempts\)", line)


def test_no_line_of_a_run_has_words_of_the_code(tmp_path):
    with serving(Peer(answer, faults=[status(503), peers.delayed])) as peer:
        words = [sys.executable, "-m", "refusion_eval", *command(peer, tmp_path / "a", "--patience", "9")]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert "503; it is tried again" in done.stderr
    assert not re.search(r"Passing|served|unknown", done.stderr + done.stdout)


@pytest.mark.parametrize("system", ["{system: server", "{system: 'server:http://127.0.0.1:1'", "{decoder: server"])
def test_a_sweep_varies_the_settings_of_a_server_that_its_options_name(tmp_path, monkeypatch, system):
    monkeypatch.setenv("MY_KEY", KEY)
    spec, name = tmp_path / "s.yaml", "pretrained" if "decoder" in system else "model"
    arguments = f"{system}, {name}: '{MODEL}', warmup: 0}}"
    spec.write_text(f"systems:\n  peer:\n    arguments: {arguments}\n    grid: {{gen_length: [32]}}\n")
    with serving(Peer(answer)) as peer:
        words = ["sweep", str(spec), "--base-url", peer.url, "--tasks", "mini_gsm8k", "--limit", "1", "--rounds", "1"]
        words += ["--api-key-env", "MY_KEY", "--served-model", "m", "--timeout", "9", "--patience", "0"]
        result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert sorted({body["max_tokens"] for body in peer.bodies}) == [32, 96]
    assert {headers.get("Authorization") for headers in peer.headers} == {f"Bearer {KEY}"}
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 2


def test_a_sweep_without_a_server_refuses_the_options_of_servers(tmp_path):
    result = CliRunner().invoke(app, ["sweep", "mini_figure4", "--api-key-env", "K", "--out", str(tmp_path)])
    assert "has no system of a server, so --api-key-env changes nothing" in str(result.exception)


def test_two_servers_of_a_suite_have_folders_of_their_own():
    names = "server:http://127.0.0.1:1,server:http://127.0.0.1:2/v1"
    done = CliRunner().invoke(app, ["suite", "--system", names, "--limit", "1", "--dry-run"])
    folders = {line.split("--run-dir ")[1].split()[0] for line in done.stdout.splitlines() if " run --run-dir " in line}
    assert len(folders) == 2
    assert all("server-127.0.0.1-" in folder for folder in folders)


def test_without_a_tokenizer_a_chat_template_is_asked_for_in_one_line():
    with pytest.raises(ConfigError, match=r"chat template .* is not here; name its checkpoint \(pretrained=\.\.\.\)"):
        _NoTokenizer().render_chat([{"role": "user", "content": "1+1?"}])


def test_eval_sh_s_suite_puts_our_loop_stock_generate_and_the_server_side_by_side(tmp_path, capsys):
    words = ["suite", "--system", "refusion,qwen3,server:http://127.0.0.1:1", "--limit", "2", "--dry-run"]
    result = CliRunner().invoke(app, [*words, "--results", str(tmp_path), "--rounds", "1"])
    runs = [line for line in result.output.splitlines() if " run --run-dir " in line]
    wanted = ("--system refusion", "--system qwen3", "--loop generate", "--model Qwen/Qwen3-8B --no-thinking")
    assert len(runs) == 4
    assert all(text in line for text, line in zip(wanted, runs, strict=True))
    assert "--system server:http://127.0.0.1:1" in runs[3]


@pytest.mark.parametrize("option", [("--base-url", "http://h"), ("--served-model", "m"), ("--api-key-env", "K")])
def test_a_suite_without_a_server_refuses_its_options(option):
    assert CliRunner().invoke(app, ["suite", "--system", "qwen3", *option, "--dry-run"]).exit_code == 2


def test_the_key_is_in_no_output_record_or_process_list(tmp_path):
    faults = [status(429, f"slow down, {KEY}", Retry_After="0"), status(400, f"no: {KEY}"), None]
    seen = []

    def watched(number, body):
        seen.append(b"".join(path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()))
        return answer(number, body)

    with serving(Peer(watched, faults=faults)) as peer:
        words = [sys.executable, "-m", "refusion_eval", "--verbose", *command(peer, tmp_path / "a")]
        env = {**os.environ, "MY_KEY": KEY}
        done = subprocess.run(
            [*words, "--api-key-env", "MY_KEY"], capture_output=True, env=env, cwd=tmp_path, timeout=100
        )
    assert done.returncode == 3
    assert any(headers.get("Authorization") == f"Bearer {KEY}" for headers in peer.headers)
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not any(KEY.encode() in text for text in (done.stdout, done.stderr, *files, *seen))


def test_a_run_that_is_killed_loses_nothing_and_asks_nothing_twice(tmp_path):
    reached, released = threading.Event(), threading.Event()

    def hangs(handler, content):
        reached.set()
        released.wait(60)

    with serving(Peer(answer, faults=[None, None, hangs])) as peer:
        words = [sys.executable, "-m", "refusion_eval", *command(peer, tmp_path / "a", "--timeout", "60")]
        process = subprocess.Popen(words, cwd=tmp_path)
        assert reached.wait(60)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        released.set()
        recorded = len(samples(tmp_path / "a"))
        first = [body["prompt"] for body in peer.bodies]
        assert run(peer, tmp_path / "a").exit_code == 0
        second = [body["prompt"] for body in peer.bodies[len(first) :]]
    assert (len(first), recorded) == (3, 2)
    assert second == first[2:]
    assert len({sample.key for sample in samples(tmp_path / "a")}) == 3


def test_a_second_signal_does_not_wait_for_a_silent_server(tmp_path):
    reached, released = threading.Event(), threading.Event()

    def hangs(handler, content):
        reached.set()
        released.wait(60)

    with serving(Peer(answer, faults=[None, hangs])) as peer:
        words = [sys.executable, "-m", "refusion_eval", *command(peer, tmp_path / "a", "--timeout", "60")]
        with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
            assert reached.wait(60)
            process.send_signal(signal.SIGINT)
            assert any("a second signal stops at once" in line for line in process.stderr)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        released.set()
    assert len(samples(tmp_path / "a")) == 1


def test_lm_eval_takes_a_server_as_model_args(tmp_path):
    with serving(Peer(answer)) as peer:
        results = lm_eval.simple_evaluate(
            model="refusion",
            model_args=f"decoder=server,base_url={peer.url},pretrained={MODEL},run_dir={tmp_path / 'a'},warmup=0",
            tasks=["mini_gsm8k"],
            task_manager=TaskManager(include_path=str(tasks_path())),
            limit=2,
            apply_chat_template=True,
        )
    assert "mini_gsm8k" in results["results"]
    assert [sample.tokens for sample in samples(tmp_path / "a")] == [list(IDS)] * 2


def test_two_models_of_one_server_are_two_systems_in_one_view_and_have_no_mean_over_seeds(tmp_path):
    with serving(Peer(answer)) as peer:
        listed = [{"id": name, "owned_by": "x"} for name in ("m1", "m2")]
        peer.facts = {**peer.facts, "/v1/models": {"data": listed}}
        for seed, name in enumerate(("m1", "m2")):
            more = ("--served-model", name, "--set", "temperature=0.7", "--seed", str(seed))
            assert run(peer, tmp_path / name, *more, limit=2).exit_code == 0
        label = f"server {peer.url[7:]}"
    figures = run_measurements([tmp_path / "m1", tmp_path / "m2"])
    assert {figure.label for figure in figures} == {f"{label} m1", f"{label} m2"}
    assert len(by_key(figures)) == len(figures)
    assert not means_over_seeds(figures)
    assert {point.system for point in load_points([tmp_path / "m1", tmp_path / "m2"])} == {f"{label} m1", f"{label} m2"}
    assert {figure.label for figure in run_measurements([tmp_path / "m1"])} == {label}  # nothing to tell it from
