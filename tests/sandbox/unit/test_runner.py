"""Programs that a runner runs in their own process, and tests with much data."""

import pytest

from refusion_eval.sandbox import Program, check_program, wire


@pytest.mark.usefixtures("isolation")
def test_a_runner_has_the_program_as_a_text_and_files_as_streams() -> None:
    runner = "import os\ndef size():\n    os.write(0, b'ab')\n    os.pwrite(1, b'cd', 3)\n"
    runner += "    return len(PROGRAM), *(os.fstat(number).st_size for number in (0, 1)), os.pread(0, 9, 0)\n"
    for _ in range(2):  # they are empty at first
        assert check_program("abc", "assert size() == (3, 2, 5, b'ab')", runner=runner).passed
    assert check_program(" ", "assert size() == 1", runner=runner).reason == "no_code"
    assert Program(candidate="abc", test="").source == "abc"


_WORKS = """
import os, signal, threading, time
for number in (signal.SIGPROF, signal.SIGALRM, signal.SIGVTALRM, signal.SIGXCPU):
    signal.signal(number, signal.SIG_IGN)
for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL, signal.ITIMER_VIRTUAL):
    signal.setitimer(timer, 0)
def work(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
def in_thread(seconds):
    thread = threading.Thread(target=work, args=(seconds,))
    thread.start()
    thread.join()
def in_child(seconds):
    if not (pid := os.fork()):
        work(seconds)
        os._exit(0)
    os.waitpid(pid, 0)
def in_orphans(seconds):
    reader, writer = os.pipe()
    for _ in range(2):
        if not os.fork():
            if not os.fork():
                work(seconds / 2)
            os._exit(0)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
asleep = time.sleep
"""


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize("work", ["work", "in_thread", "in_child", "in_orphans", "asleep"])
def test_no_call_takes_more_time_than_it_may(work: str) -> None:
    several = f"for _ in range(4):\n    {work}(0.3)"
    assert check_program(_WORKS, several, call_s=1).passed
    verdict = check_program(_WORKS, f"{work}(0.1)\n{work}(6)\n{work}(0)", call_s=1)
    reason = "timeout_wall" if work == "asleep" else "timeout_cpu"
    assert (verdict.reason, verdict.seconds - verdict.waited_s < 5) == (reason, True), verdict


@pytest.mark.usefixtures("isolation")
def test_tests_may_be_longer_than_what_a_program_may_say() -> None:
    assert check_program("x = 1", "assert x == 1", helpers=f"#{'x' * wire.MAX_FRAME_BYTES}").passed
    assert check_program("x = 'x' * (33 << 20)", "assert x").reason == "output_limit"
