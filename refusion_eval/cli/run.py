"""The command `run`, and what `check` shares with it: the choice of a system."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from refusion_eval.benchmarks import OURS
from refusion_eval.cli import (
    Data,
    IncludePath,
    Sandbox,
    Settings,
    System,
    Tasks,
    log_to_stderr,
    names_of,
    options_from,
    read_pairs,
    say,
    show,
)
from refusion_eval.errors import ConfigError
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.scripts.steps import EXIT_INCOMPLETE

if TYPE_CHECKING:
    from refusion_eval.evaluation.loop import Turn

SYSTEM_FIELDS = ("decoder", "pretrained")
HELPS = {
    "pretrained": "Checkpoint: a folder, a hub id, or embedded. The default is that of --system, else embedded.",
    "decoder": "Name of the decoder, or where one of your own is: FILE.py:DECODER or MODULE:DECODER. The default is "
    "that of --system, else refusion.",
    "system": "Name of the system in tables, for a checkpoint of your own. The default is the decoder's.",
}


@options_from(
    ModelArgs,
    "pretrained:model",
    "decoder",
    "adapter",
    "system:name",
    "backbone",
    "preset",
    "batch_size",
    "tps_samples",
    "kv_budget_gib",
    "dtype",
    "device",
    "attention",
    "cuda_graphs",
    "revision",
    "enable_thinking:thinking",
    "chat_template",
    "warmup",
    "loop",
    "engine",
    "workers",
    "worker_cpus",
    "ray_address",
    "tune",
    "backend",
    without_default=(*SYSTEM_FIELDS, "enable_thinking"),
    helps=HELPS,
)
def run(
    given: dict[str, Any],
    system: System = None,
    tasks: Tasks = "",
    include_path: IncludePath = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Evaluate only the first items of every task.")] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Folder where samples are recorded and found again. The default is under results/runs."),
    ] = None,
    data: Data = None,
    prompts: Annotated[
        Literal["ours", "release"],
        typer.Option(help="What a benchmark's name in --tasks means: this project's prompts, or the release's."),
    ] = "ours",
    sandbox: Sandbox = "auto",
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
    settings: Settings = None,
) -> None:
    """Run tasks with one system, and print the table. Every sample is recorded and scored."""
    log_to_stderr()
    from refusion_eval.evaluation.loop import evaluate, own_tasks, run_worker_or_return, task_names
    from refusion_eval.results.measured import run_measurements
    from refusion_eval.results.render import write_csv
    from refusion_eval.results.tables import summary, summary_table
    from refusion_eval.runs.model_args import parse_model_args
    from refusion_eval.runs.terminal import Interruption, resume_hint
    from refusion_eval.store.records import REFUSED

    arguments = with_system(system, given)
    loop = arguments["loop"] if arguments["loop"] != "engine" else None
    parts = (system or arguments["decoder"], arguments.get("preset"), loop, prompts if prompts != OURS else None)
    run_dir = run_dir or default_run_dir(
        Path("results/runs"), str(arguments["pretrained"]), "-".join(filter(None, parts))
    )
    places = {"run_dir": str(run_dir), "data_dir": None if data is None else str(data)}
    seeds = {} if seed is None else {"seed": seed}
    args = parse_model_args({**arguments, **places, **seeds, **read_pairs(settings)})
    names = task_names(names_of(tasks), args.pretrained, prompts=prompts, data=data)
    with Interruption(lambda: resume_hint(run_dir), finish_first=False):
        run_worker_or_return(args)
        if own_tasks().keys() >= set(names):
            outcome = evaluate(args, names, limit=limit, sandbox=sandbox, turn=_turn(turn))
        else:
            from refusion_eval.lm_eval_plugin.tasks import evaluate_any  # lm_eval takes seconds to import

            outcome = evaluate_any(args, names, include_path, limit=limit, sandbox=sandbox, turn=_turn(turn))
        if turn is None:
            figures = run_measurements([run_dir])
            show(summary_table(summary(figures)), run_dir / "table.md")
            write_csv(figures, run_dir / "results.csv")
    if not outcome.is_complete:
        refused = [sample for sample in outcome.failed if sample.stop == REFUSED]
        if refused:
            first = refused[0]
            say(
                f"error: {len(refused)} prompts are refused, and the same command would refuse them again. "
                f"{first.key.task} item {first.item_id}: {first.error}"
            )
        num_failed = len(outcome.failed) - len(refused)
        if num_failed or outcome.unscored:
            say(
                f"error: {num_failed} samples could not be decoded and {outcome.unscored} could not be judged; "
                "they are missing from the table. Run the same command again to retry them"
            )
        raise typer.Exit(EXIT_INCOMPLETE)


def with_system(system: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """Model arguments of a published system with the given ones over them; without a system, the embedded ReFusion.

    Raises:
        ConfigError: the system is unknown, or a decoder is given beside it.
    """
    from refusion_eval.runs.model_args import system_arguments

    if system is None:
        return {"pretrained": "embedded", "decoder": "refusion", **given}
    if "decoder" in given:
        raise ConfigError(f"--system {system} brings its decoder; leave out --decoder {given['decoder']}")
    return system_arguments(system, given.get("pretrained")) | given


def default_run_dir(runs: Path, model: str, name: str) -> Path:
    """Returns the folder of a system's records if the user names none, for example runs/ReFusion-refusion."""
    # A decoder of one's own may be named by its file.
    return runs / re.sub(r"[:/]", "-", f"{Path(model).name}-{name}")


def _turn(text: str | None) -> "Turn | None":
    """Reads the value of --round."""
    from refusion_eval.evaluation.loop import Turn

    if text is None:
        return None
    number, _, total = text.partition("/")
    if not (number.isdecimal() and total.isdecimal() and 1 <= int(number) <= int(total)):
        raise ConfigError(f"--round {text}: write it as K/N, the K-th of N rounds, for example 1/3")
    return Turn(int(number), int(total))
