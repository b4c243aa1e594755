import typer


def suite(context: typer.Context) -> None:
    """Evaluate one or several systems in one table, as eval.sh. suite --help lists the options."""
    from refusion_eval.scripts.suite import main

    raise typer.Exit(main(context.args))
