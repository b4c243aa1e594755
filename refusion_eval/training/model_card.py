"""The README of an embedded checkpoint, written from its training records."""

import csv
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from refusion_eval.training.config import TrainConfig

_TITLES = {
    "autoregressive": "Embedded autoregressive backbone",
    "refusion": "Embedded ReFusion fine-tune",
    "autoregressive_sft": "Embedded autoregressive fine-tune",
    "llada": "Embedded LLaDA fine-tune",
    "bd3lm": "Embedded BD3-LM fine-tune",
}
_TEXTS = {
    "autoregressive": "Next-token training on the answers of the seven mini tasks and of drills of single steps.",
    "refusion": (
        "ReFusion's hybrid objective (AR on clean slots, MDM on masked slots, release normalisation) on the same data, "
        "from the embedded autoregressive backbone."
    ),
    "autoregressive_sft": (
        "Next-token training on the answers of the same data, from the embedded autoregressive backbone, for as many "
        "steps as the diffusion fine-tunes: the autoregressive row of a comparison at equal budget."
    ),
    "llada": (
        "LLaDA's supervised fine-tuning (masked answer, full attention, every mask predicted in its own row, EOS "
        "filling learned) on the same data, from the embedded autoregressive backbone. For the decoders llada and "
        "fast_dllm_llada."
    ),
    "bd3lm": (
        "Block diffusion, BD3-LM's objective (masked blocks, each given the clean blocks before it, all blocks in one "
        "forward), on the same data, from the embedded autoregressive backbone. For the decoder bd3lm with the "
        "`block_size` below as block_length."
    ),
}
_VARIANT_TEXT = (
    "Like the embedded ReFusion fine-tune, on the first part of its samples, each seen once, with other slot sizes "
    "where the settings below say so. One point of a study, not a model to compare systems with."
)


def write_card(
    target: Path,
    stage: str,
    configs: Mapping[str, TrainConfig],
    work_dir: Path,
    *,
    num_samples: int,
    hardware: str,
) -> None:
    """Writes README.md and loss.csv into the directory of a checkpoint."""
    lines = {name: (work_dir / name / "metrics.jsonl").read_text().splitlines() for name in configs}
    metrics = {name: [json.loads(line) for line in stage_lines] for name, stage_lines in lines.items()}
    with (target / "loss.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["stage", "step", "seconds", "lr", "ar", "mdm"])
        for name, rows in metrics.items():
            for row in rows:
                numbers = [f"{row[column]:.5g}" for column in ("lr", "ar", "mdm")]
                writer.writerow([name, row["step"], row["seconds"], *numbers])

    table = "".join(
        f"| {name} | {config.objective} | {config.num_steps} | {config.tokens_per_batch} "
        f"| {config.peak_lr:g}, {config.muon_lr:g} | {config.seed} | {metrics[name][-1]['seconds'] / 60:.1f}"
        f" | {metrics[name][-1]['ar']:.4f} "
        f"| {metrics[name][-1]['mdm']:.4f} |\n"
        for name, config in configs.items()
    )
    settings = json.dumps(asdict(configs[stage]), indent=2)
    title = _TITLES.get(stage, f"ReFusion variant {stage}")
    text = _TEXTS.get(stage, _VARIANT_TEXT)
    (target / "README.md").write_text(
        f"# {title}\n\n"
        f"{text}\n\n"
        "A tiny Qwen3 (head size 128, rotary base 1e6) with its own byte-level BPE tokenizer, trained from random "
        "weights (arranged by `refusion_eval.training.embedded.prepare_for_lookup`) on synthetic items made by "
        "`refusion_eval.benchmarks.mini`; no other data. It does the mini tasks and nothing else, and serves to run "
        "every part of this project with true (small) numbers on any machine.\n\n"
        f"- Data: {num_samples} synthetic conversations, disjoint from `tasks/mini/*/test.jsonl`: items of the seven "
        "mini tasks, and drills of single steps (sums, kinds of things, letters of options).\n"
        f"- Hardware: {hardware}.\n"
        "- Weights: bfloat16 (trained in float32).\n"
        "- Made by: `python -m refusion_eval.training.embedded`.\n"
        "- Loss curve: `loss.csv`.\n\n"
        "| stage | objective | steps | tokens a batch | peak lr (AdamW, Muon) | seed | minutes | last AR loss "
        "| last MDM loss |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
        f"{table}\n"
        f"Settings of the last stage:\n\n```json\n{settings}\n```\n",
        encoding="utf-8",
    )
