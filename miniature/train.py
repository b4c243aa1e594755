"""`python -m miniature.train`: trains the embedded models, from nothing and on any machine.

    tokenizer, training rows, initial weights  ->  autoregressive  ->  refusion, autoregressive_sft, llada, bd3lm
                                                                             autoregressive_sft  ->  idlm, wedlm

Each stage is a training run (`miniature.run`) with a configuration of its own, followed by a measurement on held-out
draws. All fine-tunes start from the backbone and see the same samples, so that they are comparable and can be trained
in any order. They have three later runs on the rows of the later courses, of which nearly half are drills of
calculations. I-DLM and WeDLM continue trained autoregressive models, so the last run alone is theirs, and the samples
are still the same. Every command is printed. The same command continues an interrupted training, and what is finished
is not made again.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from miniature.card import write_card
from miniature.data import drill_pairs, items
from miniature.family import EMBEDDED, Course, Family
from miniature.initial import write_initial
from miniature.measure import PLAIN, draws, measure
from miniature.run import MiniatureConfig
from miniature.tokenizer import train_tokenizer
from refusion_eval import api
from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.decoders import trained_decoders
from refusion_eval.errors import ConfigError
from refusion_eval.store.atomic_write import write_atomically
from refusion_eval.training.checkpoints.save import replacing, save_backbone
from refusion_eval.training.config import read_run_config

BACKBONE = "autoregressive"
ROWS, TWICE = "train.jsonl", "results_twice.jsonl"
# Courses after the first: the names of their rows and the ends of the names of their runs.
LATER = ("second", "third", "fourth")
COURSE_ROWS = (ROWS, *(f"{name}.jsonl" for name in LATER))
LATER_SETTINGS = ("optimisation.epochs=1", "optimisation.lr=2e-3")
STAGES = (BACKBONE, "refusion", "autoregressive_sft", "llada", "bd3lm", "idlm", "wedlm")
CONTINUES: Mapping[str, str] = dict.fromkeys(("idlm", "wedlm"), "autoregressive_sft")  # in the last course

# Changes of the release's recipe that are tried on a part of the samples (`trials`); for the last one the rows differ.
TRIALS: Mapping[str, Sequence[str]] = {
    "release": (),
    "paper_normalisation": ("objective.normalisation=paper",),
    "exact_masking": ("objective.masking=exact",),
    "adamw": ("optimisation.optimizer=adamw",),
    "half_rate": ("optimisation.lr=1.5e-3",),
    "double_rate": ("optimisation.lr=6e-3",),
    "results_twice": (),
}
TRIAL_SETTINGS = (
    "objective.masking=bernoulli",
    "optimisation.epochs=null",
    "optimisation.max_steps=500",
    "optimisation.warmup_steps=50",
)


def runs_of(stage: str) -> tuple[str, ...]:
    """The training runs of a stage, of which each starts from the one before; fine-tunes have one in each course."""
    if stage in CONTINUES:
        return (*runs_of(CONTINUES[stage])[:-1], stage)
    return (stage, *(f"{stage}_{name}" for name in LATER)) if stage in STAGES and stage != BACKBONE else (stage,)


def stage_of(run: str) -> str:
    """The stage of a training run."""
    return next((stage for stage in STAGES if run in runs_of(stage)), run)


def trial_stage(trial: str) -> str:
    """The stage of a trial."""
    return f"refusion_trial_{trial}"


# Studies of one quantity, each the ReFusion stage with other settings: the number of samples, in percent (Appendix
# C.3), or the slot size on 10 % of the samples. Every sample is seen once, and the warm-up is at most a tenth.
_WARMUP_STEPS = {1: 5, 3: 15, 10: 50, 30: 100}
_SHARES = {
    percent: (f"data.share={percent / 100}", f"optimisation.warmup_steps={warmup}")
    for percent, warmup in _WARMUP_STEPS.items()
}
VARIANTS: Mapping[str, Sequence[str]] = {f"refusion_data_{percent}": share for percent, share in _SHARES.items()} | {
    f"refusion_slots_{size}": (*_SHARES[10], f"objective.slot_sizes=[{size}]") for size in (4, 8, 16, 32)
}
_TRIAL_STAGES = {trial_stage(name): (*TRIAL_SETTINGS, *changes) for name, changes in TRIALS.items()}


def training_pairs(family: Family, count: int, seed: int) -> list[tuple[str, str]]:
    """The first `count` (query, response) pairs of the training stream of each task, task by task."""
    return [
        (BENCHMARKS[name].prompts.user(item.prompt_row), item.response)
        for name in family.draws
        for item in islice(items(name, test=False, seed=seed, family=family), count)
    ]


def write_tokenizer(family: Family, target: Path) -> None:
    """Trains and writes the tokenizer."""
    pairs = training_pairs(family, family.num_tokenizer_items, family.courses[0].seed)
    turns = [text for query, response in pairs for text in ("user\n" + query, "assistant\n" + response)]
    with replacing(target) as part:
        train_tokenizer(turns, family.vocabulary_size).save_pretrained(part)


def write_rows(family: Family, course: Course, target: Path) -> None:
    """Writes the training rows of a course: items of the tasks, then drills of single steps."""
    pairs = training_pairs(family, course.num_items, course.seed)
    for drill, count in course.num_drills.items():
        pairs += drill_pairs(drill, seed=course.seed, count=count, family=family)
    lines = (json.dumps({"query": query, "response": response}) + "\n" for query, response in pairs)
    write_atomically(target, "".join(lines))


def rows_of(run: str) -> str:
    """The name of the file with the rows of a training run."""
    return TWICE if run == trial_stage("results_twice") else COURSE_ROWS[runs_of(stage_of(run)).index(run)]


def settings_of(run: str, work_dir: Path, changes: Sequence[str] = ()) -> list[str]:
    """What the command line of a training run adds to the configuration of its stage, as "section.key=value".

    Args:
        run: a training run: one of those of a name in `STAGES`, a name in `VARIANTS`, or the stage of a trial.
        work_dir: folder of all runs.
        changes: further settings, which replace those of the stage but no path.
    """
    runs = runs_of(stage_of(run))
    course = runs.index(run)
    before = work_dir / (runs[course - 1] if course else BACKBONE) / "model"
    paths = {
        "backbone.model": work_dir / "initial" if run == BACKBONE else before,
        "data.files": work_dir / rows_of(run),
        "data.cache_dir": work_dir / "tokens",
        "output.run_dir": work_dir / run,
    }
    settings = [f"{key}={json.dumps(str(path))}" for key, path in paths.items()]
    own = LATER_SETTINGS if course else (*VARIANTS.get(run, ()), *_TRIAL_STAGES.get(run, ()))
    return [*own, *changes, "backbone.shape=null", *settings]


def config_of(family: Family, run: str) -> Path:
    """The configuration file of a training run."""
    stage = stage_of(run)
    return family.configs / f"{stage if stage in STAGES else 'refusion'}.yaml"


def prepare(family: Family, work_dir: Path, changes: Sequence[str] = ()) -> None:
    """Writes tokenizer, training rows and initial weights, as far as they are missing.

    Args:
        family: what is trained.
        work_dir: folder of all runs.
        changes: settings of the training runs; those of `backbone.shape` and `backbone.seed` act here.

    Raises:
        ConfigError: the rows in the folder were drawn by another version of the tasks.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    tokenizer, rows, initial = work_dir / "tokenizer", work_dir / ROWS, work_dir / "initial"
    if not tokenizer.exists():
        write_tokenizer(family, tokenizer)
    for name, course in zip(COURSE_ROWS, family.courses, strict=True):
        if not (work_dir / name).exists():
            write_rows(family, course, work_dir / name)
        _check_rows(family, course, work_dir / name)
    if not initial.exists():
        paths = (f"backbone.tokenizer={json.dumps(str(tokenizer))}", f"data.files={json.dumps(str(rows))}")
        write_initial(
            read_run_config(str(config_of(family, BACKBONE)), (*paths, *changes), MiniatureConfig).backbone, initial
        )


def _check_rows(family: Family, course: Course, path: Path) -> None:
    """Refuses rows that were drawn by another version of the tasks."""
    first = replace(family, draws=dict(list(family.draws.items())[:1]))
    ((query, response),) = training_pairs(first, 1, course.seed)
    with path.open(encoding="utf-8") as file:
        if json.loads(next(file)) != {"query": query, "response": response}:
            raise ConfigError(f"{path} was drawn by another version of the mini tasks; name another folder")


def carry_out(config: Path, settings: Sequence[str]) -> None:
    """One training run in a process of its own, with a configuration file and settings as "section.key=value"."""
    changes = [part for setting in settings for part in ("--set", setting)]
    command = ("miniature.run", "--config", str(config), *changes)
    print(f"$ python -m {shlex.join(command)}", flush=True)
    subprocess.run((sys.executable, "-m", *command), check=True)


def train_stage(family: Family, run: str, work_dir: Path, changes: Sequence[str] = ()) -> None:
    """Carries out one training run; see `settings_of`."""
    carry_out(config_of(family, run), settings_of(run, work_dir, changes))


def measure_stage(family: Family, stage: str, work_dir: Path, num_items: int) -> None:
    """Prints the accuracy of a trained stage on held-out draws of every task."""
    model = api.load_model(str(work_dir / runs_of(stage)[-1] / "model"))
    decoder = plain_decoder(stage, work_dir)
    settings = {"gen_length": family.gen_length, **PLAIN[decoder]}
    for name in family.draws:
        found = measure(model, decoder, BENCHMARKS[name], draws(family, name, num_items), **settings)
        print(f"{stage} {name}: {found.accuracy:.1f} % of {num_items} held-out draws, TPF {found.tpf:.2f}", flush=True)


def export(family: Family, stage: str, work_dir: Path, out_dir: Path) -> None:
    """Writes the checkpoint of a stage in bfloat16, with its card and its loss curve."""
    source, target = work_dir / runs_of(stage)[-1] / "model", out_dir / stage
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    save_backbone(model, tokenizer, target, decoders=decoders_of(stage, work_dir))
    write_card(family, target, stage, [work_dir / name for name in dict.fromkeys((BACKBONE, *runs_of(stage)))])


def plain_decoder(stage: str, work_dir: Path) -> str:
    """The plainest decoder that a trained stage is for."""
    return (*decoders_of(stage, work_dir), "refusion")[0]


def decoders_of(stage: str, work_dir: Path) -> Sequence[str]:
    """The decoders that a trained stage is for, the plainest first; none if it serves those of several systems."""
    objective = json.loads((work_dir / stage / "run.json").read_text())["config"]["objective"]["objective"]
    return trained_decoders(objective)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m miniature.train", description="Train tiny models from scratch.")
    parser.add_argument("--work-dir", type=Path, default=Path("runs/miniature"), help="data and runs of all stages")
    parser.add_argument("--out-dir", type=Path, help="also write the checkpoints there in bfloat16, with their cards")
    parser.add_argument(
        "--stages",
        default=",".join(STAGES),
        help=f"stages to train, separated by commas; the {BACKBONE} backbone is trained first if --work-dir lacks it; "
        f"other names: {', '.join(VARIANTS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="changes",
        metavar="SECTION.KEY=VALUE",
        help="change a setting of every stage, as in train.sh",
    )
    parser.add_argument(
        "--held-out", type=int, default=50, help="held-out draws of each task that a model answers; 0 for none"
    )
    given = parser.parse_args()
    stages = [name.strip() for name in given.stages.split(",")]
    known = (*STAGES, *VARIANTS)
    if unknown := [name for name in stages if name not in known]:
        parser.error(f"--stages: there is no stage {', '.join(map(repr, unknown))}; known: {', '.join(known)}")
    family = EMBEDDED
    try:
        prepare(family, given.work_dir, given.changes)
        for stage in dict.fromkeys((BACKBONE, *stages)):
            for run in runs_of(stage):
                train_stage(family, run, given.work_dir, given.changes)
            if stage in stages and given.held_out:
                measure_stage(family, stage, given.work_dir, given.held_out)
            if stage in stages and given.out_dir is not None:
                export(family, stage, given.work_dir, given.out_dir)
    except ConfigError as error:
        parser.error(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)


if __name__ == "__main__":
    main()
