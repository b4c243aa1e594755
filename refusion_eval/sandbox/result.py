"""The input and the result of a check."""

import math
from dataclasses import dataclass

# Reason -> status. One place decides, so that no caller can count a fault of the sandbox as a fault of the model.
STATUS_OF_REASON = {
    reason: status
    for status, reasons in {
        "passed": ("passed",),
        "failed": ("failed_assertion", "wrong_type", "raised", "exited", "protocol_error", "syntax_error", "no_code"),
        "timed_out": ("timeout_cpu", "timeout_wall"),
        "killed": ("memory", "output_limit", "signal"),
        "error": ("inseparable", "sandbox_error", "worker_broke", "no_time"),
    }.items()
    for reason in reasons
}

_MAX_DETAIL_CHARS = 400


@dataclass(frozen=True, kw_only=True)
class Program:
    """One candidate program and the test that decides about it.

    Attributes:
        candidate: source text of the untrusted program (for HumanEval the prompt plus the completion).
        test: source text of the trusted test; it may call whatever the candidate defines by name.
        timeout_s: seconds the check may take, on a processor or asleep; waiting for a busy processor is free. A check
            that waits for twelve times as long, and two minutes at least, has the reason "no_time".
        memory_mb: mebibytes the candidate may use, all its processes together and with what it makes the test hold.
        helpers: trusted source text that the test needs (for HumanEval the prompt). Its functions win over functions of
            the same name in the candidate; a function with nothing but a docstring is a placeholder and does not.
        runner: source text that runs in the program's process in the candidate's place, and has the candidate's text as
            `PROGRAM`. What it gives the test is as little trusted as what a program gives. Its standard input and its
            standard output are files, empty at first, of 32 MiB at most.
        call_s: seconds that the program has for each call by the test: those of its threads and children on processors,
            and those in which all of them sleep, as the watchdog sees them, up to a tenth of a second late.
    """

    candidate: str
    test: str
    timeout_s: float = 10
    memory_mb: int = 1024
    helpers: str = ""
    runner: str = ""
    call_s: float = math.inf

    @property
    def source(self) -> str:
        """The text that the program's process runs."""
        has_runner = self.runner and self.candidate.strip()  # nothing runs an empty program
        return f"PROGRAM = {self.candidate!r}\n{self.runner}" if has_runner else self.candidate


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Result of one check.

    Attributes:
        status: what `STATUS_OF_REASON` gives for the reason; "error" is a fault of the sandbox or of the test, never of
            the candidate.
        reason: one of its keys.
        detail: one short line of printable characters, such as the exception and its message; may be empty.
        seconds: wall-clock seconds of the check.
        tier: the isolation it ran under: "A", "B", "C", or "none".
        waited_s: those of the seconds that did not count against its limit, because others had the processor.
    """

    status: str
    reason: str
    detail: str
    seconds: float
    tier: str
    waited_s: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the candidate passed its test."""
        return self.status == "passed"


def result_of(reason: str, detail: str, seconds: float, tier: str, waited_s: float = 0.0) -> CheckResult:
    """Build the result that belongs to a reason."""
    return CheckResult(
        status=STATUS_OF_REASON[reason],
        reason=reason,
        detail="".join(char if char.isprintable() else " " for char in detail[:_MAX_DETAIL_CHARS]),
        seconds=round(seconds, 4),
        tier=tier,
        waited_s=round(waited_s, 4),
    )
