"""The benchmark of the sandbox checks all reference programs in every way and reports where."""

import json

import pytest
import sandbox
from sandbox import measure_sandbox, reference_programs

from refusion_eval.benchmarks import get_task
from refusion_eval.errors import ConfigError, SandboxError
from refusion_eval.sandbox import probe

pytestmark = pytest.mark.usefixtures("isolation")


def test_every_way_checks_the_references_and_the_record_says_where(script, tmp_path):
    out = tmp_path / "sandbox.json"
    status, output, _ = script(sandbox.main, "--mini", "--rounds", "1", "--workers", "2", "--out", out)
    assert status == 0
    record = json.loads(out.read_text())
    assert set(record["rates"]) == {"sandbox", "without isolation", "an interpreter each"}
    assert all(len(rates) == 1 and rates[0] > 0 for rates in record["rates"].values())
    assert (record["tier"], record["workers"], record["mini"]) == (probe().tier, 2, True)
    assert record["num_programs"] == len(get_task("mini_humaneval").rows())
    assert record["conditions"]["cores"] >= 1
    for way in record["rates"]:
        assert way in output
    assert "synthetic" in output


@pytest.mark.parametrize("benchmark", ["humaneval", "mbpp"])
def test_a_reference_that_fails_is_an_error_and_no_figure(benchmark):
    rows = get_task(f"mini_{benchmark}").rows()[:3]
    broken = {"humaneval": {"canonical_solution": "    return None\n"}, "mbpp": {"code": "x = 1\n"}}[benchmark]
    rows[1] = {**rows[1], **broken}
    with pytest.raises(SandboxError, match=r"sandbox: reference programs \[1\]"):
        measure_sandbox(benchmark, rows, mini=True, num_rounds=1, workers=1, progress=lambda text: None)


def test_a_benchmark_without_programs_is_refused():
    with pytest.raises(ConfigError, match=r"'gsm8k' has no programs.*humaneval, mbpp"):
        reference_programs("gsm8k", [])
