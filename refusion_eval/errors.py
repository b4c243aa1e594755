"""One error class per cause, all with one plain sentence: what was wrong, where, and what to do."""

from collections.abc import Sequence
from typing import Any

from refusion_eval.untrusted import visible


class RefusionEvalError(Exception):
    """Anything this project refuses on purpose; the command line prints its message without a traceback."""

    def __str__(self) -> str:
        """The message on one line, including any quoted library error, without characters that a terminal obeys."""
        return visible(" ".join(line.strip() for line in super().__str__().splitlines()))


class ConfigError(RefusionEvalError, ValueError):
    """A setting, a model argument or a task file is wrong."""


class CheckpointError(RefusionEvalError):
    """A checkpoint cannot be loaded, or does not fit what is asked of it."""


class DataError(RefusionEvalError):
    """Benchmark data or outputs to be scored are missing or malformed."""


class MissingRowsError(DataError):
    """There are no rows of a benchmark in any of the places where they could be.

    Attributes:
        advice: what to do, without the places that were tried.
    """

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice


class DecodeError(RefusionEvalError):
    """One request cannot be decoded.

    Attributes:
        results: of requests that were decoded together, the result or the error of each; empty for a single request.
    """

    results: Sequence[Any] = ()


class GaveUpError(RefusionEvalError):
    """A run ended early, because one request after the other could not be decoded, for one reason."""


class SandboxError(RefusionEvalError):
    """Model-written code cannot be run in isolation here."""


class StoreError(RefusionEvalError):
    """A run directory cannot be opened, read or written."""


class ScaleOutError(RefusionEvalError):
    """Processes of one run cannot work together."""
