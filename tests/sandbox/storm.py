"""All programs of the corpus against one profile at once, within a scene; run in a process of its own.

`python -m tests.sandbox.storm PROFILE [NAME ...]` prints JSON: a `Storm`. It needs no more than the standard library,
so that an ordinary user's interpreter runs it too.
"""

import dataclasses
import json
import sys
import threading
import time
from dataclasses import dataclass, field

from refusion_eval.sandbox import CheckResult, Program, check_programs, pool, probe
from refusion_eval.sandbox.jail import PROFILES
from refusion_eval.sandbox.probe import self_test
from tests.sandbox.corpus import Case, cases
from tests.sandbox.scene import Scene

_BEAT_S = 0.05
# What a program says that others left no process to, who share the user's count of them in tier C; it is tried alone.
_CROWDED = ("can't start new thread", "Resource temporarily unavailable")


@dataclass(frozen=True, kw_only=True)
class Storm:
    """What came of it.

    Attributes:
        fault: why the profile does not hold on this machine; nothing was tried then.
        tier: of the profile.
        verdicts: name -> fields of a `CheckResult`.
        effects: what changed outside.
        told: names of programs whose verdict tells the secret.
        overruns_s: name -> seconds beyond the time limit, without those in which others had the processor.
        late_s: greatest delay of a thread of the harness that only sleeps, as a measure of how busy the machine is.
        seconds: wall clock of all.
    """

    fault: str = ""
    tier: str = ""
    verdicts: dict[str, dict] = field(default_factory=dict)
    effects: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    overruns_s: dict[str, float] = field(default_factory=dict)
    late_s: float = 0.0
    seconds: float = 0.0


class _Metronome(threading.Thread):
    """Sleeps in short beats and notes how late it ever woke."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.late_s = 0.0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            started_s = time.monotonic()
            time.sleep(_BEAT_S)
            self.late_s = max(self.late_s, time.monotonic() - started_s - _BEAT_S)


def _check(profile: str, programs: list[Program]) -> list[CheckResult]:
    """As benchmarks check programs where they would get this profile; else the same below the choice of one."""
    if profile == "none":
        return check_programs(programs, sandbox="none")
    if profile == probe().profile:
        return check_programs(programs)
    return pool.check_all(programs, profile)


def storm(profile: str, chosen: dict[str, Case]) -> Storm:
    """Check programs under one profile and look around.

    Args:
        profile: one of `PROFILES`.
        chosen: programs by name.
    """
    fault = "" if profile == "none" else self_test(profile)
    if fault:
        return Storm(fault=fault)
    tier = PROFILES[profile].tier
    chosen = {name: case for name, case in chosen.items() if tier in case.tiers or profile == "none"}
    scene = Scene(sys.executable)
    try:
        programs = [
            Program(
                candidate=case.placed(scene.places),
                test=case.test,
                helpers=case.helpers,
                timeout_s=case.timeout_s,
                memory_mb=case.memory_mb,
            )
            for case in chosen.values()
        ]
        metronome = _Metronome()
        metronome.start()
        started_s = time.monotonic()
        verdicts = dict(zip(chosen, _check(profile, programs), strict=True))
        for (name, verdict), program in zip(verdicts.items(), programs, strict=True):
            if tier == "C" and verdict.detail.endswith(_CROWDED):
                verdicts[name] = pool.check_on(profile, program)
        seconds = time.monotonic() - started_s
        metronome.stop.set()
        return Storm(
            tier=tier,
            verdicts={name: dataclasses.asdict(verdict) for name, verdict in verdicts.items()},
            effects=scene.effects(),
            told=[name for name, verdict in verdicts.items() if scene.secret in verdict.detail],
            overruns_s={
                name: verdict.seconds - verdict.waited_s - chosen[name].timeout_s for name, verdict in verdicts.items()
            },
            late_s=metronome.late_s,
            seconds=seconds,
        )
    finally:
        scene.close()


def main() -> None:
    """Print a storm as JSON."""
    profile, *names = sys.argv[1:]
    known = cases()
    found = storm(profile, {name: known[name] for name in names} if names else known)
    json.dump(dataclasses.asdict(found), sys.stdout)


if __name__ == "__main__":
    main()
