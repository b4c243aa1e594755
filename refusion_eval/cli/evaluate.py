import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from refusion_eval import cli
from refusion_eval.benchmarks import Task
from refusion_eval.cli import parameters
from refusion_eval.cli.artefacts import SWEEPS, Artefacts
from refusion_eval.cli.plans import RUN_ARGUMENTS, carry_out, plan_of, with_system
from refusion_eval.cli.protocol_runs import SUITE_CONTINUES, ProtocolRuns, default_runs, plan_of_protocol
from refusion_eval.cli.protocols import protocol as protocol  # a command of this group
from refusion_eval.cli.suite_runs import PUBLISHED_BASELINE, Suite
from refusion_eval.errors import ConfigError
from refusion_eval.evaluation.tasks import find_tasks, task_names
from refusion_eval.results.gate import run_conditions
from refusion_eval.results.results_file import measurement_cells
from refusion_eval.results.tables import summary, summary_table
from refusion_eval.runs.model_args import TO_SERVERS, ModelArgs, parse_model_args
from refusion_eval.runs.terminal import Interruption, resume_hint
from refusion_eval.sweep.spec import read_spec, shipped_specs, with_model, with_samples

if TYPE_CHECKING:
    from refusion_eval.runs.system import System

# The files of models load slowly, so they are imported inside the functions that need them.

SYSTEM_FIELDS = ("decoder", "pretrained")
HELPS = {
    "pretrained": "Checkpoint: a folder, a GGUF file, a hub id, smollm2, or embedded. The default is that of "
    "--system, else embedded.",
    "decoder": "Name of the decoder, or where one of your own is: FILE.py:DECODER or MODULE:DECODER. The default is "
    "that of --system, else refusion.",
    "system": "Name of the system in tables, for a checkpoint of your own. The default is the decoder's.",
}


@parameters.options_from(ModelArgs, f"{' '.join(TO_SERVERS)} tracker")
def suite(
    given: dict[str, Any],
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            help="ReFusion checkpoint: hub id or directory, for example GSAI-ML/ReFusion; with --system the checkpoint "
            "of that one system, published (all that have a public checkpoint), or embedded."
        ),
    ] = "",
    system: Annotated[
        str,
        typer.Option(
            help="Systems of the paper by name, separated by commas (`systems` lists them), as they were published; "
            "all: the embedded family on the mini tasks; server:URL: the model of a server, with the prompts of the "
            "autoregressive system beside it."
        ),
    ] = "",
    preset: Annotated[
        str,
        typer.Option(
            help="With --system: settings table of the decoders, such as official. Or FILE.yaml, a table of your own, "
            "for the systems with its decoder."
        ),
    ] = "",
    adapter: Annotated[str, typer.Option(help="With --system and --model: LoRA adapter of the model.")] = "",
    baseline: Annotated[
        str, typer.Option(help=f"Autoregressive checkpoint to compare with. The default is {PUBLISHED_BASELINE}.")
    ] = "",
    no_baseline: Annotated[
        bool, typer.Option("--no-baseline", help="Run no baseline; the table then has no speed-up.")
    ] = False,
    suite: Annotated[
        Literal["paper", "2026"],
        typer.Option(
            help="Benchmarks that are run without --tasks, which may name some of them: paper, the paper's seven, or "
            "2026, newer ones."
        ),
    ] = "paper",
    tasks: parameters.Tasks = "",
    include_path: parameters.IncludePath = None,
    limit: parameters.Limit = None,
    samples: parameters.Samples = None,
    settings: parameters.Settings = None,
    data: parameters.Data = None,
    results: Annotated[
        Path | None, typer.Option(help="Folder of runs, tables, pages. The default is results (tables: results/local).")
    ] = None,
    no_cuda_graphs: Annotated[
        bool, typer.Option("--no-cuda-graphs", help="Compute every forward anew instead of replaying recordings (GPU).")
    ] = False,
    gpu_check: Annotated[
        bool, typer.Option("--gpu-check", help="Check this machine's GPU in RESULTS/gpu instead of evaluating.")
    ] = False,
    prompts: parameters.Prompts = None,
    sandbox: parameters.Sandbox = "auto",
    artefacts: Annotated[
        bool,
        typer.Option(
            "--artefacts",
            help="Also make every table and figure of the paper that these systems support, in "
            "RESULTS/<model>/artefacts, and a page of all samples, RESULTS/reports/<model>.html. For the embedded "
            "family this takes about 40 minutes.",
        ),
    ] = False,
    rounds: parameters.OtherRounds = None,
    fused: Annotated[
        bool,
        typer.Option(
            "--fused",
            help="Also run ReFusion with fused forwards and BD3-LM with merged ones, as embedded models always do.",
        ),
    ] = False,
    verifier: Annotated[
        bool,
        typer.Option(
            "--verifier", help="Also run ReFusion with the verifier's own tokens, as embedded models always do."
        ),
    ] = False,
    dry_run: parameters.DryRun = False,
    as_json: parameters.Json = False,
    root: Annotated[Path, typer.Option(hidden=True, help="Folder that holds `results`; eval.sh gives it.")] = Path(),
) -> None:
    """Evaluate one or several systems in one table, as eval.sh. Run it again to continue an interrupted run.

    Without options: the tiny embedded models on the eight mini tasks, on any machine, in minutes (the protocol `eval`).
    With --model: that checkpoint on the real benchmarks, with the prompts of ReFusion's release.
    """
    options = SimpleNamespace(**context.params)
    try:
        runs: ProtocolRuns | Suite = default_runs(options) or Suite(options)
    except ConfigError as error:
        raise cli.wrong_options("suite", error) from error
    if gpu_check:
        raise typer.Exit(runs.step("gpu-check", out=f"{results or root / 'results'}/gpu") or runs.status)
    with Interruption(lambda: SUITE_CONTINUES, finish_first=False):
        runs.run()
        if artefacts and isinstance(runs, Suite):
            Artefacts(runs).make()
    runs.print_plan()
    raise typer.Exit(runs.status)


@parameters.options_from(
    ModelArgs, RUN_ARGUMENTS, without_default=(*SYSTEM_FIELDS, "enable_thinking", "diffusing", "diffusion"), helps=HELPS
)
def run(
    given: dict[str, Any],
    context: typer.Context,
    system: parameters.System = None,
    tasks: parameters.Tasks = "",
    include_path: parameters.IncludePath = None,
    limit: parameters.Limit = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the records, to continue them too. The default is in results/runs.")
    ] = None,
    data: parameters.Data = None,
    prompts: parameters.Prompts = None,
    sandbox: parameters.Sandbox = "auto",
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all random draws. The default is 0.")] = None,
    turn: Annotated[
        str | None,
        typer.Option(
            "--round",
            metavar="K/N",
            help="Evaluate only every N-th item, from the K-th on, and print no table. In N rounds several systems "
            "take turns, so that what slows the machine for a while slows all of them.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="With --protocol: other rounds than its file's, which make another protocol."),
    ] = None,
    concurrency: Annotated[
        str,
        typer.Option(
            help="Numbers of requests at once, such as 1,2,4,8: a run for each, in RUN_DIR-cNUMBER, and then tables of "
            "throughput and latency."
        ),
    ] = "",
    thought_budget: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens of a thought, after which its end is set and the answer decoded; the same as --set "
            "thought_budget=N.",
        ),
    ] = None,
    settings: parameters.Settings = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            metavar="FILE:SYSTEM",
            help="Run one system of a protocol, which says model, tasks and settings. Its records name the protocol.",
        ),
    ] = None,
    allow_code: parameters.AllowCode = False,
    fail_if: parameters.FailIf = None,
    junit: parameters.Junit = None,
    as_json: parameters.Json = False,
) -> None:
    """Run tasks with one system, and print the table. Every sample is recorded and scored."""
    conditions = run_conditions(fail_if or ())
    if conditions and turn is not None:
        raise ConfigError("--fail-if is about the table, and --round prints none; give it with the whole run")
    cli.prepare(junit)
    shown = {"fail_if", "junit", "as_json"}
    of_user = {name: value for name, value in context.params.items() if _is_given(context, name) and name not in shown}
    status = carry_out(
        plan_of(of_user) if protocol is None else plan_of_protocol(of_user),
        with_tables=turn is None,
        with_load=bool(concurrency),
        conditions=conditions if fail_if else None,
        junit_file=junit,
        as_json=as_json,
    )
    raise typer.Exit(status)


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether the user gave an option, so that its value is not the default of its help."""
    return getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"


@parameters.options_from(ModelArgs, " ".join(TO_SERVERS))
def sweep(
    given: dict[str, Any],
    spec: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a sweep of the package; list prints these names.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep. The default is results/sweeps/NAME.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint of the file's ReFusion systems: a folder, a hub id, or embedded. Revision, adapter, "
            "preset, chat template and backbone that the file gives them are left out."
        ),
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Other tasks than the file's, separated by commas, named as in `run`.")
    ] = "",
    include_path: parameters.IncludePath = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Another number of items than the file's.")] = None,
    samples: parameters.Samples = None,
    data: parameters.Data = None,
    sandbox: parameters.Sandbox = "auto",
    batch_size: Annotated[
        str | None, typer.Option(help="Requests decoded together, or auto. Speed is measured at 1 only.")
    ] = None,
    rounds: parameters.Rounds = parameters.DEFAULT_ROUNDS,
    allow_code: parameters.AllowCode = False,
    dry_run: parameters.DryRun = False,
    as_json: parameters.Json = False,
) -> None:
    """Run many settings, each as a run of its own. It writes sweep.csv and points.csv. Run it again to continue."""
    if spec == "list":
        print("\n".join(shipped_specs()))
        return
    read = read_spec(spec, given, allow_code=allow_code)
    read = read if model is None else with_model(read, model)
    read = read if samples is None else with_samples(read, samples)
    changes: dict[str, Any] = {"tasks": tuple(parameters.names_of(tasks)), "limit": limit}
    read = dataclasses.replace(read, **{name: value for name, value in changes.items() if value})
    cli.log_to_stderr()
    from refusion_eval.sweep.run import plan_entries, plan_sweep, planned_points, run_sweep

    out = out or Path("results/sweeps") / read.name
    if dry_run:  # refuses what the sweep would refuse
        plan = plan_sweep(read, out, include_path, data=data, sandbox=sandbox, batch_size=batch_size)
        if as_json:
            cli.print_value(list(plan_entries(read, plan)))
        else:
            cli.tell("\n".join(planned_points(read)))
        return
    to_continue = f"the points that are finished are in {out}; run the same command again to continue"
    with Interruption(lambda: to_continue, finish_first=False):
        result = run_sweep(
            read, out, include_path, data=data, sandbox=sandbox, batch_size=batch_size, rounds=rounds, on_point=cli.say
        )
    cli.show(summary_table(summary(result.figures)), measurement_cells(result.figures), as_json=as_json)
    figure = read.name.removeprefix("mini_")
    drawn = f"plot {figure} {out} --out figures" if figure in SWEEPS else f"report {out}/runs/* --out {out}/report.html"
    if not as_json:
        shared = f", {len(result.run_dirs)} of them decoded" if len(result.run_dirs) < result.num_points else ""
        cli.tell(f"{result.num_points} points{shared}: {out / 'sweep.csv'}\nNext: refusion-eval {drawn}")
    if result.incomplete:
        names = ", ".join(path.name for path in result.incomplete)
        cli.say(f"error: samples of {names} failed; the same command retries all but prompts that are too long")
        raise typer.Exit(cli.EXIT_INCOMPLETE)


def rerun(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a recorded run.")],
    out: Annotated[Path | None, typer.Option(help="Directory of the second run. The default is RUN-again.")] = None,
    data: parameters.Data = None,
    sandbox: parameters.Sandbox = "auto",
    as_json: parameters.Json = False,
) -> None:
    """Repeat a recorded run and compare every sample. Compared are tokens, texts and verdicts."""
    cli.log_to_stderr()
    from refusion_eval.evaluation.rerun import rerun as repeat

    second = out or run_dir.with_name(f"{run_dir.name}-again")
    with Interruption(lambda: resume_hint(second), finish_first=False):
        result = repeat(run_dir, second, data=data, sandbox=sandbox)
    if as_json:
        cli.print_value(result._asdict())
    else:
        cli.tell(result.in_words())
    if not result.is_same:
        raise typer.Exit(cli.EXIT_INCOMPLETE)


@parameters.options_from(
    ModelArgs,
    "pretrained:model decoder adapter revision dtype device enable_thinking:thinking chat_template backend loop "
    "base_url server_api served_model api_key_env",
    without_default=(*SYSTEM_FIELDS, "enable_thinking", "loop"),
    helps=HELPS,
)
def check(
    given: dict[str, Any],
    system: parameters.System = None,
    tasks: Annotated[
        str,
        typer.Option(metavar="TASKS", help="Also print the prompt of the first item of these tasks, as it is sent."),
    ] = "",
    data: parameters.Data = None,
    prompts: parameters.Prompts = None,
    allow_code: parameters.AllowCode = False,
    against_release: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Decode so many prompts of --tasks (default: mini_gsm8k) by the decoder and by the release's own loop "
            "on the same weights, and compare tokens and forwards. Exit status 4 if they differ.",
        ),
    ] = None,
    settings: parameters.Settings = None,
    release_set: Annotated[
        list[str] | None,
        typer.Option(
            help="With --against-release: KEY=VALUE of the release's loop alone, by its name. Again for more."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --against-release: also write the comparison to this JSON file.")
    ] = None,
    as_json: parameters.Json = False,
) -> None:
    """Say whether a decoder can run a checkpoint. Its configuration is read, and what tensors a folder has; no weights.

    Of a server it prints what its endpoints tell: name, version, model and settings. It does not wait for one to start.
    """
    arguments = with_system(system, given) | ({"allow_code": True} if allow_code else {})
    asked = parameters.names_of(tasks)
    if against_release is not None:
        if "loop" in given:
            raise ConfigError("--against-release decodes by this engine and by the release's loop; leave --loop out")
        names = task_names(asked or ["mini_gsm8k"], arguments["pretrained"], prompts=prompts, data=data)
        pairs = (cli.read_pairs(settings), cli.read_pairs(release_set))
        raise typer.Exit(_against_release(arguments, pairs, names, against_release, data, out, as_json=as_json))
    cli.refuse_unused("--against-release", release_set=release_set, out=out)
    args = parse_model_args({**arguments, **cli.read_pairs(settings)})
    names = task_names(asked, args.pretrained, prompts=prompts, data=data) if asked else []
    with cli.told_if_silent(f"asking {args.base_url}" if args.base_url else cli.LOADING):
        facts, lines, first = _described(args, names, data)
    if as_json:
        cli.print_value({name: first if name == "prompts" else fact for name, fact in facts.items()})
        return
    cli.tell("\n".join(lines))
    for task, prompt in first.items():
        cli.tell(f"{task}, item {prompt['id']}: a prompt of {prompt['num_tokens']} tokens\n{prompt['text']}")


def _described(
    args: ModelArgs, names: Sequence[str], data: Path | None
) -> tuple[Mapping[str, Any], Sequence[str], dict[str, Any]]:
    """Facts and lines about what would be run, and the first prompts of the tasks of these names."""
    if not (args.has_files or names):  # then nothing needs PyTorch
        from refusion_eval.runs.server_client import client_of
        from refusion_eval.runs.server_facts import endpoints

        return *endpoints(client_of(args)), {}
    from refusion_eval.runs.system import System

    opened = System(args)
    if names and (reason := opened.backend.no_prompts):
        raise ConfigError(f"--tasks: {reason}; leave it out")
    described = opened.backend.describe(opened)
    first = {task.name: _first_prompt(opened, task, data) for task in find_tasks(names)}
    return described.facts, described.lines, first


def _against_release(
    arguments: dict[str, Any],
    settings: tuple[dict[str, str], dict[str, str]],
    tasks: Sequence[str],
    number: int,
    data: Path | None,
    out: Path | None,
    *,
    as_json: bool,
) -> int:
    cli.prepare(out)
    cli.log_to_stderr()
    from refusion_eval.evaluation.parity import compare, opened
    from refusion_eval.store.atomic_write import write_output

    told: dict[str, Any] = {"model": arguments["pretrained"], "decoder": arguments["decoder"], "tasks": {}}
    compared = []
    for task in find_tasks(tasks):
        ours, theirs, unknown = opened(arguments, *settings, task)
        facts: dict[str, Any] = {"loop": theirs.backend.identity()["release_loop"], "place": ours.model.place}
        facts |= {"settings": dict(ours.resolve(task.name, {}).values), "release": dict(theirs.args.settings)}
        told["tasks"][task.name] = facts | {"not_in_the_release": unknown, "items": []}
        for parity in compare(ours, theirs, task, number, data):
            compared.append(parity)
            told["tasks"][task.name]["items"].append(dataclasses.asdict(parity) | {"equal": parity.is_equal})
            if not as_json:
                cli.tell(f"{task.name}, {parity.in_words()}")
        if unknown and not as_json:
            cli.tell(f"{task.name}: the release's loop has no argument for {', '.join(unknown)}")
    num_equal = sum(parity.is_equal for parity in compared)
    told["equal"] = num_equal == len(compared)
    if out is not None:
        write_output(out, json.dumps(told, indent=2, default=str) + "\n")
    if as_json:
        cli.print_value(told)
    else:
        cli.tell(
            f"{num_equal} of {len(compared)} prompts have the same tokens and forwards by {facts['loop']['entry']}"
        )
    return 0 if told["equal"] else cli.EXIT_FAILED


def _first_prompt(system: "System", task: Task, data: Path | None) -> dict[str, Any]:
    """The prompt of a task's first item as the model gets it, but with markers in place of sealed texts."""
    item = task.items(data)[0]
    text = system.render_turns(item.turns)
    real, _ = item.sealing.unseal(text)
    return {"id": item.id, "num_tokens": len(system.encode_item(real, item, task.benchmark.prompts.gap)), "text": text}


def lm_eval(context: typer.Context) -> None:
    """Run lm_eval with the model of this project registered. It is for places where Python reads no start-up hook."""
    from refusion_eval.lm_eval_plugin.any_task import run_lm_eval

    run_lm_eval(context.args)
