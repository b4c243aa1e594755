"""Tables of the documentation that are made from files in results/ and from the code, by the name of their markers."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from readme_table import Maker

from refusion_eval.results.render import Table, markdown_source, read_csv
from refusion_eval.sandbox.jail import PROFILES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "embedded"


def table_of(columns: Sequence[str], rows: Sequence[Sequence[Any]], num_left: int = 1) -> str:
    """A Markdown table of plain values."""
    texts = [[str(value) for value in row] for row in rows]
    return Table(columns=list(columns), rows=texts, num_left=num_left, escape=markdown_source).markdown()


def csv_table(words: Sequence[str]) -> str:
    """A CSV file as it is."""
    with (ROOT / words[0]).open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return table_of(head, rows)


def bench_train(_: Sequence[str]) -> str:
    """Training against a plain loop with padding."""
    rows = []
    for entry in json.loads((RESULTS / "bench_train.json").read_text(encoding="utf-8")):
        speed, low, high, memory, *_ = entry["ratios"].values()
        size, padded = entry["conditions"]["batch_size"], entry["rows"]["padded"]
        rows.append([size, f"{speed:.1f} ({low:.1f} to {high:.1f})", f"{memory:.2f}", f"{padded:.2f}"])
    columns = ("Samples a step", "tokens/s, times the plain loop", "Peak memory, times", "Rows a useful token, padded")
    return table_of(columns, rows, 0)


def soak(_: Sequence[str]) -> str:
    """Many requests in one process."""
    found = json.loads((RESULTS / "soak.json").read_text(encoding="utf-8"))
    conditions, first, last = found["conditions"], found["moments"][0], found["moments"][-1]
    rows = [
        ("requests, of random prompts, lengths, settings and batches", f"{conditions['num_requests']:,}"),
        ("decoders", len(found["decoded"])),
        ("requests that failed", found["failed"]),
        ("repeated probes that drifted", found["drifted"]),
        ("live tensors before and after, MiB", " and ".join(f"{m['tensor_bytes'] / 2**20:.1f}" for m in (first, last))),
        ("memory of the process, second round and last, MiB", _mib(found["moments"][1], last)),
    ]
    return table_of(("`python performance/soak.py --max-gen 64 --max-prompt 128`", "Found"), rows)


def _mib(*moments: dict[str, Any]) -> str:
    return " and ".join(f"{moment['host_bytes'] / 2**20:.0f}" for moment in moments)


def sandbox(_: Sequence[str]) -> str:
    """Programs a second."""
    found = json.loads((RESULTS / "sandbox.json").read_text(encoding="utf-8"))
    rows = [(name, f"{median(rates):.0f}", len(rates)) for name, rates in found["rates"].items()]
    head = f"`python performance/sandbox.py --rounds 7`: {found['num_programs']} references of HumanEval"
    columns = (head, f"Checks a second, {found['workers']} at a time", "Rounds")
    return table_of(columns, rows) + f"\nMeasured on {found['conditions']['cpu']}.\n"


def tiers(_: Sequence[str]) -> str:
    """The ways to isolate a program, the strongest first."""
    rows = [(profile.tier, name, ", ".join(profile.layers)) for name, profile in PROFILES.items()]
    return table_of(("Tier", "Profile", "Layers"), rows, 3)


def scaling(_: Sequence[str]) -> str:
    """Accuracy and speed by training samples."""
    with (RESULTS / "scaling.csv").open(encoding="utf-8", newline="") as file:
        means = [row for row in csv.DictReader(file) if row["task"] == "average"]
    values = {(row["samples"], row["metric"]): _with_interval(row) for row in means}
    samples = dict.fromkeys(row["samples"] for row in means)
    rows = [(f"{int(each):,}", values[each, "accuracy"], values[each, "tps"]) for each in samples]
    hardware = ", ".join(sorted({row["hardware"] for row in means}))
    return table_of(("Training samples", "Accuracy, %", "TPS"), rows, 0) + f"\nMeasured on {hardware}.\n"


def _with_interval(row: dict[str, str]) -> str:
    value, low, high = (float(row[name]) for name in ("value", "ci_low", "ci_high"))
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def slot_sizes(_: Sequence[str]) -> str:
    """Accuracy and parallelism by slot size."""
    figures = [figure for figure in read_csv(RESULTS / "slot_sizes.csv") if figure.is_mean]
    found: dict[int, dict[str, str]] = {}
    for figure in figures:
        found.setdefault(int(figure.settings["slot_size"]), {})[figure.metric] = f"{figure.value:.1f}"
    rows = [(size, values["accuracy"], values["tpf"]) for size, values in sorted(found.items())]
    return table_of(("Slot size", "Accuracy, %", "TPF"), rows, 0)


def training_memory_table(_: Sequence[str]) -> str:
    """GB on each GPU, computed from the shapes of Qwen3-8B."""
    from refusion_eval.bench.checkpoints import SHAPES  # transformers loads slowly
    from refusion_eval.models.checkpoint import parse_model_config
    from refusion_eval.training.config import read_run_config
    from refusion_eval.training.cost import GB, training_memory

    settings = {
        "`refusion_8b` as it is (`zero2`, all weights)": (),
        "with `optimisation.offload_optimizer=true`": ("optimisation.offload_optimizer=true",),
        "`parallelism=fsdp`, `backbone.dtype=float32`": ("parallelism=fsdp", "backbone.dtype=float32"),
        "`parallelism=ddp`, `backbone.lora={rank: 16, alpha: 32}`": (
            "parallelism=ddp",
            "backbone.lora={rank: 16, alpha: 32}",
        ),
    }
    shape = {"model_type": "qwen3", **asdict(SHAPES["8B"]), "head_dim": 128, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
    shape |= {"max_position_embeddings": 40960, "hidden_act": "silu", "tie_word_embeddings": False}
    model = parse_model_config(shape, ROOT)
    rows = []
    for name, changes in settings.items():
        config = read_run_config("refusion_8b", changes)
        needs = [training_memory(config, model, count) / GB for count in (1, 2, 4, 8)]
        rows.append([name, *(f"{need:.0f}" for need in needs)])
    return table_of(("Setting", "1 GPU", "2", "4", "8"), rows)


MAKERS: dict[str, Maker] = {
    "csv": csv_table,
    "bench_train": bench_train,
    "soak": soak,
    "sandbox": sandbox,
    "tiers": tiers,
    "scaling": scaling,
    "slot_sizes": slot_sizes,
    "training_memory": training_memory_table,
}
