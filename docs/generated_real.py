"""Makers of what the pages say of the real checkpoint, and of speed by engine and by the length of prompts."""

import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from generated_common import ROOT, csv_rows, interval, listed, table_of, title

from refusion_eval.results.metric_list import ACCURACY, SCORES
from refusion_eval.results.published import read_published
from refusion_eval.results.results_file import read_csv

REAL_RESULTS = ROOT / "results" / "real"
OWN = "this engine"
FEWEST = 5  # answers over which an interval of the bootstrap stands without a caution


class _Score(NamedTuple):
    """A score of the real checkpoint.

    Attributes:
        heading: what stands in the place of the benchmark's name.
        metrics: several have a mean without an interval.
        beside: tasks whose published figures are shown.
        guessing: percent that guessing gives.
    """

    task: str
    heading: str = ""
    metrics: Sequence[str] = SCORES
    beside: Sequence[str] = ()
    guessing: float = 0.0


_BY_INSTRUCTION = "accuracy by instruction"
REAL = (
    _Score("refusion_ifeval", "IFEval, prompts"),
    _Score("refusion_ifeval", "IFEval, instructions", (_BY_INSTRUCTION,)),
    _Score("refusion_ifeval", "IFEval, mean of both", (ACCURACY, _BY_INSTRUCTION), ("ifeval",)),
    _Score("refusion_arc_challenge_release", beside=("arc_challenge", "arc"), guessing=25.0),
    _Score("refusion_mmlu_redux_ok", beside=("mmlu",), guessing=25.0),  # of which nothing is published
    # The mean over its rows of 1 / number of choices, which is 0 for free answers.
    _Score("refusion_bbh", beside=("bbh",), guessing=26.4),
    _Score("refusion_gsm8k_release", beside=("gsm8k",)),
    _Score("refusion_humaneval_release", beside=("humaneval",)),
)
NEAR_FLOOR = 2  # points


def real(words: Sequence[str]) -> str:
    """The scores of the real checkpoint beside published ones; with the word "front" a sentence of them."""
    measured = {(row.task, row.metric): row for row in read_csv(REAL_RESULTS / "smollm2.csv")}
    published = [row for row in read_published("published.csv") if row["artefact"] == "smollm2"]
    rows, sentence, floors = [], [], []
    for entry in REAL:
        scores = [measured[entry.task, metric] for metric in entry.metrics if (entry.task, metric) in measured]
        first, is_mean = scores[0], len(scores) > 1
        name, value = entry.heading or title(first.benchmark), interval(first.value, first.ci_low, first.ci_high)
        if is_mean:
            value = f"{fmean(score.value for score in scores):.1f}"
        at_floor = not is_mean and first.ci_low <= entry.guessing + NEAR_FLOOR
        beside = [row for task in entry.beside for row in published if row["task"] == task]
        of = f" for {beside[0]['task'].upper()}" if beside and beside[0]["task"] != first.benchmark else ""
        printed = [f"published{of}: {beside[0]['value']}"] if beside else []
        told = ", ".join([*([] if is_mean else [f"{first.n:,} rows"]), *printed])
        (floors if at_floor else sentence).append(f"{name} {value} ({told})")
        shown = f"{value} (floor: {entry.guessing:g})" if at_floor else value
        shares = [f"{measured[entry.task, metric].value:.0f}" for metric in ("extracted", "cut", "collapsed")]
        of_others = [f"{row['value']} ({row['task']}; {row['settings'].replace('=', ': ')})" for row in beside]
        rows.append((name, first.n, shown, *shares, "; ".join(of_others) or "-"))
    if words == ["front"]:
        return (
            f"Accuracy in percent: {'; '.join(sentence)}. Near or below what guessing gives, so that they "
            f"cannot tell models of this size apart: {'; '.join(floors)}. What is published is of the bfloat16 "
            "weights, under other protocols.\n"
        )
    columns = ("Benchmark", "Rows", "Accuracy %", "Answer found %", "Cut short %", "Collapsed %", "Published %")
    return table_of(columns, rows)


def small_runs(_: Sequence[str]) -> str:
    """The loss of short trainings from the real checkpoint: the means of the first and of the last quarter of a log."""
    rows = []
    for path in sorted((REAL_RESULTS / "small").glob("*.csv")):
        entries = csv_rows(path.name, path.parent)
        quarter, losses = len(entries) // 4, [float(entry["total"]) for entry in entries]
        minutes = sum(float(entry["seconds"]) for entry in entries) / 60
        means = (f"{fmean(part):.2f}" for part in (losses[:quarter], losses[-quarter:]))
        rows.append((f"`smollm2_{path.stem}`", entries[-1]["step"], *means, f"{minutes:.0f}"))
    return table_of(("Recipe", "Steps", "Loss, first quarter", "Loss, last quarter", "Minutes"), rows)


def _rate(rows: Sequence[Mapping[str, str]]) -> float:
    """Tokens per second after the first token, which belongs to the prompt."""
    return sum(int(row["tokens"]) - 1 for row in rows) / sum(float(row["decode_seconds"]) for row in rows)


def engines(words: Sequence[str]) -> str:
    """Tokens per second of each engine by threads and length, for these types of weights or, with memory, for all."""
    rows = csv_rows("engines.csv", REAL_RESULTS)
    places = sorted({(int(row["threads"]), int(row["length"])) for row in rows})
    by_engine: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        if not words or row["weights"] in words:
            by_engine.setdefault((row["weights"], row["engine"]), []).append(row)
    kinds = ("F32", "F16", "BF16", "file")
    lines = []
    for (weights, engine), own in sorted(by_engine.items(), key=lambda of: (kinds.index(of[0][0]), of[0][1] != OWN)):
        rates = []
        for place in places:
            there = [row for row in own if (int(row["threads"]), int(row["length"])) == place]
            rates.append(f"{_rate(there):.1f}")
        memory = [] if words else [max(int(row["peak_mb"]) for row in own)]
        lines.append((engine, {"file": "Q4_1"}.get(weights, weights), *rates, *memory))
    sizes = {place: {int(row["prompt_tokens"]) for row in rows if row["length"] == str(place[1])} for place in places}
    headings = [f"{threads} × {fmean(sizes[threads, length]):.0f}" for threads, length in places]
    items = {length: {row["item"] for row in rows if row["length"] == str(length)} for _, length in places}
    counts = [f"{len(items[length])} of about {length:,} tokens" for length in sorted(items)]
    prompts = f"\nPrompts: {listed(counts)}, each decoded once, on {rows[0]['cpu']}.\n"
    table = table_of(("Engine", "Weights", *headings, *([] if words else ["MB"])), lines, 2)
    return table if words else table + prompts


def engines_text(_: Sequence[str]) -> str:
    """How the speeds of `engines` compare with transformers', what bounds them, and where its tokens differ."""
    rows = csv_rows("engines.csv", REAL_RESULTS)

    def of(engine: str, place: tuple[str, str], weights: str = "F32") -> list[dict[str, str]]:
        wanted = (*place, engine, weights)
        return [row for row in rows if (row["threads"], row["length"], row["engine"], row["weights"]) == wanted]

    def ratio(place: tuple[str, str], other: str, weights: str = "F32") -> float:
        return _rate(of(OWN, place, weights)) / _rate(of(other, place, weights))

    places = dict.fromkeys((row["threads"], row["length"]) for row in rows)
    ratios: dict[str, list[float]] = {}
    for place in places:
        ratios.setdefault(place[0], []).append(ratio(place, "transformers"))
    kinds = dict.fromkeys(row["weights"] for row in rows if row["engine"] == OWN)
    faster = [ratio(place, "llama.cpp", kind) for place in places for kind in kinds]
    one, two = (f"{min(ratios[threads]):.1f} to {max(ratios[threads]):.1f}" for threads in ("1", "2"))
    shortest, shares = min((length for _, length in places), key=int), []
    for threads in ratios:
        own = of(OWN, (threads, shortest))
        if copied := own[0]["copy_gb_per_second"]:  # nothing disturbed its measurement
            share = _rate(own) * float(own[0]["weight_bytes"]) / float(copied) / 1e9
            shares.append(f"{share:.0%} ({threads} thread{'s' * (threads != '1')})")
    answers = [row for row in rows if row["engine"] == OWN and row["weights"] in ("F16", "BF16")]
    leads = [float(row["margin"]) for row in answers if row["margin"]]
    rounded = (
        f" {len(answers) - len(leads)} of {len(answers)} answers with 16-bit weights are those of float32; the others "
        f"leave it where its first choice led by {max(leads):.3f} or less, because the weights were rounded."
        if leads
        else ""
    )
    return (
        f"In float32 this engine is {one} times as fast as transformers with one thread, and {two} times with two. "
        f"Weights of the same type decode {min(faster):.2f} to {max(faster):.2f} times as fast as in llama.cpp. After "
        f"the shortest prompts it reads its weights at {listed(shares)} of the speed of a copy by as many threads, "
        f"which bounds it. 16-bit weights stay 16 bits in memory and are computed with in float32.{rounded}\n"
    )


def prompt_lengths(words: Sequence[str]) -> str:
    """Speed by the length of the prompt (`bench --prompt-lengths`), for each of these files of results/lengths."""
    lines, sources, numbers = [], {}, set()
    for word in words:
        measured = json.loads((ROOT / "results" / "lengths" / f"{word}.json").read_text(encoding="utf-8"))
        conditions = measured["conditions"]
        for figure in measured["figures"]:
            first = [1000 * value for value in figure["first_seconds"]]
            counts = [f"{figure[name]:,.0f}" for name in ("forwards", "rows", "cached_rows")]
            times = (interval(*first, digits=0), interval(*figure["decode_tps"]), f"{figure['tpf'][0]:.2f}")
            memory = f"{figure['peak_bytes'] / 1e6:,.0f}"
            lines.append((word, figure["system"], f"{figure['prompt_tokens']:,.0f}", *times, *counts, memory))
        machine = next(iter(conditions["systems"].values()))["hardware"]
        number = conditions["num_rounds"]
        num_answers = measured["figures"][0]["num_answers"]
        numbers.add(num_answers)
        extent = f"{num_answers} answers a length in {number} round{'s' * (number > 1)}"
        ends = ", each of the full length (`--ignore-eos`)" if conditions.get("ignore_eos") else ""
        sources.setdefault(f"{extent}{ends}, on {machine['cpu']}", []).append(word)
    columns = ("Model", "System", "Prompt tokens", "First forward, ms", "Tokens/s after it", "TPF", "Forwards")
    table = table_of((*columns, "New rows", "Cached rows", "MB"), lines, 2)
    conditions_of = "; ".join(f"{listed(names)}: {extent}" for extent, names in sources.items())
    few = min(numbers)
    spread = (
        f" An interval over {few} answers shows their spread, and holds the true value in fewer than 95 % of cases."
    )
    return f"{table}\n{conditions_of}.{spread if few < FEWEST else ''}\n"
