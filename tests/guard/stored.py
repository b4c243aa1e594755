"""Records that are compared with stored ones.

The stored files are written by the tests themselves, and only on purpose: `REFUSION_EVAL_WRITE_GUARD=1 pytest
tests/guard`. They say what every decoder and every mini task gave when they were written, so a change of the code that
is meant to leave behaviour alone must leave them alone.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RECORDS = Path(__file__).parent / "records"
WRITE = "REFUSION_EVAL_WRITE_GUARD"
# Probabilities of one machine differ from those of another by some rounding errors of float32.
TOLERANCE = 5e-4
_DIGITS = 5
_MOST_SHOWN = 20


def check(name: str, records: dict[str, Any], *, writes: bool = True) -> None:
    """Fails if records differ from the stored ones of that name.

    If the environment asks for it, they are written instead, unless `writes` says that another test writes them.
    """
    path = RECORDS / f"{name}.json"
    if writes and os.environ.get(WRITE):
        lines = [f"{json.dumps(key)}: {json.dumps(_rounded(records[key]))}" for key in sorted(records)]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        pytest.skip(f"wrote {path.name}")
    stored, now = (without_mean_tpf(one) for one in (json.loads(path.read_text()), json.loads(json.dumps(records))))
    found = list(differences(stored, now))
    shown = "\n".join(found[:_MOST_SHOWN])
    assert not found, f"{len(found)} differences from {path.name} (stored, now):\n{shown}"


def without_mean_tpf(records: dict[str, Any]) -> dict[str, Any]:
    """Rows of a table or CSV without the mean of TPF, which is defined anew: all tokens by all forwards."""
    kept = {name: row for name, row in records.items() if not name.endswith(("mean tpf", "mean tpf_canvas"))}
    of_mean = {key: cell for key, cell in kept.get("mean (mini)", {}).items() if key != "TPF"}
    return kept | ({"mean (mini)": of_mean} if of_mean else {})


def differences(stored: Any, now: Any, where: str = "") -> Iterator[str]:
    """One line for each place at which two JSON values differ; floats differ by more than the tolerance.

    A field that only the present record has is new, not different; a record that only the present has is different.
    """
    if isinstance(stored, dict) and isinstance(now, dict):
        for key in stored:
            if key in now:
                yield from differences(stored[key], now[key], f"{where}/{key}")
            else:
                yield f"{where}/{key}: only stored"
        if not where:
            yield from (f"/{key}: only now" for key in now if key not in stored)
    elif isinstance(stored, list) and isinstance(now, list) and len(stored) == len(now):
        for index, (before, after) in enumerate(zip(stored, now, strict=True)):
            yield from differences(before, after, f"{where}/{index}")
    elif isinstance(stored, float) and isinstance(now, float):
        same = math.isclose(stored, now, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        if not same and not (math.isnan(stored) and math.isnan(now)):
            yield f"{where}: {stored!r}, {now!r}"
    elif type(stored) is not type(now) or stored != now:
        yield f"{where}: {stored!r}, {now!r}"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return round(value, _DIGITS) if isinstance(value, float) and math.isfinite(value) else value
