import typer


def train(context: typer.Context) -> None:
    """Train a model on the GPUs of one or several machines, as train.sh does. train --help lists the options."""
    from refusion_eval.scripts.train import main

    raise typer.Exit(main(context.args))
