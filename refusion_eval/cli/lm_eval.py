import typer


def lm_eval(context: typer.Context) -> None:
    """Run lm_eval with the model of this project registered. It is for places where Python reads no start-up hook."""
    from refusion_eval.lm_eval_plugin.command import run_lm_eval

    run_lm_eval(context.args)
