"""Tokens per forward (TPF): how many tokens one model call yields, by our definition and by the release's."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import ArrayLike

from refusion_eval.errors import DataError
from refusion_eval.metrics.bootstrap import Bootstrap, bootstrap, check_denominators, ratio_statistic
from refusion_eval.trace import Fix, ForwardDone, Select, Trace


def tpf(tokens: ArrayLike, forwards: ArrayLike, *, seed: int = 0) -> Bootstrap:
    """All tokens kept / all forwards, resampled by item.

    Args:
        tokens: [items], tokens kept up to and including the first EOS.
        forwards: [items], model calls.
        seed: seed of the resampling.

    Raises:
        DataError: no items, different lengths, or no forward at all.
    """
    check_denominators(forwards)
    return bootstrap([tokens, forwards], ratio_statistic, seed=seed)


def tpf_release(trace: Trace, slot_size: int) -> float | None:
    """The figure the public ReFusion release prints as TPF, for comparison with it: mean over iterations of c / f.

    An iteration is one plan with its infill, f its forwards. If the verification accepted directly, c is the slot size
    times the slots stored, a slot cut by EOS counted whole; if slots were completed, c is the slot size times all
    selected slots, even those dropped because of EOS. So c is neither what the output keeps nor summed before dividing
    (ML-GSAI/ReFusion, generate.py). Refresh forwards of the KV re-computation, absent from the release, count in f.

    Args:
        trace: events of one request.
        slot_size: positions of a slot (k).

    Returns:
        None where iterations do not exist: another decoder, or plans fused into verifications.

    Raises:
        DataError: slot_size below 1.
    """
    if slot_size < 1:
        raise DataError(f"slot_size is {slot_size}; a slot has at least one position")
    kinds = [event.kind for event in trace.of(ForwardDone)]
    plans = [event for event in trace.of(Select) if event.unit == "slot"]
    if not plans or any(kinds[plan.forward] != "plan" for plan in plans):
        return None
    starts = [plan.forward for plan in plans]
    fixed: list[set[int]] = [set() for _ in plans]
    for fix in trace.of(Fix):
        fixed[bisect_right(starts, fix.forward) - 1].update(fix.positions)
    ratios = []
    for plan, end, positions in zip(plans, [*starts[1:], len(kinds)], fixed, strict=True):
        forwards = kinds[plan.forward : end]
        completed = len([kind for kind in forwards if kind != "refresh"]) > 2
        if completed:
            num_slots = len(plan.chosen)
        else:
            num_slots = sum(not positions.isdisjoint(range(slot, slot + slot_size)) for slot in plan.chosen)
        ratios.append(slot_size * num_slots / len(forwards))
    return float(np.mean(ratios))
