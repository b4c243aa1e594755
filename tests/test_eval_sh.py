"""eval.sh up to the command that it becomes; `tests/cli/test_suite.py` has what this command runs."""

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


def test_a_dry_run_sets_up_torch_first_then_becomes_the_command_suite():
    lines = commands("--limit", "3")
    steps = ["-m venv", "pip install torch==", "pip install -e .", "-m refusion_eval suite --dry-run --limit 3"]
    found = [next(number for number, line in enumerate(lines) if step in line) for step in steps]
    assert found == sorted(found)
    assert not (ROOT / "no-such-environment").exists()


def test_what_a_server_needs_is_installed_where_one_is_named():
    assert not any("server" in line for line in commands())
    *_, extra, suite = commands("--system", "refusion,server:http://127.0.0.1:1")
    assert extra.endswith("pip install -e .\\[server\\] -c constraints.txt")
    assert "--system refusion,server:http://127.0.0.1:1" in suite.replace("\\", "")


def test_an_extra_is_installed_on_top_of_the_clone_where_it_is_named():
    *_, first, second = commands("--setup", "--extra", "server", "--extra", "wandb")
    assert first.endswith("pip install -e .\\[server\\] -c constraints.txt")
    assert second.endswith("pip install -e .\\[wandb\\] -c constraints.txt")
    for words, message in {("--extra", "sever"): "no such extra", ("--setup", "--extra"): "needs the name"}.items():
        done = eval_sh("--dry-run", *words)
        assert (done.returncode, message in done.stderr) == (2, True)


@pytest.fixture
def environment(tmp_path):
    """An environment that is set up, and whose Python prints its arguments."""

    def make(code='echo "$@"'):
        python = tmp_path / "environment" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\ncase "$1" in -) cat >/dev/null; echo stamp; exit;; -c) exit;; esac\n{code}\n')
        python.chmod(0o755)
        (tmp_path / "environment" / "set-up").write_text("stamp\n")
        return {"REFUSION_EVAL_VENV": str(tmp_path / "environment"), "PYTHON": str(python)}

    return make


def test_options_and_the_users_folder_reach_the_command(environment, tmp_path):
    done = eval_sh("--data", "a b", "--dry-run", cwd=tmp_path, **environment('pwd; printf "<%s>" "$@"'))
    folder, words = done.stdout.splitlines()
    assert Path(folder) == tmp_path
    assert words == f"<-m><refusion_eval><suite><--root><{ROOT}><--data><a b><--dry-run>"


def test_in_its_own_folder_results_have_short_names(environment):
    assert eval_sh("--limit", "1", **environment()).stdout == "-m refusion_eval suite --limit 1\n"


def test_help_has_the_options_of_the_script_and_of_the_command(environment):
    assert "--setup" in eval_sh("--help").stdout
    assert "REFUSION_EVAL_VENV" in eval_sh("-h").stdout
    assert eval_sh("--help", **environment()).stdout.endswith("-m refusion_eval suite --help\n")


@pytest.mark.parametrize("status", [1, 2, 3, 130])
def test_the_status_of_the_command_is_that_of_the_script(environment, status):
    assert eval_sh(**environment(f"exit {status}")).returncode == status


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_command_which_may_finish_its_work(environment, number):
    patient = f"trap 'kill $!; echo recorded; exit {128 + number}' INT TERM; echo running; sleep 60 >&- & wait"
    script = subprocess.Popen(
        ["bash", ROOT / "eval.sh"],
        env={**os.environ, **environment(patient)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while script.stdout.readline() != "running\n":
        assert script.poll() is None
    script.send_signal(number)
    assert script.communicate(timeout=60)[0] == "recorded\n"
    assert script.returncode == 128 + number


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


@pytest.mark.process
def test_an_installation_says_how_many_libraries_it_has_reached(tmp_path):
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    steps = (
        "echo Collecting a; echo Collecting b; sleep 1",
        *(f"mkdir -p '{packages}/{name}-1.dist-info'" for name in "abc"),
        "sleep 1",
    )
    prepared = f"venv='{tmp_path}' seconds_between=0.1; : >$venv/setup.log"
    said = sourced(f'{prepared}; counted bash -c "{"; ".join(steps)}"; echo done').splitlines()
    wanted = ["  2 of about 110 libraries found", "  3 of about 110 libraries installed", "done"]
    assert [line for line in dict.fromkeys(said) if line in wanted] == wanted


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


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "hatch_build.py", *STARTUP_FILES])
def test_the_environment_is_made_anew_when_what_it_was_made_from_changes(tmp_path, name):
    for source in ("environment.sh", "pyproject.toml", "constraints.txt", "hatch_build.py", *STARTUP_FILES):
        shutil.copy(ROOT / source, tmp_path)
    stamp = ["bash", "-c", "source ./environment.sh; stamp"]
    before = subprocess.run(stamp, cwd=tmp_path, capture_output=True, check=True).stdout
    with (tmp_path / name).open("a") as file:
        file.write("\n")
    assert subprocess.run(stamp, cwd=tmp_path, capture_output=True, check=True).stdout != before


def test_setup_stops_after_the_environment():
    assert not any("refusion_eval suite" in line for line in commands("--setup"))


def test_an_environment_that_somebody_else_made_is_left_alone(tmp_path):
    (tmp_path / "precious").touch()
    done = eval_sh("--setup", REFUSION_EVAL_VENV=str(tmp_path))
    assert done.returncode == 2
    assert "was not made by this script" in done.stderr
    assert (tmp_path / "precious").exists()
