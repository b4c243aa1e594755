"""Real servers asked by their chats: 20 items, a server that is killed in the middle, and the same command again."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from refusion_eval.errors import StoreError
from refusion_eval.paths import embedded_path
from refusion_eval.store.run_store import RunReader
from refusion_eval.training.checkpoints.to_gguf import convert
from tests.server import ollama_stand_in
from tests.server.peers import free_port, transformers_serve
from tests.server.test_real_servers import llama_cpp, wait_for

pytest.importorskip("tenacity", reason="needs the extra `server`")
pytest.importorskip("gguf", reason="needs the package gguf")
pytestmark = [pytest.mark.process, pytest.mark.slow]

MODEL = str(embedded_path("autoregressive_sft"))
SERVE = Path(__file__).parents[2] / "examples" / "serve_gguf.py"
NUM_ITEMS, BEFORE_THE_KILL = 20, 5
SECONDS = 240.0


@pytest.fixture(scope="module")
def upstream(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "sft.gguf"
    convert(MODEL, path)
    with llama_cpp(path) as url:
        yield url, path


@contextlib.contextmanager
def started(words, url, path="/v1/models", **environment):
    """A process that serves at an address, as the context's value."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(f"{url}{path}")
            yield process
        finally:
            process.kill()


def command(url, run_dir, *more):
    words = ["run", "--system", f"server:{url}", "--tasks", "mini_gsm8k", "--limit", str(NUM_ITEMS), "--warmup", "0"]
    return [sys.executable, "-m", "refusion_eval", *words, "--patience", "0", "--run-dir", str(run_dir), *more]


def samples(run_dir):
    try:
        with RunReader.open(run_dir) as reader:
            return {sample.item_id: sample for sample in reader.samples() if sample.error is None}
    except StoreError:  # there is no run yet
        return {}


def through_a_kill(start, url, tmp_path, *more):
    """The samples of a run whose server was killed; those of a run that nothing disturbed have the same texts."""
    with start() as process:
        run = subprocess.Popen(command(url, tmp_path / "killed", *more), stderr=subprocess.DEVNULL)
        until = time.monotonic() + SECONDS
        while len(samples(tmp_path / "killed")) < BEFORE_THE_KILL and time.monotonic() < until:
            time.sleep(0.02)
        process.kill()
        assert run.wait(SECONDS) != 0
    before = samples(tmp_path / "killed")
    assert BEFORE_THE_KILL <= len(before) < NUM_ITEMS
    with start():
        subprocess.run(command(url, tmp_path / "killed", *more), check=True, timeout=SECONDS)
        subprocess.run(command(url, tmp_path / "whole", *more), check=True, timeout=SECONDS)
    found, whole = samples(tmp_path / "killed"), samples(tmp_path / "whole")
    assert len(found) == len(whole) == NUM_ITEMS
    assert {item: sample.text for item, sample in found.items()} == {item: s.text for item, s in whole.items()}
    assert {item: found[item].created for item in before} == {item: s.created for item, s in before.items()}
    assert {(sample.server["prompt"], sample.server["template"]) for sample in found.values()} == {
        ("messages", "server")
    }
    assert all(sample.num_tokens and sample.stop in ("eos", "length", "stop_string") for sample in found.values())
    return found


def test_llama_cpp_through_its_chat(tmp_path, upstream):
    _, path = upstream
    port = free_port()
    words = [sys.executable, str(SERVE), str(path), "--port", str(port), "--context", "2048"]
    url = f"http://127.0.0.1:{port}"
    found = through_a_kill(lambda: started(words, url), url, tmp_path, "--server-api", "chat")
    # Without drafts there is a forward for each token.
    assert all(sample.num_forwards == sample.server["completion_tokens"] for sample in found.values())


def test_transformers_serve_through_its_chat(tmp_path):
    port = free_port()
    words = transformers_serve(MODEL, port)
    found = through_a_kill(
        lambda: started(words, f"http://127.0.0.1:{port}", "/health"),
        f"http://127.0.0.1:{port}",
        tmp_path,
        *("--server-api", "chat", "--served-model", MODEL),
    )
    assert {sample.num_forwards for sample in found.values()} == {0}
    assert all({"top_k", "min_p"} <= set(sample.server["dropped"]) for sample in list(found.values())[1:])


def test_litellm_in_front_of_llama_cpp(tmp_path, upstream, monkeypatch):
    # Its dependencies are not those of this project, so it lives in an environment of its own.
    script = os.environ.get("REFUSION_EVAL_LITELLM") or shutil.which("litellm")
    if script is None:
        pytest.skip("needs REFUSION_EVAL_LITELLM, the path of the script litellm: pip install 'litellm[proxy]'")
    url, _ = upstream
    entry = {"model": "openai/sft", "api_base": f"{url}/v1", "api_key": "none"}
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"model_list": [{"model_name": "sft", "litellm_params": entry}]}))
    port = free_port()
    monkeypatch.setenv("LITELLM_MASTER_KEY", "sk-0123456789abcdef")  # the gateway starts with one only
    words = [script, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    found = through_a_kill(
        lambda: started(words, f"http://127.0.0.1:{port}", "/health/liveliness", LITELLM_LOCAL_MODEL_COST_MAP="True"),
        f"http://127.0.0.1:{port}",
        tmp_path,
        *("--server-api", "chat", "--api-key-env", "LITELLM_MASTER_KEY"),
    )
    assert {sample.server.get("from_cache") for sample in found.values()} == {None}


def test_ollamas_protocol_in_front_of_llama_cpp(tmp_path, upstream):
    url, _ = upstream
    port = free_port()
    words = [sys.executable, ollama_stand_in.__file__, str(port), url]
    found = through_a_kill(lambda: started(words, f"http://127.0.0.1:{port}"), f"http://127.0.0.1:{port}", tmp_path)
    assert all(sample.server["generation_seconds"] > 0 for sample in found.values())
    assert {sample.num_forwards for sample in found.values()} == {0}
