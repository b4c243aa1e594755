"""Former commands that are now scripts beside the package. Each one names the script that replaces it."""

import typer

SCRIPTS = {
    "bench-sandbox": "benchmarks/sandbox.py",
    "bench-scaleout": "benchmarks/scaleout.py",
    "bench-train": "benchmarks/train.py",
    "soak": "benchmarks/soak.py",
}


def moved(context: typer.Context) -> None:
    """Print the script that replaces the command, and exit with status 2."""
    name = str(context.info_name)
    message = f"error: `refusion-eval {name}` is now a script with the same options"
    typer.echo(f"{message}: run `python {SCRIPTS[name]}` in a checkout of the project", err=True)
    raise typer.Exit(2)
