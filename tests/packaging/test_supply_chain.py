"""Nothing from outside runs unasked: no network at import, no pickle, no remote code, no silent audit."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from refusion_eval.cli import app
from refusion_eval.models import location as location_module
from refusion_eval.paths import embedded_path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("refusion_eval", "performance", "tasks", "plots", "miniature", "docs", "examples")

IMPORT_ALL = """
import importlib, pkgutil, socket, sys

def refuse(*arguments, **options):
    raise SystemExit(f"an import opens a connection: {arguments}")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
import refusion_eval
names = [module.name for module in pkgutil.walk_packages(refusion_eval.__path__, "refusion_eval.")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


@pytest.mark.process
def test_no_module_opens_a_connection_when_it_is_imported():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 150


# Sources that run code which is not their own, and the reason.
RUNS_CODE = {
    "refusion_eval/sandbox/guest.py": "runs a model's program in the sandbox",
    "refusion_eval/sandbox/judge.py": "runs a benchmark's tests in a separate process",
    "miniature/programs.py": "runs functions of the synthetic tasks, which the module defines",
    "refusion_eval/runs/release_worker.py": "runs the loop of a checkpoint, where the user allows it",
}
PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}


def findings(source):
    """Yields (line, description) of everything in a source that could run code from a file or a download."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from ((node.lineno, f"import {name}") for name in names if (name or "").split(".")[0] in PICKLING)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called in ("eval", "exec"):
            yield node.lineno, called
        if called == "torch.load" and options.get("weights_only") != "True":
            yield node.lineno, "torch.load without weights_only=True"
        if options.get("trust_remote_code", "False") != "False":
            yield node.lineno, "trust_remote_code"
        if options.get("allow_pickle", "False") != "False":
            yield node.lineno, "allow_pickle"
        if called in ("yaml.load", "yaml.unsafe_load", "yaml.full_load") and "Loader" not in options:
            yield node.lineno, called
        if options.get("shell", "False") != "False" or called == "os.system":
            yield node.lineno, "a shell"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import torch\ntorch.load('x')",
        "torch.load('x', weights_only=flag)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "np.load('x', allow_pickle=True)",
        "yaml.load(text)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_scan_finds_what_runs_code(source):
    assert list(findings(source))


def test_no_source_runs_code_from_files_or_downloads():
    sources = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    violations = {}
    for path in sources:
        if names := [f"{line}: {name}" for line, name in findings(path.read_text(encoding="utf-8"))]:
            violations[path.relative_to(ROOT).as_posix()] = names
    ways = {name: {text.rpartition(": ")[2] for text in names} for name, names in violations.items()}
    assert ways.pop("refusion_eval/runs/release_worker.py") == {"trust_remote_code"}
    assert ways == {name: {"exec"} for name in RUNS_CODE if not name.endswith("release_worker.py")}


def test_a_pinned_revision_is_asked_for_and_the_commit_is_recorded(monkeypatch, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / commit
    snapshot.symlink_to(embedded_path("refusion"))
    download = Mock(return_value=str(snapshot))
    monkeypatch.setattr(location_module, "snapshot_download", download)
    command = ["run", "--model", "someone/model", "--revision", "v1.0", "--decoder", "autoregressive", "--limit", "1"]
    command += ["--tasks", "mini_gsm8k", "--set", "gen_length=4", "--warmup", "0", "--run-dir", str(tmp_path / "run")]
    app(command, standalone_mode=False)
    revisions = [call.kwargs["revision"] for call in download.call_args_list]
    assert revisions[0] == "v1.0"
    assert set(revisions[1:]) == {commit}
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())
    text = json.dumps(recorded)
    assert f'"checkpoint_revision": "{commit}"' in text
    assert '"revision": "v1.0"' in text
    for name in ("versions", "seed", "settings", "package_version", "arguments"):
        assert f'"{name}"' in text


@pytest.mark.parametrize(
    ("code", "report", "status", "words"),
    [
        (0, "No known vulnerabilities found", 0, "vulnerabilities: none known"),
        (1, "Found 2 known vulnerabilities in 1 package", 1, "vulnerabilities:\nFound 2 known"),
        (1, "ConnectionError: no route", 0, "not checked, the service does not answer (ConnectionError: no route)"),
    ],
)
def test_an_audit_without_an_answer_says_that_nothing_was_checked(tmp_path, code, report, status, words):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\necho '{report}' >&2\nexit {code}\n")
    python.chmod(0o755)
    environment = {**os.environ, "REFUSION_EVAL_VENV": str(tmp_path)}
    done = subprocess.run(["bash", ".ci/audit"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == status
    assert words in done.stdout
