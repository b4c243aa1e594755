import typer


def suite(context: typer.Context) -> None:
    """Evaluate one or several systems and write one table of all, as eval.sh does. suite --help lists the options."""
    from refusion_eval.scripts.suite import main

    raise typer.Exit(main(context.args))
