"""Programs that a runner runs in their own process, and tests with much data."""

import pytest

from refusion_eval.sandbox import Program, check_program, wire


@pytest.mark.usefixtures("isolation")
def test_a_runner_has_the_program_as_a_text_and_its_timer_is_a_time_limit() -> None:
    runner = "def size():\n    return len(PROGRAM)\n"
    assert check_program("abc", "assert size() == 3", runner=runner).passed
    assert check_program(" ", "assert size() == 1", runner=runner).reason == "no_code"
    timer = "import signal\ndef wait():\n    signal.setitimer(signal.ITIMER_PROF, 0.1)\n    while True:\n        pass\n"
    assert check_program("abc", "wait()", runner=timer).reason == "timeout_cpu"
    assert Program(candidate="abc", test="").source == "abc"


@pytest.mark.usefixtures("isolation")
def test_tests_may_be_longer_than_what_a_program_may_say() -> None:
    assert check_program("x = 1", "assert x == 1", helpers=f"#{'x' * wire.MAX_FRAME_BYTES}").passed
    assert check_program("x = 'x' * (33 << 20)", "assert x").reason == "output_limit"
