"""The text of a recorded decoding: with the order of its positions (Figure 5), or at several moments (Figure 9)."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from refusion_eval.benchmarks import is_mini
from refusion_eval.errors import DataError
from refusion_eval.paper.rows import TokenCell
from refusion_eval.report.replay import Position, Replay, Speller, apply
from refusion_eval.report.sample import is_withheld, sample_replay
from refusion_eval.store.records import PASSED, Sample
from refusion_eval.store.run_store import RunReader
from refusion_eval.types import Fix

NUM_PANELS = 6
_SEARCHED_ITEMS = 50
_SHOWN_SETTINGS = ("slot_size", "block_size", "tau_slot", "tau_token", "block_length", "steps", "threshold")
_ACTIONS = {"plan": "planned", "draft": "drafted", "fix": "accepted", "forward": "read", "stop": "done"}


def longest_sample(run_dir: Path, task: str | None) -> tuple[str | None, str | None]:
    """Task and item whose decoding took most steps, among the first items of every task; right answers come first."""
    most = (False, 0)
    longest: tuple[str | None, str | None] = (task, None)
    num_items: Counter[str] = Counter()
    with RunReader.open(run_dir) as reader:
        scores = reader.scores_by_sample()
        for sample in reader.samples():
            is_wanted = task in (None, sample.key.task, sample.benchmark)
            num_items[sample.key.task] += is_wanted
            if not is_wanted or num_items[sample.key.task] > _SEARCHED_ITEMS:
                continue
            if sample.trace is None or is_withheld(sample):
                continue
            num_steps = len({event.forward for event in sample.events().of(Fix)})
            verdict = scores.get(sample.key, {}).get(PASSED)
            rank = (verdict is not None and bool(verdict.value), num_steps)
            if num_steps and rank > most:
                most, longest = rank, (sample.key.task, sample.item_id)
    return longest


def generation_order(system: str, sample: Sample, speller: Speller) -> list[TokenCell]:
    """The final text, each position with the step at which it became final."""
    replay = _replay(sample)
    return _cells(replay, len(replay.steps) - 1, {"panel": 1, "title": "", "system": system}, sample, speller)


def step_by_step(system: str, sample: Sample, speller: Speller) -> list[TokenCell]:
    """The text after the first plan, after the first draft, and after evenly spread acceptances up to the last one."""
    replay = _replay(sample)
    cells = []
    for panel, number in enumerate(sorted(_shown_steps(replay)), start=1):
        step = replay.steps[number]
        title = f"forward {step.forward + 1} of {len(replay.forwards)}: {_ACTIONS[step.action]}"
        cells += _cells(replay, number, {"panel": panel, "title": title, "system": system}, sample, speller)
    return cells


def _replay(sample: Sample) -> Replay:
    where = f"{sample.key.task}, item {sample.item_id}"
    if is_withheld(sample):
        raise DataError(f"{where}: GPQA's authors ask that its questions appear nowhere; name another --task")
    replay = sample_replay(sample)
    if not replay.kept:
        raise DataError(f"{where}: no token became final, so there is nothing to show; name another --item")
    return replay


def _shown_steps(replay: Replay) -> set[int]:
    fixes = [number for number, step in enumerate(replay.steps) if step.action == "fix"]
    actions = [step.action for step in replay.steps]
    shown = {actions.index(action) for action in ("plan", "draft") if action in actions}
    num_fixes = NUM_PANELS - len(shown)
    if len(fixes) <= num_fixes:
        return shown | set(fixes)
    return shown | {fixes[round(number * (len(fixes) - 1) / (num_fixes - 1))] for number in range(num_fixes)}


def _cells(replay: Replay, last: int, facts: dict[str, Any], sample: Sample, speller: Speller) -> list[TokenCell]:
    """The positions of the final text as they are after the step with the number `last`, with facts about all."""
    states = [Position() for _ in range(replay.num_positions)]
    order: dict[int, tuple[int, int]] = {}  # position -> 1-based step at which it became final, and its forward
    moments: dict[int, int] = {}  # forward -> 1-based step
    for number, step in enumerate(replay.steps):
        if number <= last:
            apply(states, step, number)
        for change in step.changes:
            if change.state == "fixed":
                moment = moments.setdefault(step.forward, len(moments) + 1)
                order |= dict.fromkeys(change.positions, (moment, step.forward))
    pieces = speller.pieces([replay.tokens[position] for position in replay.kept])
    named = ((name, sample.settings.get(name)) for name in _SHOWN_SETTINGS)
    facts |= {
        "task": sample.key.task,
        "item": sample.item_id,
        "settings": ", ".join(f"{name}={json.dumps(value)}" for name, value in named if value is not None),
        "mini": is_mini(sample.key.task),
    }
    cells = []
    for position, final in zip(replay.kept, pieces, strict=True):
        state, token = states[position].state, states[position].token
        draft = "" if token is None else speller.piece(token)
        cells.append(
            TokenCell(
                position=position,
                text=final if state == "fixed" else draft,
                final=final,
                state=state if state != "dropped" else "mask",
                order=order[position][0] if state == "fixed" else 0,
                forward=order[position][1] if state == "fixed" else -1,
                slot=position - position % (sample.slot_size or 1),
                **facts,
            )
        )
    return cells
