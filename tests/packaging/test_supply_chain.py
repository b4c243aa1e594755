"""Nothing from outside runs unasked: no network at import, no pickle, no remote code, no unread licence."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from refusion_eval import supply_chain
from refusion_eval.cli import app
from refusion_eval.models import checkpoint as checkpoint_module
from refusion_eval.paths import embedded_path
from refusion_eval.supply_chain import Library, complaints, libraries

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    [*(ROOT / "refusion_eval").rglob("*.py"), *(ROOT / "tasks").rglob("*.py"), *(ROOT / "plots").glob("*")]
)

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


def test_no_module_opens_a_connection_when_it_is_imported():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 150


# Where code is run that is not a module's own, and why that is meant.
RUNS_CODE = {
    "evaluate/sandbox/guest.py": "a model's program, in the sandbox",
    "evaluate/sandbox/judge.py": "a benchmark's own tests, in a process of their own",
    "training/mini/code.py": "functions of the synthetic tasks, from the module's own table",
}
PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}


def findings(source):
    """(line, what) of everything in a source that could run code from a file or a download."""
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


@pytest.mark.parametrize("path", [path for path in SOURCES if path.suffix == ".py"], ids=lambda path: path.name)
def test_no_source_runs_code_from_files_or_downloads(path):
    found = list(findings(path.read_text(encoding="utf-8")))
    if path.as_posix().removeprefix(f"{ROOT.as_posix()}/refusion_eval/") in RUNS_CODE:
        assert {what for _, what in found} == {"exec"}
    else:
        assert not found


def test_a_pinned_revision_is_asked_for_and_the_commit_is_recorded(monkeypatch, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / commit
    snapshot.symlink_to(embedded_path("refusion"))
    download = Mock(return_value=str(snapshot))
    monkeypatch.setattr(checkpoint_module, "snapshot_download", download)
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


def test_every_library_of_an_installation_has_an_allowed_licence():
    found = libraries()
    assert {"torch", "transformers", "lm-eval", "huggingface-hub", "numpy"} <= {it.name for it in found}
    assert not {"pytest", "hypothesis", "mypy"} & {it.name for it in found}
    assert complaints(found) == []


@pytest.mark.parametrize("licence", ["GPL-3.0-only", "AGPL", "LGPL", "unknown", "MIT AND GPL-2.0-only", "proprietary"])
def test_a_new_library_under_another_licence_is_named(licence):
    (complaint,) = complaints([Library("newcomer", "1.0", licence)])
    assert "newcomer 1.0" in complaint
    assert licence in complaint


@pytest.mark.parametrize("licence", ["MIT", "GPL-2.0-only OR MIT", "Apache-2.0 AND MIT", "(MIT OR AGPL)"])
def test_a_choice_of_an_allowed_licence_is_enough(licence):
    assert complaints([Library("newcomer", "1.0", licence)]) == []


def test_the_list_is_printed_by_one_command(capsys):
    assert supply_chain.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [it.name for it in libraries()]


@pytest.mark.parametrize(
    ("status", "errors", "is_sound", "words"),
    [
        (0, "No known vulnerabilities found", True, "none known"),
        (1, "Found 2 known vulnerabilities in 1 package", False, "vulnerabilities:"),
        (1, "ConnectionError: no route", True, "NOT CHECKED, the service does not answer (ConnectionError: no route)"),
    ],
)
def test_an_audit_without_an_answer_is_told_and_no_success(monkeypatch, status, errors, is_sound, words):
    done = Mock(returncode=status, stdout="torch 1.0 ID", stderr=errors)
    monkeypatch.setattr(supply_chain.subprocess, "run", Mock(return_value=done))
    monkeypatch.setattr(supply_chain.util, "find_spec", Mock())
    sound, text = supply_chain.vulnerabilities()
    assert sound is is_sound
    assert words in text
