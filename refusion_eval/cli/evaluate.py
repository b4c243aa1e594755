import dataclasses
import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import typer

from refusion_eval import cli
from refusion_eval.benchmarks import RELEASE
from refusion_eval.cli.artefacts import SWEEPS, Artefacts
from refusion_eval.cli.protocol_runs import SUITE_CONTINUES, ProtocolRuns, default_runs, run_of_protocol
from refusion_eval.cli.protocols import protocol as protocol  # a command of this group
from refusion_eval.cli.suite_runs import PUBLISHED_BASELINE, Suite
from refusion_eval.errors import ConfigError
from refusion_eval.evaluation.turns import Turn
from refusion_eval.results.gate import Failure, failures_of_run, run_conditions
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.results_file import measurement_cells
from refusion_eval.results.tables import summary, summary_table
from refusion_eval.runs.model_args import OF_SERVERS, TO_SERVERS, ModelArgs, parse_model_args, server_place
from refusion_eval.runs.systems import NO_FILES, system_arguments
from refusion_eval.runs.terminal import Interruption, resume_hint
from refusion_eval.store.records import REFUSED, SERVER
from refusion_eval.sweep.spec import read_spec, shipped_specs, with_model, with_samples

# The files of models load slowly, so they are imported inside the functions that need them.

SYSTEM_FIELDS = ("decoder", "pretrained")
HELPS = {
    "pretrained": "Checkpoint: a folder, a GGUF file, a hub id, or embedded. The default is that of --system, else "
    "embedded.",
    "decoder": "Name of the decoder, or where one of your own is: FILE.py:DECODER or MODULE:DECODER. The default is "
    "that of --system, else refusion.",
    "system": "Name of the system in tables, for a checkpoint of your own. The default is the decoder's.",
}


@cli.options_from(ModelArgs, f"{' '.join(TO_SERVERS)} tracker")
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
    tasks: cli.Tasks = "",
    include_path: cli.IncludePath = None,
    limit: cli.Limit = None,
    samples: cli.Samples = None,
    settings: cli.Settings = None,
    data: cli.Data = None,
    results: Annotated[
        Path | None, typer.Option(help="Folder of runs, tables, pages. The default is results (tables: results/local).")
    ] = None,
    no_cuda_graphs: Annotated[
        bool, typer.Option("--no-cuda-graphs", help="Compute every forward anew instead of replaying recordings (GPU).")
    ] = False,
    gpu_check: Annotated[
        bool, typer.Option("--gpu-check", help="Check this machine's GPU in RESULTS/gpu instead of evaluating.")
    ] = False,
    prompts: cli.Prompts = None,
    sandbox: cli.Sandbox = "auto",
    artefacts: Annotated[
        bool,
        typer.Option(
            "--artefacts",
            help="Also make every table and figure of the paper that these systems support, in "
            "RESULTS/<model>/artefacts, and a page of all samples, RESULTS/reports/<model>.html. For the embedded "
            "family this takes about 40 minutes.",
        ),
    ] = False,
    rounds: cli.OtherRounds = None,
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
    dry_run: cli.DryRun = False,
    as_json: cli.Json = False,
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
        raise typer.Exit(runs.step("gpu-check", "--out", f"{results or root / 'results'}/gpu") or runs.status)
    with Interruption(lambda: SUITE_CONTINUES, finish_first=False):
        runs.run()
        if artefacts and isinstance(runs, Suite):
            Artefacts(runs).make()
    runs.print_plan()
    raise typer.Exit(runs.status)


@cli.options_from(
    ModelArgs,
    "pretrained:model decoder adapter system:name backbone preset batch_size tps_samples samples kv_budget_gib dtype "
    "device attention cuda_graphs revision enable_thinking:thinking chat_template warmup loop "
    f"{' '.join(OF_SERVERS)} engine workers worker_cpus ray_address tracker tune backend",
    without_default=(*SYSTEM_FIELDS, "enable_thinking", "diffusion"),
    helps=HELPS,
)
def run(
    given: dict[str, Any],
    context: typer.Context,
    system: cli.System = None,
    tasks: cli.Tasks = "",
    include_path: cli.IncludePath = None,
    limit: cli.Limit = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the records, to continue them too. The default is in results/runs.")
    ] = None,
    data: cli.Data = None,
    prompts: cli.Prompts = None,
    sandbox: cli.Sandbox = "auto",
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
    settings: cli.Settings = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            metavar="FILE:SYSTEM",
            help="Run one system of a protocol, which says model, tasks and settings. Its records name the protocol.",
        ),
    ] = None,
    allow_code: cli.AllowCode = False,
    fail_if: cli.FailIf = None,
    as_json: cli.Json = False,
) -> None:
    """Run tasks with one system, and print the table. Every sample is recorded and scored."""
    cli.log_to_stderr()
    from refusion_eval.evaluation.loop import Outcome, run_worker_or_return
    from refusion_eval.evaluation.tasks import task_names
    from refusion_eval.lm_eval_plugin.any_task import evaluate_any
    from refusion_eval.results.concurrency import run_dir_of
    from refusion_eval.runs.system import ModelCache

    conditions = run_conditions(fail_if or ())
    if conditions and turn is not None:
        raise ConfigError("--fail-if is about the table, and --round prints none; give it with the whole run")
    share = None if turn is None else Turn.read(turn)
    planned = None
    if rounds is not None and protocol is None:
        raise ConfigError("--rounds is for --protocol; leave it out, or take one turn with --round K/N")
    if allow_code and protocol is None:
        raise ConfigError("--allow-code is for the file of --protocol; leave it out: what you name yourself runs")
    if protocol is not None:
        beside: dict[str, Any] = {
            "system": system,
            "prompts": prompts,
            "include-path": include_path,
            "set": settings or None,
        }
        beside |= {"concurrency": concurrency, "thought-budget": thought_budget}
        of_user = {name: value for name, value in given.items() if not _is_default(context, name)}
        planned = run_of_protocol(
            protocol,
            of_user,
            tasks,
            limit,
            seed=seed,
            turn=share,
            rounds=rounds,
            allow_code=allow_code,
            beside=beside,
        )
        given, seed, limit, run_dir = {}, None, planned.limit, run_dir or planned.run_dir
    arguments = with_system(system, given)
    model = str(arguments["pretrained"])
    given_names = cli.names_of(tasks)
    names = planned.tasks if planned else task_names(given_names, model, prompts=prompts, data=data)
    loop = arguments["loop"] if arguments.get("loop") == "generate" else None
    # A folder with records of one kind of prompts is not continued with the other kind by the default alone.
    is_released = prompts == RELEASE or any(name.endswith(f"_{RELEASE}") for name in names if name not in given_names)
    preset = Path(arguments["preset"]).stem if arguments.get("preset") else None
    # Servers of one model are several runs.
    served = f"{SERVER}-{server_place(arguments.get('base_url'), arguments.get('server_name'))}"
    kind = served if str(system).startswith(SERVER) else system or arguments["decoder"]
    parts = (Path(model).name, kind, preset, loop)
    name = "-".join(filter(None, (*parts, RELEASE if is_released else None)))
    run_dir = run_dir or Path("results/runs") / re.sub(r"[:/]", "-", name)  # a user's decoder is named by its file
    by_option = {"seed": seed, "thought_budget": thought_budget}
    given_settings: dict[str, Any] = {name: value for name, value in by_option.items() if value is not None}
    given_settings |= {"data_dir": None if data is None else str(data), **cli.read_pairs(settings)}
    sizes = cli.numbers_of(concurrency, "--concurrency", int) if concurrency else ()
    if sizes and share is not None:
        raise ConfigError("--concurrency and --round exclude each other: give one of them")
    places = [run_dir_of(run_dir, size) for size in sizes] or [run_dir]
    outcomes, model_cache = [], ModelCache()
    failures: list[Failure] = []
    for number, place in enumerate(places):
        of_size = {"batch_size": sizes[number]} if sizes else {}
        args = (
            dataclasses.replace(planned.args, run_dir=str(place), data_dir=given_settings["data_dir"])
            if planned
            else parse_model_args({**arguments, **given_settings, "run_dir": str(place), **of_size})
        )
        with Interruption(functools.partial(resume_hint, place), finish_first=False):
            run_worker_or_return(args)
            outcomes += [
                evaluate_any(args, names, include_path, limit=limit, sandbox=sandbox, model_cache=model_cache, turn=of)
                for of in (planned.turns if planned else [share])
            ]
            if turn is None:
                figures = run_measurements([place], hash_records=True)
                cells, csv, markdown = measurement_cells(figures), place / "results.csv", place / "table.md"
                failed = failures_of_run(conditions, figures) if fail_if else None
                failures += failed or ()
                table = summary_table(summary(figures))
                cli.show(table, cells, as_json=as_json, csv=csv, markdown=markdown, failures=failed)
    if sizes:
        cli.show_load(places, as_json=as_json)
    outcome = Outcome.of(outcomes)
    if not outcome.is_complete:
        refused = [sample for sample in outcome.failed if sample.stop == REFUSED]
        for first in refused[:1]:
            cli.say(
                f"error: {len(refused)} prompts are refused, and the same command would refuse them again. "
                f"{first.key.task} item {first.item_id}: {first.error}"
            )
        num_failed = len(outcome.failed) - len(refused)
        if num_failed or outcome.unscored:
            cli.say(
                f"error: {num_failed} samples could not be decoded and {outcome.unscored} could not be judged; "
                "they are missing from the table. Run the same command again to retry them"
            )
        if outcome.missing and turn is None:  # in turns the table comes last, and says it once
            cli.say(
                f"error: {', '.join(outcome.missing)}: not asked, for want of rows; the notes of the table say more"
            )
        raise typer.Exit(cli.EXIT_INCOMPLETE)
    if failures:
        raise typer.Exit(cli.EXIT_FAILED)


def _is_default(context: typer.Context, name: str) -> bool:
    """Whether the user left out an option, so that its value is the default of its help."""
    return getattr(context.get_parameter_source(name), "name", "") == "DEFAULT"


def with_system(system: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """The given model arguments over those of a published system, or of the embedded ReFusion without a system."""
    if system is None:
        return {"pretrained": "embedded", "decoder": "refusion", **given}
    if "decoder" in given:
        raise ConfigError(f"--system {system} brings its decoder; leave out --decoder {given['decoder']}")
    return system_arguments(system, given.get("pretrained")) | given


@cli.options_from(ModelArgs, " ".join(TO_SERVERS))
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
    include_path: cli.IncludePath = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Another number of items than the file's.")] = None,
    samples: cli.Samples = None,
    data: cli.Data = None,
    sandbox: cli.Sandbox = "auto",
    batch_size: Annotated[
        str | None, typer.Option(help="Requests decoded together, or auto. Speed is measured at 1 only.")
    ] = None,
    rounds: cli.Rounds = cli.DEFAULT_ROUNDS,
    allow_code: cli.AllowCode = False,
    dry_run: cli.DryRun = False,
    as_json: cli.Json = False,
) -> None:
    """Run many settings, each as a run of its own. It writes sweep.csv and points.csv. Run it again to continue."""
    if spec == "list":
        print("\n".join(shipped_specs()))
        return
    read = read_spec(spec, given, allow_code=allow_code)
    read = read if model is None else with_model(read, model)
    read = read if samples is None else with_samples(read, samples)
    changes: dict[str, Any] = {"tasks": tuple(cli.names_of(tasks)), "limit": limit}
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
    data: cli.Data = None,
    sandbox: cli.Sandbox = "auto",
    as_json: cli.Json = False,
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


@cli.options_from(
    ModelArgs,
    "pretrained:model decoder adapter revision backend base_url served_model api_key_env",
    without_default=SYSTEM_FIELDS,
    helps=HELPS,
)
def check(given: dict[str, Any], system: cli.System = None, as_json: cli.Json = False) -> None:
    """Say whether a decoder can run a checkpoint. Its configuration is read, and what tensors a folder has; no weights.

    Of a server it prints what its endpoints tell: name, version, model and settings. It does not wait for one to start.
    """
    args = parse_model_args(with_system(system, given))
    if args.loop == SERVER:
        with cli.told_if_silent(f"asking {args.base_url}"):
            _check_server(args, as_json=as_json)
        return
    with cli.told_if_silent(cli.LOADING):
        _check_checkpoint(args, as_json=as_json)


def _check_server(args: ModelArgs, *, as_json: bool) -> None:
    from refusion_eval.runs.server_client import client_of

    if args.pretrained != NO_FILES:  # the files of its tokenizer
        from refusion_eval.runs.system import System

        _ = System(args).model
    client = client_of(args)
    described = client.describe(patience=0)
    if as_json:
        cli.print_value(described)
        return
    name = f"{described['name']} {described['version']}".strip()
    cli.tell(f"{client.root}: {name} serves the model {described['model']}")
    if described["settings"]:
        told = (f"{setting}={value}" for setting, value in described["settings"].items())
        cli.tell(f"{client.root}: {', '.join(told)}")


def _check_checkpoint(args: ModelArgs, *, as_json: bool) -> None:
    from refusion_eval.runs.system import System

    opened = System(args)
    has_weights = opened.model.check_files()
    config = opened.model.config
    brought = "".join(f", {key}={value}" for key, value in opened.checkpoint_settings.items())
    name, decoder = opened.args.pretrained, opened.args.decoder
    if as_json:
        facts = {"model": name, "decoder": decoder, "family": config.family, "num_layers": config.num_layers}
        cli.print_value(facts | {"settings": opened.checkpoint_settings, "place": opened.model.place})
        return
    cli.tell(f"{name}: {config.family}, {config.num_layers} layers{brought}; {decoder} can run it")
    cli.tell(f"{name}: {opened.model.place}")
    if not has_weights:
        cli.tell(f"{name}: the folder has no weights yet")


def lm_eval(context: typer.Context) -> None:
    """Run lm_eval with the model of this project registered. It is for places where Python reads no start-up hook."""
    from refusion_eval.lm_eval_plugin.any_task import run_lm_eval

    run_lm_eval(context.args)
