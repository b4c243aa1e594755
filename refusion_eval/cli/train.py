import typer


def train(context: typer.Context) -> None:
    """Train a model on one or several machines, as train.sh. train --help lists the options."""
    from refusion_eval.scripts.train import main

    raise typer.Exit(main(context.args))
