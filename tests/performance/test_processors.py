"""What other processors change: which variants a machine can do, what is counted, and that a failure is one."""

import os
import subprocess
from pathlib import Path

import processors
import pytest
import torch
from processors import OWN, Response, rows_of, variants

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("own", "done"), [("AVX512", ["default", "avx2"]), ("AVX2", ["default"]), ("DEFAULT", []), ("SVE256", [])]
)
def test_a_processor_does_what_lesser_ones_do_and_says_why_not_more(monkeypatch, own: str, done: list[str]):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: own)
    found = {variant.split()[0].partition("=")[2]: reason for variant, reason in variants().items()}
    assert [level for level, reason in found.items() if not reason] == done
    assert list(found) == ["default", "avx2", "avx512"]


def test_responses_with_other_tokens_or_forwards_are_counted():
    own = {("a", "0"): Response(True, (1, 2), 2), ("a", "1"): Response(False, (1,), 1)}
    other = {("a", "0"): Response(True, (1, 2), 1), ("a", "1"): Response(True, (3, 4), 1)}
    first, second = (list(row.values()) for row in rows_of("S", {OWN: own, "X=1": other}))
    assert first == ["S", "a", OWN, 2, 1, 3, 3, 0]
    assert second == ["S", "a", "X=1", 2, 2, 4, 2, 2]


def test_the_script_decodes_under_each_variant_and_writes_a_row_for_each(script, tmp_path: Path, monkeypatch):
    ran = []
    monkeypatch.setattr(processors, "_run_under", lambda variant, arguments: ran.append((variant, arguments[-1])))
    monkeypatch.setattr(processors, "responses", lambda run_dir: {("a", "0"): Response(True, (1,), 1)})
    monkeypatch.setattr(processors, "variants", lambda: {"X=1 Z=2": "", "Y=2": "there is none"})
    status, out, errors = script(processors.measure, "--limit", "3", "--out", tmp_path / "rows.csv")
    assert (status, ran) == (0, [(OWN, "3"), ("X=1 Z=2", "3")])
    assert "Y=2: not run, because there is none" in errors
    assert "0 responses changed" in out
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1 + 2 * len(processors.SYSTEMS)


@pytest.mark.parametrize("failing", ["X=1", "none"])
def test_a_variant_under_which_tests_fail_fails_and_the_others_still_run(tmp_path: Path, failing: str):
    python = tmp_path / "python"  # stands in for pytest: fails under one variant
    listed = r"printf 'X=1 Q=7\t\nY=2\t\nZ=3\tthere is none\n'; exit"
    python.write_text(
        f'#!/usr/bin/env bash\n[ "$2" != --list ] || {{ {listed}; }}\necho "X=$X Q=$Q Y=$Y"; [ "X=$X" != {failing} ]\n'
    )
    python.chmod(0o755)
    command = ["bash", str(ROOT / ".ci" / "processors")]
    done = subprocess.run(command, env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True)
    assert done.returncode == (failing == "X=1")
    assert ("failed: X=1 Q=7" in done.stdout) == (failing == "X=1")
    assert "== X=1 Q=7\nX=1 Q=7 Y=\n== Y=2\nX= Q= Y=2\n== Z=3: not run, because there is none\n" in done.stdout
