"""Runs against servers with chats: what is sent, what records and tables hold, and how an interface is found."""

import json
import ssl

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from typer.testing import CliRunner

from refusion_eval.benchmarks import Item
from refusion_eval.benchmarks.rows import WITHHELD, Gap, Sealing, Turns
from refusion_eval.cli import app
from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.lm_eval_plugin.adapter import RefusionLM
from refusion_eval.models.tokenizer import Tokenizer
from refusion_eval.paths import embedded_path, tasks_path
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.tables import summary, summary_table
from refusion_eval.runs import server, server_facts
from refusion_eval.runs.apis import APIS
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.server_client import ServerClient
from refusion_eval.runs.server_requests import fields_of
from refusion_eval.runs.system import System
from refusion_eval.store.run_store import RunReader
from tests.server.peers import Peer, serving

pytest.importorskip("tenacity", reason="needs the extra `server`")

MODEL = "embedded:autoregressive_sft"
ANSWER = "2 + 2 = 4.\nThe answer is 4."
USAGE = {"prompt_tokens": 30, "completion_tokens": 20}
JSON = {"Content-Type": "application/json"}


def event(content="", finish=None, **more):
    choice = {"index": 0, "delta": {"content": content, **more.pop("delta", {})}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], "id": "chatcmpl-1", **more}).encode() + b"\n\n"


def chat(number, body, *, usage=USAGE, reasoning="Four."):
    parts = (event(delta={"reasoning_content": reasoning}), event(ANSWER[:7]), event(ANSWER[7:], "stop"))
    last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n" if usage else b""
    return b"".join(parts) + last + b"data: [DONE]\n\n"


def served(owner="m-owner", answer=chat):
    return Peer(answer, facts={"/v1/models": {"data": [{"id": "m", "owned_by": owner}]}})


def run(peer, run_dir, *more):
    words = ["run", "--system", f"server:{peer.url}", "--tasks", "mini_gsm8k", "--limit", "2", "--warmup", "0"]
    return CliRunner().invoke(app, [*words, "--run-dir", str(run_dir), "--patience", "0", *more])


def samples(run_dir):
    with RunReader.open(run_dir) as reader:
        return list(reader.samples())


def test_a_chat_gets_conversations_and_its_thoughts_are_never_judged(tmp_path):
    with serving(served()) as peer:
        words = ["--server-api", "chat", "--system-prompt", "Be brief.", "--reasoning-effort", "low"]
        assert run(peer, tmp_path / "a", *words).exit_code == 0
    assert set(peer.paths) >= {"/v1/chat/completions"}
    body = peer.bodies[0]
    assert [turn["role"] for turn in body["messages"]] == ["system", "user"]
    assert body["messages"][0]["content"] == "Be brief."
    assert body["messages"][1]["content"].endswith("End with: The answer is <number>.")
    assert (body["max_tokens"], body["temperature"], body["reasoning_effort"]) == (96, 0.0, "low")
    assert "add_special_tokens" not in body
    for sample in samples(tmp_path / "a"):
        assert (sample.text, sample.tokens, sample.num_tokens, sample.num_forwards) == (ANSWER, None, 20, 0)
        assert (sample.server["prompt"], sample.server["template"]) == ("messages", "server")
        assert (sample.server["reasoning"], sample.server["tokens"]) == ("Four.", "usage")
    shown = summary_table(summary(run_measurements([tmp_path / "a"]))).markdown()
    assert "server's template" in shown
    assert "tpf" not in {figure.metric for figure in run_measurements([tmp_path / "a"])}


def test_states_of_a_text_are_recorded_with_their_times_where_they_are_asked_for(tmp_path):
    texts = ["x y 4.", "2 y = 4.", ANSWER]

    def answer(number, body):
        if not body.get("diffusing"):
            return chat(number, body)
        states = (event(text, diffusion_meta={"diffusion_content": True}) for text in texts)
        return b"".join(states) + event("", "stop") + b"data: [DONE]\n\n"

    with serving(served("Inception", answer)) as peer:
        assert run(peer, tmp_path / "a", "--server-api", "chat", "--diffusing").exit_code == 0
        assert run(peer, tmp_path / "b", "--server-api", "chat").exit_code == 0
        refused = [run(peer, tmp_path / "c", "--diffusing", "--server-api", api) for api in ("completions", "ollama")]
    assert {"diffusing is for chats only; add server_api=chat" in str(one.exception) for one in refused} == {True}
    for sample in samples(tmp_path / "a"):
        assert (sample.text, sample.num_tokens) == (ANSWER, None)
        moments, recorded = zip(*sample.server["states"], strict=True)
        assert list(recorded) == texts
        assert 0 < moments[0] < moments[-1] <= sample.seconds
    assert all("states" not in sample.server for sample in samples(tmp_path / "b"))
    shown = CliRunner().invoke(app, ["replay", str(tmp_path / "a")]).stdout
    assert "state 3/3" in shown
    assert "<draft:x y>" in shown
    assert CliRunner().invoke(app, ["replay", str(tmp_path / "a"), "--out", str(tmp_path / "a.gif")]).exit_code == 0


def test_long_thoughts_and_many_states_are_recorded_and_read_again(tmp_path):
    thoughts, texts = "Let me think. " * 400, [f"{number} {'word ' * 900}" for number in range(300)]

    def answer(number, body):
        states = (event(text, diffusion_meta={"diffusion_content": True}) for text in [*texts, ANSWER])
        first = event(delta={"reasoning_content": thoughts})
        return first + b"".join(states) + event("", "stop") + b"data: [DONE]\n\n"

    with serving(served("Inception", answer)) as peer:
        assert run(peer, tmp_path / "a", "--server-api", "chat", "--diffusing", "--limit", "1").exit_code == 0
    (sample,) = samples(tmp_path / "a")
    assert (sample.text, sample.server["reasoning"]) == (ANSWER, thoughts)
    assert len(sample.server["states"]) == 301


def test_thoughts_and_states_that_no_record_may_hold_are_bounded_as_json(tmp_path, monkeypatch):
    def answer(number, body):
        if body.get("diffusing"):
            parts = (event("\u6c49" * 100, diffusion_meta={"diffusion_content": True}) for _ in range(2))
            return b"".join(parts) + event(ANSWER, "stop", diffusion_meta={"diffusion_content": True})
        return chat(number, body, reasoning="\u6c49" * 200)

    for module in (server, server_facts):
        monkeypatch.setattr(module, "LONGEST_TEXT", 1000)
    with serving(served("Inception", answer)) as peer:
        run(peer, tmp_path / "a", "--server-api", "chat")
        run(peer, tmp_path / "b", "--server-api", "chat", "--diffusing")
    assert {"a text of more than 0 MiB" in sample.error for sample in samples(tmp_path / "a")} == {True}
    assert {(sample.text, "states" in sample.server) for sample in samples(tmp_path / "b")} == {(ANSWER, False)}


def test_fields_that_a_server_takes_and_does_not_follow_are_recorded_and_said(tmp_path):
    with serving(served("dlmserve")) as peer:
        assert run(peer, tmp_path / "a").exit_code == 0
    assert {tuple(sample.server["ignored"]) for sample in samples(tmp_path / "a")} == {("seed",)}
    shown = " ".join(summary_table(summary(run_measurements([tmp_path / "a"]))).markdown().split())
    assert "it takes the fields seed and does not follow them" in shown
    assert "TPF is empty where dlmserve tells no forwards" in shown


@pytest.mark.parametrize(
    ("api", "left_out"),
    [
        ("responses", {"seed", "stop", "top_k", "min_p", "repetition_penalty", "presence_penalty"}),
        ("generate", {"reasoning_effort"}),
        ("ollama", set()),
        ("chat", set()),
    ],
)
def test_fields_that_an_interface_has_no_place_for_are_recorded(api, left_out):
    fields = fields_of(APIS[api], most_tokens=96, temperature=0.0, seed=1, stops=["."], effort="low")
    sent = {}
    with serving(served()) as peer:
        client = ServerClient(peer.url, api=api, timeout=5.0, patience=0.0)
        client.start()
        client.complete("[]", (), fields, sent)
    assert left_out <= set(sent.get("dropped", ()))
    assert ("dropped" in sent) == bool(left_out)
    assert not {"stream", "max_tokens", "temperature", "cache_prompt"} & set(sent.get("dropped", ()))


def test_few_shot_examples_of_lm_eval_are_turns_of_the_conversation(tmp_path):
    task = {"include": str(tasks_path() / "mini" / "mini_gsm8k.yaml"), "task": "shots", "num_fewshot": 2}
    (tmp_path / "shots.yaml").write_text(json.dumps(task))
    with serving(served()) as peer:
        lm_eval.simple_evaluate(
            model="refusion",
            model_args=f"decoder=server,base_url={peer.url},server_api=chat,system_prompt=Be brief.,warmup=0",
            tasks=["shots"],
            task_manager=TaskManager(include_path=str(tmp_path)),
            limit=1,
            apply_chat_template=True,
            fewshot_as_multiturn=True,
        )
    (body,) = peer.bodies
    assert [turn["role"] for turn in body["messages"]] == ["system", *["user", "assistant"] * 2, "user"]
    assert body["messages"][0]["content"] == "Be brief."


def test_a_chat_fills_no_gap_and_says_so_in_one_line():
    system = System(parse_model_args({"decoder": "server", "base_url": "http://h", "server_api": "chat"}))
    item = Item(id="HumanEval/0", number=0, row={}, turns=Turns("def f():\n", behind="return 1"), sealing=Sealing())
    real, _ = system.unsealed(system.render_turns(item.turns), item.sealing)
    with pytest.raises(ConfigError, match="item HumanEval/0 has a gap, and a server fills none"):
        system.encode_item(real, item, Gap(lambda row: "", lambda row, count: 4))


def test_lm_eval_has_to_make_conversations_for_a_chat_and_our_command_does(tmp_path):
    task = {"include": str(tasks_path() / "mini" / "mini_gsm8k.yaml"), "task": "ours"}
    (tmp_path / "ours.yaml").write_text(json.dumps(task))
    with serving(served()) as peer:
        with pytest.raises(ConfigError, match="takes conversations; add --apply_chat_template"):
            lm_eval.simple_evaluate(
                model="refusion",
                model_args=f"decoder=server,base_url={peer.url},server_api=chat,warmup=0",
                tasks=["ours"],
                task_manager=TaskManager(include_path=str(tmp_path)),
                limit=1,
            )
        words = ["--server-api", "chat", "--include-path", str(tmp_path), "--tasks", "ours", "--limit", "1"]
        done = run(peer, tmp_path / "a", *words)
    assert done.exit_code == 0, done.exception
    (body,) = peer.bodies
    assert [turn["role"] for turn in body["messages"]] == ["user"]


def test_sealed_texts_with_quotes_stand_in_conversations_of_lm_eval_as_they_are():
    sealing, text = Sealing(), 'Is "x" so?'
    with serving(served()) as peer:
        words = {"decoder": "server", "base_url": peer.url, "server_api": "chat", "warmup": 0, "patience": 0}
        lm = RefusionLM.create_from_arg_obj(words)
        lm.begin_evaluation({}, {}, sealing)
        turns = [{"role": "user", "content": f"Q: {sealing.seal('gpqa/1/question', text)}"}]
        request = (lm.apply_chat_template(turns), {"max_gen_toks": 96, "until": []})
        asked = [Instance("generate_until", {"question": turns[0]["content"]}, request, 0, ("refusion_gpqa", 0, 1))]
        assert lm.generate_until(asked) == [ANSWER]
    assert peer.bodies[0]["messages"] == [{"role": "user", "content": f"Q: {text}"}]


def test_another_interface_system_prompt_or_effort_is_another_run(tmp_path):
    with serving(served()) as peer:
        assert run(peer, tmp_path / "a", "--server-api", "chat").exit_code == 0
        for more in (["--server-api", "completions"], ["--server-api", "chat", "--system-prompt", "Be brief."]):
            assert run(peer, tmp_path / "a", *more).exit_code == 1


def test_sealed_texts_with_quotes_stand_in_a_conversation_as_they_are():
    sealing, words = Sealing(), {"decoder": "server", "base_url": "http://h", "server_api": "chat"}
    system, text = System(parse_model_args(words)), 'Is "x" so?\nOr not?'
    prompt = system.render_turns(Turns(f"Q: {sealing.seal('gpqa/1/question', text)}"))
    real, sealed = system.unsealed(prompt, sealing)
    assert (json.loads(real), sealed) == ([{"role": "user", "content": f"Q: {text}"}], (text,))
    assert system.beginning == ""


@pytest.mark.parametrize("place", ["reasoning_content", "refusal", "error"])
def test_a_sealed_question_is_withheld_wherever_a_server_repeats_it(place, tmp_path):
    question = "A purple quark enters the seventh hidden chamber of the old green reactor: what is its spin?"
    wrong = {f"Incorrect Answer {number}": str(number) for number in (1, 2, 3)}
    row = {"Question": question, "Correct Answer": "4", **wrong, "Record ID": "r"}
    (tmp_path / "data" / "gpqa").mkdir(parents=True)
    (tmp_path / "data" / "gpqa" / "train.jsonl").write_text(json.dumps(row))

    def answer(number, body):
        if place == "error":
            return 400, JSON, json.dumps({"error": {"message": f"no answer to: {question}"}}).encode()
        return event(delta={place: f"So: {question}"}) + event("The answer is (A).", "stop")

    with serving(served(answer=answer)) as peer:
        words = ["--tasks", "gpqa", "--limit", "1", "--data", str(tmp_path / "data"), "--server-api", "chat"]
        run(peer, tmp_path / "a", *words)
    assert question in json.dumps(peer.bodies)
    (sample,) = samples(tmp_path / "a")
    assert WITHHELD in str((sample.server, sample.error))
    assert "seventh hidden chamber" not in str(sample)


def test_without_usage_a_chat_has_tokens_only_where_files_count_them(tmp_path):
    def answer(number, body):
        return chat(number, body, usage=None)

    with serving(served(answer=answer)) as peer:
        run(peer, tmp_path / "a", "--server-api", "chat")
        run(peer, tmp_path / "b", "--server-api", "chat", "--model", MODEL)
    assert {sample.num_tokens for sample in samples(tmp_path / "a")} == {None}
    counted = samples(tmp_path / "b")[0]
    assert counted.num_tokens > 10
    assert counted.server["tokens"] == "tokenizer"
    metrics = {figure.metric for figure in run_measurements([tmp_path / "a"])}
    assert not {"server_tps", "tps", "tpf"} & metrics


@pytest.mark.parametrize("counted", [20, 128])  # of 96 that were asked for
def test_a_count_of_a_canvas_is_no_count_of_an_answer(counted, tmp_path):
    def answer(number, body):
        return chat(number, body, usage={"completion_tokens": counted})

    with serving(served("dlmserve", answer)) as peer:
        assert run(peer, tmp_path / "a").exit_code == 0
    assert {(sample.text, sample.num_tokens) for sample in samples(tmp_path / "a")} == {(ANSWER, None)}
    assert samples(tmp_path / "a")[0].server["completion_tokens"] == counted


def test_what_not_every_chat_knows_is_left_out_after_one_refusal(tmp_path):
    def answer(number, body):
        if "top_k" in body or "min_p" in body:
            message = "Unrecognized request argument supplied: top_k"
            return 400, JSON, json.dumps({"error": {"message": message}}).encode()
        return chat(number, body)

    with serving(served(answer=answer)) as peer:
        assert run(peer, tmp_path / "a", "--server-api", "chat").exit_code == 0
    assert len(peer.bodies) == 3  # for two items
    assert peer.bodies[-1].keys() == {
        *("model", "messages", "max_tokens", "temperature", "top_p", "seed", "stream", "stream_options")
    }
    assert "min_p" in samples(tmp_path / "a")[0].server["dropped"]


def test_a_temperature_that_a_server_refuses_ends_the_run_and_names_the_range(tmp_path):
    def answer(number, body):
        found = [{"loc": ["body", "temperature"], "msg": "Input should be greater than or equal to 0.5"}]
        return 400, JSON, json.dumps({"error": {"message": found}}).encode()

    with serving(served("Inception", answer)) as peer:
        done = run(peer, tmp_path / "a")
    assert done.exit_code == 1
    assert "refuses temperature=0.0" in str(done.exception)
    assert "greater than or equal to 0.5" in str(done.exception)
    assert "--samples 4" in str(done.exception)


def test_a_server_that_calls_the_length_otherwise_gets_its_name(tmp_path):
    def answer(number, body):
        if "max_tokens" in body:
            message = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
            return 400, JSON, json.dumps({"error": {"message": message, "param": "max_tokens"}}).encode()
        return chat(number, body)

    with serving(served(answer=answer)) as peer:
        assert run(peer, tmp_path / "a", "--server-api", "chat").exit_code == 0
    assert [body.get("max_completion_tokens") for body in peer.bodies] == [None, 96, 96]


def test_ollama_gets_its_options_and_streams_a_line_an_object(tmp_path):
    def answer(number, body):
        said = [{"thinking": "Four.", "content": ""}, {"content": ANSWER}]
        lines = [{"message": one, "done": False} for one in said]
        lines.append({"message": {"content": ""}, "done": True, "done_reason": "stop", "eval_count": 20})
        return (
            200,
            {"Content-Type": "application/x-ndjson"},
            b"".join(json.dumps(one).encode() + b"\n" for one in lines),
        )

    with serving(served("library", answer)) as peer:
        assert run(peer, tmp_path / "a").exit_code == 0
    (body,) = {json.dumps(body, sort_keys=True): body for body in peer.bodies[:1]}.values()
    assert body["options"] | {"num_predict": 96, "gen_length": 96, "temperature": 0.0, "top_k": -1} == body["options"]
    assert "max_tokens" not in body
    sample = samples(tmp_path / "a")[0]
    assert (sample.text, sample.num_tokens, sample.server["reasoning"]) == (ANSWER, 20, "Four.")


def test_a_whole_answer_without_a_reason_has_no_end_token(tmp_path):
    def answer(number, body):
        said = {"message": {"content": ANSWER}, "done": True, "eval_count": 96}
        return 200, JSON, json.dumps(said).encode()

    with serving(served("ollada", answer)) as peer:
        assert run(peer, tmp_path / "a", "--model", MODEL, "--limit", "1").exit_code == 0
    (sample,) = samples(tmp_path / "a")
    tokens = Tokenizer(embedded_path("autoregressive_sft")).encode(ANSWER)
    assert (sample.text, sample.stop, sample.num_tokens) == (ANSWER, "", len(tokens))


@pytest.mark.parametrize(("pieces", "temperature"), [(31, 0.0), (31, 0.7), (20, 0.0)])
def test_an_answer_that_ollama_breaks_off_for_its_repetition_is_taken_where_it_would_be_the_same(pieces, temperature):
    def lines(*said):
        kind = {"Content-Type": "application/x-ndjson"}
        return 200, kind, b"".join(json.dumps(one).encode() + b"\n" for one in said)

    def answer(number, body):
        if number == 1:
            return lines({"message": {"content": "4"}, "done": True, "done_reason": "stop"})
        return lines(*[{"message": {"content": "la "}, "done": False}] * pieces)

    sent = {}
    with serving(served("library", answer)) as peer:
        client = ServerClient(peer.url, timeout=5.0, patience=0.0)
        client.start()
        fields = fields_of(client.api, most_tokens=96, temperature=temperature, seed=1)
        assert client.complete("[]", (), fields, {}).finish_reason == "stop"
        if temperature or pieces < 30:
            with pytest.raises(DecodeError, match="breaks off"):
                client.complete("[]", (), fields, sent)
        else:
            taken = client.complete("[]", (), fields, sent)
            assert (taken.text, taken.finish_reason, taken.stopped_by) == ("la " * 31, "", "")
    assert sent["attempts"] == 2


def test_the_model_of_a_deployment_is_known_by_its_first_answer_and_a_change_is_said(tmp_path):
    def answer(number, body):
        return event(ANSWER, "stop", model="gpt-b" if number == 3 else "gpt-a", id=f"c{number}")

    with serving(Peer(answer, facts={})) as peer:
        place = f"{peer.url}/openai/deployments/prod?api-version=2024-10-21"
        for name in ("a", "b"):
            assert run(peer, tmp_path / name, "--system", "server", "--base-url", place).exit_code == 0
    told = [[sample.server.get("model") for sample in samples(tmp_path / name)] for name in ("a", "b")]
    assert told == [[None, None], [None, "gpt-a"]]
    shown = summary_table(summary(run_measurements([tmp_path / "a"]))).markdown()
    assert "which was not asked" not in shown
    with RunReader.open(tmp_path / "a") as reader:
        (process,) = reader.run.processes.values()
    assert process["after"]["settings"] == {"answers_as": "gpt-a"}


@pytest.mark.parametrize(
    ("there", "found"), [(("/v1/completions", "/v1/chat/completions"), "completions"),
                         (("/v1/chat/completions",), "chat"), (("/api/chat",), "ollama"), ((), "completions")],
)  # fmt: skip
def test_what_an_unknown_server_has_is_found_by_one_token(there, found):
    class Choosy(Peer):
        def reply(self, path, headers, body):
            return super().reply(path, headers, body) if not body or path in there else (404, JSON, b"{}")

    with serving(Choosy(facts=served().facts)) as peer:
        client = ServerClient(peer.url, timeout=5.0, patience=0.0)
        client.start()
        assert client.api_name == found
    assert {body.get("max_tokens", body.get("options", {}).get("num_predict")) for body in peer.bodies} == {1}


def test_check_says_by_which_interface_a_server_is_asked():
    with serving(served("Inception")) as peer:
        words = ["check", "--system", f"server:{peer.url}"]
        shown, as_json = (CliRunner().invoke(app, [*words, *more]).stdout for more in ((), ("--json",)))
    assert f"{peer.url}: asked by /v1/chat/completions\n" in shown
    assert json.loads(as_json)["api"] == "chat"


@pytest.mark.parametrize("argument", [{"system_prompt": "Be brief."}, {"reasoning_effort": "low"}])
def test_arguments_of_chats_need_a_chat(argument):
    with pytest.raises(ConfigError, match="is for chats only; add server_api=chat"):
        parse_model_args({"decoder": "server", "base_url": "http://h", **argument})


def test_the_authorities_of_certificates_are_read_once_and_not_for_each_request(tmp_path, monkeypatch):
    read, seen = ssl.SSLContext.load_verify_locations, []
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *args: seen.append(1) or read(*args))
    with serving(served()) as peer:
        assert run(peer, tmp_path / "a", "--server-api", "chat").exit_code == 0
    assert len(peer.paths) > 2
    assert len(seen) <= 1
