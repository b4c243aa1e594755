"""Attempts at a request of a server: which failures may pass, how long is waited, and what the others mean."""

import logging
import re
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, TypeVar

from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.runs.server_key import Key
from refusion_eval.runs.server_wire import Passing, error_message, short

if TYPE_CHECKING:  # the extra `server` brings both
    import httpx2
    import tenacity

log = logging.getLogger(__name__)

# Answers that a later attempt may change; every 5xx is one too.
_PASSING = (408, 425, 429)
# Answers that concern every request, so that the run ends: the key, credit, its rights, and the model or the path.
_ENDS_RUN = (401, 402, 403, 404)
_FEWEST_ATTEMPTS = 2  # whatever time the first one took
_T = TypeVar("_T")


class Rejected(Exception):
    """The server cannot read the request as it is."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Attempts:
    """Repeats what failed for a reason that may pass.

    Args:
        root: address of the server, for messages.
        key: is kept out of these.
    """

    def __init__(self, root: str, key: Key) -> None:
        self._root, self._clean = root, key.clean
        self.stopped = threading.Event()  # ends waiting

    def repeat(self, attempt: Callable[[], _T], patience: float) -> _T:
        """What an attempt returns, of which there are two at least, and more in `patience` seconds.

        Raises:
            DecodeError: all failed.
        """
        import httpx2
        import tenacity

        backoff = tenacity.wait_random_exponential(multiplier=0.5, max=30)

        def wait(state: "tenacity.RetryCallState") -> float:
            asked = getattr(state.outcome and state.outcome.exception(), "retry_after", None)
            return backoff(state) if asked is None else min(asked, patience)

        def tell(state: "tenacity.RetryCallState") -> None:
            level = logging.WARNING if state.attempt_number == 1 and patience else logging.DEBUG
            error = state.outcome.exception() if state.outcome else None
            log.log(level, "%s: %s; it is tried again", self._root, self._reason(error))

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((httpx2.RequestError, Passing)),
            wait=wait,
            stop=tenacity.stop_any(
                tenacity.stop_when_event_set(self.stopped),
                tenacity.stop_all(tenacity.stop_after_attempt(_FEWEST_ATTEMPTS), tenacity.stop_after_delay(patience)),
            ),
            sleep=tenacity.sleep_using_event(self.stopped),
            before_sleep=tell,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except (httpx2.RequestError, Passing) as error:
            number = retrying.statistics.get("attempt_number", 1)
            # Without the cause, whose traceback would show what the server wrote.
            raise DecodeError(f"{self._root}: {self._reason(error)} ({number} attempts)") from None

    def _reason(self, error: BaseException | None) -> str:
        return self._clean(str(error) or f"no answer ({type(error).__name__})")

    def fault(self, response: "httpx2.Response", text: str) -> Exception:
        """The error that a response is, by its status, with what the text of its body says."""
        status, message = response.status_code, self._clean(error_message(self._clean(text)))
        if 300 <= status < 400:
            target = short(self._clean(response.headers.get("location", "")))
            return ConfigError(f"{self._root} redirects to {target}, which is not followed: name that address")
        if status in _ENDS_RUN:
            return ConfigError(f"{self._root} refuses every request ({status}): {message}")
        if 400 <= status < 500 and status not in _PASSING:
            return Rejected(status, message)
        said = f"the server answers {status}: {message}" if message else f"the server answers {status}"
        return Passing(said, _retry_after(response.headers))


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait: by retry-after-ms, or by Retry-After as a number or a date."""
    milliseconds, value = headers.get("retry-after-ms", ""), headers.get("retry-after", "")
    if re.fullmatch(r"\d{1,9}(\.\d+)?", milliseconds):
        return float(milliseconds) / 1000
    if re.fullmatch(r"\d{1,6}(\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None
