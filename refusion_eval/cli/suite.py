"""The command `suite`, which eval.sh starts: systems take turns, and one table has all of them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from refusion_eval import cli
from refusion_eval.cli.artefacts import Artefacts
from refusion_eval.cli.suite_runs import PUBLISHED_BASELINE, Suite
from refusion_eval.errors import ConfigError
from refusion_eval.runs.terminal import Interruption


def suite(
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
            "or all: the embedded family on the mini tasks."
        ),
    ] = "",
    preset: Annotated[str, typer.Option(help="With --system: settings table of the decoders, such as official.")] = "",
    adapter: Annotated[str, typer.Option(help="With --system and --model: LoRA adapter of the model.")] = "",
    baseline: Annotated[
        str, typer.Option(help=f"Autoregressive checkpoint to compare with. The default is {PUBLISHED_BASELINE}.")
    ] = "",
    no_baseline: Annotated[
        bool, typer.Option("--no-baseline", help="Run no baseline; the table then has no speed-up.")
    ] = False,
    tasks: cli.Tasks = "",
    include_path: cli.IncludePath = None,
    limit: cli.Limit = None,
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
    rounds: cli.Rounds = cli.DEFAULT_ROUNDS,
    fused: Annotated[
        bool, typer.Option("--fused", help="Also run ReFusion with fused forwards, as embedded models always do.")
    ] = False,
    dry_run: cli.DryRun = False,
    root: Annotated[Path, typer.Option(hidden=True, help="Folder that holds `results`; eval.sh gives it.")] = Path(),
) -> None:
    """Evaluate one or several systems in one table, as eval.sh. Run it again to continue an interrupted run.

    Without options: the tiny embedded models on the eight mini tasks, on any machine, in minutes. With --model: that
    checkpoint on the real benchmarks, with the prompts of ReFusion's release.
    """
    try:
        runs = Suite(SimpleNamespace(**context.params))
    except ConfigError as error:
        raise cli.wrong_options("suite", error) from error
    if gpu_check:
        raise typer.Exit(runs.step("gpu-check", "--out", f"{runs.results}/gpu"))
    with Interruption(
        lambda: "what is finished is recorded; run the same command again to continue", finish_first=False
    ):
        runs.run()
        if artefacts:
            Artefacts(runs).make()
    raise typer.Exit(runs.status)
