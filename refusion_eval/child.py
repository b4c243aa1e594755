"""A script in a process of its own, because what it computes for a stranger may hang or use up its memory."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# The first answer of a process also waits for its imports.
_START_SECONDS = 60.0
# Where a process dies of itself, another one is asked once, because a user's kill says nothing about the question.
_ATTEMPTS = 2


class Child:
    """One process, started when first asked and again after each death. Only one thread at a time may ask.

    Its script reads questions as JSON lines, the first of them `first`, and answers each with a JSON line.
    """

    def __init__(self, script: Path, first: Any) -> None:
        self._script, self._first = script, first
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._is_given_up = False
        self.seconds = 0.0

    def ask(self, question: Any, timeout_s: float) -> Any | None:
        """The answer; None if it took too long, or if the process died and its replacement as well.

        A script may limit itself: SIGPROF, which a timer of its processor time sends, counts as too long.
        """
        for _ in range(_ATTEMPTS):
            if self._is_given_up:
                break
            process = self._running()
            started_s = time.monotonic()
            line = self._ask(process, question, timeout_s)
            self.seconds += time.monotonic() - started_s
            if line is not None and line.endswith(b"\n"):
                return json.loads(line)
            if self.close() == -signal.SIGPROF or line is None:
                break
        return None

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], question: Any, timeout_s: float) -> bytes | None:
        """The answer's line, not a whole one if the process died; None if there is none in time."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return b""
        ready, _, _ = select.select([process.stdout], [], [], timeout_s)
        return process.stdout.readline() if ready else None

    def _running(self) -> subprocess.Popen[bytes]:
        # After a fork the parent still reads from the pipes of its process, so the fork starts a process of its own.
        if self._process is None or self._owner != os.getpid():
            # -P keeps the modules of the script's folder from shadowing others.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(self._script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._owner = os.getpid()
            if not self._ask(self._process, self._first, _START_SECONDS):
                self.close()
                raise ChildProcessError(f"{self._script.name} does not run")
        return self._process

    def kill(self) -> None:
        """Kills the process while another thread waits for its answer; that thread sees the end of the pipe."""
        self._is_given_up = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> int | None:
        """Kills the process, if there is one of this process, and frees its pipes. Returns its exit status."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return None
        process.kill()
        process.communicate()
        return process.returncode
