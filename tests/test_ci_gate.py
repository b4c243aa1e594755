"""The script that makes a served model a gate in CI, with a server that becomes worse."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from refusion_eval.benchmarks import BENCHMARKS, Task
from tests.server.peers import free_port

ROOT = Path(__file__).resolve().parents[1]
SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

answers = json.load(open(sys.argv[1]))

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(*((200, {"data": [{"id": "m", "owned_by": "vllm"}]}) if self.path == "/v1/models" else (404, {})))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        text = next(f"The answer is {gold}." for question, gold in answers.items() if question in asked)
        choice = {"text": text, "index": 0, "finish_reason": "stop"}
        self.reply(200, {"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 5}})

    def reply(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


@pytest.mark.slow
@pytest.mark.process
def test_a_model_that_becomes_worse_fails_and_leaves_the_accepted_records(tmp_path):
    items = Task(BENCHMARKS["gsm8k"], mini=True).items(None)[:12]
    gold = {item.row["question"]: BENCHMARKS["gsm8k"].gold(item.row) for item in items}
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "good.json").write_text(json.dumps(gold))
    (tmp_path / "bad.json").write_text(json.dumps(dict.fromkeys(gold, "-77")))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    options = "--tasks mini_gsm8k --limit 12 --warmup 0"
    environment = {**os.environ, "PATH": path, "PORT": str(free_port()), "OPTIONS": options}

    def gate(answers):
        words = ["bash", str(ROOT / "examples" / "ci_gate.sh"), "runs", sys.executable, "server.py", answers]
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert gate("good.json").returncode == 0
    records = (tmp_path / "runs" / "accepted" / "run.json").read_bytes()
    failed = gate("bad.json")
    assert failed.returncode == 4, failed.stderr
    assert "failed: accuracy < -2 (p < 0.05): mini_gsm8k: difference is -100" in failed.stderr
    assert ElementTree.parse(tmp_path / "runs" / "junit.xml").getroot().get("failures") == "1"
    assert (tmp_path / "runs" / "accepted" / "run.json").read_bytes() == records
    assert (tmp_path / "runs" / "new").is_dir()
