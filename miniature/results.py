"""`python -m miniature.results`: all files of results/embedded that depend on the embedded models, from one pass.

    python -m miniature.train --work-dir W --stages refusion_data_1,...,refusion_slots_32 --out-dir W/out
    python -m miniature.results --work-dir W

The settings of all systems are chosen first (`miniature.frontier`); then `eval.sh --artefacts` and the variants run,
which must have the machine for themselves, because they measure speed. A part that is finished is not made again.
"""

import argparse
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlencode

from miniature.card import num_samples, read_record
from miniature.family import EMBEDDED
from miniature.pictures import PAGE, REPORTED, SCREENSHOT
from miniature.train import VARIANTS, runs_of, stage_of
from refusion_eval.paths import embedded_path, embedded_systems

OUT = Path("results/embedded")
PACKAGE = (sys.executable, "-m", "refusion_eval")
SLOT_SETTINGS = ("block_size=32", "tau_slot=0.6", "tau_token=0.3")  # of the variants with one slot size
BACKBONE_RUN, REFUSION_RUNS = "embedded-autoregressive", ("embedded-refusion-unfused", "embedded-refusion-fused")
VERIFIER_RUN, MERGED_RUN = "embedded-refusion-verifier", "embedded-bd3lm-merged"
# As root, Chromium starts only without its sandbox.
BROWSER = ("chromium", "--headless", *(("--no-sandbox",) if os.geteuid() == 0 else ()), "--hide-scrollbars")
SIZE = ("--window-size=1200,725", "--virtual-time-budget=5000")
# What the address of the page leaves out, so that the matrix has room; the means are those of all tasks.
LEFT_OUT = {"tasks": json.dumps(["mini_gpqa", "mini_mmlu_pro", "mini_parts"])}


def _num_samples(work_dir: Path, run: str) -> int:
    """The samples of a training run and of the earlier ones of its stage."""
    runs = runs_of(stage_of(run))
    return sum(num_samples(read_record(work_dir / part)) for part in runs[: runs.index(run) + 1])


def choices(work_dir: Path) -> Iterator[Sequence[str]]:
    """The commands of the frontiers, which choose the settings, and of what else needs no speed."""
    module = (sys.executable, "-m")
    frontiers, verifier = work_dir / "frontiers.csv", work_dir / "verifier.csv"
    yield (*module, "miniature.frontier", "--out", str(frontiers), "--settings", "tasks/settings")
    # The last one as it is shipped, in bfloat16.
    *earlier, last = runs_of("refusion")[-3:]
    places = {run: work_dir / run / "model" for run in earlier} | {last: embedded_path("refusion")}
    courses = [f"{_num_samples(work_dir, run)}={place}" for run, place in places.items()]
    yield (*module, "miniature.verifier", *courses, "--out", str(verifier))
    for made in (frontiers, frontiers.with_suffix(".png"), verifier):
        yield ("cp", str(made), str(OUT))
    yield (*module, "miniature.equal_accuracy", str(frontiers), "--out", f"{OUT}/equal_accuracy.csv")
    yield (*module, "miniature.letters", "--models", "embedded:", "--items", "40", "--out", f"{OUT}/letters.csv")


def speeds(work_dir: Path) -> Iterator[Sequence[str]]:
    """The commands that measure speed."""
    results = work_dir / "results"
    yield ("bash", "eval.sh", "--system", "all", "--artefacts", "--results", str(results))
    for name in VARIANTS:
        slots = [f"slot_size={name.rsplit('_', 1)[1]}", *SLOT_SETTINGS] if "_slots_" in name else []
        settings = [word for setting in (*slots, "fuse=false") for word in ("--set", setting)]
        model = ("--model", str(work_dir / "out" / name), "--decoder", "refusion")
        tasks = ("--tasks", ",".join(f"mini_{task}" for task in EMBEDDED.draws))
        yield (*PACKAGE, "run", *model, *tasks, "--run-dir", str(results / "runs" / name), *settings)
    yield (*PACKAGE, "sweep", f"{OUT}/orders.yaml", "--out", str(work_dir / "orders"))


def tables(work_dir: Path) -> Iterator[Sequence[str]]:
    """The commands that make tables and pictures of what was measured."""
    runs = work_dir / "results" / "runs"
    family = [str(runs / f"embedded-{name}") for name in embedded_systems() if name != "refusion"]
    refusion = [str(runs / name) for name in REFUSION_RUNS]
    baseline = ("--baseline", BACKBONE_RUN)
    verifier = str(runs / VERIFIER_RUN)
    for csv, markdown, of in (
        ("family", "family", [*family, str(runs / MERGED_RUN), *refusion, verifier]),
        ("results", "table", [*refusion, verifier, str(runs / BACKBONE_RUN)]),
    ):
        files = ("--csv", f"{OUT}/{csv}.csv", "--markdown", f"{OUT}/{markdown}.md")
        yield (*PACKAGE, "table", *of, *files, *baseline)
    answers = (*family, str(runs / MERGED_RUN), *refusion, verifier)
    yield (sys.executable, "-m", "miniature.verdicts", *answers, "--out", f"{OUT}/verdicts.csv")
    slots = [str(runs / name) for name in VARIANTS if "_slots_" in name]
    yield (*PACKAGE, "table", *slots, "--csv", f"{OUT}/slot_sizes.csv")
    points = {runs / name: name for name in VARIANTS if "_data_" in name} | {runs / REFUSION_RUNS[0]: "refusion"}
    entries = [f"{_num_samples(work_dir, runs_of(stage)[-1])}={run}" for run, stage in points.items()]
    yield (sys.executable, "plots/scaling.py", *entries, "--out", f"{OUT}/scaling.csv")
    yield (sys.executable, "plots/orders.py", str(work_dir / "orders" / "sweep.csv"), "--out", f"{OUT}/orders.csv")
    yield (sys.executable, "plots/overview.py", f"{OUT}/family.csv", "--out", f"{OUT}/overview.png")
    yield ("rm", "-r", f"{OUT}/artefacts")
    yield ("cp", "-r", str(work_dir / "results" / "embedded" / "artefacts"), str(OUT))
    yield ("rm", "-r", f"{OUT}/artefacts/case_study")  # the records that figures 5 and 9 were drawn from
    yield (*PACKAGE, "plot", "figure7", f"{OUT}/scaling.csv", "--out", f"{OUT}/artefacts")
    yield (*PACKAGE, "report", *(str(runs / name) for name in REPORTED), "--out", PAGE)
    yield (*BROWSER, *SIZE, f"--screenshot={SCREENSHOT}", f"{Path(PAGE).resolve().as_uri()}#/?{urlencode(LEFT_OUT)}")
    yield (sys.executable, "-m", "miniature.pictures")
    yield (sys.executable, "docs/write.py")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m miniature.results", description="Measure the embedded family.")
    parser.add_argument("--work-dir", type=Path, required=True, help="runs of the training, and what is measured")
    parser.add_argument("--dry-run", action="store_true", help="print the commands instead of running them")
    given = parser.parse_args()
    if not given.dry_run and shutil.which(BROWSER[0]) is None:
        parser.error(
            f"{BROWSER[0]}, which makes {SCREENSHOT}, is not installed; install it (Debian: apt-get install chromium)"
        )
    for command in itertools.chain.from_iterable(part(given.work_dir) for part in (choices, speeds, tables)):
        print(f"$ {shlex.join(command)}", flush=True)
        if not given.dry_run:
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
