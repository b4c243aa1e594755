"""The plan of `refusion-eval run` from its options, the words that stand for them, and what a plan does."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from refusion_eval import cli
from refusion_eval.benchmarks import RELEASE as RELEASE_PROMPTS
from refusion_eval.cli import parameters
from refusion_eval.errors import ConfigError
from refusion_eval.evaluation.tasks import plan_run
from refusion_eval.results.concurrency import run_dir_of
from refusion_eval.results.gate import Condition, Verdict, failed, junit, verdicts_of_run
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.results_file import measurement_cells
from refusion_eval.results.tables import summary, summary_table
from refusion_eval.runs.model_args import LOOPS, OF_SERVERS, RELEASE, server_folder
from refusion_eval.runs.plan import Plan, PlannedRun, Turn
from refusion_eval.runs.systems import system_arguments
from refusion_eval.runs.terminal import Interruption, resume_hint
from refusion_eval.store.atomic_write import write_output
from refusion_eval.store.records import REFUSED, SERVER

# Model arguments that are options of `run`, as FIELD or FIELD:OPTION.
RUN_ARGUMENTS = (
    "pretrained:model decoder adapter system:name backbone preset batch_size tps_samples samples kv_budget_gib dtype "
    "device attention cuda_graphs revision enable_thinking:thinking chat_template warmup loop "
    f"{' '.join(OF_SERVERS)} engine workers worker_cpus ray_address tracker tune backend"
)


def model_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """The model arguments among options of `run`, by the names of their fields."""
    named = parameters.option_names(RUN_ARGUMENTS).items()
    return {field: options[option] for field, option in named if options.get(option) is not None}


def with_system(system: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """The given model arguments over those of a published system, or of the embedded ReFusion without a system."""
    if system is None:
        ours = {} if given.get("loop") == RELEASE else {"decoder": "refusion"}
        return {"pretrained": "embedded", **ours, **given}
    if "decoder" in given:
        raise ConfigError(f"--system {system} brings its decoder; leave out --decoder {given['decoder']}")
    published = system_arguments(system, given.get("pretrained"), given) | given
    if given.get("loop") == RELEASE and "preset" not in given:
        published.pop("preset", None)  # no settings table has the names of the release's own loop
    return published


def plan_of(options: Mapping[str, Any], name: str = "") -> Plan:
    """The plan of `run` without a protocol, by the names of its options in Python; others have their defaults.

    Args:
        name: what messages call the runs.
    """
    turn = Turn.read(options["turn"]) if "turn" in options else None
    if "rounds" in options:
        raise ConfigError("--rounds is for --protocol; leave it out, or take one turn with --round K/N")
    arguments = with_system(options.get("system"), model_arguments(options))
    if "allow_code" in options:
        if arguments.get("loop") != RELEASE:
            told = "the file of --protocol and for --loop release; leave it out: what you name yourself runs"
            raise ConfigError(f"--allow-code is for {told}")
        arguments["allow_code"] = True
    settings = {key: options[key] for key in ("seed", "thought_budget") if key in options}
    settings |= cli.read_pairs(options.get("settings"))
    run = plan_run(
        {**arguments, **settings},
        parameters.names_of(options.get("tasks", "")),
        options.get("run_dir", ""),
        **{key: options[key] for key in ("data", "prompts", "limit", "include_path", "sandbox") if key in options},
        name=name,
        options=options,
    )
    if not run.args.run_dir:
        run = replace(run, args=replace(run.args, run_dir=str(_default_folder(run, arguments))))
    if "concurrency" not in options:
        return Plan(runs=(run,), turns=(turn,))
    if turn is not None:
        raise ConfigError("--concurrency and --round exclude each other: give one of them")
    sizes = parameters.numbers_of(options["concurrency"], "--concurrency", int)
    return Plan(runs=_at_once(run, list(dict.fromkeys(sizes))))


def _default_folder(run: PlannedRun, arguments: Mapping[str, Any]) -> Path:
    options, preset = run.options, arguments.get("preset")
    # A folder with records of one kind of prompts is not continued with the other kind by the default alone.
    given = parameters.names_of(options.get("tasks", ""))
    is_released = options.get("prompts") == RELEASE_PROMPTS or any(
        name.endswith(f"_{RELEASE_PROMPTS}") for name in run.tasks if name not in given
    )
    # Servers of one model are several runs.
    served = server_folder(arguments.get("base_url"), arguments.get("server_name"))
    system, loop = options.get("system"), run.args.loop
    parts = (
        Path(run.args.pretrained).name,
        served if str(system).startswith(SERVER) else system or arguments.get("decoder"),
        Path(preset).stem if preset else None,
        LOOPS[loop].mark,
        RELEASE_PROMPTS if is_released else None,
    )
    # A user's decoder is named by its file.
    return Path("results/runs") / re.sub(r"[:/]", "-", "-".join(filter(None, parts)))


def _at_once(run: PlannedRun, sizes: Sequence[int]) -> tuple[PlannedRun, ...]:
    """The run with each of these numbers of requests at once, in a folder of its own."""
    sized = (replace(run.args, batch_size=size, run_dir=str(run_dir_of(run.run_dir, size))) for size in sizes)
    return tuple(replace(run, args=args) for args in sized)


@functools.cache
def _parameters(command: str) -> Mapping[str, Any]:
    """Name in Python -> parameter of a command."""
    group: Any = get_command(cli.app)
    return {one.name: one for one in group.get_command(typer.Context(group), command).params}


def words_of(command: str, options: Mapping[str, Any], arguments: Sequence[str] = ()) -> list[str]:
    """The words of a command line by which a command gets these options, in this order: its parser's inverse."""
    words = [command, *arguments]
    for name, value in options.items():
        option = _parameters(command)[name]
        if isinstance(value, bool):
            words += (option.opts if value else option.secondary_opts)[:1]
        else:
            for one in value if option.multiple else [value]:
                words += [option.opts[0], str(one)]
    return words


def carry_out(
    plan: Plan,
    *,
    with_tables: bool = True,
    with_load: bool = False,
    conditions: Sequence[Condition] | None = None,
    junit_file: Path | None = None,
    as_json: bool = False,
) -> int:
    """Makes the runs of a plan, each with all its turns before the next, and returns the exit status.

    Args:
        with_tables: print the figures of each run, and write them into its folder.
        with_load: then print throughput and latency of the runs by their number of requests at once.
        conditions: those on the figures; None if none were given.
        junit_file: where they are written as JUnit XML.
        as_json: print the figures as JSON.
    """
    cli.log_to_stderr()
    from refusion_eval.evaluation.loop import Outcome, run_worker_or_return
    from refusion_eval.lm_eval_plugin.any_task import evaluate_any
    from refusion_eval.runs.system import ModelCache

    outcomes, model_cache = [], ModelCache()
    verdicts: list[Verdict] = []
    told: list[Any] = []
    emit = told.append if with_load else cli.print_value
    for run in plan.runs:
        with Interruption(functools.partial(resume_hint, run.run_dir), finish_first=False):
            run_worker_or_return(run.args)
            outcomes += [evaluate_any(run, model_cache=model_cache, turn=turn) for turn in plan.turns]
            if with_tables:
                figures = run_measurements([run.run_dir], hash_records=True)
                cells, csv, markdown = measurement_cells(figures), run.run_dir / "results.csv", run.run_dir / "table.md"
                of_run = verdicts_of_run(conditions or (), figures)
                verdicts += of_run
                failures = None if conditions is None else failed(of_run)
                table = summary_table(summary(figures))
                cli.show(table, cells, as_json=as_json, csv=csv, markdown=markdown, failures=failures, emit=emit)
    if junit_file is not None:
        write_output(junit_file, junit(verdicts))
    if with_load:
        cli.show_load([run.run_dir for run in plan.runs], as_json=as_json, emit=emit)
    if told:
        *of_runs, load = told
        names = (str(run.run_dir) for run in plan.runs)
        cli.print_value({"runs": dict(zip(names, of_runs, strict=True)), "load": load})
    outcome = Outcome.of(outcomes)
    if not outcome.is_complete:
        _tell_what_is_missing(outcome, with_tables=with_tables)
        return cli.EXIT_INCOMPLETE
    return cli.EXIT_FAILED if failed(verdicts) else 0


def _tell_what_is_missing(outcome: Any, *, with_tables: bool) -> None:
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
    if outcome.missing and with_tables:  # in turns the table comes last, and says it once
        cli.say(f"error: {', '.join(outcome.missing)}: not asked, for want of rows; the notes of the table say more")
