"""Tables of the Markdown files that are made from files in results/ and from the code, by the name of their markers.

A table is between `<!-- NAME:begin WORDS -->` and `<!-- NAME:end -->`; NAME is a key of `MAKERS`.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import torch
import yaml
from generated_common import GPU_RESULTS, RESULTS, ROOT, csv_rows, interval, listed, systems_of, table_of
from generated_courses import OF_COURSES
from generated_pairs import PAIRED, front
from generated_real import engines, engines_text, prompt_lengths, real, small_runs
from generated_text import FAMILY, means_of

from refusion_eval.bench.checkpoints import SHAPES, config_of
from refusion_eval.bench.gpu_check import CHECKS, GpuCheck
from refusion_eval.bench.gpu_report import results_rows
from refusion_eval.bench.predict import CARDS, WIDTHS, expected
from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.benchmarks.extract import answers, formulas, frames, letters, words
from refusion_eval.models.checkpoint import parse_model_config
from refusion_eval.models.device import weight_bytes
from refusion_eval.paper.tables import paper_table
from refusion_eval.results.measured import read_measurements
from refusion_eval.results.metric_list import METRICS
from refusion_eval.results.published import read_published
from refusion_eval.results.results_file import read_csv
from refusion_eval.results.tables import summary, summary_table
from refusion_eval.runs.server_facts import FIELDS
from refusion_eval.sandbox.jail import PROFILES
from refusion_eval.training.config import read_run_config
from refusion_eval.training.cost import GB, training_memory

NO_GPU = "No result of a GPU is in this repository: every speed and every memory need of one is an estimate.\n"
BLOCK = re.compile(r"(<!-- (\w+):begin ?([^>]*?) ?-->\n).*?(<!-- \2:end -->\n)", re.DOTALL)

Maker = Callable[[Sequence[str]], str]  # words behind the name -> Markdown


def regenerated(text: str) -> str:
    """The text with every table written again between its markers.

    Raises:
        KeyError: a marker names no table.
    """
    return BLOCK.sub(lambda found: f"{found[1]}{MAKERS[found[2]](found[3].split())}{found[4]}", text)


# --- Addresses ---


def clone(_: Sequence[str]) -> str:
    """Where the project, its site and a report page are, by the addresses in mkdocs.yml."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    repository, site = settings["repo_url"], settings["site_url"]
    unknown = urlsplit(repository).hostname == "example.org"
    badge = f"[![tests]({repository}/actions/workflows/tests.yaml/badge.svg)]({repository}/actions)"
    return (
        f"```bash\ngit clone {repository} refusion_eval && cd refusion_eval\n```\n\n"
        f"[Documentation]({site}) · [A sample report]({site}sample-report.html) with every answer of the tiny models · "
        f"{'`example.org` stands for the address, which `mkdocs.yml` does not name yet' if unknown else badge}\n"
    )


# --- Measurements ---


def results(tasks: Sequence[str]) -> str:
    """The compact table with its hardware; of all tasks if none is named, else of these and the mean."""
    rows = [row for row in read_csv(RESULTS / "results.csv") if not tasks or row.task in tasks or row.is_mean]
    hardware = ", ".join(sorted({row.hardware for row in rows if row.hardware}))
    return f"{summary_table(summary(rows)).markdown().strip()}\n\nMeasured on {hardware}.\n"


def gpu(_: Sequence[str]) -> str:
    """What was found on GPUs, or that nothing was."""
    rows = results_rows(GPU_RESULTS)
    return table_of(("Results", "GPU", "Check", "Verdict", "What was found"), rows, 5) if rows else NO_GPU


def gpu_checks(_: Sequence[str]) -> str:
    """The checks of `gpu-check` with the seconds that they are estimated to take."""
    rows = [
        (f"`{name}`", getattr(GpuCheck, name.replace("-", "_")).__doc__, int(seconds))
        for name, seconds in CHECKS.items()
    ]
    return table_of(("Check", "What it does", "Seconds, estimated"), rows, 2)


def gpu_estimate(_: Sequence[str]) -> str:
    """The expected forward of an 8B model by GPU and width, without the time of the host."""
    rows, config = [], config_of(SHAPES["8B"])
    size = weight_bytes(config, torch.bfloat16)
    for name, card in CARDS.items():
        for width in WIDTHS:
            parts = expected(card, config, width)
            total = sum(parts.values())
            share = f"{size / total / card.copy:.0%} of {card.copy / 1e12:.2f} TB/s"
            rows.append((name, width, *(f"{1e3 * part:.2f}" for part in (*parts.values(), total)), share))
    columns = ("GPU", "Width", "Products", "Head", "Small kernels", "Ends", "In all, ms", "Share of copying")
    return table_of(columns, rows)


def _paper_block(number: int) -> Maker:
    def block(files: Sequence[str]) -> str:
        table = paper_table(number, read_measurements([ROOT / file for file in files]))
        return table.markdown().partition("\n\n")[2]  # the text around the table has headings of its own

    return block


# What follows "golden" in the names of the files of recorded decodings -> whose they are.
RECORDED = {
    "": "ReFusion",
    "_ar": "transformers' greedy `generate`",
    "_llada": "LLaDA",
    "_dream": "Dream",
    "_bd3lm": "BD3-LM",
    "_fast_dllm_llada": "Fast-dLLM",
    "_fast_dllm_dream": "Fast-dLLM",
    "_d2f_llada": "D2F",
    "_d2f_dream": "D2F",
    "_wedlm": "WeDLM",
    "_idlm": "I-DLM",
    "_idlm_sampled": "I-DLM",
    "_d3llm_llada": "d3LLM",
    "_d3llm_dream": "d3LLM",
    "_dparallel_llada": "dParallel",
    "_dparallel_dream": "dParallel",
    "_sdar": "SDAR",
    "_freedave_sdar": "FreeDave",
    "_fast_dllm_v2": "Fast-dLLM v2",
    "_llada2": "LLaDA2",
}


def equal_data(systems: Sequence[str]) -> str:
    """Accuracy and TPF of systems of the embedded family by task, and what they show; the TPF of AR-SFT is always 1."""
    systems = systems_of(systems)
    rows = []
    for task, lines in groupby(summary(read_csv(RESULTS / "family.csv")), key=lambda line: line.task):
        by_system = {line.system: line for line in lines}
        scores = {system: by_system[system].measurement("accuracy") for system in systems}
        cells = [
            f"{interval(row.value, row.ci_low, row.ci_high, 0)} at {by_system[system].measurement('tpf').value:.1f}"
            for system, row in scores.items()
        ]
        first = next(iter(scores.values()))
        rows.append((f"**mean of {first.num_tasks}**" if first.is_mean else task, *cells))
    return f"{front(systems, means_of('tpf'))}\n{table_of(('Accuracy % at TPF', *systems), rows)}"


def recordings(_: Sequence[str]) -> str:
    """How many recorded decodings of public code the decoders are compared with."""
    files = {
        file.stem.removeprefix("golden"): file
        for file in (ROOT / "tests" / "data" / "parity").rglob("golden*.jsonl")
        if not file.stem.endswith("_accept")  # single decisions
    }
    unnamed = files.keys() - RECORDED.keys()
    assert not unnamed, f"say in RECORDED whose decodings these are: {sorted(unnamed)}"
    number = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files.values())
    return (
        f"The decoders give the tokens and forwards of {number} recorded decodings of public code, and in each forward "
        f"the same rows and committed tokens: of {listed(list(dict.fromkeys(RECORDED.values())))}.\n"
    )


def memory_bound(_: Sequence[str]) -> str:
    """Speed with weights that do not fit into the processor's cache."""
    measured = json.loads((RESULTS / "bench_0.6B_inflated.json").read_text(encoding="utf-8"))
    ratios = measured["ratios"]
    rows = []
    for name, standing, ratio in (
        ("Autoregressive, the same weights", "autoregressive", 1.0),
        ("ReFusion", "refusion", ratios["refusion unfused / our autoregressive"]),
        ("ReFusion, fused", "refusion fused", ratios["refusion fused / our autoregressive"]),
    ):
        found = measured["standings"][standing]
        tpf = found["num_tokens"] / found["num_forwards"]
        rows.append((name, f"{tpf:.1f}", f"{median(found['tokens_per_second']):.1f}", f"{ratio:.1f}"))
    return table_of(("Decoded", "TPF", "TPS", "Speed-up"), rows)


def hours(words: Sequence[str]) -> str:
    """Hours on one A100 by the published seconds a response; only the sum if the word `sum` is given."""
    seconds = {
        (row["system"], row["task"]): float(row["value"])
        for row in read_published("published.csv")
        if row["artefact"] == "table9_v2" and row["metric"] == "latency_mean"
    }
    items = {name: one.source.num_rows for name, one in BENCHMARKS.items() if one.in_paper}
    needs = {
        system: [seconds[system, name] * count / 3600 for name, count in items.items()]
        for system in ("refusion", "qwen3")
    }
    columns = zip(items, *needs.values(), strict=True)
    rows = [
        (name, f"{items[name]:,}", *(f"{need:.1f}" for need in need_by_system)) for name, *need_by_system in columns
    ]
    total = ("all", f"{sum(items.values()):,}", *(f"{sum(each):.0f}" for each in needs.values()))
    head = ("Benchmark", "Items", "ReFusion, hours", "Qwen3-8B, hours")
    return table_of(head, [total] if words == ["sum"] else [*rows, total])


def artefact(words: Sequence[str]) -> str:
    """The published figures of one artefact."""
    rows = [row for row in read_published("published.csv") if row["artefact"] == words[0]]
    columns = {"System": "label", "Task": "task", "Metric": "metric", "Value": "value", "Settings": "settings"}
    return table_of(list(columns), [[row[name] for name in columns.values()] for row in rows])


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
    means = [row for row in csv_rows("scaling.csv") if row["task"] == "average"]
    values = {
        (row["samples"], row["metric"]): interval(*(float(row[name]) for name in ("value", "ci_low", "ci_high")))
        for row in means
    }
    samples = dict.fromkeys(row["samples"] for row in means)
    rows = [(f"{int(each):,}", values[each, "accuracy"], values[each, "tps"]) for each in samples]
    hardware = ", ".join(sorted({row["hardware"] for row in means}))
    return table_of(("Training samples", "Accuracy, %", "TPS"), rows, 0) + f"\nMeasured on {hardware}.\n"


def slot_sizes(_: Sequence[str]) -> str:
    """Accuracy and parallelism by slot size."""
    figures = [figure for figure in read_csv(RESULTS / "slot_sizes.csv") if figure.is_mean]
    found: dict[int, dict[str, str]] = {}
    for figure in figures:
        found.setdefault(int(figure.settings["slot_size"]), {})[figure.metric] = f"{figure.value:.1f}"
    rows = [(size, values["accuracy"], values["tpf"]) for size, values in sorted(found.items())]
    return table_of(("Slot size", "Accuracy, %", "TPF"), rows, 0)


def _verifier_rows(rows: Iterable[Mapping[str, str]], of: Mapping[str, Callable[[Mapping[str, str]], str]]) -> str:
    """Accuracy by each rule, the paired difference and TPF, after columns of the table's own."""
    lines = []
    for row in rows:
        difference = interval(*(float(row[f"difference{end}"]) for end in ("", "_ci_low", "_ci_high")))
        accuracies = [f"{float(row[f'accuracy_{rule}']):.1f}" for rule in ("paper", "verifier")]
        counts = [f"{float(row[f'tpf_{rule}{way}']):.2f}" for way in ("", "_fused") for rule in ("paper", "verifier")]
        own = [text(row) for text in of.values()]
        lines.append((*own, *accuracies, difference, f"{float(row['p_value']):.2g}", *counts))
    columns = ("Paper %", "Verifier %", "Difference", "p", "TPF, paper", "TPF, verifier")
    return table_of((*of, *columns, "fused: paper", "fused: verifier"), lines, len(of))


def _verifier_block(kind: str) -> Maker:
    """The verifier's token against the paper's rule, by task, on items of a kind and the shipped checkpoint."""

    def block(_: Sequence[str]) -> str:
        rows = [row for row in csv_rows("verifier.csv") if row["items"] == kind]
        last = max(int(row["samples"]) for row in rows)
        return _verifier_rows([row for row in rows if int(row["samples"]) == last], {"Task": lambda row: row["task"]})

    return block


def verifier_courses(_: Sequence[str]) -> str:
    """The same over all tasks, by checkpoint and kind of items."""
    means = [row for row in csv_rows("verifier.csv") if row["task"] == "mean"]
    return _verifier_rows(
        means, {"Training samples": lambda row: f"{int(row['samples']):,}", "Items": lambda row: row["items"]}
    )


def training_memory_table(_: Sequence[str]) -> str:
    """GB on each GPU, computed from the shapes of Qwen3-8B."""
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


# What makes sentences, some of them with a table.
TEXTS: dict[str, Maker] = {
    **FAMILY,
    **PAIRED,
    **OF_COURSES,
    "recordings": recordings,
    "engines_text": engines_text,
    "real": real,
}

# --- Answers ---


def answer_frames(_: Sequence[str]) -> str:
    """Each frame in which an answer may stand, with an example and what is read in it: the rules are run."""
    readers: Sequence[tuple[str, Callable[[str], str | None]]] = (
        ("42", lambda text: answers.last_number_stated(text).answer),
        ("x+1", lambda text: formulas.last_box_or_statement(text).answer),
        ("C", lambda text: letters.last_letter_stated(text, 4).answer),
        ("True", lambda text: words.last_word_stated(text, words.PAIRS[0]).answer),
        ("ash birch", lambda text: words.last_list_stated(text).answer),
    )
    rows = []
    for strength, group in (("marked", frames.FRAMES), ("weaker", frames.WEAKER_FRAMES)):
        for frame in group:
            lines = frame.example.replace("{{{}}}", "{{}}").format("{}").split("\n")
            example = "<br>".join(f"`{line}`" for line in lines if line)
            read = [value for value, reader in readers if reader(frame.example.format(value)) == value]
            rows.append(f"| {frame.name} | {strength} | {example} | {', '.join(read)} |\n")
    head = "| Frame | Statement | Example | Values that are read in it |\n| :-- | :-- | :-- | :-- |\n"
    return head + "".join(rows)


def metric_definitions(_: Sequence[str]) -> str:
    rows = [(f"`{one.name}`", one.label, one.unit, one.meaning) for one in METRICS]
    return f"\n{table_of(('Name', 'On the page', 'Unit', 'Definition'), rows, 4)}"


def server_fields(_: Sequence[str]) -> str:
    """What is read of a server's answer beside its text: which field means what, and who tells it."""
    only = {True: ", diffusion models only", False: ", other models only", None: ""}
    rows = [
        (f"`{field.fact}`", f"`{field.place}`", field.unit, f"{field.told_by}{only[field.diffusion]}")
        for field in FIELDS
    ]
    return f"\n{table_of(('In the record', 'Field of the answer', 'Unit there', 'Told by'), rows, 4)}"


MAKERS: dict[str, Maker] = {
    "server_fields": server_fields,
    "metrics": metric_definitions,
    "frames": answer_frames,
    "clone": clone,
    "results": results,
    "small_runs": small_runs,
    "engines": engines,
    "prompt_lengths": prompt_lengths,
    "gpu": gpu,
    "gpu_checks": gpu_checks,
    "gpu_estimate": gpu_estimate,
    **{f"table{number}": _paper_block(number) for number in range(1, 8)},
    "equal_data": equal_data,
    "memory_bound": memory_bound,
    "hours": hours,
    "artefact": artefact,
    "csv": csv_table,
    "verifier": _verifier_block("test items"),
    "verifier_courses": verifier_courses,
    "verifier_settings": _verifier_block("test items, own settings"),
    "bench_train": bench_train,
    "soak": soak,
    "sandbox": sandbox,
    "tiers": tiers,
    "scaling": scaling,
    "slot_sizes": slot_sizes,
    "training_memory": training_memory_table,
    **TEXTS,
}
