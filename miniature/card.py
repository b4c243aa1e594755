"""The README of a tiny checkpoint, written from the records of its training runs."""

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas

from miniature.family import Family

_TITLES = {
    "autoregressive": "Embedded autoregressive backbone",
    "refusion": "Embedded ReFusion fine-tune",
    "autoregressive_sft": "Embedded autoregressive fine-tune",
    "llada": "Embedded LLaDA fine-tune",
    "bd3lm": "Embedded BD3-LM fine-tune",
    "idlm": "Embedded I-DLM fine-tune",
    "wedlm": "Embedded WeDLM fine-tune",
}
_TEXTS = {
    "autoregressive": "Next-token training on the answers of the mini tasks and of drills of single steps.",
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
    "idlm": (
        "I-DLM's objective (next tokens of the text, and of blocks of masks that continue it, with causal attention) "
        "on the same data: in its last course, from the embedded autoregressive fine-tune. For the decoder idlm with "
        "up to one more than the `block_size` below as gen_block_size."
    ),
    "wedlm": (
        "WeDLM's objective (next tokens of the text, and masked blocks with their known tokens first, with causal "
        "attention) on the same data: in its last course, from the embedded autoregressive fine-tune. For the decoder "
        "wedlm with up to the `block_size` below as window_size."
    ),
}
_VARIANT_TEXT = (
    "Like the embedded ReFusion fine-tune, on part of its samples, each seen once, with other slot sizes where the "
    "settings below say so. One point of a study, not a model to compare systems with."
)
_LOSS_COLUMNS = ("stage", "step", "seconds", "lr", "ar", "mdm")


def read_record(run_dir: Path) -> dict[str, Any]:
    """The record of a training run."""
    record: dict[str, Any] = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    return record


def num_samples(run: Mapping[str, Any]) -> int:
    """Number of samples that a training run took, from its record."""
    return int(run["steps"] * run["config"]["optimisation"]["global_batch_size"])


def write_card(family: Family, target: Path, stage: str, run_dirs: Sequence[Path]) -> None:
    """Writes README.md and loss.csv into the directory of a checkpoint.

    Args:
        family: what the checkpoint was trained on.
        target: directory of the checkpoint, which holds its config.json.
        stage: name of the last stage.
        run_dirs: training runs of the backbone and of the stage, in this order.
    """
    runs = {folder.name: read_record(folder) for folder in run_dirs}
    logs = {folder.name: pandas.read_csv(folder / "log.csv") for folder in run_dirs}
    losses = pandas.concat(log.assign(stage=name, seconds=log.seconds.cumsum()) for name, log in logs.items())
    losses.to_csv(target / "loss.csv", columns=_LOSS_COLUMNS, index=False, float_format="%.5g")

    facts = list(runs.values())[-1]
    head_dim = json.loads((target / "config.json").read_text(encoding="utf-8"))["head_dim"]
    table = "".join(_table_row(name, run, logs[name]) for name, run in runs.items())
    optimisation = facts["config"]["optimisation"]
    backbone, *fine_tunes = map(num_samples, runs.values())
    seen = f"{sum(fine_tunes) or backbone} synthetic conversations"
    if fine_tunes:
        seen += f" after the backbone's {backbone}"
    settings = json.dumps({name: facts["config"][name] for name in ("objective", "optimisation")}, indent=2)
    (target / "README.md").write_text(
        f"# {_TITLES.get(stage, f'ReFusion variant {stage}')}\n\n"
        f"{_TEXTS.get(stage, _VARIANT_TEXT)}\n\n"
        f"A tiny Qwen3 (head size {head_dim}, rotary base 1e6) with its own byte-level BPE tokenizer, trained from "
        "random weights (arranged by `miniature.initial.prepare_for_lookup`) on synthetic items made by `miniature`; "
        "no other data. It does the mini tasks and nothing else, and serves to run every part of this project with "
        "true (small) numbers on any machine.\n\n"
        f"- Data: {seen}, disjoint from `tasks/mini/*/test.jsonl`: "
        f"{len(family.draws)} mini tasks ({', '.join(family.draws)}) and drills of single steps "
        f"({', '.join(family.drills)}).\n"
        f"- Hardware: {facts['device']} ({platform.machine()}), torch {facts['versions']['torch']}.\n"
        f"- EOS filling: {100 * facts['data'].get('eos_filling', 0):.0f} % of the answers' tokens, up to a multiple of "
        f"{facts['config']['objective']['eos_multiple']} tokens (0: none).\n"
        f"- Weights: bfloat16 (trained in float32, with matrix products in {optimisation['compute_dtype']}).\n"
        "- Made by: `python -m miniature.train`.\n"
        "- Loss curve: `loss.csv`.\n\n"
        "| stage | objective | optimiser | steps | samples a step | peak lr | seed | minutes | last AR loss "
        "| last MDM loss | SHA-256 of its rows |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|\n"
        f"{table}\n"
        f"Settings of the last stage:\n\n```json\n{settings}\n```\n",
        encoding="utf-8",
    )


def _table_row(name: str, run: dict[str, Any], log: pandas.DataFrame) -> str:
    objective, optimisation = (run["config"][section] for section in ("objective", "optimisation"))
    last = log.iloc[-1]
    cells = (
        name,
        objective["objective"],
        optimisation["optimizer"],
        run["steps"],
        optimisation["global_batch_size"],
        f"{optimisation['lr']:g}",
        optimisation["seed"],
        f"{log.seconds.sum() / 60:.1f}",
        f"{last.ar:.4f}",
        f"{last.mdm:.4f}",
        run["data"]["files"][0]["sha256"][:8],
    )
    return f"| {' | '.join(map(str, cells))} |\n"
