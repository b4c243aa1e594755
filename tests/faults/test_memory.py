"""A limit of the address space: a command works within it, or one line says that memory has ended."""

import os
import resource
import subprocess
import sys

import pytest
import torch

from refusion_eval import cli
from tests.faults.front_end import error_of
from tests.faults.runs import records

RUN = ("run", "--tasks", "mini_gsm8k", "--limit", "1", "--warmup", "0", "--set", "gen_length=16")
GIB = 2**30


def started(arguments, limit=None):
    """Runs a command in a process of its own; returns exit status and error output."""

    def confine():
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "refusion_eval", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=confine, env=environment)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def calm(server, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("calm") / "run"
    status, text = server.run([*RUN, "--run-dir", str(run_dir)])
    assert status == 0, text
    return run_dir


@pytest.mark.process
@pytest.mark.parametrize("limit", [pytest.param(1.5, marks=pytest.mark.slow), 2.5])
def test_a_run_without_memory_is_one_line_and_continues_with_equal_records(limit, calm, tmp_path):
    command = (*RUN, "--run-dir", tmp_path / "run")
    status, text = started(command, int(limit * GIB))
    if status != 0:
        assert "not enough memory" in error_of(text)
        assert started(command)[0] == 0
    assert records(tmp_path / "run") == records(calm)


@pytest.mark.process
@pytest.mark.parametrize("words", [("table",), ("report", "--out", "OUT.html"), ("plot", "figure5", "--out", "OUT")])
def test_a_reader_without_memory_is_one_line(words, calm, tmp_path):
    name, *rest = (word.replace("OUT", str(tmp_path / "out")) for word in words)
    figure = rest[:1] if name == "plot" else []
    status, text = started((name, *figure, calm, *rest[len(figure) :]), int(1.5 * GIB))
    assert status == 0 or "not enough memory" in error_of(text), text


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "kv_budget_gib"),
        (RuntimeError("CUDA error: out of memory"), "gen_length"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "dtype"),
        (MemoryError(), "ulimit -v"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "ulimit -v"),
    ],
)
def test_what_helps_depends_on_whose_memory_has_ended(error, advice, capsys):
    def call():
        try:
            raise error
        finally:
            raise ValueError("while the batch ended")

    assert cli.status_of("run", call) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert advice in line
    assert ("GPU" in line) == ("ulimit" not in line)
