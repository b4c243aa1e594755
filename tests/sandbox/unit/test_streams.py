"""Each program has standard streams of its own."""

import os

import pytest

from tests.sandbox.conftest import CALLERS, Caller, run_as

_CHECK = """
import os, sys
from refusion_eval.errors import SandboxError
from refusion_eval.sandbox.pool import WorkerProcess
from refusion_eval.sandbox.result import Program
program = '''
import fcntl, os
def flags():
    return [fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_NONBLOCK | os.O_APPEND) for fd in range(3)]
def change():
    for fd in range(3):
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)
'''
profile = sys.argv[1]
try:
    worker = WorkerProcess(profile)
except SandboxError as error:
    sys.exit(f"does not hold here: {error}")
test = f"assert flags() == [{os.O_RDWR}] * 3; change()"
print([worker.check(Program(candidate=program, test=test)).reason for _ in range(3)])
worker.close()
"""


@pytest.mark.parametrize("caller", [*CALLERS, Caller(os.geteuid(), "none")], ids=lambda caller: caller.label)
def test_what_a_program_sets_on_its_streams_is_gone_in_the_next(caller):
    done = run_as(caller.uid, "-c", _CHECK, caller.profile)
    if done.stderr.startswith("does not hold here"):
        pytest.skip(done.stderr)
    assert done.stdout == "['passed', 'passed', 'passed']\n", done.stderr
