"""Systems that are to be compared take turns over the items, so that what slows a machine slows all of them."""

import gc
import sys
from collections.abc import Callable

from refusion_eval.runs.plan import Plan, PlannedRun, Turn


def run_in_turns(plan: Plan, take: Callable[[PlannedRun, Turn | None], bool]) -> None:
    """Has every run take each of its turns; `take` returns False to leave a run out of the later ones."""
    remaining = list(plan.runs)
    for turn in plan.turns:
        for run in list(remaining):
            if not take(run, turn):
                remaining.remove(run)


def free_memory() -> None:
    """Frees what a finished turn leaves behind, so that the next system has as much memory as in its own process."""
    gc.collect()  # a system and its runner refer to each other
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # memory that torch keeps would be missing from the KV budget of the next model
