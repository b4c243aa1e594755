"""`python -m miniature.train`: trains tiny models for the mini tasks, from nothing and on any machine.

    tokenizer, training rows, initial weights  ->  autoregressive  ->  refusion, autoregressive_sft, llada, bd3lm

Each stage is a training run of the package (`refusion_eval.training.run`) with a configuration of `configs/`, followed
by a run of `refusion-eval` on the held-out items. All fine-tunes start from the backbone and see the same samples, so
that they are comparable and can be trained in any order. Every command is printed. The same command continues an
interrupted training, and what is finished is not made again.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from miniature.card import write_card
from miniature.data import DRAWS, items
from miniature.drills import DRILLS, drill_pairs
from miniature.initial import write_initial
from miniature.tokenizer import train_tokenizer
from refusion_eval.benchmarks import BENCHMARKS, Task
from refusion_eval.decoders import trained_decoders
from refusion_eval.store.atomic_write import write_atomically
from refusion_eval.training.checkpoints.save import replacing, save_backbone
from refusion_eval.training.config_files import read_run_config

SEED = 2512
VOCABULARY_SIZE = 2048
NUM_TOKENIZER_ITEMS, NUM_TRAIN_ITEMS = 3000, 15_000  # of each mini task
NUM_DRILL_ITEMS = 20_000  # of each drill

CONFIGS = Path(__file__).parent / "configs"
BACKBONE = "autoregressive"
STAGES = (BACKBONE, "refusion", "autoregressive_sft", "llada", "bd3lm")

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


def training_pairs(benchmark: str, count: int) -> Iterator[tuple[str, str]]:
    """The first `count` (query, response) pairs of the training stream of a mini task."""
    for item in islice(items(benchmark, test=False, seed=SEED), count):
        yield BENCHMARKS[benchmark].prompts.user(item.prompt_row), item.response


def write_tokenizer(target: Path) -> None:
    """Trains and writes the tokenizer."""
    pairs = [pair for benchmark in DRAWS for pair in training_pairs(benchmark, NUM_TOKENIZER_ITEMS)]
    turns = [text for query, response in pairs for text in ("user\n" + query, "assistant\n" + response)]
    with replacing(target) as part:
        train_tokenizer(turns, VOCABULARY_SIZE).save_pretrained(part)


def write_rows(target: Path) -> None:
    """Writes the training rows: items of the mini tasks, then drills of single steps."""
    pairs = [pair for benchmark in DRAWS for pair in training_pairs(benchmark, NUM_TRAIN_ITEMS)]
    for drill in DRILLS:
        pairs += drill_pairs(drill, seed=SEED, count=NUM_DRILL_ITEMS)
    lines = (json.dumps({"query": query, "response": response}) + "\n" for query, response in pairs)
    write_atomically(target, "".join(lines))


def settings_of(stage: str, work_dir: Path, changes: Sequence[str] = ()) -> list[str]:
    """What the command line of a training run adds to the configuration of a stage, as "section.key=value".

    Args:
        stage: a name in `STAGES` or `VARIANTS`.
        work_dir: folder of all runs.
        changes: further settings, which replace those of the stage but no path.
    """
    start = work_dir / "initial" if stage == BACKBONE else work_dir / BACKBONE / "model"
    paths = {
        "backbone.model": start,
        "data.files": work_dir / "train.jsonl",
        "data.cache_dir": work_dir / "tokens",
        "output.run_dir": work_dir / stage,
    }
    settings = [f"{key}={json.dumps(str(path))}" for key, path in paths.items()]
    return [*VARIANTS.get(stage, ()), *changes, "backbone.shape=null", *settings]


def config_of(stage: str) -> Path:
    """The configuration file of a stage."""
    return CONFIGS / f"{'refusion' if stage in VARIANTS else stage}.yaml"


def prepare(work_dir: Path, changes: Sequence[str] = ()) -> None:
    """Writes tokenizer, training rows and initial weights, as far as they are missing.

    Args:
        work_dir: folder of all runs.
        changes: settings of the training runs; those of `backbone.shape` and `backbone.seed` act here.
    """
    tokenizer, rows, initial = work_dir / "tokenizer", work_dir / "train.jsonl", work_dir / "initial"
    work_dir.mkdir(parents=True, exist_ok=True)
    if not tokenizer.exists():
        write_tokenizer(tokenizer)
    if not rows.exists():
        write_rows(rows)
    if not initial.exists():
        paths = (f"backbone.tokenizer={json.dumps(str(tokenizer))}", f"data.files={json.dumps(str(rows))}")
        write_initial(read_run_config(str(config_of(BACKBONE)), (*paths, *changes)).backbone, initial)


def train_stage(stage: str, work_dir: Path, changes: Sequence[str] = ()) -> None:
    """Trains one stage; see `settings_of`."""
    settings = [part for setting in settings_of(stage, work_dir, changes) for part in ("--set", setting)]
    _run("refusion_eval.training.run", "--config", str(config_of(stage)), *settings)


def measure(stage: str, work_dir: Path, num_items: int) -> None:
    """Prints the accuracy of a trained stage on the first held-out items of every mini task."""
    tasks = ",".join(Task(BENCHMARKS[name], mini=True).name for name in DRAWS)
    model, results = work_dir / stage / "model", work_dir / stage / "held_out"
    decoder = (*_decoders(stage, work_dir), "refusion")[0]
    options = ("--model", str(model), "--decoder", decoder, "--name", stage, "--run-dir", str(results))
    _run("refusion_eval", "run", *options, "--tasks", tasks, "--limit", str(num_items))


def export(stage: str, work_dir: Path, out_dir: Path) -> None:
    """Writes the checkpoint of a stage in bfloat16, with its card and its loss curve."""
    source, target = work_dir / stage / "model", out_dir / stage
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    save_backbone(model, tokenizer, target, decoders=_decoders(stage, work_dir))
    write_card(target, stage, [work_dir / name for name in dict.fromkeys((BACKBONE, stage))])


def _decoders(stage: str, work_dir: Path) -> Sequence[str]:
    objective = json.loads((work_dir / stage / "run.json").read_text())["config"]["objective"]["objective"]
    return trained_decoders(objective)


def _run(module: str, *arguments: str) -> None:
    print(f"$ python -m {shlex.join((module, *arguments))}", flush=True)
    subprocess.run((sys.executable, "-m", module, *arguments), check=True)


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
        "--held-out", type=int, default=50, help="held-out items of each task that a model answers; 0 for none"
    )
    given = parser.parse_args()
    stages = [name.strip() for name in given.stages.split(",")]
    known = (*STAGES, *VARIANTS)
    if unknown := [name for name in stages if name not in known]:
        parser.error(f"--stages: there is no stage {', '.join(map(repr, unknown))}; known: {', '.join(known)}")
    prepare(given.work_dir, given.changes)
    try:
        for stage in dict.fromkeys((BACKBONE, *stages)):
            train_stage(stage, given.work_dir, given.changes)
            if stage in stages and given.held_out:
                measure(stage, given.work_dir, given.held_out)
            if stage in stages and given.out_dir is not None:
                export(stage, given.work_dir, given.out_dir)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)


if __name__ == "__main__":
    main()
