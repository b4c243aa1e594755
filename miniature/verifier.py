"""`python -m miniature.verifier`: the verifier's own token against the paper's rule, on checkpoints of several courses.

The two rules decode the same items, held-out draws and the test items, with and without fused forwards, which change no
token. Their settings are the same, those chosen for the paper's rule; on the test items the verifier also has the
settings that were chosen for it.

    python -m miniature.verifier 225536=W/refusion_third/model 300512=W/refusion_fourth/model --out verifier.csv

A CSV that exists is continued. Accuracy and tokens a forward do not depend on the speed of the machine.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas

from miniature.data import asked_items
from miniature.family import EMBEDDED, Family
from miniature.item import Item
from miniature.measure import Measured, draws, measure
from refusion_eval import api
from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.config import read_yaml
from refusion_eval.metrics import mean_of_intervals, paired_difference, scaled
from refusion_eval.paths import tasks_path
from refusion_eval.results.compare import mcnemar

MEAN = "mean"
RULES = ("paper", "verifier")
Settings = Mapping[str, Mapping[str, Any]]  # benchmark -> settings
DRAWS, TEST_ITEMS, OWN_SETTINGS = ITEMS = ("draws", "test items", "test items, own settings")
COLUMNS = (
    *("samples", "items", "task", "n", *(f"accuracy_{rule}" for rule in RULES)),
    *("difference", "difference_ci_low", "difference_ci_high", "gained", "lost", "p_value"),
    *(f"tpf_{rule}{way}" for way in ("", "_fused") for rule in RULES),
)


def measured(
    family: Family, checkpoints: Mapping[int, Path], count: int, settings: Mapping[str, Settings], out: Path
) -> pandas.DataFrame:
    """Measures what the CSV lacks: a row for each checkpoint, kind of items and task, and their mean.

    Args:
        family: the family of the checkpoints.
        checkpoints: the number of samples that each checkpoint was trained on -> its folder.
        count: number of draws of each task.
        settings: rule -> benchmark -> the settings that were chosen for it.
        out: the CSV.
    """
    rows = pandas.read_csv(out) if out.exists() else pandas.DataFrame(columns=COLUMNS)
    done = set(rows[["samples", "items"]].itertuples(index=False, name=None))
    for samples, folder in checkpoints.items():
        for kind in ITEMS:
            if (samples, kind) in done:
                continue
            model = api.load_model(str(folder))
            found = {}
            for task in family.draws:
                chosen = draws(family, task, count) if kind == DRAWS else asked_items(task, family)
                own = settings if kind == OWN_SETTINGS else dict.fromkeys(RULES, settings["paper"])
                found[task] = _decodings(model, task, chosen, {rule: own[rule][task] for rule in RULES})
                print(f"{samples} samples, {kind}, {task}", flush=True)
            added = [{"samples": samples, "items": kind, **row} for row in _compared(found)]
            rows = pandas.DataFrame([*rows.to_dict("records"), *added], columns=COLUMNS)
            rows.to_csv(out, index=False, float_format="%.6g")
    return rows


def _decodings(
    model: api.LoadedModel, task: str, chosen: Sequence[Item], settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, Measured]:
    """Each rule with its settings, with and without fused forwards."""
    return {
        rule + way: measure(
            model, "refusion", BENCHMARKS[task], chosen, **{**settings[rule], "completion": rule, "fuse": bool(way)}
        )
        for way in ("", "_fused")
        for rule in RULES
    }


def _compared(found: Mapping[str, Mapping[str, Measured]]) -> list[dict[str, Any]]:
    """The rows of the tasks and of their mean, whose tokens a forward are all tokens by all forwards."""
    lines = [(task, [one]) for task, one in found.items()] + [(MEAN, list(found.values()))]
    rows = []
    for task, parts in lines:
        totals = {name: [part[name] for part in parts] for name in parts[0]}
        pairs = [(before.passed, after.passed) for before, after in zip(*(totals[rule] for rule in RULES), strict=True)]
        changes = [after - before for pair in pairs for before, after in zip(*pair, strict=True)]
        gained, lost = changes.count(1), changes.count(-1)
        difference = scaled(mean_of_intervals([paired_difference(*pair) for pair in pairs]), 100)
        bounds = {"": difference.value, "_ci_low": difference.low, "_ci_high": difference.high}
        rows.append(
            {"task": task, "n": len(changes), "gained": gained, "lost": lost, "p_value": mcnemar(gained, lost)}
            | {f"accuracy_{rule}": sum(one.accuracy for one in totals[rule]) / len(parts) for rule in RULES}
            | {f"difference{end}": bound for end, bound in bounds.items()}
            | {
                f"tpf_{name}": sum(one.tokens for one in parts_of) / sum(one.forwards for one in parts_of)
                for name, parts_of in totals.items()
            }
        )
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m miniature.verifier", description=__doc__.split("\n", 1)[0])
    parser.add_argument("checkpoints", nargs="+", help="SAMPLES=FOLDER of each checkpoint")
    parser.add_argument("--items", type=int, default=100, help="number of draws of each task")
    parser.add_argument("--out", type=Path, required=True, help="CSV")
    given = parser.parse_args()
    checkpoints = {int(samples): Path(folder) for samples, folder in (one.split("=", 1) for one in given.checkpoints)}
    files = {rule: f"mini_refusion{end}.yaml" for rule, end in zip(RULES, ("", "_verifier"), strict=True)}
    settings = {rule: read_yaml(tasks_path() / "settings" / file, file)["benchmarks"] for rule, file in files.items()}
    measured(EMBEDDED, checkpoints, given.items, settings, given.out)


if __name__ == "__main__":
    main()
