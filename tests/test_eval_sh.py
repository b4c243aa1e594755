"""eval.sh up to the commands it would run; what they do is tested where they are written."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from refusion_eval.paths import embedded_systems
from refusion_eval.runs.model_args import published_systems
from refusion_eval.scripts.artefacts import write_spec
from refusion_eval.sweep.spec import read_spec

ROOT = Path(__file__).resolve().parents[1]
STARTUP_FILES = ("_refusion_eval_autoload.py", "refusion_eval_autoload.pth", "refusion_eval_autoload.start")

if shutil.which("bash") is None:
    pytest.skip("needs bash", allow_module_level=True)


def eval_sh(*arguments, cwd=ROOT, **environment):
    return subprocess.run(
        ["bash", ROOT / "eval.sh", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "REFUSION_EVAL_VENV": "no-such-environment", **environment},
    )


def commands(*arguments, **options):
    done = eval_sh("--dry-run", *arguments, **options)
    assert done.returncode == 0, done.stderr
    return [line[2:] for line in done.stdout.splitlines() if line.startswith("+ ")]


def test_a_dry_run_sets_up_torch_first_then_runs_both_systems_and_the_table():
    lines = commands()
    steps = [
        "-m venv",
        "pip install torch==",
        "pip install -e .",
        "--decoder refusion",
        "--decoder autoregressive",
        "table",
    ]
    found = [next(number for number, line in enumerate(lines) if step in line) for step in steps]
    assert found == sorted(found)
    assert not (ROOT / "no-such-environment").exists()


CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """A folder at the front of PATH for programs that this machine may lack; pip has no configuration."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)

    def make(name, status=0):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)

    return make


def torch_command(**environment):
    (line,) = [line for line in commands("--setup", **environment) if "torch==" in line]
    return line


@pytest.mark.parametrize(
    ("without_gpu", "named", "index"),
    [
        (1, "", f" --index-url {CPU_INDEX}"),
        (0, "", ""),
        (1, "default", ""),
        (1, "https://example.org/whl", " --index-url https://example.org/whl"),
        (0, "https://example.org/whl", " --index-url https://example.org/whl"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the default index has builds without CUDA")
def test_a_machine_without_a_gpu_gets_pytorchs_cpu_build_unless_an_index_is_named(stand_ins, without_gpu, named, index):
    stand_ins("nvidia-smi", without_gpu)
    assert torch_command(REFUSION_EVAL_TORCH_INDEX=named).partition("torch==")[2].partition(" ")[2] == index.strip()


def sourced(code, **environment):
    """What bash prints of some code with the functions of environment.sh."""
    return subprocess.run(
        ["bash", "-c", f"set -eu; source ./environment.sh; dry_run=false installer=pip; {code}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHON": sys.executable, **environment},
    ).stdout


@pytest.fixture
def package_index(tmp_path):
    """The address of an index that has one build of torch, for this Python."""
    build = f"torch-9.9.9+cpu-cp{sys.version_info[0]}{sys.version_info[1]}-any.whl"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "index.html").write_text(f'<a href="/{build}">{build}</a>')
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(("version", "has_it"), [("9.9.9", "yes"), ("9.9.8", "no")])
def test_the_cpu_index_is_used_if_it_answers_with_the_build(package_index, version, has_it):
    asked = f"if has_torch {package_index} torch=={version}; then echo yes; else echo no; fi"
    assert sourced(asked, no_proxy="127.0.0.1").strip() == has_it


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the default index has builds without CUDA")
def test_without_the_cpu_index_torch_comes_from_the_default_one(stand_ins):
    stand_ins("nvidia-smi", 1)
    said = sourced('has_torch() { return 1; }; choose_index torch==9.9.9; echo "index=$index."')
    assert f"{CPU_INDEX} cannot be used from here" in said
    assert said.endswith("index=.\n")


def test_uv_installs_where_it_is_there_and_pip_where_pip_has_an_index_of_its_own(stand_ins):
    assert "/bin/python -m pip install torch==" in torch_command()
    stand_ins("uv")
    assert " uv pip install --python no-such-environment/bin/python torch==" in f" {torch_command()}"
    assert "/bin/python -m pip install torch==" in torch_command(PIP_EXTRA_INDEX_URL="https://example.org/simple")


def test_a_real_model_is_compared_with_its_backbone_by_default():
    lines = commands("--model", "GSAI-ML/ReFusion")
    runs = [line for line in lines if " run " in line]
    assert len(runs) == 6
    assert "--model GSAI-ML/ReFusion --decoder refusion" in runs[0]
    assert "--model Qwen/Qwen3-8B --decoder autoregressive --no-thinking --preset paper_implied" in runs[1]


def test_a_real_model_is_asked_with_the_prompts_of_the_release_unless_others_are_wanted():
    assert [run.split("--prompts ")[1] for run in runs_of("--model", "some/model")] == ["release", "release"]
    ours = runs_of("--model", "some/model", "--prompts", "ours")
    unfused = "--model some/model --decoder refusion --set fuse=false"
    assert ours[0] == f"--run-dir results/runs/model-refusion-unfused {unfused}"
    assert not any("--prompts" in run for run in (*ours, *runs_of()))


def test_task_files_and_their_folder_are_those_of_the_users_folder(tmp_path):
    run, *_ = runs_of("--tasks", "own.yaml,lm_eval:gsm8k,math", "--include-path", ".", cwd=tmp_path)
    assert f"--tasks {tmp_path}/own.yaml,lm_eval:gsm8k,math --include-path {tmp_path}/." in run


def test_a_baseline_is_checked_before_the_first_run():
    lines = commands("--model", "GSAI-ML/ReFusion", "--baseline", "some/model")
    (checked,) = (number for number, line in enumerate(lines) if "check --model some/model" in line)
    assert " run " in lines[checked + 1]


@pytest.mark.parametrize("arguments", [[], ["--model", "some/model", "--no-baseline"]])
def test_without_a_baseline_to_name_nothing_is_checked(arguments):
    assert not any(" check " in line for line in commands(*arguments))


@pytest.fixture
def fake_environment(tmp_path):
    """An environment that is set up, and whose Python ends with the given status where a command holds a word."""

    def make(word, status):
        python = tmp_path / "bin" / "python"
        python.parent.mkdir()
        # The script's own steps are taken by a real Python, which starts this one for the commands.
        cases = f'"-m refusion_eval.scripts"*) exec {sys.executable} "$@";; *" "{word}*) exit {status};;'
        cases += " -) cat >/dev/null; echo stamp;;"
        python.write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\n')
        python.chmod(0o755)
        (tmp_path / "set-up").write_text("stamp\n")
        return {"REFUSION_EVAL_VENV": str(tmp_path), "PYTHON": str(python)}

    return make


def run_with(environment, tmp_path):
    done = eval_sh("--model", "some/model", "--results", str(tmp_path / "results"), **environment)
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("+ ")], done.stderr


def test_a_failed_baseline_leaves_the_table_of_the_first_run_and_a_status(fake_environment, tmp_path):
    status, lines, errors = run_with(fake_environment("run*autoregressive", 1), tmp_path)
    assert status == 1
    assert f" table {tmp_path}/results/runs/release/model-refusion-unfused --csv " in lines[-1]
    assert "the baseline failed, so the table has no speed-up" in errors


@pytest.mark.parametrize("status", [130, 143])
@pytest.mark.parametrize("interrupted", ["run*refusion", "run*autoregressive"])
def test_an_interrupted_run_ends_the_script_at_once(fake_environment, tmp_path, interrupted, status):
    ended, lines, _ = run_with(fake_environment(interrupted, status), tmp_path)
    assert ended == status
    assert interrupted.removeprefix("run*") in lines[-1].split("--decoder ")[-1]
    assert " run " in lines[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_of_the_script_ends_it_after_the_run_has_ended(fake_environment, tmp_path, number):
    environment = fake_environment("nothing", 0)
    python = Path(environment["PYTHON"])
    patient = f"trap 'kill $!; echo recorded; exit {128 + number}' INT TERM; echo running; sleep 60 >&- & wait"
    python.write_text(python.read_text().replace("esac", f'*"refusion_eval run"*) {patient};; esac'))
    script = subprocess.Popen(
        ["bash", ROOT / "eval.sh", "--no-baseline", "--results", tmp_path / "results"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while script.stdout.readline() != "running\n":
        assert script.poll() is None
    os.killpg(script.pid, number)
    said = script.communicate(timeout=60)[0]
    assert "recorded" in said
    assert " table " not in said
    assert script.returncode in (128 + number, -number)


def test_failed_samples_of_a_baseline_are_in_the_table_and_in_the_status(fake_environment, tmp_path):
    status, lines, _ = run_with(fake_environment("run*autoregressive", 3), tmp_path)
    assert status == 3
    assert "model-refusion" in lines[-1]
    assert "Qwen3-8B-autoregressive" in lines[-1]


def test_a_failed_first_run_ends_with_its_status(fake_environment, tmp_path):
    status, lines, _ = run_with(fake_environment("run*refusion", 1), tmp_path)
    assert status == 1
    assert " run " in lines[-1]


def test_a_baseline_that_cannot_be_run_is_refused_before_the_first_run(fake_environment, tmp_path):
    status, lines, errors = run_with(fake_environment("check", 1), tmp_path)
    assert status == 1
    assert not any(" run " in line for line in lines)
    assert [line.rpartition(" ")[2] for line in lines] == ["refusion", "autoregressive"]  # model and baseline
    assert "name another model with --model" in errors
    assert "--no-baseline" in errors


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "hatch_build.py", *STARTUP_FILES])
def test_the_environment_is_made_anew_when_what_it_was_made_from_changes(tmp_path, name):
    for source in ("environment.sh", "pyproject.toml", "constraints.txt", "hatch_build.py", *STARTUP_FILES):
        shutil.copy(ROOT / source, tmp_path)
    stamp = ["bash", "-c", "source ./environment.sh; stamp"]
    before = subprocess.run(stamp, cwd=tmp_path, capture_output=True, check=True).stdout
    with (tmp_path / name).open("a") as file:
        file.write("\n")
    assert subprocess.run(stamp, cwd=tmp_path, capture_output=True, check=True).stdout != before


def test_no_baseline_runs_refusion_alone():
    assert len(runs_of("--no-baseline", "--model", "some/model")) == 1
    assert all("--decoder refusion" in run for run in runs_of("--no-baseline"))


def test_options_reach_every_run(tmp_path):
    lines = commands("--tasks", "gsm8k", "--limit", "3", "--data", str(tmp_path), "--sandbox", "none")
    for line in lines:
        if " run " in line:
            assert f"--tasks gsm8k --limit 3 --data {tmp_path} --sandbox none" in line


def test_relative_paths_mean_where_the_user_stands(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "rows").mkdir()
    lines = commands("--model", "checkpoint", "--data", "rows", "--results", "out", "--no-baseline", cwd=tmp_path)
    assert (
        f"--run-dir {tmp_path}/out/runs/release/checkpoint-refusion-unfused --model {tmp_path}/checkpoint" in lines[-3]
    )
    assert f"--data {tmp_path}/rows" in lines[-3]
    assert f"--csv {tmp_path}/out/checkpoint/results.csv" in lines[-1]


def test_setup_stops_after_the_environment():
    assert not any(" run " in line for line in commands("--setup"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modle", "x"], "unknown option '--modle'"),
        (["--limit", "0"], "--limit is '0'"),
        (["--limit", "many"], "--limit is 'many'"),
        (["--limit"], "--limit needs a value"),
        (["--data", "/no/such/folder"], "there is no directory '/no/such/folder'"),
        (["--sandbox", "off"], "--sandbox is 'off'"),
        (["gsm8k"], "unknown option 'gsm8k'"),
    ],
)
def test_a_wrong_option_is_one_clear_line_and_status_2(arguments, message):
    done = eval_sh(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert message in line


def test_an_environment_that_somebody_else_made_is_left_alone(tmp_path):
    (tmp_path / "precious").touch()
    done = eval_sh("--setup", REFUSION_EVAL_VENV=str(tmp_path))
    assert done.returncode == 2
    assert "was not made by this script" in done.stderr
    assert (tmp_path / "precious").exists()


def test_help_names_every_option():
    text = eval_sh("--help").stdout
    for option in ("--model", "--baseline", "--no-baseline", "--tasks", "--limit", "--data", "--results", "--setup"):
        assert option in text


def runs_of(*arguments, **options):
    """The runs of one round, without the option that says so."""
    runs = [line.split(" run ", 1)[1] for line in commands(*arguments, "--rounds", "1", **options) if " run " in line]
    return [run.replace(" --round 1/1", "") for run in runs]


def test_systems_take_turns_in_rounds_of_which_none_is_empty():
    def order(*arguments):
        runs = [line for line in commands(*arguments) if " run " in line]
        return [(line.split("--run-dir results/runs/")[1].split()[0], line.split("--round ")[1][:3]) for line in runs]

    systems = ["embedded-refusion-unfused", "embedded-refusion-fused", "embedded-autoregressive"]
    assert order() == [(system, f"{number}/3") for number in (1, 2, 3) for system in systems]
    assert order("--limit", "2") == [(system, f"{number}/2") for number in (1, 2) for system in systems]
    assert [number for _, number in order("--model", "some/model", "--no-baseline")] == ["1/1"]


def test_systems_run_as_published_and_all_is_the_embedded_family():
    assert runs_of("--system", "dream,qwen3") == [
        "--run-dir results/runs/release/dream --system dream --prompts release",
        "--run-dir results/runs/release/qwen3-paper_implied --system qwen3 --preset paper_implied --prompts release",
    ]
    decoders = [run.split("--decoder ")[1].split()[0] for run in runs_of("--system", "all")]
    in_package = [decoder for _, decoder in embedded_systems().values()]
    assert list(dict.fromkeys(decoders)) == list(dict.fromkeys(in_package))
    assert "--model embedded:llada --decoder fast_dllm_llada" in " ".join(runs_of("--system", "all"))
    published = [name for name, system in published_systems().items() if system.pretrained]
    runs = runs_of("--system", "all", "--model", "published")
    assert [run.split("--system ")[1].split()[0] for run in runs] == published


def test_embedded_ones_are_chosen_by_their_decoder():
    runs = runs_of("--system", "refusion", "--model", "embedded")
    arguments = "--model embedded --decoder refusion --set fuse="
    assert runs == [
        f"--run-dir results/runs/embedded-refusion-unfused {arguments}false",
        f"--run-dir results/runs/embedded-refusion-fused {arguments}true",
    ]


def test_a_preset_is_for_the_systems_that_have_it():
    runs = runs_of("--system", "refusion,llada", "--preset", "paper_implied")
    assert runs == [
        "--run-dir results/runs/release/refusion-unfused --system refusion --set fuse=false --prompts release",
        "--run-dir results/runs/release/llada-paper_implied --system llada --preset paper_implied --prompts release",
    ]


def parts_of(*arguments):
    """The commands after the first table of --artefacts, without the interpreter."""
    return [
        line.split(" refusion_eval ", 1)[1] for line in commands("--artefacts", *arguments) if " refusion_eval " in line
    ]


@pytest.mark.parametrize(
    "arguments",
    [[], ["--model", "GSAI-ML/ReFusion"], ["--system", "refusion,qwen3"], ["--system", "refusion", "--model", "a/b"]],
)
def test_artefacts_has_every_table_figure_and_page_from_the_runs_before(arguments):
    lines = parts_of(*arguments)
    made = [line.split()[1] if line.startswith("plot") else line.split()[0] for line in lines]
    figures = [f"figure{number}" for number in (1, 3, 4, 5, 6, 8, 9)]
    for part in ("paper-table", "claims", "compare", "speed", "locality", "sweep", "replay", "report", *figures):
        assert part in made
    run_dirs = [line.split()[2] for line in lines if line.startswith("run ")]
    (loop,) = (place for place, line in enumerate(lines) if "--loop generate" in line)
    assert "--decoder autoregressive" in lines[loop]
    assert loop < made.index("speed")
    assert all(run_dir in lines[made.index("speed")] for run_dir in run_dirs)
    (refusion,) = {one for one in run_dirs if one.endswith("refusion-unfused")}
    assert f" {refusion} " in lines[made.index("compare")]
    assert (f" {refusion} " if arguments else " --prompt ") in lines[made.index("replay")]
    for part in ("figure5", "figure9"):
        assert " --model " in lines[made.index(part)]
    assert {f"{refusion}-recompute_kv", f"{refusion}-serial"} <= set(run_dirs)


@pytest.mark.parametrize("more", [[], ["--artefacts"]])
def test_refusion_is_the_papers_algorithm_and_fused_forwards_are_rows_beside_it(more):
    real = (["--model", "GSAI-ML/ReFusion"], ["--system", "refusion,qwen3"])
    for arguments in ([], ["--system", "all"], ["--model", "embedded"], *real, [*real[0], "--fused"]):
        runs = runs_of(*arguments, *more)
        refusion = [run for run in runs if "refusion" in run]
        fused = [run for run in refusion if "-fused " in run]
        assert len(fused) == ("--fused" in arguments or arguments not in real)
        assert len(refusion) - len(fused) == 1 + 2 * len(more)
        assert all("--set fuse=true" in run for run in fused)
        assert all("-unfused" in run and "--set fuse=false" in run for run in refusion if run not in fused)
        assert not any("fuse=" in run for run in runs if run not in refusion)


@pytest.mark.parametrize(
    ("tasks", "shown"), [("gsm8k", "gsm8k"), ("math,gsm8k", "math"), ("gsm8k,mbpp", "mbpp"), ("mini_gsm8k", "gsm8k")]
)
def test_figures_are_of_a_task_that_was_run(tasks, shown):
    lines = parts_of("--model", "GSAI-ML/ReFusion", "--tasks", tasks)
    (serial,) = (line for line in lines if "serial=true" in line)
    assert serial.endswith(f"--tasks {shown}")
    plots = [line for line in lines if line.startswith("plot ") and "locality.csv" not in line]
    assert len(plots) == 6
    # The case study is decoded anew, so its task says with which prompts.
    asked = {line: f"refusion_{shown}_release" if "--model" in line else shown for line in plots}
    assert all(f"--task {asked[line]} " in line for line in plots)


def test_locality_is_measured_on_the_models_of_the_papers_figure_too():
    def measured(*arguments):
        return [line.split()[2] for line in parts_of(*arguments) if line.startswith("locality ")]

    assert measured() == ["embedded", "embedded:llada"]
    assert measured("--model", "GSAI-ML/ReFusion") == ["GSAI-ML/ReFusion"]
    published = measured("--system", "refusion,llada,dream")
    assert published == ["GSAI-ML/ReFusion", "GSAI-ML/LLaDA-8B-Instruct", "Dream-org/Dream-v0-Instruct-7B"]


def test_sweeps_of_a_real_checkpoint_are_its_own_on_that_task(tmp_path):
    for figure in ("figure4", "figure6", "figure8"):
        write_spec(figure, "gsm8k", tmp_path / f"{figure}.yaml", model="a/b", baseline="c/d")
        spec = read_spec(str(tmp_path / f"{figure}.yaml"))
        systems = {system.name: system for system in spec.systems}
        assert spec.tasks == ("gsm8k",)
        assert systems["refusion"].arguments["pretrained"] == "a/b"
        assert systems["refusion"].settings == {"fuse": False}
        assert figure == "figure6" or systems["qwen3"].arguments["pretrained"] == "c/d"


def test_sweeps_of_the_embedded_family_are_of_the_systems_that_are_in_the_package(tmp_path):
    for figure in ("figure4", "figure6", "figure8"):
        write_spec(figure, "math", tmp_path / f"{figure}.yaml", model="embedded", baseline="embedded")
        spec = read_spec(str(tmp_path / f"{figure}.yaml"))
        assert spec.tasks == ("math",)
        in_package = {decoder for _, decoder in embedded_systems().values()}
        assert {system.arguments["decoder"] for system in spec.systems} <= in_package
        assert "refusion" in {system.name for system in spec.systems}


@pytest.mark.parametrize(("module", "options"), [("suite", ("--artefacts",)), ("train", ("--config", "tiny"))])
def test_a_dry_run_needs_no_installed_package(module, options):
    command = [sys.executable, "-S", "-m", f"refusion_eval.scripts.{module}", *options, "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "+ " in done.stdout


def test_the_check_of_a_gpu_runs_instead_of_an_evaluation():
    steps = [line for line in commands("--gpu-check", "--results", "out") if " -m refusion_eval " in line]
    assert len(steps) == 1
    assert " gpu-check --out " in steps[0]
    assert steps[0].endswith("/out/gpu")


def test_the_command_suite_prints_what_the_script_does(tmp_path):
    def steps(lines):
        return [line.split(" -m refusion_eval ", 1)[1] for line in lines if " -m refusion_eval " in line]

    options = ["--system", "refusion,qwen3", "--limit", "3"]
    command = [sys.executable, "-m", "refusion_eval", "suite", "--dry-run", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert steps(done.stdout.splitlines()) == steps(commands(*options))
    refused = subprocess.run([*command, "--limt"], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr == (
        "refusion-eval suite: unknown option '--limt'; refusion-eval suite --help lists the options\n"
    )


def test_an_adapter_goes_with_its_checkpoint():
    (run,) = runs_of("--system", "d2f_llada", "--model", "some/base", "--adapter", "some/lora")
    assert run.endswith("--system d2f_llada --model some/base --adapter some/lora --prompts release")


def test_a_system_may_run_another_checkpoint():
    (run,) = runs_of("--system", "llada", "--model", "some/copy", "--preset", "paper_implied")
    run_dir, options = run.removeprefix("--run-dir ").split(" ", 1)
    assert run_dir == "results/runs/release/copy-llada-paper_implied"
    assert options == "--system llada --model some/copy --preset paper_implied --prompts release"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--system", "ladda"], "there is no system 'ladda'"),
        (["--system", "llada,dream", "--model", "some/copy"], "--system names 2 systems"),
        (["--preset", "official"], "need --system"),
        (["--system", "llada", "--preset", "mine"], "no settings table of these systems is called 'mine'"),
        (["--system", "llada", "--preset", "matched"], "no settings table of these systems is called 'matched'"),
        (["--system", "all", "--preset", "official"], "no settings table of these systems is called 'official'"),
        (["--model", "published"], "need --system"),
        (["--prompts", "theirs"], "--prompts is 'theirs', it must be ours or release"),
        (["--prompts", "release"], "--model embedded runs the mini tasks"),
        (["--system", "llama3", "--model", "embedded"], "there is no embedded checkpoint of 'llama3'"),
        (["--system", "d2f_llada", "--adapter", "some/lora"], "--adapter needs --model"),
        (["--artefacts", "--system", "llada", "--model", "some/copy"], "name refusion among --system"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_set_up(arguments, message):
    done = eval_sh("--dry-run", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "+ " not in done.stdout
