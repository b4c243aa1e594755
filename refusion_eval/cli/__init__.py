"""The command line. Each command imports what it needs when it is called: `--help` loads no torch."""

import sys

from refusion_eval.cli import (  # noqa: F401 - they register their commands
    converting,
    decoding,
    drawing,
    judging,
    looking,
    measuring,
    moved,
    scoring,
    sweeping,
)
from refusion_eval.cli.root import app
from refusion_eval.errors import RefusionEvalError


def main() -> None:
    """Runs the command line; what this project refuses is one line on stderr and exit status 1."""
    try:
        app()
    except RefusionEvalError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
