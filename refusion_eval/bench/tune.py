"""Makes the table of kernels of a card (`gpu-check --checks tune`): steps that measure, and what they decide.

Each step has a process of its own, and its figures are on the disk as soon as it ends. A later call goes on where this
one ended: a step that was made with the same code and the same torch on this device is not made again, if its time
sufficed. The commit does not tell: the results may be in it, so that the first call changes the checkout, and a copy
of a checkout has none.
"""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from refusion_eval.bench import tune_kernels, tune_steps
from refusion_eval.bench.child import in_process
from refusion_eval.bench.gpu_report import OWN_CONDITIONS, Result
from refusion_eval.bench.tune_choices import summary, table_of
from refusion_eval.bench.tune_steps import LEFT_OUT, Tuning
from refusion_eval.errors import ConfigError
from refusion_eval.models.choices import (
    CHOICES,
    Choices,
    choices_text,
    read_choices,
    shipped_files,
    shipped_folders,
)
from refusion_eval.models.device import cpu_threads
from refusion_eval.store.atomic_write import write_atomically
from refusion_eval.store.manifest import hash_of_package

TUNED = "tune.json"
SECONDS = 420.0  # of a call
SAME = ("device", "shape")  # of all steps of a file
CURRENT = ("code", "torch")  # of a step that is not made again
LEAST_SHARE = 0.5  # of its estimate that has to be left for a step to begin
PATIENCE = 2  # a step is stopped after so many times its estimate


class Step(NamedTuple):
    seconds: float  # that it is estimated to take at the shape 8B on an H100, with the start of its process
    measure: Callable[[Tuning], dict[str, Any]]
    needs: tuple[str, ...] = ()  # steps whose figures it reads, of which it needs one at least


# In their order.
STEPS: Mapping[str, Step] = {
    "card": Step(15, tune_steps.card),
    "forward": Step(30, tune_steps.forward),
    "products": Step(20, tune_steps.products),
    "products-cublaslt": Step(20, partial(tune_steps.products, way="cublaslt")),
    "products-unsplit": Step(20, partial(tune_steps.products, way="unsplit")),
    "products-no-workspace": Step(20, partial(tune_steps.products, way="no workspace")),
    "sweep": Step(90, tune_kernels.sweep_products),
    "whole": Step(80, tune_steps.whole, ("products", "sweep")),
    "tokens": Step(40, tune_steps.tokens, ("whole",)),
    "attention": Step(35, tune_kernels.attention_by_case),
    "batches": Step(50, tune_steps.batches),
}


def tune(
    out: Path, device: str, shape: str | None, facts: Mapping[str, Any], seconds: float, progress: Callable[[str], None]
) -> Result:
    """Makes the steps for which there is time, writes `tune.json` after each, and `choices.json` once it is decided.

    Raises:
        ConfigError: the folder has steps of another device or shape, or files that cannot be read.
    """
    begun, steps, facts = time.monotonic(), _earlier_steps(out, facts), {**facts, "code": hash_of_package()}
    if (out / CHOICES).exists():
        read_choices(out / CHOICES)  # one that is damaged is named before the time is spent
    conditions = {name: facts[name] for name in (*CURRENT, *OWN_CONDITIONS)}
    waiting: list[str] = []
    for place, (name, step) in enumerate(STEPS.items()):
        is_current = name in steps and all(steps[name].get(fact) == facts[fact] for fact in CURRENT)
        if is_current and not steps[name].get(LEFT_OUT):
            continue
        if not is_current:
            _remove(steps, name)  # what other code measured decides nothing
        now = time.monotonic()
        left = begun + seconds - now
        is_late = left < (0 if shape is None else LEAST_SHARE * step.seconds)
        if is_late or (step.needs and not steps.keys() & set(step.needs)):
            waiting.append(name)
            seconds = 0 if is_late else seconds  # a later step that is shorter would lack the figures of this one
            continue
        progress(f"tune: {name}, about {step.seconds:.0f} of {left:.0f} s")
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        done = {other: steps[other]["figures"] for other in list(STEPS)[:place] if other in steps}
        # A step that is made again because its time ended has the time that no later step needs.
        after = [other for other in list(STEPS)[place + 1 :] if steps.get(other, {LEFT_OUT: True}).get(LEFT_OUT)]
        spare = left - sum(STEPS[other].seconds for other in {*after, *_readers(name)})
        span = left if shape is None else min(left, max(step.seconds, spare))
        tuning = Tuning(device, shape, now + span, done)
        figures, failure = in_process(partial(_figures_of, step.measure, tuning), min(left, PATIENCE * span))
        if failure:
            progress(f"tune: {name}: {failure}")
            waiting.append(name)
            continue
        _remove(steps, name)  # in the same write, so that no later call takes what was made from other figures
        took = time.monotonic() - now
        left_out = figures.pop(LEFT_OUT, [])
        steps[name] = conditions | {"started": when, "seconds": took, "figures": figures, LEFT_OUT: left_out}
        if left_out:
            progress(f"tune: {name}: its time ended before {', '.join(left_out)}")
            waiting.append(name)
        written = {fact: facts[fact] for fact in SAME} | {"steps": steps}
        write_atomically(out / TUNED, json.dumps(written, indent=1) + "\n")
    found = {name: step["figures"] for name, step in steps.items()}
    table, passed = table_of(found, facts)
    lines = summary(found, table)
    if table is not None:
        _write_table(out / CHOICES, table)
        if table.device != "cpu" and (out / CHOICES).resolve() not in shipped_files():
            folder = next((one for one in reversed(shipped_folders()) if one.is_dir()), shipped_folders()[0])
            lines[-1] += f"; no forward reads {out / CHOICES}: copy it to {folder / 'CARD' / CHOICES}"
    print("\n".join(lines), flush=True)
    text = f"{len(steps)} of {len(STEPS)} steps; {lines[-1]}"
    if waiting:
        text += f"; the same command makes the others: {', '.join(waiting)}"
    return Result(passed, text, {"steps": list(steps)})


@cpu_threads(1)  # what a rehearsal computes is so small that more are slower
def _figures_of(measure: Callable[[Tuning], dict[str, Any]], tuning: Tuning) -> dict[str, Any]:
    return measure(tuning)


def _remove(steps: dict[str, dict[str, Any]], name: str) -> None:
    for removed in {name, *_readers(name)}:
        steps.pop(removed, None)


def _readers(name: str) -> set[str]:
    """The steps that read the figures of a step, directly or not."""
    found = {other for other, step in STEPS.items() if name in step.needs}
    return found.union(*map(_readers, found))


def _earlier_steps(out: Path, facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    path = out / TUNED
    if not path.exists():
        return {}
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        found = {name: before[name] for name in SAME}
        steps = {name: dict(step) for name, step in before["steps"].items() if name in STEPS}
        if not all(isinstance(step["figures"], dict) for step in steps.values()):
            raise TypeError("figures are no mapping")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        advice = "remove it, or name another --out"
        raise ConfigError(f"{path} holds no steps: {type(error).__name__}: {error}; {advice}") from error
    for name, value in found.items():
        if value != facts[name]:
            raise ConfigError(f"{path} is of {name} {value}, not {facts[name]}; name another --out")
    return steps


def _write_table(path: Path, table: Choices) -> None:
    """Writes the table of a card beside those for other sizes that the file has."""
    others = read_choices(path) if path.exists() else ()
    kept = [other for other in others if (other.device, other.sizes) != (table.device, table.sizes)]
    write_atomically(path, choices_text([*kept, table]))
