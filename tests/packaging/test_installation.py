"""Wheel, source distribution and editable install in fresh environments, without network.

A fresh environment sees the libraries of this one (lm_eval, torch, ...), but not this one's own start-up files.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

for library in ("hatchling", "editables"):
    pytest.importorskip(library, reason=f"building needs {library}: pip install -e '.[dev]'")

ROOT = Path(__file__).resolve().parents[2]
STARTUP_FILES = {"_refusion_eval_autoload.py", "refusion_eval_autoload.pth", "refusion_eval_autoload.start"}
FIND_MODELS = """
from lm_eval.api.registry import get_model
print(get_model("dummy").__name__, get_model("refusion").__name__)
"""


def build(kind, folder, source=ROOT):
    """Builds with hatchling's own hook and returns the file."""
    code = f"import hatchling.build, sys; print(hatchling.build.build_{kind}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, folder], cwd=source, capture_output=True, text=True, check=True)
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def editable(tmp_path_factory):
    return build("editable", tmp_path_factory.mktemp("editable"))


class Environment:
    """A virtual environment with one thing installed."""

    def __init__(self, folder, install=None):
        self.folder = folder
        self.python = folder / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.site = next(folder.glob("lib/python*/site-packages"))
        if install is not None:
            self.pip("install", "--no-deps", "--no-index", "--no-compile", install)
        # Sorted last, and a plain path: start-up files that lie there are not read from here.
        (self.site / "zz_libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    def pip(self, *arguments):
        command = [sys.executable, "-m", "pip", "--python", self.python, "--quiet", *arguments]
        subprocess.run(command, check=True, capture_output=True, text=True)

    def run(self, *arguments, **options):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(
            [self.python, *arguments], capture_output=True, text=True, env=environment, cwd=self.folder, **options
        )


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("installed"), wheel)


def test_wheel_holds_package_tasks_published_figures_and_startup_files(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tasks = {f"refusion_eval/tasks/{path.relative_to(ROOT / 'tasks').as_posix()}" for path in tracked("tasks")}
    published = {f"refusion_eval/published/{path.name}" for path in tracked("results/published")}
    assert names >= STARTUP_FILES
    assert names >= tasks
    assert "refusion_eval/training/configs/refusion_8b.yaml" in names
    assert "refusion_eval/py.typed" in names
    licences = {name.split("/", 2)[2] for name in names if ".dist-info/licenses/" in name}
    assert licences == {"LICENSE", "refusion_eval/report/page/vendor/LICENSE-chartjs.md"}
    assert published
    assert names >= published
    choices = {path.parent.name for path in tracked("results/gpu") if path.name == "choices.json"}
    assert {name.split("/")[2] for name in names if name.startswith("refusion_eval/gpu/")} == choices
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"refusion_eval", *STARTUP_FILES}


def tracked(folder):
    listed = subprocess.run(["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


@pytest.mark.slow
def test_a_wheel_from_the_source_distribution_is_the_same(wheel, tmp_path):
    with tarfile.open(build("sdist", tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    again = build("wheel", tmp_path, source)
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_an_image_is_built_from_all_that_a_wheel_needs(wheel, tmp_path):
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert rules[1] == "*"
    for path in (path for rule in rules if rule.startswith("!") for path in tracked(rule[1:])):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for name in re.findall(r"(?m)^COPY (\S+) ", dockerfile):
        assert (tmp_path / name).exists()
    (tmp_path / "dist").mkdir()
    built = build("wheel", tmp_path / "dist", tmp_path)
    assert sorted(zipfile.ZipFile(built).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_editable_wheel_copies_no_task(editable):
    names = set(zipfile.ZipFile(editable).namelist())
    assert names >= STARTUP_FILES
    assert not any("tasks" in name for name in names)


def test_wheel_makes_lm_eval_find_our_model_and_its_own(installed):
    done = installed.run("-c", FIND_MODELS)
    assert done.stdout.split() == ["DummyLM", "RefusionLM"], done.stderr


@pytest.mark.slow
def test_the_stock_command_evaluates_a_mini_task_with_our_model(installed, tmp_path):
    # The default attention would be compiled here for half a minute, as in every fresh installation.
    arguments = "decoder=autoregressive,pretrained=embedded,attention=sdpa,gen_length=64,run_dir=" + str(
        tmp_path / "run"
    )
    done = installed.run(
        *("-m", "lm_eval", "--model", "refusion", "--model_args", arguments, "--limit", "2", "--apply_chat_template"),
        *("--include_path", installed.site / "refusion_eval" / "tasks", "--tasks", "mini_gsm8k", "--log_samples"),
        *("--output_path", tmp_path / "out"),
    )
    assert done.returncode == 0, done.stderr
    assert "gen_length=64" in done.stderr
    assert "[model_args]" in done.stderr
    (results,) = tmp_path.glob("out/*/results_*.json")
    content = json.loads(results.read_text())
    assert set(content["results"]["mini_gsm8k"]) >= {"acc,last", "extracted,last"}
    assert content["config"]["decoder_settings"]["mini_gsm8k"]["source"]["gen_length"] == "model_args"
    assert (tmp_path / "run" / "run.json").exists()


def test_editable_install_makes_lm_eval_find_our_model_and_reads_the_checkouts_tasks(editable, tmp_path):
    environment = Environment(tmp_path, editable)
    done = environment.run("-c", FIND_MODELS)
    assert done.stdout.split() == ["DummyLM", "RefusionLM"], done.stderr
    assert environment.run("-m", "refusion_eval", "tasks-path").stdout.strip() == str(ROOT / "tasks")


def test_a_model_that_somebody_registers_first_hides_neither_ours_nor_lm_evals(installed):
    first = """
from lm_eval.api.registry import model_registry, register_model
from lm_eval.api.model import LM
@register_model("mine")
class Mine(LM):
    def generate_until(self, requests): ...
    def loglikelihood(self, requests): ...
    def loglikelihood_rolling(self, requests): ...
print(all(name in model_registry for name in ("mine", "hf", "refusion")))
"""
    assert installed.run("-c", first).stdout.strip() == "True"


def test_startup_loads_nothing_but_the_hook(installed):
    code = "import sys; print([name for name in sys.modules if 'refusion' in name or name.startswith('lm_eval')])"
    assert installed.run("-c", code).stdout.strip() == "['_refusion_eval_autoload']"


def test_hook_is_installed_once_although_a_venv_reads_it_twice(installed):
    code = "import sys; print([type(finder).__name__ for finder in sys.meta_path].count('RegistryFinder'))"
    assert installed.run("-c", code).stdout.strip() == "1"


def test_without_startup_files_our_own_command_still_reaches_lm_eval(installed):
    code = f"import sys; sys.path += [{str(installed.site)!r}, {sysconfig.get_paths()['purelib']!r}]\n"
    script = (
        code + "sys.argv = ['refusion-eval', 'lm-eval', 'ls', '--help']\nfrom refusion_eval.cli import main\nmain()"
    )
    done = installed.run("-S", "-c", script)
    assert done.returncode == 0, done.stderr
    assert "List available tasks" in done.stdout


def test_a_half_removed_installation_starts_silently(wheel, tmp_path):
    environment = Environment(tmp_path, wheel)
    (environment.site / "_refusion_eval_autoload.py").unlink()
    done = environment.run("-c", "pass")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_uninstalling_leaves_nothing_behind(wheel, tmp_path):
    environment = Environment(tmp_path, wheel)
    (environment.site / "zz_libraries.pth").unlink()
    environment.pip("uninstall", "--yes", "refusion-eval")
    assert not [path for path in environment.site.rglob("*") if "refusion" in path.name]
    assert environment.run("-c", "pass").stderr == ""


def processor_seconds(environment):
    before = os.times()
    environment.run("-c", "pass")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_startup_costs_less_than_5_ms(installed, tmp_path):
    plain = Environment(tmp_path)
    for _ in range(3):
        pairs = [(processor_seconds(installed), processor_seconds(plain)) for _ in range(40)]
        extra = statistics.mean(with_hook - without for with_hook, without in pairs)
        if extra < 0.005:
            return
    pytest.fail(f"{1000 * extra:.1f} ms more processor time for each start")
