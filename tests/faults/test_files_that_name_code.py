"""Files of strangers that name code, a host or a key: nothing is imported or sent unless the command line allows it."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

import refusion_eval
from refusion_eval import decoders
from refusion_eval.cli import app
from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.paths import embedded_path

CODE = """
from pathlib import Path
from refusion_eval.decoders.autoregressive import DECODER
Path(__file__).with_name("ran").touch()
"""
COMMANDS = {
    "check": ("protocol", "check", "FILE"),
    "diff": ("protocol", "diff", "eval", "FILE"),
    "protocol run": ("protocol", "run", "FILE", "--dry-run"),
    "run": ("run", "--protocol", "FILE:a", "--run-dir", "OUT", "--data", "."),
    "sweep": ("sweep", "FILE", "--dry-run", "--out", "OUT"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with code that leaves a trace of its import."""
    monkeypatch.chdir(tmp_path)
    decoders._decoder_at.cache_clear()  # as in another process
    for name in ("evil", "evil_beside"):
        (tmp_path / f"{name}.py").write_text(CODE)
    return tmp_path


def invoked(folder, command, arguments, *options, tasks="[mini_gsm8k]"):
    text = f"tasks: {tasks}\nlimit: 1\nsystems:\n  a: {{arguments: {{{arguments}}}}}\n"
    (folder / "file.yaml").write_text(text)
    words = [word.replace("FILE", "file.yaml").replace("OUT", str(folder / "out")) for word in COMMANDS[command]]
    return CliRunner().invoke(app, [*words, *options])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("place", ["evil.py:DECODER", "evil_beside:DECODER", "os:DECODER"])
def test_no_command_imports_what_a_file_names(command, place, folder):
    done = invoked(folder, command, f"pretrained: embedded, decoder: '{place}'")
    assert isinstance(done.exception, ConfigError), done.output
    assert f"names code, {place}, which runs only with --allow-code" in str(done.exception)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("command", ["check", "diff", "protocol run", "sweep"])
def test_the_command_line_allows_it(command, folder):
    done = invoked(folder, command, "pretrained: 'embedded:autoregressive', decoder: 'evil.py:DECODER'", "--allow-code")
    assert not isinstance(done.exception, ConfigError), done.exception
    assert (folder / "ran").exists()
    if command == "protocol run":
        assert " run --run-dir " in done.output
        assert " --allow-code" in done.output


def test_allow_code_without_a_file_is_refused(folder):
    done = CliRunner().invoke(app, ["run", "--allow-code", "--limit", "1"])
    assert "--allow-code is for the file of --protocol" in str(done.exception)


@pytest.mark.parametrize("name", ["evil.yaml", "lm_eval:evil.yaml"])
def test_a_sweep_reads_no_task_file_that_its_file_names(name, folder):
    (folder / "evil.yaml").write_text("task: evil\ndoc_to_text: !function evil.DECODER\n")
    done = invoked(folder, "sweep", "pretrained: embedded", tasks=f"['{name}']")
    assert f"tasks: names code, {name}, which runs only with --allow-code" in str(done.exception)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_cluster_that_a_file_names_is_not_contacted(command, folder):
    done = invoked(folder, command, "pretrained: embedded, engine: ray, ray_address: 'h:1'")
    assert "names code, h:1, which runs only with --allow-code" in str(done.exception)


HOST = "pretrained: none, decoder: server, base_url: 'http://192.0.2.1:9'"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("host", [HOST, "system: 'server:http://192.0.2.1:9'"])
def test_a_file_does_not_choose_which_key_goes_to_its_host(command, host, folder, monkeypatch):
    monkeypatch.setenv("SECRET", "sk-1")
    done = invoked(folder, command, f"{host}, api_key_env: SECRET")
    assert isinstance(done.exception, ConfigError), done.output
    assert re.search("names a host and the variable SECRET.*--api-key-env SECRET", str(done.exception))


@pytest.mark.parametrize("command", ["check", "diff", "protocol run"])
def test_the_command_line_names_the_key_of_a_host(command, folder, monkeypatch):
    monkeypatch.setenv("MINE", "sk-1")
    done = invoked(folder, command, f"{HOST}, api_key_env: SECRET", "--api-key-env", "MINE")
    assert not isinstance(done.exception, ConfigError), done.exception
    assert "SECRET" not in done.output
    assert ("--api-key-env MINE" in done.output) is (command == "protocol run")


@pytest.mark.parametrize("place", ["evil.py:DECODER", "evil_beside:DECODER", "os:path"])
def test_a_checkpoint_names_no_code(place, folder):
    shutil.copytree(embedded_path("autoregressive"), folder / "checkpoint")
    path = folder / "checkpoint" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoders": ["autoregressive", place]}))
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(path))}: decoders names code, '{place}'"):
        refusion_eval.load_model(str(folder / "checkpoint"))
    for words in (["check", "--model", "checkpoint"], ["run", "--model", "checkpoint", "--tasks", "mini_gsm8k"]):
        assert isinstance(CliRunner().invoke(app, words).exception, CheckpointError)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("command", ["check", "diff", "protocol run", "sweep"])
def test_no_file_allows_the_code_of_a_checkpoint(command, folder):
    done = invoked(folder, command, "pretrained: mine, decoder: dream, loop: release, allow_code: true")
    assert "names code, that of the checkpoint mine, which runs only with --allow-code" in str(done.exception)
