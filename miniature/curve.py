"""`python -m miniature.curve`: accuracy on held-out draws over the steps of each stage's training.

Every checkpoint that a stage kept (`output.keep`) is measured on the same draws, which are no test items and are of
the grades of training, with the plain settings of its decoder (`measure.PLAIN`). A CSV that exists is continued.

    python -m miniature.curve --work-dir W --out results/embedded/learning_curves.csv
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from miniature.family import TRAINED_GRADES, Family
from miniature.measure import PLAIN, draws, measure
from miniature.panels import panels
from miniature.train import decoders_of, plain_decoder, runs_of
from refusion_eval import api
from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.paper.style import style_of
from refusion_eval.training.checkpoints.save import save_backbone
from refusion_eval.training.trainer import CHECKPOINTS, PREFIX, WEIGHTS_FILE, checkpoints

# The fine-tunes and the names of their systems in figures.
SERIES = {"autoregressive_sft": "AR-SFT", "bd3lm": "BD3-LM", "llada": "LLaDA", "refusion": "ReFusion"}
COLUMNS = ("stage", "step", "samples", "task", "n", "accuracy", "tpf")


def models(work_dir: Path, stage: str, steps: Sequence[int]) -> Iterator[tuple[int, int, api.LoadedModel]]:
    """The kept checkpoints of a stage, without those of `steps`: optimiser steps and samples so far, and the model."""
    before = 0
    for run in runs_of(stage):
        folder = work_dir / run
        if not (folder / "model").exists():
            return
        facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        batch = facts["config"]["optimisation"]["global_batch_size"]
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
        for checkpoint in checkpoints(folder / CHECKPOINTS):
            step = before + int(checkpoint.name.removeprefix(PREFIX))
            if step in steps:
                continue
            weights = torch.load(checkpoint / WEIGHTS_FILE, map_location="cpu", weights_only=True)
            loaded = {name.removeprefix("model."): weight for name, weight in weights.items()}  # of `LossModel`
            model.load_state_dict(loaded | {"lm_head.weight": loaded["model.embed_tokens.weight"]})
            with TemporaryDirectory() as target:
                save_backbone(model, tokenizer, Path(target) / "model", decoders=decoders_of(stage, work_dir))
                yield step, step * batch, api.load_model(f"{target}/model")
        before += facts["steps"]


def measured(family: Family, work_dir: Path, stages: Sequence[str], num_items: int, out: Path) -> pandas.DataFrame:
    """Measures all checkpoints that the CSV lacks, and appends each to it at once."""
    rows = pandas.read_csv(out) if out.exists() else pandas.DataFrame(columns=COLUMNS)
    for stage in stages:
        decoder = plain_decoder(stage, work_dir)
        settings = {"gen_length": family.gen_length, **PLAIN[decoder]}
        for step, samples, model in models(work_dir, stage, rows[rows.stage == stage].step.tolist()):
            for task in family.draws:
                chosen = draws(family, task, num_items)
                found = measure(model, decoder, BENCHMARKS[task], chosen, **settings)
                row = (stage, step, samples, task, len(chosen), found.accuracy, found.tpf)
                rows.loc[len(rows)] = list(row)
            rows.to_csv(out, index=False, float_format="%.6g")
            mean = rows[(rows.stage == stage) & (rows.step == step)].accuracy.mean()
            print(f"{stage} after {step} steps: {mean:.1f} % in the mean of {len(family.draws)} tasks", flush=True)
    return rows


def draw(family: Family, rows: pandas.DataFrame, target: Path) -> None:
    """Draws one panel a task, with the accuracy of each stage over the samples of its training."""
    with panels(list(family.draws), "Thousand training samples of the fine-tune", target) as drawn:
        for task, axes in drawn.items():
            for stage, name in SERIES.items():
                points = rows[(rows.stage == stage) & (rows.task == task)].sort_values("samples")
                style = style_of(stage)
                axes.plot(points.samples / 1000, points.accuracy, color=style.colour, marker=style.marker, label=name)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m miniature.curve", description="Accuracy over training.")
    parser.add_argument("--work-dir", type=Path, required=True, help="runs of the stages")
    parser.add_argument("--stages", default=",".join(SERIES), help="stages, separated by commas: %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="the CSV; the picture is written beside it")
    parser.add_argument("--held-out", type=int, default=50, help="held-out draws of each task: %(default)s")
    given = parser.parse_args()
    family = TRAINED_GRADES
    rows = measured(family, given.work_dir, given.stages.split(","), given.held_out, given.out)
    draw(family, rows, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
