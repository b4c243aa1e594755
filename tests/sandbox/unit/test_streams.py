"""Each program has standard streams of its own."""

import os

import pytest

from refusion_eval.sandbox.jail import PROFILES
from refusion_eval.sandbox.pool import WorkerProcess
from refusion_eval.sandbox.probe import self_test
from refusion_eval.sandbox.result import Program

_FLAGS = """
import fcntl, os
def flags():
    return [fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_NONBLOCK | os.O_APPEND) for fd in range(3)]
def change():
    for fd in range(3):
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)
"""


@pytest.mark.parametrize("profile", PROFILES)
def test_what_a_program_sets_on_its_streams_is_gone_in_the_next(profile):
    if profile != "none" and (fault := self_test(profile)):
        pytest.skip(f"{profile} does not hold here: {fault}")
    worker = WorkerProcess(profile, PROFILES[profile].tier)
    try:
        for _ in range(2):
            assert worker.check(Program(candidate=_FLAGS, test=f"assert flags() == [{os.O_RDWR}] * 3; change()")).passed
    finally:
        worker.close()
