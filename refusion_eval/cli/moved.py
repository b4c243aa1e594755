"""Former commands that are now scripts beside the package; each names the script to run instead."""

import typer

from refusion_eval.cli.root import app

SCRIPTS = {
    "bench-sandbox": "benchmarks/sandbox.py",
    "bench-scaleout": "benchmarks/scaleout.py",
    "bench-train": "benchmarks/train.py",
    "soak": "benchmarks/soak.py",
}


def moved(context: typer.Context) -> None:
    """Prints the script that replaces the command and exits with status 2."""
    name = str(context.info_name)
    message = f"error: `refusion-eval {name}` is now a script with the same options"
    typer.echo(f"{message}: run `python {SCRIPTS[name]}` in a checkout of the project", err=True)
    raise typer.Exit(2)


for _name in SCRIPTS:
    app.command(
        _name,
        hidden=True,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )(moved)
