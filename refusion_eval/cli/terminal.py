"""What commands print, and where."""

import logging
import os
import sys
from typing import Any

WIDTH_WITHOUT_TERMINAL = 140

# Exit status of a command that finished, but with samples that failed or differ.
EXIT_INCOMPLETE = 3


def console() -> Any:
    """Returns the console that tables are printed on."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)


class _StderrHandler(logging.Handler):
    """Writes to the stderr of the moment: the live progress display replaces `sys.stderr` while it runs."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def log_to_stderr() -> None:
    """Shows the log of this project on stderr; of lm-eval only errors, and none of its many progress bars."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("refusion_eval")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def say(text: str) -> None:
    """Prints a line of progress on stderr."""
    print(text, file=sys.stderr)
