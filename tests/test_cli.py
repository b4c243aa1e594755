import csv
import json
import logging
import os
import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from typer.main import get_command
from typer.testing import CliRunner

import refusion_eval
from refusion_eval import cli, doctor
from refusion_eval.benchmarks import BENCHMARKS, Task
from refusion_eval.cli import COMMANDS, GROUPS, app, main
from refusion_eval.cli.parameters import descriptions
from refusion_eval.errors import CheckpointError, StoreError
from refusion_eval.paths import embedded_names
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.server_client import ServerClient
from refusion_eval.store.records import ScoreRow
from refusion_eval.store.run_store import RunStore
from tests.models.tiny import save_checkpoint
from tests.results.conftest import sample, write_run
from tests.store.conftest import make_manifest, make_sample

__all__ = ["write_run"]

RUNNER = CliRunner()
ROOT = Path(refusion_eval.__file__).parents[1]


@pytest.fixture
def refusal(monkeypatch, capsys):
    """Runs the command line and returns its exit status and error output."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["refusion-eval", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, capsys.readouterr().err

    return run


def test_help_shows_every_command_in_its_group_on_one_screen():
    text = RUNNER.invoke(app, ["--help"], env={"COLUMNS": "80"}).output
    assert len(text.splitlines()) <= 58
    shown = [(f"─ {group} ─", *(f"│ {name} " for name in names)) for group, names in GROUPS.items()]
    places = [text.index(start) for group in shown for start in group]
    assert places == sorted(places)


def test_the_version_is_printed_and_the_shell_completes_commands():
    assert RUNNER.invoke(app, ["--version"]).output.split()[-1] == refusion_eval.__version__
    asked = {"_REFUSION_EVAL_COMPLETE": "complete_bash", "COMP_WORDS": "refusion-eval tab", "COMP_CWORD": "1"}
    code = "import sys; from refusion_eval.cli import main; sys.argv = ['refusion-eval']; main()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["table"]


def test_quiet_leaves_out_progress_and_verbose_shows_where_an_error_comes_from(refusal, tmp_path, checkpoint, capsys):
    command = ["run", "--model", checkpoint, "--decoder", "autoregressive", "--set", "gen_length=8", "--warmup", "0"]
    command += ["--limit", "1", "--tasks", "mini_gsm8k", "--run-dir"]
    said = {}
    for name, options in (("quiet", ["--quiet"]), ("usual", [])):
        cli.app([*options, *command, str(tmp_path / name)], standalone_mode=False)
        said[name] = capsys.readouterr()
    assert "mini_gsm8k" in said["quiet"].out
    assert "tokens/s" in said["usual"].err
    assert "tokens/s" not in said["quiet"].err
    with pytest.raises(StoreError):
        refusal("--verbose", "table", str(tmp_path))
    assert refusal("table", str(tmp_path))[0] == 1
    for words in (["--verbose", "--quiet", "doctor"], ["--quiet", "doctor", "-v"], ["doctor", "--verbose", "--quiet"]):
        assert "exclude each other" in " ".join(refusal(*words)[1].replace("│", " ").split())


def test_windows_gets_one_line_about_wsl_and_the_help(refusal, monkeypatch):
    monkeypatch.setattr(cli.sys, "platform", "win32")
    status, text = refusal("doctor")
    assert status == 1
    assert "WSL" in text
    assert len(text.splitlines()) == 1
    assert RUNNER.invoke(app, ["--help"]).exit_code == 0


ROOT = Path(__file__).parents[1]
PAGES = "".join((ROOT / f"docs/reference/{name}.md").read_text() for name in ("json", "metrics"))


def assert_on_a_page(keys):
    # The page of JSON says how bounds are named.
    told = [key for key in keys for name in (key, re.sub("_ci_(low|high)$", "", key)) if f"`{name}`" in PAGES]
    assert [key for key in keys if key not in told] == []


def test_json_has_the_same_figures_as_the_files(tmp_path):
    run_dir = str(tmp_path / "run")
    with RunStore.open(run_dir, make_manifest()) as store:
        for number in range(2):
            sample = make_sample(number)
            store.append(sample)
            store.append_scores([ScoreRow(key=sample.key, item_id=str(number), scorer="s", value=float(number))])
    for command in (["table", run_dir], ["speed", run_dir], ["compare", run_dir, run_dir]):
        said = RUNNER.invoke(app, [*command, "--json", "--csv", str(tmp_path / "out.csv")])
        rows = list(csv.DictReader((tmp_path / "out.csv").open(newline="")))
        assert said.exit_code == 0, said.output
        assert [list(row) for row in json.loads(said.stdout)] == [list(row) for row in rows]
        assert [str(row["n"]) for row in json.loads(said.stdout)] == [row["n"] for row in rows]
        if command[0] == "speed":
            assert_on_a_page(rows[0])


class _ElapsedTimer:
    """A timer whose time is over when it starts."""

    def __init__(self, seconds, tell):
        self.start, self.cancel = tell, lambda: None


@pytest.mark.parametrize("option", [[], ["--quiet"]])
def test_a_command_that_is_silent_says_what_it_does(option, monkeypatch, tmp_path):
    monkeypatch.setattr(cli.threading, "Timer", _ElapsedTimer)
    handler = cli._StderrHandler()
    monkeypatch.setattr(cli.LOGGER, "handlers", [handler])
    said = RUNNER.invoke(app, [*option, "table", str(tmp_path)]).stderr
    assert ("reading the records of the runs ..." in said) == (option == [])
    handler.has_spoken = True
    assert "reading" not in RUNNER.invoke(app, [*option, "table", str(tmp_path)]).stderr


def test_loudness_is_set_after_the_name_of_a_command():
    for option, level in (("--quiet", "WARNING"), ("-v", "DEBUG"), ("--no-such", "INFO")):
        RUNNER.invoke(app, ["version", option])
        assert logging.getLevelName(cli.LOGGER.level) == level


def test_runs_suites_checks_and_claims_are_printed_as_json(checkpoint, tmp_path):
    def printed(*words):
        done = RUNNER.invoke(app, [*words, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    options = ["--tasks", "mini_gsm8k", "--limit", "2"]
    run = ["run", "--model", checkpoint, "--decoder", "autoregressive", "--set", "gen_length=8", "--warmup", "0"]
    rows = printed(*run, *options, "--run-dir", str(tmp_path / "run"))
    assert {(row["task"], row["n"]) for row in rows} >= {("mini_gsm8k", 2)}
    made = printed("suite", "--system", "autoregressive", "--model", "embedded", *options, "--results", str(tmp_path))
    assert {row["metric"] for row in made} >= {"accuracy", "tpf"}
    checked = printed("check", "--model", checkpoint, "--decoder", "autoregressive", "--tasks", "mini_gsm8k, mini_math")
    assert checked["prompts"].keys() == {"mini_gsm8k", "mini_math"}
    assert (checked["decoder"], checked["settings"].keys()) == ("autoregressive", {"eos_ids"})
    assert_on_a_page(checked)
    judged = printed("claims", str(tmp_path / "run"))
    assert {claim["verdict"] for claim in judged["claims"]} >= {"not measured"}
    for key in ("claims", "averages"):
        assert_on_a_page(judged[key][0])
    planned = printed("suite", *options, "--results", str(tmp_path), "--dry-run")
    assert [entry["command"][:2] for entry in planned[:-1]] == [["refusion-eval", "run"]] * (len(planned) - 1)
    assert planned[-1]["command"][1] == "table"
    assert len(planned) > 2
    assert printed("claims", str(tmp_path / "run"), "--only-measured")["claims"] == []


@pytest.mark.parametrize(("command", "key"), [("doctor", "found"), ("systems", "decoder"), ("tasks", "metric")])
def test_lists_are_printed_as_json(command, key):
    listed = json.loads(RUNNER.invoke(app, [command, "--json"]).stdout)
    assert len(listed) > 3
    assert all(entry[key] for entry in listed)


def test_every_command_and_every_option_of_it_says_what_it_is_for():
    for name in COMMANDS:
        command = get_command(app).get_command(None, name)
        assert command.help.rstrip().endswith("."), name
        for option in command.params:
            assert option.help, f"{name} {option.name}"


def test_options_of_a_run_are_the_fields_of_the_model_arguments():
    options = {option.name: option for option in get_command(app).get_command(None, "run").params}
    described = descriptions(ModelArgs)
    assert described.keys() == {entry.name for entry in fields(ModelArgs)}
    assert options["warmup"].help == described["warmup"]
    assert options["warmup"].default == "1"
    assert options["thinking"].opts == ["--thinking"]
    assert options["thinking"].secondary_opts == ["--no-thinking"]
    assert options["model"].default is None


READING = {
    "protocol list": 0,
    "protocol check eval": 0,
    "protocol diff eval table1": 1,
    "sweep list": 0,
    "systems": 0,
    "tasks": 0,
    "tasks-path": 0,
    "version": 0,
    "table RUN": 0,
    "compare RUN RUN": 0,
    "export RUN --out FOLDER/texts.jsonl": 0,
    "export RUN --out FOLDER/csv --format csv": 0,
    "export RUN --out FOLDER/hf --format hf": 0,
    "export RUN --out FOLDER/lm --format lm-eval": 0,
    "export RUN --out FOLDER/eee --format every-eval-ever": 0,
    "score --task mini_gsm8k --outputs gold --csv FOLDER/gold.csv": 0,
    "rescore --list-filters": 0,
    "check --system server:http://127.0.0.1:9": 1,
}


def test_commands_that_read_or_judge_texts_load_no_torch(write_run, tmp_path):
    run_dir = write_run("run", [sample(1)])
    slow = ("torch", "transformers", "lm_eval")
    code = f"import sys; sys.modules.update(dict.fromkeys({slow})); from refusion_eval.cli import run_command\n"
    code += "print([run_command(*words.split()) for words in sys.argv[1:]])"
    commands = [words.replace("RUN", str(run_dir)).replace("FOLDER", str(tmp_path)) for words in READING]
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == str(list(READING.values())), done.stderr
    assert "127.0.0.1:9" in done.stderr.splitlines()[-1]
    assert "torch" not in done.stderr


def test_a_command_says_what_takes_long_and_not_what_it_does_not_do(monkeypatch):
    def describe(client, *, patience):
        time.sleep(0.3)
        return {"name": "x", "version": "1", "model": "m", "settings": {}}

    monkeypatch.setattr(ServerClient, "describe", describe)
    monkeypatch.setattr(cli, "_SILENT_SECONDS", 0.05)
    monkeypatch.setattr(cli.LOGGER, "handlers", [])  # those of commands of other tests have spoken
    done = RUNNER.invoke(app, ["check", "--system", "server:http://127.0.0.1:9"])
    assert done.stderr.splitlines() == ["asking http://127.0.0.1:9 ..."]


def test_help_loads_no_torch():
    loaded = "print([name for name in ('torch', 'lm_eval') if name in sys.modules])"
    code = f"import atexit, sys; atexit.register(lambda: {loaded}); from refusion_eval.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "tau_slt=1"], "unknown key 'tau_slt'; did you mean tau_slot"),
        (["--set", "tau_slot"], "write it as KEY=VALUE"),
        (["--decoder", "refuson"], "did you mean refusion"),
        (["--model", "/no/such", "--tasks", "mini_gsm8k"], "no directory '/no/such'"),
    ],
)
def test_what_is_refused_is_one_line_and_status_1(refusal, arguments, message, tmp_path):
    status, text = refusal("run", "--run-dir", str(tmp_path), *arguments)
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    assert status == 1
    assert message in lines[-1]
    assert "Traceback" not in text


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_outputs_that_are_no_file_are_refused_with_what_to_name(refusal, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    status, text = refusal("score", "--task", "mini_gsm8k", "--outputs", name)
    assert (status, text) == (1, f"error: {name} is not a file; name a file of JSON lines\n")


def test_score_of_the_gold_answers_is_perfect(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = RUNNER.invoke(app, ["score", "--task", "mini_gsm8k", "--outputs", "gold"])
    assert result.exit_code == 0
    assert "100.00%" in result.output
    with (tmp_path / "mini_gsm8k.gold.csv").open(newline="") as file:
        columns = next(csv.reader(file))
    verdicts = json.loads(RUNNER.invoke(app, ["score", "--task", "mini_gsm8k", "--outputs", "gold", "--json"]).stdout)
    assert (verdicts["value"], verdicts["ci_high"], verdicts["n"]) == (100, 100, 100)
    assert [list(text) for text in verdicts["texts"]] == [columns] * 100
    assert_on_a_page([*verdicts, *columns])


def test_run_and_table_write_csv_and_markdown(checkpoint, tmp_path):
    options = ["--decoder", "autoregressive", "--set", "gen_length=8", "--warmup", "0"]
    options += ["--limit", "2", "--tasks", "mini_gsm8k"]
    options += ["--name", "Mine (Retrained)", "--backbone", "Some-8B"]
    command = ["run", "--model", checkpoint, "--run-dir", str(tmp_path / "run"), *options]
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "mini_gsm8k" in result.output
    assert ",Mine (Retrained),Some-8B,mini_gsm8k," in (tmp_path / "run" / "results.csv").read_text()
    outputs = ["--csv", str(tmp_path / "new" / "out.csv"), "--markdown", str(tmp_path / "other" / "out.md")]
    assert RUNNER.invoke(app, ["table", str(tmp_path / "run"), *outputs]).exit_code == 0
    assert "mini_gsm8k" in (tmp_path / "new" / "out.csv").read_text()
    assert "mini" in (tmp_path / "other" / "out.md").read_text()


@pytest.mark.parametrize("option", ["--csv", "--markdown"])
def test_a_table_that_cannot_be_written_is_one_line_and_status_1(refusal, tmp_path, option):
    (tmp_path / "file").touch()
    status, text = refusal("table", str(tmp_path), option, str(tmp_path / "file" / "table"))
    assert status == 1
    assert text.startswith(f"error: {tmp_path}/file/table cannot be written")
    assert len(text.splitlines()) == 1


def test_a_run_with_failed_samples_ends_with_status_3(checkpoint, tmp_path):
    command = ["run", "--model", checkpoint, "--run-dir", str(tmp_path), "--limit", "1", "--tasks", "mini_gsm8k"]
    assert RUNNER.invoke(app, [*command, "--set", "gen_length=1048576"]).exit_code == 3


def test_a_prompt_that_is_too_long_is_told_as_such_and_not_to_be_tried_again(checkpoint, tmp_path):
    command = ["run", "--model", checkpoint, "--run-dir", str(tmp_path), "--limit", "2", "--tasks", "mini_gsm8k"]
    result = RUNNER.invoke(app, [*command, "--set", "gen_length=1048576"])
    text = " ".join(result.output.split())
    assert "2 prompts were refused, for example as too long for the context, and are in no figure." in text
    assert "error: 2 prompts are refused, and the same command would refuse them again. mini_gsm8k item" in text
    assert "exceed the context of" in text
    assert "retry" not in text
    assert "run its command again" not in (tmp_path / "results.csv").read_text()


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        ({"url": ROOT.as_uri(), "dir_info": {"editable": True}}, "editable install"),
        ({"url": "file:///elsewhere", "dir_info": {"editable": True}}, "not the installed copy, which is /elsewhere/"),
        ({}, "copied at its installation"),
        (None, "not installed"),
    ],
)
def test_doctor_says_which_copy_of_the_package_runs(monkeypatch, origin, said):
    def installed(name):
        if origin is None:
            raise doctor.PackageNotFoundError(name)
        return SimpleNamespace(read_text=lambda file: json.dumps(origin), locate_file=ROOT.joinpath)

    monkeypatch.setattr(doctor, "distribution", installed)
    monkeypatch.setattr(doctor, "git_commit", lambda: "0123abc")
    name, text = next(doctor.report())
    assert name == "package"
    assert text.startswith(f"{ROOT / 'refusion_eval'}, {said}")
    assert text.endswith(", commit 0123abc")


def test_doctor_names_versions_device_attention_sandbox_tasks_and_data(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("REFUSION_EVAL_DATA", raising=False)
    text = RUNNER.invoke(app, ["doctor"]).output
    for word in ("torch: ", "cuda", "attention: ", "sandbox", "tasks: ", "lm_eval hook: ", "data gsm8k: "):
        assert word in text
    assert "data gsm8k: hub dataset openai/gsm8k\n" in text
    assert re.search(r"^data humaneval_plus\w*: file https://", text, re.MULTILINE)  # and not the hub's
    assert re.search(r"^load: .*\nmemory: \d+ GiB\ndisk: \d+ GiB free .*\nhub token: found$", text, re.MULTILINE)
    assert "hf_secret" not in text
    assert set(embedded_names()) == set(re.findall(r"^embedded (\w+): /", text, re.MULTILINE))
    (metric,) = (line for line in text.splitlines() if line.startswith("code metric"))
    assert Path(metric.partition(": ")[2]).is_file()


def test_check_says_whether_a_decoder_can_run_a_checkpoint_without_weights(shared, tmp_path, refusal):
    tiny = shared / "parity" / "tiny"
    for path in tiny.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    result = RUNNER.invoke(app, ["check", "--model", str(tmp_path), "--decoder", "autoregressive"])
    assert result.exit_code == 0, result.output
    assert "autoregressive can run it" in result.output
    assert ": cpu, float32" in result.output
    assert re.search(r": context of [\d,]+ tokens, (a|no) chat template\n", result.output)
    facts = json.loads(RUNNER.invoke(app, ["check", "--model", "embedded", "--json"]).stdout)
    model = refusion_eval.load_model("embedded", device="cpu")
    tensors = load_file(model.directory / "model.safetensors").values()
    assert facts["num_parameters"] == sum(tensor.numel() for tensor in tensors)
    assert facts["context"] == model.config.max_positions
    assert result.stdout.endswith("the folder has no weights yet\n")
    status, text = refusal("check", "--model", "/no/such/checkpoint")
    assert status == 1
    assert text.startswith("error: no directory '/no/such/checkpoint'")


def test_check_prints_the_prompt_of_a_task_and_what_the_template_adds(tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text("system: be brief\n{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    words = ["check", "--tasks", "gsm8k", "--chat-template", str(template)]
    told = RUNNER.invoke(app, words).stdout
    assert 'begins a conversation without a system turn by "system: be brief"\n' in told
    facts = json.loads(RUNNER.invoke(app, [*words, "--json"]).stdout)
    assert facts["prompts_begin"] == "system: be brief"
    ((task, prompt),) = facts["prompts"].items()
    row = Task(BENCHMARKS["gsm8k"], mini=True).items(None)[0].row
    assert (task, prompt["id"]) == ("mini_gsm8k", "0")
    assert prompt["text"].startswith(f"system: be brief\nuser: {row['question']}\n")
    tokenizer = refusion_eval.load_model("embedded", device="cpu").tokenizer
    assert prompt["num_tokens"] == len(tokenizer.encode(prompt["text"]))
    assert f"mini_gsm8k, item 0: a prompt of {prompt['num_tokens']} tokens\n{prompt['text']}" in told


def test_check_and_run_refuse_the_same_weights(tmp_path, refusal):
    save_checkpoint(tmp_path / "model", family="qwen3")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    words = ["--model", str(tmp_path / "model"), "--decoder", "autoregressive"]
    assert RUNNER.invoke(app, ["check", *words]).exit_code == 0
    for changed, said in (
        ({"model_type": "Dream", "mask_token_id": 3}, "has no tensor model.layers.0.self_attn.q_proj.bias"),
        ({"vocab_size": config["vocab_size"] + 1}, "has shape"),
    ):
        (tmp_path / "model" / "config.json").write_text(json.dumps({**config, **changed}))
        words[-1] = "dream" if "model_type" in changed else "autoregressive"
        status, text = refusal("check", *words)
        assert status == 1
        assert said in text
        with pytest.raises(CheckpointError, match=re.escape(said)):
            refusion_eval.load_model(str(tmp_path / "model"))


def test_a_setting_that_is_given_twice_is_refused(refusal):
    status, text = refusal("run", "--set", "eos_ids=1", "--set", "eos_ids=2")
    assert status == 1
    assert "--set eos_ids is given twice (1, 2); several values go in one: A+B" in text


def test_a_preset_that_is_not_there_is_refused_before_data_is_looked_for(refusal, tmp_path):
    arguments = ("--tasks", "refusion_gsm8k", "--data", str(tmp_path), "--run-dir", str(tmp_path / "run"))
    status, text = refusal("run", "--decoder", "autoregressive", "--preset", "matchd", *arguments)
    assert status == 1
    assert "unknown preset 'matchd'; did you mean matched" in text
    assert not (tmp_path / "run").exists()
