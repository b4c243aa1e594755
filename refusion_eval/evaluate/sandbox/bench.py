"""Throughput of the sandbox: the 164 HumanEval references, each in a fresh guest.

Run as `python -m refusion_eval.evaluate.sandbox.bench --data DIR [--rounds N] [--workers N] [--sandbox none]`.
"""

import argparse
import collections
import time
from pathlib import Path

from refusion_eval.evaluate.sandbox import Program, check_programs, probe
from refusion_eval.evaluate.sandbox.corpus import humaneval_programs


def main() -> None:
    """Check the references and print checks per second and the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with humaneval/test.jsonl")
    parser.add_argument("--rounds", type=int, default=1, help="how often to check all references")
    parser.add_argument("--workers", type=int, help="programs at a time (default: two per processor)")
    parser.add_argument("--sandbox", default="auto", help="auto or none")
    options = parser.parse_args()
    programs = humaneval_programs(options.data / "humaneval" / "test.jsonl") * options.rounds
    warm_up = [Program(candidate="def f(): return 1", test="assert f() == 1")] * (options.workers or 8)
    check_programs(warm_up, workers=options.workers, sandbox=options.sandbox)
    started_s = time.perf_counter()
    verdicts = check_programs(programs, workers=options.workers, sandbox=options.sandbox)
    seconds = time.perf_counter() - started_s
    reasons = collections.Counter(verdict.reason for verdict in verdicts)
    tier = "none" if options.sandbox == "none" else probe().tier
    rate = len(verdicts) / seconds
    print(f"{len(verdicts)} checks in {seconds:.2f} s: {rate:.1f} checks/s, tier {tier}, {dict(reasons)}")


if __name__ == "__main__":
    main()
