"""The command `run`, and what `check` shares with it: the choice of a system."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from refusion_eval import cli
from refusion_eval.benchmarks import RELEASE
from refusion_eval.errors import ConfigError
from refusion_eval.evaluation.turns import Turn
from refusion_eval.runs.model_args import ModelArgs, parse_model_args, system_arguments

SYSTEM_FIELDS = ("decoder", "pretrained")
HELPS = {
    "pretrained": "Checkpoint: a folder, a hub id, or embedded. The default is that of --system, else embedded.",
    "decoder": "Name of the decoder, or where one of your own is: FILE.py:DECODER or MODULE:DECODER. The default is "
    "that of --system, else refusion.",
    "system": "Name of the system in tables, for a checkpoint of your own. The default is the decoder's.",
}


@cli.options_from(
    ModelArgs,
    "pretrained:model decoder adapter system:name backbone preset batch_size tps_samples kv_budget_gib dtype device "
    "attention cuda_graphs revision enable_thinking:thinking chat_template warmup loop engine workers worker_cpus "
    "ray_address tune backend",
    without_default=(*SYSTEM_FIELDS, "enable_thinking"),
    helps=HELPS,
)
def run(
    given: dict[str, Any],
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
    settings: cli.Settings = None,
) -> None:
    """Run tasks with one system, and print the table. Every sample is recorded and scored."""
    cli.log_to_stderr()
    from refusion_eval.evaluation.loop import run_worker_or_return, task_names
    from refusion_eval.lm_eval_plugin.any_task import evaluate_any
    from refusion_eval.results.measured import run_measurements
    from refusion_eval.results.render import write_csv
    from refusion_eval.results.tables import summary, summary_table
    from refusion_eval.runs.terminal import Interruption, resume_hint
    from refusion_eval.store.records import REFUSED

    arguments = with_system(system, given)
    model = str(arguments["pretrained"])
    given_names = cli.names_of(tasks)
    names = task_names(given_names, model, prompts=prompts, data=data)
    loop = arguments["loop"] if arguments["loop"] != "engine" else None
    # A folder with records of one kind of prompts is not continued with the other kind by the default alone.
    is_released = prompts == RELEASE or any(name.endswith(f"_{RELEASE}") for name in names if name not in given_names)
    parts = (Path(model).name, system or arguments["decoder"], arguments.get("preset"), loop)
    name = "-".join(filter(None, (*parts, RELEASE if is_released else None)))
    run_dir = run_dir or Path("results/runs") / re.sub(r"[:/]", "-", name)  # a user's decoder is named by its file
    places = {"run_dir": str(run_dir), "data_dir": None if data is None else str(data)}
    seeds = {} if seed is None else {"seed": seed}
    args = parse_model_args({**arguments, **places, **seeds, **cli.read_pairs(settings)})
    share = None if turn is None else Turn.read(turn)
    with Interruption(lambda: resume_hint(run_dir), finish_first=False):
        run_worker_or_return(args)
        outcome = evaluate_any(args, names, include_path, limit=limit, sandbox=sandbox, turn=share)
        if turn is None:
            figures = run_measurements([run_dir])
            cli.show(summary_table(summary(figures)), run_dir / "table.md")
            write_csv(figures, run_dir / "results.csv")
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
        raise typer.Exit(cli.EXIT_INCOMPLETE)


def with_system(system: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """The given model arguments over those of a published system, or of the embedded ReFusion without a system."""
    if system is None:
        return {"pretrained": "embedded", "decoder": "refusion", **given}
    if "decoder" in given:
        raise ConfigError(f"--system {system} brings its decoder; leave out --decoder {given['decoder']}")
    return system_arguments(system, given.get("pretrained")) | given
