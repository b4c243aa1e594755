"""`python -m miniature.trials`: changes of ReFusion's recipe, each trained on a part of the data and measured.

Every trial starts from the same backbone, sees the same samples once and differs from the release's recipe in what its
name says. Accuracies are of held-out draws, which are no test items and are of the grades of training. A CSV that
exists is continued.

    python -m miniature.trials --work-dir W --out results/embedded/trials.csv
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pandas

from miniature.family import TRAINED_GRADES, Family
from miniature.measure import PLAIN, draws, measure
from miniature.train import BACKBONE, ROWS, TRIALS, TWICE, prepare, train_stage, trial_stage
from refusion_eval import api
from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.store.atomic_write import write_atomically

COLUMNS = ("trial", "changes", "samples", "backbone_steps", "ar", "mdm", "task", "n", "accuracy", "tpf")


def measured(family: Family, trial: str, work_dir: Path, num_items: int) -> list[dict[str, Any]]:
    """Trains a trial and measures it; one row of the CSV for each task."""
    stage = trial_stage(trial)
    train_stage(family, stage, work_dir)
    backbone, log = (pandas.read_csv(work_dir / name / "log.csv").iloc[-1] for name in (BACKBONE, stage))
    facts = json.loads((work_dir / stage / "run.json").read_text(encoding="utf-8"))
    samples = int(log.step) * facts["config"]["optimisation"]["global_batch_size"]
    model = api.load_model(str(work_dir / stage / "model"))
    rows = []
    for task in family.draws:
        chosen = draws(family, task, num_items)
        found = measure(model, "refusion", BENCHMARKS[task], chosen, gen_length=family.gen_length, **PLAIN["refusion"])
        common = (trial, " ".join(TRIALS[trial]), samples, int(backbone.step), log.ar, log.mdm)
        rows.append(dict(zip(COLUMNS, (*common, task, len(chosen), found.accuracy, found.tpf), strict=True)))
    return rows


def with_result_twice(response: str) -> str:
    """A response of gsm8k or math whose last calculation names its result too, which then stands there twice."""
    return re.sub(
        r"(\d[-+*/]\d+)(\$?)\. The answer is (\$\\boxed\{)?(\d+)",
        lambda found: f"{found[1]}={found[4]}{found[2]}. The answer is {found[3] or ''}{found[4]}",
        response,
    )


def write_results_twice(work_dir: Path) -> None:
    """Writes the rows of the trial `results_twice`."""
    lines = []
    for line in (work_dir / ROWS).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        lines.append(json.dumps(row | {"response": with_result_twice(row["response"])}) + "\n")
    write_atomically(work_dir / TWICE, "".join(lines))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m miniature.trials", description="Try changes of ReFusion's recipe.")
    parser.add_argument("--work-dir", type=Path, required=True, help="data and runs of the stages")
    parser.add_argument("--out", type=Path, required=True, help="the CSV; one that exists is continued")
    parser.add_argument("--trials", default=",".join(TRIALS), help="trials, separated by commas: %(default)s")
    parser.add_argument("--held-out", type=int, default=100, help="held-out draws of each task: %(default)s")
    given = parser.parse_args()
    trials = given.trials.split(",")
    if unknown := [name for name in trials if name not in TRIALS]:
        parser.error(f"--trials: there is no trial {', '.join(unknown)}; known: {', '.join(TRIALS)}")
    family = TRAINED_GRADES
    prepare(family, given.work_dir)
    train_stage(family, BACKBONE, given.work_dir)
    if "results_twice" in trials:
        write_results_twice(given.work_dir)
    rows = pandas.read_csv(given.out) if given.out.exists() else pandas.DataFrame(columns=COLUMNS)
    for trial in trials:
        if trial in set(rows.trial):
            continue
        found = measured(family, trial, given.work_dir, given.held_out)
        rows = pandas.DataFrame([*rows.to_dict("records"), *found], columns=COLUMNS)
        rows.to_csv(given.out, index=False, float_format="%.6g")
        mean = sum(row["accuracy"] for row in found) / len(found)
        print(f"{trial}: {mean:.1f} % in the mean of {len(found)} tasks", flush=True)


if __name__ == "__main__":
    main()
