"""lm-eval's own command line with the model of this project registered."""

import sys
from collections.abc import Sequence

import lm_eval.models  # noqa: F401 - lm-eval lists its own models only while no other is registered
from lm_eval.__main__ import cli_evaluate

from refusion_eval.lm_eval_plugin import adapter  # noqa: F401 - registers the model


def run_lm_eval(arguments: Sequence[str]) -> None:
    """Runs `lm_eval` with these arguments."""
    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
