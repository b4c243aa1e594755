"""Where a layer is missing, the next one is taken and the report names what is missing."""

import json

import pytest

from refusion_eval import doctor
from refusion_eval.sandbox import SandboxReport
from tests.sandbox.conftest import ORDINARY_UID, run_as

# The user's own user namespace, where user namespaces are switched off; then as few capabilities as any user has.
_SWITCHED_OFF = """
import os
from refusion_eval.sandbox import linux
uid, gid = os.getuid(), os.getgid()
linux.call("unshare", linux.CLONE_NEWUSER)
for name, text in (("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1"), ("uid_map", f"{uid} {uid} 1")):
    open(f"/proc/self/{name}", "w").write(text)
open("/proc/sys/user/max_user_namespaces", "w").write("0")
linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
linux.drop_capabilities()
"""
# As a container's filter does: load the number, compare with that of unshare, refuse.
_REFUSED = """
import os, struct
from refusion_eval.sandbox import linux, seccomp
from tests.sandbox.refused import REFUSED
number = REFUSED["unshare"][seccomp.ARCHITECTURES[os.uname().machine][0]]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
linux.install_seccomp(b"".join(struct.pack("=HBBI", *step) for step in steps))
"""
_REPORT = """
import dataclasses, json
from refusion_eval.sandbox import check_program, probe
program = "def solve(n):\\n    return %s"
verdicts = [check_program(program % text, "assert solve(20) == 6765").status for text in ("6765", "0")]
print(json.dumps([dataclasses.asdict(probe()), verdicts]))
"""


def _report(preparation: str) -> tuple[SandboxReport, list[str]]:
    done = run_as(ORDINARY_UID, "-c", preparation + _REPORT)
    if done.returncode:
        pytest.skip(f"an ordinary user has neither user namespaces nor Landlock here: {done.stderr[-300:]}")
    report, verdicts = json.loads(done.stdout)
    return SandboxReport(**report), verdicts


@pytest.mark.parametrize(
    ("preparation", "reason"),
    [
        (_SWITCHED_OFF, "user namespaces are switched off: user.max_user_namespaces = 0"),
        (_REFUSED, "user namespaces are refused (Operation not permitted)"),
    ],
)
def test_without_user_namespaces_doctor_says_so_and_landlock_takes_over(preparation, reason, monkeypatch):
    report, verdicts = _report(preparation)
    assert (report.tier, report.profile) == ("C", "landlock")
    assert verdicts == ["passed", "failed"]
    monkeypatch.setattr(doctor, "probe", lambda: report)
    lines = [f"{name}: {found}" for name, found in doctor.report() if name.startswith("sandbox")]
    assert any(line.startswith("sandbox: tier C (landlock): Landlock") for line in lines)
    assert any(line.startswith("sandbox user-namespaces: ") and reason in line for line in lines)
    assert any("sysctl -w user.max_user_namespaces" in line for line in lines)


def test_doctor_names_every_active_layer():
    lines = [found for name, found in doctor.report() if name == "sandbox" and found.startswith("tier ")]
    if not lines:
        pytest.skip("programs cannot be isolated here")
    assert "seccomp filter" in lines[0]
    assert "resource limits" in lines[0]
