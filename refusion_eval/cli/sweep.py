import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from refusion_eval import cli

DRAWN = ("figure4", "figure6", "figure8")  # figures that the package's sweeps are named after


def sweep(
    spec: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a sweep of the package; list prints these names.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep. The default is results/sweeps/NAME.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint of the file's ReFusion systems: a folder, a hub id, or embedded.")
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Other tasks than the file's, separated by commas, named as in `run`.")
    ] = "",
    include_path: cli.IncludePath = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Another number of items than the file's.")] = None,
    data: cli.Data = None,
    sandbox: cli.Sandbox = "auto",
    batch_size: Annotated[
        str | None, typer.Option(help="Requests decoded together, or auto. Speed is measured at 1 only.")
    ] = None,
    rounds: cli.Rounds = cli.DEFAULT_ROUNDS,
    dry_run: cli.DryRun = False,
) -> None:
    """Run many settings, each as a run of its own. It writes sweep.csv and points.csv. Run it again to continue."""
    from refusion_eval.sweep.spec import read_spec, shipped_specs, with_model

    if spec == "list":
        print("\n".join(shipped_specs()))
        return
    read = read_spec(spec) if model is None else with_model(read_spec(spec), model)
    if tasks:
        read = dataclasses.replace(read, tasks=tuple(cli.names_of(tasks)))
    if limit is not None:
        read = dataclasses.replace(read, limit=limit)
    cli.log_to_stderr()
    from refusion_eval.results.tables import summary, summary_table
    from refusion_eval.runs.terminal import Interruption
    from refusion_eval.sweep.run import planned_points, run_sweep

    if dry_run:
        print("\n".join(planned_points(read)))
        return
    out = out or Path("results/sweeps") / read.name
    to_continue = f"the points that are finished are in {out}; run the same command again to continue"
    with Interruption(lambda: to_continue, finish_first=False):
        result = run_sweep(
            read, out, include_path, data=data, sandbox=sandbox, batch_size=batch_size, rounds=rounds, on_point=cli.say
        )
    cli.show(summary_table(summary(result.figures)))
    print(f"{len(result.run_dirs)} points: {out / 'sweep.csv'}")
    figure = read.name.removeprefix("mini_")
    drawn = f"plot {figure} {out} --out figures" if figure in DRAWN else f"report {out}/runs/* --out {out}/report.html"
    print(f"Next: refusion-eval {drawn}")
    if result.incomplete:
        names = ", ".join(path.name for path in result.incomplete)
        cli.say(f"error: samples of {names} failed; the same command retries all but prompts that are too long")
        raise typer.Exit(cli.EXIT_INCOMPLETE)
