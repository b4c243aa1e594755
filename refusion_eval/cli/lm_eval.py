"""The command `lm-eval`."""

import sys

import typer


def lm_eval(context: typer.Context) -> None:
    """Run lm_eval with the model of this project registered, where Python does not read the start-up hook."""
    import lm_eval.models  # noqa: F401 - lm-eval lists its own models only while no other is registered
    from lm_eval.__main__ import cli_evaluate

    from refusion_eval.lm_eval_plugin import adapter  # noqa: F401 - registers the model

    sys.argv = ["lm_eval", *context.args]
    cli_evaluate()
