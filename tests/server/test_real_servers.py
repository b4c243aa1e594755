"""Real servers beside this project's engine: the same greedy tokens on all eight mini tasks."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from refusion_eval import generate
from refusion_eval.cli import app
from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.loading import load_model
from refusion_eval.paths import embedded_path
from refusion_eval.runs.server_client import Refused, ServerClient
from refusion_eval.store.run_store import RunReader
from refusion_eval.training.checkpoints.to_gguf import convert
from tests.models.tiny import CLASSES, save_checkpoint
from tests.server import peers
from tests.server.peers import Peer, serving

pytest.importorskip("tenacity", reason="needs the extra `server`")
pytest.importorskip("gguf", reason="needs the package gguf")

MODEL = "embedded:autoregressive_sft"
TASKS = "mmlu_pro,arc_challenge,gsm8k,math,gpqa,humaneval,mbpp,parts"
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "servers.md"


@contextmanager
def llama_cpp(gguf, drafts="none", slots=1):
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("needs the package xllamacpp, which the extra dev installs on Linux")
    # The start of the server is that of the guide, with drafts as the guide has them.
    start, speculation = re.findall("^```python\n(.*?)^```", GUIDE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    changed = {
        "4096, 1": f"2048, {slots}",
        '"qwen.gguf"': repr(str(gguf)),
        "8000": "0",
        "server =": f"{speculation if drafts == 'ngram' else ''}server =",
        "time.sleep(3600)": "print(server.listening_address, flush=True)\ntime.sleep(300)",
    }
    for text, other in changed.items():
        assert start.count(text) == 1
        start = start.replace(text, other)
    words = [sys.executable, "-c", start]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            lines = iter(process.stdout.readline, "")
            yield next(found[0] for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        finally:
            process.kill()


def client_of(url):
    client = ServerClient(url, timeout=30, patience=0)
    client.start()
    return client


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "sft.gguf"
    convert(str(embedded_path("autoregressive_sft")), path)
    return path


def run(run_dir, *more, limit=2, tasks=TASKS, warmup=0):
    words = ["run", "--model", MODEL, "--tasks", tasks, "--limit", str(limit), "--run-dir", str(run_dir)]
    result = CliRunner().invoke(app, [*words, "--warmup", str(warmup), *more])
    assert result.exit_code == 0, result.output
    with RunReader.open(run_dir) as reader:
        return {(sample.key.task, sample.item_id): sample for sample in reader.samples()}


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return run(tmp_path_factory.mktemp("runs") / "ours", "--decoder", "autoregressive")


def test_gguf_of_a_checkpoint_is_written_by_the_command(tmp_path):
    result = CliRunner().invoke(app, ["convert", MODEL, str(tmp_path / "a.gguf"), "--to", "gguf"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.gguf").read_bytes()[:4] == b"GGUF"
    assert list(tmp_path.iterdir()) == [tmp_path / "a.gguf"]


def test_gguf_is_refused_for_what_is_no_autoregressive_layout_or_exists(tmp_path, gguf):
    save_checkpoint(tmp_path / "llada", family="llada")
    with pytest.raises(CheckpointError, match="llada"):
        convert(str(tmp_path / "llada"), tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match="exists already"):
        convert(str(embedded_path("autoregressive_sft")), gguf)


@pytest.mark.parametrize("drafts", ["none", "ngram"])
def test_llama_cpp_gives_the_same_tokens_on_all_mini_tasks(tmp_path, gguf, ours, drafts):
    with llama_cpp(gguf, drafts) as url:
        theirs = run(tmp_path / "a", "--system", "server", "--base-url", url)
        counted = httpx2.get(f"{url}/metrics", trust_env=False).text
    assert len(theirs) == 16
    assert {key: sample.tokens for key, sample in theirs.items()} == {key: s.tokens for key, s in ours.items()}
    assert {key: sample.text for key, sample in theirs.items()} == {key: s.text for key, s in ours.items()}
    assert {sample.server["cached_tokens"] for sample in theirs.values()} == {0}
    assert {sample.server["tokens"] + sample.server["prompt"] for sample in theirs.values()} == {"idsids"}
    accepted = sum(sample.server.get("accepted_tokens", 0) for sample in theirs.values())
    num_forwards = sum(sample.num_forwards for sample in theirs.values())
    assert num_forwards == sum(sample.num_tokens for sample in theirs.values()) - accepted
    assert (accepted > 0) == (drafts == "ngram")
    # The server's own counters: accepted drafts, and calls of the decoder (one more for a prompt in several parts).
    own = int(re.search(r"^llamacpp:spec_decode_num_accepted_tokens_total (\d+)", counted, re.MULTILINE)[1])
    assert own == accepted


def test_llama_cpp_behind_faults_gives_the_same_tokens_and_no_record_twice(tmp_path, gguf, ours):
    faults = [peers.dropped, None, peers.truncated, peers.corrupted, None, peers.status(503, Retry_After="0")]
    with llama_cpp(gguf) as url:
        host, port = url.removeprefix("http://").split(":")
        with serving(Peer(faults=faults, upstream=(host, int(port)))) as proxy:
            patient = ("--patience", "30", "--system", "server", "--base-url", proxy.url)
            theirs = run(tmp_path / "a", *patient, tasks="gsm8k,math")
    assert {key: sample.tokens for key, sample in theirs.items()} == {key: ours[key].tokens for key in theirs}
    assert len(proxy.bodies) == len(theirs) + 4


def test_a_prompt_that_llama_cpp_refuses_as_too_long_is_an_error_with_both_numbers(gguf):
    with llama_cpp(gguf) as url, pytest.raises(Refused, match=r"2800 tokens.*2048"):
        client_of(url).complete("", [5] * 2800, {"max_tokens": 4, "stream": True}, {})


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(("family", "scaled"), [("qwen2", False), ("qwen3", False), ("llama", False), ("llama", True)])
def test_llama_cpp_computes_each_layout_as_this_project(tmp_path, family, scaled):
    # Random weights, so that a wrong rotation, bias or norm changes the tokens; the tokenizer is that of the package.
    rope = {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}} if scaled else {}
    save_random(tmp_path / "hf", family, **rope)
    convert(str(tmp_path / "hf"), tmp_path / "a.gguf")
    model = load_model(tmp_path / "hf", dtype="float32")
    prompt = np.random.default_rng(0).integers(0, 1800, 60).tolist()
    mine = generate(model, prompt, "autoregressive", gen_length=24, eos_ids=())
    with llama_cpp(tmp_path / "a.gguf") as url:
        # Not as a stream, which leaves out the ids of tokens inside a character.
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        asked = {"verbose": True, "return_tokens": True}
        answer = httpx2.post(f"{url}/v1/completions", json={**body, **asked}, trust_env=False, timeout=60).json()
    assert answer["__verbose"]["tokens"] == list(mine.tokens)


def save_random(directory: Path, family: str, **rope) -> None:
    config_class, model_class = CLASSES[family]
    torch.manual_seed(0)
    sizes = {"vocab_size": 1837, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 16}
    model = model_class(
        config_class(**sizes, **rope, tie_word_embeddings=False, eos_token_id=1834, initializer_range=0.2)
    )
    for name, weight in model.named_parameters():  # biases and norms start as zeros and ones
        if weight.ndim == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5) if "norm" in name else torch.nn.init.normal_(weight)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(embedded_path("autoregressive_sft")).save_pretrained(directory)


@pytest.mark.slow
def test_transformers_serve_gives_the_same_texts_and_counts(tmp_path, ours):
    model, port = str(embedded_path("autoregressive_sft")), peers.free_port()
    words = peers.transformers_serve(model, port)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(f"{url}/health")
            theirs = run(tmp_path / "a", "--system", "server", "--base-url", url, "--served-model", model)
        finally:
            process.kill()
    assert {key: (s.text, s.num_tokens) for key, s in theirs.items()} == {
        key: (s.text, s.num_tokens) for key, s in ours.items()
    }
    assert {s.server["completion_tokens"] - s.num_tokens for s in theirs.values()} == {0}
    assert {s.server["prompt"] for s in theirs.values()} == {"text"}
    assert {s.num_forwards for s in theirs.values()} == {0}


@pytest.mark.network
def test_a_server_of_the_user_gives_the_same_tokens(tmp_path, ours):
    # For example vLLM on a CPU, which docs/guides/servers.md starts with the embedded checkpoint in float32.
    url = os.environ.get("REFUSION_EVAL_TEST_SERVER")
    if not url:
        pytest.skip("needs REFUSION_EVAL_TEST_SERVER, the address of a server of embedded:autoregressive_sft")
    theirs = run(tmp_path / "a", "--system", "server", "--base-url", url)
    assert {key: sample.tokens for key, sample in theirs.items()} == {key: s.tokens for key, s in ours.items()}


def wait_for(url: str) -> None:
    for _ in range(240):
        try:
            if httpx2.get(url, trust_env=False).status_code == 200:
                return
        except httpx2.RequestError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"no server at {url}")
