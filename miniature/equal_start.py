"""`python -m miniature.equal_start`: six systems from one autoregressive model, on the same last samples.

    python -m miniature.equal_start train --work-dir W --runs refusion:2514,bd3lm:2514
    python -m miniature.equal_start measure --work-dir W --out results/embedded/courses
    python -m miniature.equal_start table --out results/embedded/courses

The start is the embedded AR-SFT (300,512 samples), whose weights are in the package, so that anyone can repeat a
course. Every system then has one course more: the same 75,000 samples (`EQUAL_START`), steps, batch, learning rate and
optimiser, with the objective and the EOS filling of its own configuration. No recipe is tuned. Each system is measured
with `SYSTEMS`' settings, as many for each, of which one is chosen for each task on held-out draws by the rule of
`miniature.frontier`.

`train` continues what was interrupted and makes nothing twice. `measure` writes one row for each answer to a test item
into `equal_start.csv`, and what was chosen into `equal_start_settings.csv`; it appends to files that exist.
`table` prints what they say.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas

from miniature.data import asked_items
from miniature.family import EQUAL_START, Family
from miniature.frontier import choices, measured
from miniature.measure import measure
from miniature.seeds import summary
from miniature.systems import equally_tuned
from miniature.train import BACKBONE, LATER_SETTINGS, STAGES, carry_out, config_of, write_rows
from refusion_eval import api
from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.config import build
from refusion_eval.paths import embedded_path
from refusion_eval.training.config import ObjectiveConfig
from refusion_eval.training.data.token_cache import TokenCache
from refusion_eval.training.objectives.table import num_rows
from refusion_eval.training.run import RUN_FILE

START = "autoregressive_sft"
ROWS = "equal_start.jsonl"


class Variant(NamedTuple):
    """What is trained: the stage, what tables add to the names of its systems, and the settings that differ.

    `weights` names an embedded model that is measured as it is, without a course.
    """

    stage: str
    label: str = ""
    settings: Sequence[str] = ()
    weights: str = ""


# Further courses beside those of the stages.
VARIANTS = {
    # ReFusion's 11.3 million trained rows: these two have a noisy copy of each answer beside the clean one.
    "idlm_equal_rows": Variant("idlm", "rows of ReFusion", ("data.share=0.7407",)),
    "bd3lm_equal_rows": Variant("bd3lm", "rows of ReFusion", ("data.share=0.6714",)),
    # Does the gain of the verifier's token vanish where the state that it avoids was trained?
    "refusion_half_filled": Variant("refusion", "half-filled slots", ("objective.half_filled_share=0.5",)),
    # What the course teaches.
    "start": Variant(START, "before the course", weights=START),
    "backbone": Variant(START, "the backbone alone", weights=BACKBONE),
}

SYSTEMS = equally_tuned(refusion_block=32, llada_blocks=(8, 16))
ANSWERS, SETTINGS = "equal_start.csv", "equal_start_settings.csv"
ANSWER_COLUMNS = ("system", "model", "seed", "task", "item", "right", "tokens", "forwards", "rows")
SETTING_COLUMNS = ("system", "model", "seed", "task", "settings", "draws_accuracy", "draws_tpf", "trained_rows")


def variant_of(name: str) -> Variant:
    """The variant of that name, or the stage itself."""
    return VARIANTS.get(name, Variant(name))


def settings_of(name: str, seed: int, start: Path, work_dir: Path) -> list[str]:
    """What the command line of a course adds to the configuration of its stage, as "section.key=value".

    Args:
        name: a stage, or one of `VARIANTS`.
        seed: seed of the order of samples and of their corruption.
        start: folder of the weights that all courses start from.
        work_dir: folder of the courses and their rows.
    """
    paths = {
        "backbone.model": start,
        "data.files": work_dir / ROWS,
        "data.cache_dir": work_dir / "tokens",
        "output.run_dir": work_dir / f"{name}_{seed}",
    }
    own = (f"optimisation.seed={seed}", "output.save_every=100", "output.keep=1")
    return [
        *LATER_SETTINGS,
        *own,
        *variant_of(name).settings,
        "backbone.shape=null",
        *(f"{key}={json.dumps(str(path))}" for key, path in paths.items()),
    ]


def train(family: Family, name: str, seed: int, start: Path, work_dir: Path, changes: Sequence[str] = ()) -> None:
    """Carries out one course, with changes of its settings as "section.key=value"."""
    work_dir.mkdir(parents=True, exist_ok=True)
    if not (work_dir / ROWS).exists():
        write_rows(family, family.courses[-1], work_dir / ROWS)
    carry_out(config_of(family, variant_of(name).stage), [*settings_of(name, seed, start, work_dir), *changes])


def trained(work_dir: Path) -> dict[tuple[str, int], Path]:
    """(Stage or variant, seed) -> the folder of the weights, of all courses that are finished."""
    found: dict[tuple[str, int], Path] = {}
    for folder in sorted(work_dir.glob("*_*/model")):
        name, _, seed = folder.parent.name.rpartition("_")
        found[name, int(seed)] = folder
    return found


def trained_rows(work_dir: Path, name: str, seed: int) -> int:
    """The rows that a course computed: of prompts, of answers with their filling, and of noisy copies of them."""
    if variant_of(name).weights:
        return 0
    identity = json.loads((work_dir / f"{name}_{seed}" / RUN_FILE).read_text(encoding="utf-8"))["identity"]
    samples = TokenCache(work_dir / "tokens" / f"{identity['tokens']}.arrow")
    if (share := identity["data"]["share"]) is not None:
        samples = samples.draw(max_samples=None, share=share, seed=identity["data"]["sample_seed"])
    objective = build(ObjectiveConfig, identity["objective"], "objective")
    rows = num_rows(objective, samples.prompt_lengths, samples.lengths - samples.prompt_lengths)
    return int(rows.sum() * identity["optimisation"]["epochs"])


def measure_course(
    family: Family, name: str, seed: int, weights: Path, work_dir: Path, count: int
) -> tuple[list[tuple], list[tuple]]:
    """The answers of the systems of one trained model to the test items, and the settings that were chosen for them."""
    variant = variant_of(name)
    answers: list[tuple] = []
    settings: list[tuple] = []
    points = work_dir / f"{name}_{seed}_points.csv"
    systems = [replace(system, model=str(weights)) for system in SYSTEMS if system.model == variant.stage]
    rows = measured(family, "", systems, list(family.draws), count, points)
    for chosen in choices(rows):
        system = next(system for system in systems if system.name == chosen.system)
        used: dict[str, Any] = {"gen_length": family.gen_length} | json.loads(chosen.settings)
        asked = asked_items(chosen.task, family)
        found = measure(api.load_model(system.model), system.decoder, BENCHMARKS[chosen.task], asked, **used)
        common = (", ".join(filter(None, (system.name, variant.label))), name, seed, chosen.task)
        answers += [(*common, item, int(right), *counts) for item, (right, *counts) in enumerate(found.answers)]
        settings.append((*common, chosen.settings, chosen.accuracy, chosen.tpf, trained_rows(work_dir, name, seed)))
        print(f"{name} {seed}, {system.name}, {chosen.task}: {found.accuracy:g} %, TPF {found.tpf:.2f}", flush=True)
    return answers, settings


def measure_all(family: Family, work_dir: Path, count: int, out: Path) -> None:
    """Measures what `out` lacks of all finished courses and of models without one (seed 0); appends rows at once."""
    files = {ANSWERS: ANSWER_COLUMNS, SETTINGS: SETTING_COLUMNS}
    tables = {
        file: pandas.read_csv(out / file) if (out / file).exists() else pandas.DataFrame(columns=list(columns))
        for file, columns in files.items()
    }
    done = set(tables[SETTINGS][["model", "seed"]].itertuples(index=False, name=None))
    untrained = {(name, 0): embedded_path(variant.weights) for name, variant in VARIANTS.items() if variant.weights}
    for (name, seed), weights in (trained(work_dir) | untrained).items():
        if (name, seed) in done:
            continue
        for file, added in zip(files, measure_course(family, name, seed, weights, work_dir, count), strict=True):
            rows = [*tables[file].itertuples(index=False, name=None), *added]
            tables[file] = pandas.DataFrame(rows, columns=list(files[file]))
            tables[file].to_csv(out / file, index=False, float_format="%.6g")


def table(folder: Path) -> pandas.DataFrame:
    """The summary of the answers in a folder."""
    answers, settings = (pandas.read_csv(folder / file) for file in (ANSWERS, SETTINGS))
    return summary(answers, settings, SYSTEMS[0].name)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m miniature.equal_start", description=__doc__.split("\n", 1)[0])
    parser.add_argument("action", choices=("train", "measure", "table"))
    parser.add_argument("--work-dir", type=Path, help="train, measure: courses and their rows")
    parser.add_argument(
        "--start", type=Path, default=embedded_path(START), help="weights that the courses start from (%(default)s)"
    )
    parser.add_argument("--runs", default="", help="train: NAME:SEED of courses, separated by commas")
    parser.add_argument("--set", action="append", default=[], dest="changes", help="train: a setting of all courses")
    parser.add_argument("--items", type=int, default=100, help="measure: draws of each task to choose on")
    parser.add_argument("--out", type=Path, default=Path("results/embedded/courses"), help="folder of the CSV files")
    given = parser.parse_args()
    if given.action == "table":
        print(table(given.out).to_string(index=False))
        return
    if given.work_dir is None:
        parser.error(f"{given.action} needs --work-dir")
    if given.action == "measure":
        measure_all(EQUAL_START, given.work_dir, given.items, given.out)
        return
    courses = (name for name, variant in VARIANTS.items() if not variant.weights)
    known = (*(stage for stage in STAGES if stage != BACKBONE), *courses)
    runs = [run.partition(":")[::2] for run in given.runs.split(",")]
    for name, seed in runs:
        if name not in known or not seed.isdecimal():
            parser.error(f"--runs: {name}:{seed} is no course; give NAME:SEED with a name of {', '.join(known)}")
    for name, seed in runs:
        train(EQUAL_START, name, int(seed), given.start, given.work_dir, given.changes)


if __name__ == "__main__":
    main()
