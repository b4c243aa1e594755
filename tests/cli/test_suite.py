"""The command `suite`: which commands it runs, and what it does when one of them fails."""

import logging
import re
import sys

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from refusion_eval import cli
from refusion_eval.cli import app, artefacts, suite_runs
from refusion_eval.cli.artefacts import write_spec
from refusion_eval.cli.plans import words_of
from refusion_eval.errors import ConfigError
from refusion_eval.paths import embedded_systems
from refusion_eval.protocol.spec import DEFAULT, read_protocol
from refusion_eval.runs.systems import published_systems
from refusion_eval.runs.terminal import Interrupted
from refusion_eval.sweep.spec import read_spec

RUNNER = CliRunner()
COMMAND = f"+ {sys.executable} -m refusion_eval "


def suite(*arguments):
    return RUNNER.invoke(app, ["suite", *arguments])


def steps(output):
    return [line.removeprefix(COMMAND) for line in output.splitlines() if line.startswith(COMMAND)]


def commands(*arguments):
    """The commands that a suite would run, without the interpreter."""
    done = suite("--dry-run", *arguments)
    assert done.exit_code == 0, done.output
    return steps(done.stdout)


def runs_of(*arguments):
    """The runs of one round, without the option that says so."""
    runs = [line.removeprefix("run ") for line in commands("--rounds", "1", *arguments) if line.startswith("run ")]
    return [run.replace(" --round 1/1", "") for run in runs]


def test_a_suite_runs_both_systems_then_the_table():
    lines = commands()
    for start in ("run --run-dir results/runs/embedded-refusion", "run --run-dir results/runs/embedded-autoregressive"):
        assert any(line.startswith(start) for line in lines)
    assert lines[-1].startswith("table ")


def test_the_suite_of_2026_is_asked_for_by_name_and_the_papers_is_the_default():
    newer = [line for line in commands("--suite", "2026", "--model", "some/copy") if line.startswith("run ")]
    assert newer
    assert all("--tasks refusion_suite_2026 --round " in line for line in newer)
    assert commands("--suite", "paper", "--model", "some/copy") == commands("--model", "some/copy")


def test_the_suite_of_2026_makes_no_figures_of_the_paper():
    done = suite("--dry-run", "--suite", "2026", "--artefacts")
    assert done.exit_code != 0
    assert "leave --artefacts out" in done.stderr


def test_tasks_name_some_of_a_suite_or_other_forms_of_them():
    some = "math_500,mmlu_redux_as_is,livecodebench_v6_2025_01_2025_04"
    runs = runs_of("--suite", "2026", "--model", "some/copy", "--tasks", some)
    assert runs
    assert all(run.endswith(f"--tasks {some}") for run in runs)


@pytest.mark.parametrize("other", ["gsm8k", "gpqa", "math_50"])
def test_tasks_of_another_suite_are_refused_with_those_that_there_are(other):
    done = suite("--dry-run", "--suite", "2026", "--tasks", f"ifeval,{other}")
    assert done.exit_code != 0
    assert re.search(
        rf"--suite 2026: unknown task '{other}'; (did you mean \w+\?|known tasks: aime_2024, )", done.stderr
    )


def test_a_suite_ends_with_its_files_and_the_next_command():
    *_, table, records, following = suite("--dry-run", "--model", "some/copy", "--no-baseline").stdout.splitlines()
    assert table == "Table: results/local/copy/results.csv, results/local/copy/table.md"
    assert records == "Records: results/runs/release/copy-refusion-unfused"
    page = "--out results/local/copy/report.html"
    assert following == f"Next: refusion-eval report results/runs/release/copy-refusion-unfused {page}"


def test_a_real_model_is_compared_with_its_backbone_by_default():
    runs = [line for line in commands("--model", "GSAI-ML/ReFusion") if line.startswith("run ")]
    assert len(runs) == 6
    assert "--model GSAI-ML/ReFusion --decoder refusion" in runs[0]
    assert "--model Qwen/Qwen3-8B --decoder autoregressive --no-thinking --preset paper_implied" in runs[1]


def test_a_real_model_is_asked_with_the_prompts_of_the_release_unless_others_are_wanted():
    assert [run.split("--prompts ")[1] for run in runs_of("--model", "some/model")] == ["release", "release"]
    ours = runs_of("--model", "some/model", "--prompts", "ours")
    unfused = "--model some/model --decoder refusion --set fuse=false"
    assert ours[0] == f"--run-dir results/runs/model-refusion-unfused {unfused} --prompts ours"
    assert not any("--prompts" in run for run in runs_of())


def test_task_files_and_their_folder_reach_the_run(tmp_path):
    run, *_ = runs_of("--tasks", "own.yaml,lm_eval:gsm8k,math", "--include-path", str(tmp_path))
    assert f"--tasks own.yaml,lm_eval:gsm8k,math --include-path {tmp_path}" in run


def test_samples_and_settings_reach_every_run_in_folders_of_their_own():
    runs = runs_of("--system", "qwen3,refusion", "--samples", "4", "--set", "temperature=0.8")
    assert len(runs) == 2
    assert all(run.startswith("--run-dir results/runs/release/temperature=0.8/") for run in runs)
    assert all("--samples 4" in run and "--set temperature=0.8" in run for run in runs)


def test_samples_and_settings_reach_the_runs_of_a_suite_without_systems_too():
    runs = runs_of("--samples", "4", "--set", "temperature=0.8")
    assert len(runs) == 4
    assert all("--samples 4" in run and "--set temperature=0.8" in run for run in runs)


@pytest.mark.parametrize("options", [[], ["--model", "some/model", "--no-baseline"], ["--system", "qwen3,refusion"]])
def test_a_tracker_reaches_every_run_and_is_asked_for_before_any(options, monkeypatch):
    monkeypatch.setattr(suite_runs, "check_tracker", lambda name: None)
    runs = runs_of("--tracker", "trackio", *options)
    assert runs
    assert all(run.endswith("--tracker trackio") for run in runs)
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = suite("--dry-run", "--tracker", "trackio", *options)
    assert done.exit_code == 2
    assert "tracker=trackio needs the package trackio: pip install 'refusion-eval[trackio]'" in done.stderr


def test_a_baseline_is_checked_before_the_first_run():
    lines = commands("--model", "GSAI-ML/ReFusion", "--baseline", "some/model")
    (checked,) = (number for number, line in enumerate(lines) if line.startswith("check --model some/model"))
    assert lines[checked + 1].startswith("run ")


@pytest.mark.parametrize("arguments", [[], ["--model", "some/model", "--no-baseline"]])
def test_without_a_baseline_to_name_nothing_is_checked(arguments):
    assert not any(line.startswith("check ") for line in commands(*arguments))


@pytest.fixture
def ends(monkeypatch):
    """Has the commands of a suite end with given statuses, by a word that they hold; all others end with 0."""

    def make(statuses):
        def run_command(*words):
            return next((status for word, status in statuses.items() if word in words), 0)

        def carry_out(plan, **_options):
            return run_command(*words_of("run", plan.runs[0].options))

        monkeypatch.setattr(suite_runs, "run_command", run_command)
        monkeypatch.setattr(suite_runs, "carry_out", carry_out)

    return make


def run_suite(tmp_path, *arguments):
    done = suite("--model", "some/model", "--results", str(tmp_path / "results"), *arguments)
    return done.exit_code, steps(done.stderr), done.stderr


def test_a_failed_baseline_leaves_the_table_of_the_first_run_and_a_status(ends, tmp_path):
    ends({"--no-thinking": 1})
    status, lines, errors = run_suite(tmp_path)
    assert status == 1
    assert lines[-1].startswith(f"table {tmp_path}/results/runs/release/model-refusion-unfused --csv ")
    assert "the baseline failed, so the table has no speed-up" in errors
    assert sum("--no-thinking" in line for line in lines) == 1


@pytest.mark.parametrize("status", [130, 143])
@pytest.mark.parametrize("decoder", ["refusion", "autoregressive"])
def test_an_interrupted_run_ends_the_suite_at_once(ends, tmp_path, decoder, status):
    ends({"fuse=false" if decoder == "refusion" else "--no-thinking": status})
    ended, lines, _ = run_suite(tmp_path)
    assert ended == status
    assert f"--decoder {decoder}" in lines[-1]
    assert lines[-1].startswith("run ")


def test_a_signal_between_two_runs_ends_the_suite(monkeypatch, tmp_path):
    def stopped(*systems, **options):
        raise Interrupted(2)

    monkeypatch.setattr(suite_runs, "run_in_turns", stopped)
    assert run_suite(tmp_path, "--no-baseline")[0] == 130


def test_failed_samples_of_a_baseline_are_in_the_table_and_in_the_status(ends, tmp_path):
    ends({"--no-thinking": 3})
    status, lines, _ = run_suite(tmp_path)
    assert status == 3
    assert "model-refusion" in lines[-1]
    assert "Qwen3-8B-autoregressive" in lines[-1]


def test_a_failed_first_run_ends_with_its_status(ends, tmp_path):
    ends({"fuse=false": 1})
    status, lines, _ = run_suite(tmp_path)
    assert status == 1
    assert lines[-1].startswith("run ")


def test_a_baseline_that_cannot_be_run_is_refused_before_the_first_run(ends, tmp_path):
    ends({"check": 1})
    status, lines, errors = run_suite(tmp_path)
    assert status == 1
    assert [line.rpartition(" ")[2] for line in lines] == ["refusion", "autoregressive"]  # model and baseline
    assert "name another model with --model" in errors
    assert "--no-baseline" in errors


def test_a_command_that_is_refused_is_one_line_and_the_others_are_run(tmp_path):
    options = ["--system", "refusion,llada", "--model", "embedded", "--results", str(tmp_path / "results")]
    (tmp_path / "results").touch()  # where a folder is needed
    done = suite(*options, "--limit", "1", "--rounds", "1")
    assert done.exit_code == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(steps(done.stderr)) == 4
    assert "llada failed; run the same command again to continue it" in done.stderr


@pytest.mark.parametrize(("level", "option"), [("DEBUG", ["--verbose"]), ("INFO", []), ("WARNING", ["--quiet"])])
def test_the_commands_of_a_suite_are_as_quiet_as_it(level, option, monkeypatch):
    started = []
    monkeypatch.setattr(cli, "main", started.append)
    monkeypatch.setattr(cli.LOGGER, "level", logging.getLevelName(level))
    assert cli.run_command("table", "run") == 0
    assert started == [[*option, "table", "run"]]


def test_no_baseline_runs_refusion_alone():
    assert len(runs_of("--no-baseline", "--model", "some/model")) == 1
    assert all("embedded-refusion-" in run for run in runs_of("--no-baseline"))


def test_options_reach_every_run(tmp_path):
    for run in runs_of("--tasks", "gsm8k", "--limit", "3", "--data", str(tmp_path), "--sandbox", "none"):
        assert f"--tasks gsm8k --limit 3 --data {tmp_path} --sandbox none" in run


def test_folders_of_checkpoints_are_recorded_by_their_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    run, table = commands("--model", "checkpoint", "--results", "out", "--no-baseline")
    run_dir = "out/runs/release/checkpoint-refusion-unfused"
    assert run.startswith(f"run --run-dir {run_dir} --model {tmp_path}/checkpoint ")
    assert "--csv out/checkpoint/results.csv" in table


def test_systems_take_turns_in_rounds_of_which_none_is_empty():
    def order(*arguments):
        runs = [line for line in commands(*arguments) if line.startswith("run ")]
        return [(line.split("--run-dir results/runs/")[1].split()[0], line.split("--round ")[1][:3]) for line in runs]

    refusion = [f"embedded-refusion-{variant}" for variant in ("unfused", "fused", "verifier")]
    systems = [*refusion, "embedded-autoregressive"]
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
    published = [name for name, system in published_systems().items() if system.pretrained and not system.serve]
    runs = runs_of("--system", "all", "--model", "published")
    assert [run.split("--system ")[1].split()[0] for run in runs] == published


def test_embedded_systems_are_chosen_by_their_decoder():
    runs = runs_of("--system", "refusion", "--model", "embedded")
    arguments = "--model embedded --decoder refusion --set fuse="
    assert runs == [
        f"--run-dir results/runs/embedded-refusion-unfused {arguments}false",
        f"--run-dir results/runs/embedded-refusion-fused {arguments}true",
        f"--run-dir results/runs/embedded-refusion-verifier {arguments}false --set completion=verifier",
    ]


@pytest.mark.parametrize(
    ("decoder", "refusion", "baseline"),
    [("refusion", "--preset {} ", "--preset paper_implied"), ("autoregressive", "", "--preset {}")],
)
def test_a_table_of_ones_own_is_for_the_systems_with_its_decoder(tmp_path, decoder, refusion, baseline):
    path = tmp_path / "mine.yaml"
    path.write_text(f"decoder: {decoder}\nbenchmarks: {{gsm8k: {{gen_length: 64}}}}\n")
    first, second = runs_of("--model", "some/copy", "--tasks", "gsm8k", "--preset", str(path))
    assert f"--decoder refusion {refusion.format(path)}--set fuse=false" in first
    assert f"--decoder autoregressive --no-thinking {baseline.format(path)}" in second
    assert ["-mine" in run for run in (first, second)].count(True) == 1


def test_a_preset_is_for_the_systems_that_have_it():
    runs = runs_of("--system", "refusion,llada", "--preset", "paper_implied")
    assert runs == [
        "--run-dir results/runs/release/refusion-unfused --system refusion --set fuse=false --prompts release",
        "--run-dir results/runs/release/llada-paper_implied --system llada --preset paper_implied --prompts release",
    ]


@pytest.mark.parametrize(
    "arguments",
    [[], ["--model", "GSAI-ML/ReFusion"], ["--system", "refusion,qwen3"], ["--system", "refusion", "--model", "a/b"]],
)
def test_artefacts_has_every_table_figure_and_page_from_the_runs_before(arguments):
    lines = commands("--artefacts", *arguments)
    made = [line.split()[1] if line.startswith("plot") else line.split()[0] for line in lines]
    figures = [f"figure{number}" for number in (1, 3, 4, 5, 6, 8, 9)]
    for part in ("paper-table", "claims", "compare", "speed", "locality", "sweep", "replay", "report", *figures):
        assert part in made
    run_dirs = [line.split()[2] for line in lines if line.startswith("run ")]
    (loop,) = (place for place, line in enumerate(lines) if "--loop generate" in line)
    assert "--decoder autoregressive" in lines[loop]
    assert loop < made.index("speed")
    assert all(run_dir in lines[made.index("speed")] for run_dir in run_dirs)
    (refusion,) = {run_dir for run_dir in run_dirs if run_dir.endswith("refusion-unfused")}
    assert f" {refusion} " in lines[made.index("compare")]
    assert (f" {refusion} " if arguments else " --prompt ") in lines[made.index("replay")]
    for part in ("figure5", "figure9"):
        assert " --model " in lines[made.index(part)]
    assert {f"{refusion}-recompute_kv", f"{refusion}-serial"} <= set(run_dirs)


def in_full(run):
    """A run with the settings that its protocol says, as options."""
    _, _, system = run.partition(f"--protocol {DEFAULT}:")
    settings = read_protocol(DEFAULT).systems[system.split()[0]]["settings"] if system else {}
    return " ".join([run, *(f"--set {name}={str(value).lower()}" for name, value in settings.items())])


@pytest.mark.parametrize("more", [[], ["--artefacts"]])
def test_refusion_is_the_papers_algorithm_and_its_variants_are_rows_beside_it(more):
    real = (["--model", "GSAI-ML/ReFusion"], ["--system", "refusion,qwen3"])
    asked = [[*real[0], "--fused"], [*real[0], "--verifier"], [*real[0], "--fused", "--verifier"]]
    for arguments in ([], ["--system", "all"], ["--model", "embedded"], *real, *asked):
        runs = list(map(in_full, runs_of(*arguments, *more)))
        refusion = [run for run in runs if "refusion" in run]
        fused = [run for run in refusion if "-fused " in run]
        verifier = [run for run in refusion if "-verifier " in run]
        assert len(fused) == ("--fused" in arguments or (arguments not in real and arguments not in asked))
        assert len(verifier) == ("--verifier" in arguments or (arguments not in real and arguments not in asked))
        assert len(refusion) - len(fused) - len(verifier) == 1 + 2 * len(more)
        assert all("--set fuse=true" in run and "completion" not in run for run in fused)
        assert all("--set fuse=false --set completion=verifier" in run for run in verifier)
        plain = [run for run in refusion if run not in fused + verifier]
        assert all("-unfused" in run and "--set fuse=false" in run and "completion" not in run for run in plain)
        assert not any("fuse=" in run for run in runs if run not in refusion)


def test_bd3lm_with_merged_forwards_is_a_row_beside_it():
    family = [run for run in runs_of("--system", "all") if "bd3lm" in run]
    assert [run.split()[1] for run in family] == ["results/runs/embedded-bd3lm", "results/runs/embedded-bd3lm-merged"]
    assert [run.endswith(" --set separate_commit=false") for run in family] == [False, True]


@pytest.mark.parametrize(
    ("tasks", "shown"), [("gsm8k", "gsm8k"), ("math,gsm8k", "math"), ("gsm8k,mbpp", "mbpp"), ("mini_gsm8k", "gsm8k")]
)
@pytest.mark.parametrize(("prompts", "suffix"), [([], "_release"), (["--prompts", "ours"], "")])
def test_figures_are_of_a_task_that_was_run(tasks, shown, prompts, suffix):
    lines = commands("--artefacts", "--model", "GSAI-ML/ReFusion", "--tasks", tasks, *prompts)
    (serial,) = (line for line in lines if "serial=true" in line)
    assert serial.endswith(f"--tasks {shown}")
    plots = [line for line in lines if line.startswith("plot ") and "locality.csv" not in line]
    assert len(plots) == 6
    # The case study is decoded anew, so its task says with which prompts.
    asked = {line: f"refusion_{shown}{suffix}" if "--model" in line else shown for line in plots}
    assert all(f"--task {asked[line]} " in line for line in plots)


def test_locality_is_measured_on_the_models_of_the_papers_figure_too():
    def measured(*arguments):
        return [line.split()[2] for line in commands("--artefacts", *arguments) if line.startswith("locality ")]

    assert measured() == ["embedded", "embedded:llada"]
    assert measured("--model", "GSAI-ML/ReFusion") == ["GSAI-ML/ReFusion"]
    published = measured("--system", "refusion,llada,dream")
    assert published == ["GSAI-ML/ReFusion", "GSAI-ML/LLaDA-8B-Instruct", "Dream-org/Dream-v0-Instruct-7B"]


def test_sweeps_of_a_real_checkpoint_are_its_own_on_that_task(tmp_path):
    for figure in artefacts.SWEEPS:
        write_spec(figure, "gsm8k", tmp_path / f"{figure}.yaml", model="a/b", baseline="c/d")
        spec = read_spec(str(tmp_path / f"{figure}.yaml"))
        systems = {system.name: system for system in spec.systems}
        assert spec.tasks == ("gsm8k",)
        assert systems["refusion"].arguments["pretrained"] == "a/b"
        assert systems["refusion"].settings == {"fuse": False}
        assert figure == "figure6" or systems["qwen3"].arguments["pretrained"] == "c/d"
        assert "cuda_graphs" not in systems["refusion"].arguments
        write_spec(figure, "gsm8k", tmp_path / "no.yaml", model="a/b", baseline="c/d", cuda_graphs=False)
        assert {one.arguments["cuda_graphs"] for one in read_spec(str(tmp_path / "no.yaml")).systems} == {False}


def test_sweeps_of_the_embedded_family_are_of_the_systems_that_are_in_the_package(tmp_path):
    for figure in artefacts.SWEEPS:
        write_spec(figure, "math", tmp_path / f"{figure}.yaml", model="embedded", baseline="embedded")
        spec = read_spec(str(tmp_path / f"{figure}.yaml"))
        assert spec.tasks == ("math",)
        in_package = {decoder for _, decoder in embedded_systems().values()}
        assert {system.arguments["decoder"] for system in spec.systems} <= in_package
        assert "refusion" in {system.name for system in spec.systems}


def test_the_check_of_a_gpu_runs_instead_of_an_evaluation():
    assert commands("--gpu-check", "--results", "out") == ["gpu-check --out out/gpu"]


def test_a_failed_check_of_the_gpu_is_in_the_status(ends):
    ends({"gpu-check": 3})
    assert suite("--gpu-check").exit_code == 3


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
        (["--system", "ladda"], "unknown system 'ladda'; did you mean llada?"),
        (["--system", "canvas", "--model", "some/copy"], "unknown system 'canvas'"),
        (["--system", "llada,dream", "--model", "some/copy"], "--system names 2 systems"),
        (["--preset", "official"], "need --system"),
        (["--preset", "no.yaml"], "no.yaml: there is no such file"),
        (["--system", "llada", "--preset", "mine"], "no settings table of these systems is called 'mine'"),
        (["--system", "llada", "--preset", "gsm8k"], "no settings table of these systems is called 'gsm8k'"),
        (["--system", "llada", "--preset", "matched"], "no settings table of these systems is called 'matched'"),
        (["--system", "all", "--preset", "official"], "no settings table of these systems is called 'official'"),
        (["--model", "published"], "need --system"),
        (["--prompts", "release"], "--model embedded runs the mini tasks"),
        (
            ["--system", "llama3", "--model", "embedded"],
            "--model embedded: unknown system 'llama3'; did you mean llada?",
        ),
        (["--system", "d2f_llada", "--adapter", "some/lora"], "--adapter needs --model"),
        (["--artefacts", "--system", "llada", "--model", "some/copy"], "name refusion among --system"),
    ],
)
def test_what_cannot_be_run_is_one_line_before_anything_is_run(arguments, message):
    done = suite("--dry-run", *arguments)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert message in line
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modle", "x"], "No such option: --modle"),
        (["--limit", "0"], "Invalid value for '--limit'"),
        (["--limit"], "Option '--limit' requires an argument"),
        (["--sandbox", "off"], "'off' is not one of 'auto', 'none'"),
        (["--prompts", "theirs"], "'theirs' is not one of 'ours', 'release'"),
        (["gsm8k"], "extra argument"),
    ],
)
def test_a_wrong_option_is_refused_with_status_2(arguments, message):
    done = RUNNER.invoke(app, ["suite", "--dry-run", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    # A terminal of fewer columns wraps a message within its frame.
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""


def test_a_folder_of_rows_that_does_not_exist_is_refused_before_anything_is_run():
    done = suite("--dry-run", "--data", "no/such")
    assert isinstance(done.exception, ConfigError)
    assert "--data: there is no directory no/such" in str(done.exception)
    assert done.stdout == ""


# Values of the options of suite, one or more of which differ from the default in any suite.
VALUES = {
    "base_url": ["http://127.0.0.1:9"],
    "served_model": ["other"],
    "server_api": ["chat"],
    "system_prompt": ["Be brief."],
    "reasoning_effort": ["low"],
    "server_name": ["nightly"],
    "api_key_env": ["HOME"],
    "timeout": ["9"],
    "patience": ["9"],
    "tracker": ["trackio"],
    "model": ["another/model"],
    "system": ["dream"],
    "preset": ["official", "nothing"],
    "adapter": ["some/adapter"],
    "baseline": ["another/baseline"],
    "no_baseline": [True],
    "suite": ["2026"],
    "tasks": ["math"],
    "include_path": ["FOLDER"],
    "limit": ["7"],
    "samples": ["3"],
    "settings": ["temperature=0.5"],
    "data": ["FOLDER"],
    "results": ["FOLDER"],
    "no_cuda_graphs": [True],
    "gpu_check": [True],
    "prompts": ["ours", "release"],
    "sandbox": ["none"],
    "artefacts": [True],
    "rounds": ["2"],
    "fused": [True],
    "verifier": [True],
}
PRESENTATION = {"dry_run", "as_json", "root", "help"}
SUITES_TO_ASK = {
    "embedded": [],
    "family": ["--system", "all"],
    "model": ["--model", "some/model"],
    "model alone": ["--model", "some/model", "--no-baseline"],
    "system": ["--system", "refusion", "--model", "some/model"],
    "systems": ["--system", "refusion,qwen3"],
    "server": ["--system", "server:http://127.0.0.1:9,qwen3"],
    "artefacts": ["--artefacts"],
}
# Embedded systems always run what --fused and --verifier ask for, as their help says, and with --system there is no
# baseline that --no-baseline could leave out.
WITHOUT_EFFECT = {(kind, name) for kind in ("embedded", "family", "artefacts") for name in suite_runs.BESIDE}
WITHOUT_EFFECT |= {(kind, "no_baseline") for kind in ("family", "system", "systems", "server", "artefacts")}


def options_of_suite():
    group = get_command(app)
    return {option.name: option for option in group.get_command(typer.Context(group), "suite").params}


def test_every_option_of_a_suite_is_in_the_matrix():
    assert options_of_suite().keys() - {"verbose", "quiet"} - PRESENTATION == VALUES.keys()


@pytest.mark.parametrize("kind", SUITES_TO_ASK)
def test_every_option_of_a_suite_reaches_a_command_or_is_refused(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(suite_runs, "check_tracker", lambda name: None)
    given, ignored = SUITES_TO_ASK[kind], set()
    plain = commands(*given)
    for name, option in options_of_suite().items():
        if name in VALUES and option.opts[0] not in given:
            for value in VALUES[name]:
                words = [option.opts[0]] if value is True else [option.opts[0], value.replace("FOLDER", str(tmp_path))]
                done = suite("--dry-run", *given, *words)
                if done.exit_code or steps(done.stdout) != plain:
                    break
            else:
                ignored.add((kind, name))
    assert ignored == {pair for pair in WITHOUT_EFFECT if pair[0] == kind}


@pytest.mark.parametrize("option", [["--set", "tau_slot=0.5"], ["--samples", "2"], ["--preset", "official"]])
@pytest.mark.parametrize("given", [[], ["--model", "some/model"], ["--system", "refusion", "--model", "some/model"]])
def test_figures_mix_no_settings(given, option):
    done = suite("--dry-run", "--artefacts", *given, *option)
    assert done.exit_code == 2
    assert option[0] == "--preset" or f"leave {option[0]} out, or leave --artefacts out" in done.stderr


def test_addresses_that_differ_behind_the_port_have_folders_of_their_own():
    systems = "server:http://h:1/v1,server:http://h:1/a,server:http://h:1/b/v1/"
    folders = [run.removeprefix("--run-dir ").split()[0].rpartition("/")[2] for run in runs_of("--system", systems)]
    assert folders == [f"server-h-1{path}-paper_implied" for path in ("", "-a", "-b")]
    for other in ("http://h:1/", "https://h:1/v1"):
        done = suite("--system", f"server:http://h:1,server:{other}", "--dry-run")
        assert "would share one folder; leave one of them out" in done.output


@pytest.mark.parametrize("words", [["suite", "--dry-run"], ["run", "--tasks", "mini_gsm8k"], ["check"]])
def test_an_address_that_is_given_twice_is_refused(words):
    done = CliRunner().invoke(app, [*words, "--system", "server:http://a:1", "--base-url", "http://c:1"])
    assert isinstance(done.exception, ConfigError)
    assert "system server:http://a:1 names its server, and base_url=http://c:1 names one too" in str(done.exception)
