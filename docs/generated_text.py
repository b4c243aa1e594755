"""Sentences and tables about the embedded family and GPUs that state numbers or an order, made from results.

Each is a maker like those of `generated_tables`.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas
from generated_common import (
    AR,
    AR_SFT,
    BD3LM,
    GPU_RESULTS,
    REFUSION,
    RESULTS,
    interval,
    listed,
    systems_of,
    table_of,
    title,
)

from miniature.frontier import is_ablation
from refusion_eval.paths import EMBEDDED_FOLDER
from refusion_eval.results.measurement import Measurement
from refusion_eval.results.results_file import read_csv
from refusion_eval.results.tables import SummaryLine, summary

Rows = Mapping[str, Mapping[str, Measurement]]  # task -> system -> measurement


@functools.cache  # its thousands of rows take seconds
def _family() -> Sequence[SummaryLine]:
    return summary(read_csv(RESULTS / "family.csv"))


def _by_task(metric: str) -> tuple[Rows, Mapping[str, Measurement]]:
    """The measurements of a metric in family.csv by task and system, and those of the mean by system."""
    tasks: dict[str, dict[str, Measurement]] = {}
    for line in _family():
        if found := line.measurement(metric):
            tasks.setdefault(line.task, {})[line.system] = found
    return {task: rows for task, rows in tasks.items() if task != "mean"}, tasks["mean"]


def _ranked(means: Mapping[str, Measurement], digits: int, *, bounds: bool = False) -> str:
    """The systems from the largest value to the smallest, with the bounds of the intervals if asked for."""
    in_order = sorted(means.items(), key=lambda entry: -entry[1].value)
    values = {
        system: interval(row.value, row.ci_low, row.ci_high, digits) if bounds else f"{row.value:.{digits}f}"
        for system, row in in_order
    }
    return listed([f"{system} has {value}" for system, value in values.items()])


def means_of(metric: str) -> dict[str, float]:
    """The mean of a metric over all tasks of family.csv, by system."""
    return {system: row.value for system, row in _by_task(metric)[1].items()}


def family(_: Sequence[str]) -> str:
    """Accuracy, tokens a forward and speed of all systems of the family."""
    _, mean_accuracy = _by_task("accuracy")
    _, mean_tps = _by_task("tps")
    tpf, mean_tpf = _by_task("tpf")
    speedups, mean_speedup = _by_task("speedup")
    tokens, _ = _by_task("tokens_mean")
    at_once = [f"{title(task)} ({rows[REFUSION].value:.1f})" for task, rows in tpf.items() if rows[REFUSION].value > 10]
    factors = {f"{title(task)} ({rows[REFUSION].value:.1f})": rows[REFUSION] for task, rows in speedups.items()}
    sides = {
        "lies above 1 on": [task for task, row in factors.items() if row.ci_low > 1],
        "lies below 1 on": [task for task, row in factors.items() if row.ci_high < 1],
        "includes 1 on": [task for task, row in factors.items() if row.ci_low <= 1 <= row.ci_high],
    }
    where = [f"{side} {listed(tasks)}" for side, tasks in sides.items() if tasks]
    lengths = sorted(rows[REFUSION].value for rows in tokens.values())
    mean, calibration = mean_speedup[REFUSION], mean_speedup[AR_SFT]
    return (
        f"Over all tasks, in tokens per forward, {_ranked(mean_tpf, 1)}. ReFusion writes more than 10 tokens per "
        f"forward on {listed(at_once)}, where it writes most of a response at once.\n\n"
        f"In the mean of the tasks, in percent of right answers, {_ranked(mean_accuracy, 1)}.\n\n"
        f"In tokens per second, {_ranked(mean_tps, 0, bounds=True)}. AR-SFT has the shape and the decoding loop of AR, "
        f"and {interval(calibration.value, calibration.ci_low, calibration.ci_high, 2)} times its speed, so that a "
        "ratio within this interval may be due to the machine alone.\n\n"
        f"In tokens per second ReFusion has {interval(mean.value, mean.ci_low, mean.ci_high)} times the speed of its "
        f"autoregressive backbone in the mean. The interval of the factor {'; it '.join(where)}. These intervals are "
        f"over items and {mean.num_rounds} rounds, and [so few rounds say little about other states of the machine]"
        "(explanations/what-is-measured.md#intervals). With "
        f"3.0 million parameters and responses of {lengths[0]:.0f} to {lengths[-1]:.0f} tokens this says nothing about "
        "the methods at their own size.\n"
    )


def speed_range(_: Sequence[str]) -> str:
    """How far the speed of the machine changed between the rounds."""
    mean = _by_task("tps")[1][AR]
    return (
        f"The interval of AR's speed in the mean of the tasks is {mean.ci_low:,.0f} to {mean.ci_high:,.0f} tokens per "
        "second, because the speed of the machine changes between rounds. Compare tokens per forward first.\n"
    )


def memory(_: Sequence[str]) -> str:
    """Times of forwards whose weights do not fit into the processor's cache."""
    found = json.loads((RESULTS / "bench_0.6B_inflated.json").read_text(encoding="utf-8"))
    one, wide = (found["curves"]["0"][width][0] for width in ("1", "32"))
    conditions, settings = found["conditions"], found["conditions"]["settings"]
    rate, share = found["weight_bytes"] / one / 1e9, 100 * found["ratios"]["MBU of a forward of 1 row"]
    return (
        f"They have {found['weight_bytes'] / 1e9:.1f} GB in {conditions['dtype']} "
        f"(`results/embedded/bench_0.6B_inflated.json`; {conditions['num_prompts']} prompts of the mini tasks, at most "
        f"{settings['gen_length']} tokens, {conditions['num_rounds']} rounds). One row takes {1e3 * one:.0f} ms, or "
        f"{rate:.1f} GB/s of weights, {share:.0f} % of what copying reaches, and 32 rows take {1e3 * wide:.0f} ms. "
        f"ReFusion decodes with slots of {settings['slot_size']} in blocks of {settings['block_size']}:\n"
    )


def _frontiers() -> pandas.DataFrame:
    """The points of all systems; `parallel` says whether the settings let a system write several tokens a forward."""
    rows = pandas.read_csv(RESULTS / "frontiers.csv")
    return rows.assign(parallel=[json.loads(text).get("threshold", 0) is not None for text in rows.settings])


def grid(_: Sequence[str]) -> str:
    """How many settings of each system were tried."""
    rows = _frontiers()
    counts = rows.groupby("system", sort=False).agg({"settings": "nunique", "n": "max"})
    fewer = "".join(f", those of {system} on {row.n}" for system, row in counts.iterrows() if row.n < rows.n.max())
    return (
        f"For each task the settings are {listed([f'{row.settings} of {name}' for name, row in counts.iterrows()])}, "
        f"each on {rows.n.max()} draws{fewer}.\n"
    )


def most_accurate(_: Sequence[str]) -> str:
    """The most accurate setting of each system but its ablations, by task, and the mean."""
    rows = _frontiers()
    rows = rows[~rows.settings.map(is_ablation)]
    best = rows.groupby(["system", "task"], sort=False).accuracy.max().unstack(sort=False)
    best = best.assign(mean=best.mean(axis=1)).sort_values("mean", ascending=False)
    heads = [*(title(f"mini_{task}") for task in best.columns[:-1]), "mean"]
    return table_of(
        ("Most accurate setting", *heads),
        [
            (system, *(f"{value:.0f}" for value in each[:-1]), f"{each.iloc[-1]:.1f}")
            for system, each in best.iterrows()
        ],
    )


def equal_parallelism(words: Sequence[str]) -> str:
    """The best accuracy of systems among settings that are at least as parallel as the best one of the first system.

    The systems are named as in `equal_data`.
    """
    reference, *others = systems_of(words)
    rows = _frontiers()
    lines, ahead, reached = [], dict.fromkeys(others, 0), dict.fromkeys(others, 0)
    for task, points in rows.groupby("task", sort=False):
        best = points[(points.system == reference) & points.parallel].nlargest(1, ["accuracy", "tpf"]).iloc[0]
        line = [title(f"mini_{task}"), f"{best.tpf:.1f}", f"{best.accuracy:.0f}"]
        for system in others:
            fitting = points[(points.system == system) & (points.tpf >= best.tpf)]
            line.append("-" if fitting.empty else f"{fitting.accuracy.max():.0f}")
            reached[system] += not fitting.empty
            ahead[system] += bool(fitting.accuracy.max() > best.accuracy)
        lines.append(line)
    columns = ("Task", "TPF at least", f"{reference} %", *(f"{system} %" for system in others))
    counted = [
        f"{system} is so parallel on {reached[system]} of {len(lines)} tasks and ahead of {reference} on {number}"
        for system, number in ahead.items()
    ]
    return (
        f"{table_of(columns, lines)}\n{'; '.join(counted)}. These are counts of the higher of two figures on draws, "
        "without a test of the differences.\n"
    )


def _course_ends() -> list[int]:
    """The optimiser steps of the fine-tunes at the end of each course."""
    log = pandas.read_csv(EMBEDDED_FOLDER / "refusion" / "loss.csv")
    return log[log.stage != "autoregressive"].groupby("stage", sort=False).step.max().cumsum().tolist()


def _samples_after() -> dict[int, int]:
    rows = pandas.read_csv(RESULTS / "learning_curves.csv")
    return dict(zip(rows.step, rows.samples, strict=True))


def training(_: Sequence[str]) -> str:
    """In which courses the fine-tunes were trained."""
    ends, samples_of = _course_ends(), _samples_after()
    begins = listed([f"{samples_of[step]:,}" for step in ends[:-1]])
    return f"All fine-tunes saw the same samples in {len(ends)} courses. The later ones begin after {begins} samples.\n"


def courses(_: Sequence[str]) -> str:
    """Mean accuracy of each fine-tune at the end of each course."""
    rows = pandas.read_csv(RESULTS / "learning_curves.csv")
    names = {"autoregressive_sft": AR_SFT, "bd3lm": BD3LM, "refusion": REFUSION, "llada": "LLaDA"}
    means = rows.groupby(["stage", "step"]).accuracy.mean()
    steps, samples_of = _course_ends(), _samples_after()
    return table_of(
        ("Samples", *(f"{samples_of[step]:,}" for step in steps)),
        [(name, *(f"{means[stage, step]:.1f}" for step in steps)) for stage, name in names.items()],
    )


def trials(_: Sequence[str]) -> str:
    """Mean accuracy of ReFusion after each trial of its recipe."""
    rows = pandas.read_csv(RESULTS / "trials.csv", keep_default_na=False)
    means = rows.groupby(["trial", "changes"], sort=False).accuracy.mean()
    (samples,), (number,) = rows.samples.unique(), rows.n.unique()
    lines = [(trial, changes and f"`{changes}`", f"{mean:.1f}") for (trial, changes), mean in means.items()]
    return (
        f"{table_of(('Trial', 'Setting', 'Accuracy, %'), lines, 2)}\nEach line is one training on {samples:,} samples. "
        f"The accuracy is the mean over {rows.task.nunique()} tasks of {number} draws each. The trials have one seed, "
        "and their differences were not tested.\n"
    )


def orders(_: Sequence[str]) -> str:
    """What the order of slots and the number of tokens at a time cost."""
    rows = pandas.read_csv(RESULTS / "orders.csv").set_index(["Quantity", "Slots"])
    accuracy, tpf = rows.loc["Accuracy (%)"], rows.loc["Tokens per forward"]
    certain, recomputed, in_order, at_random, serial = (accuracy.iloc[place] for place in range(5))
    gains = (in_order - certain).sort_values(ascending=False)
    better = [f"{task.removeprefix('mini ')} ({gain:.0f})" for task, gain in gains.items() if gain > 3]
    ratios, of_recomputed = tpf.iloc[2] / tpf.iloc[0], tpf.iloc[1] / tpf.iloc[0]
    lost = (in_order - at_random).sort_values(ascending=False)
    large = [f"{task.removeprefix('mini ')} ({points:.0f})" for task, points in lost.items() if points > 10]
    small = lost[lost <= 10].abs()
    changed = (recomputed - certain).abs().max()
    return (
        "One slot at a time from left to right makes more answers right than slots by certainty, by points, on "
        f"{listed(better)}; on the other tasks the two differ by at most {(gains[gains <= 3]).abs().max():.0f}. It "
        f"writes {ratios.min():.2f} to {ratios.max():.2f} times the tokens per forward. This changes both the order "
        "and the number of slots at a time. One slot at a time in a random order makes fewer answers right than from "
        f"left to right, by points, on {listed(large)}; on the other tasks the two differ by at most "
        f"{small.max():.0f}. One token per forward has {serial.mean():.1f} % in the mean of the tasks, slots from left "
        f"to right {in_order.mean():.1f} %, and slots by certainty {certain.mean():.1f} %. Recomputation changes the "
        f"accuracy of a task by at most {changed:.0f} points, at {of_recomputed.min():.2f} to "
        f"{of_recomputed.max():.2f} times the tokens per forward; in the paper it costs 0.4 points on MMLU-Pro.\n"
    )


def letters(_: Sequence[str]) -> str:
    """How often the letter of a choice task is right without reasoning before it."""
    rows = pandas.read_csv(RESULTS / "letters.csv")
    at_once = rows[rows.reasoning == "no"].groupby("system", sort=False).accuracy
    parts = [f"{system} at most {share:g} %" for system, share in at_once.max().items()]
    return f"Without reasoning, of the letters of a task, {listed(parts)} are right.\n"


def _of_gpu(folder: str, file: str) -> Any:
    return json.loads((GPU_RESULTS / folder / file).read_text(encoding="utf-8"))


def _figures(folder: str) -> dict[str, Any]:
    """The figures of each check of a GPU."""
    return {check["name"]: check["result"]["figures"] for check in _of_gpu(folder, "checks.json")["checks"]}


def gpu_forwards(words: Sequence[str]) -> str:
    """Milliseconds of recorded forwards: the words are the folder of a GPU and the widths."""
    folder, *widths = words
    seconds = _figures(folder)["width-curve"]["seconds"]["recorded"]
    times = listed([f"{1e3 * seconds[width]:.2f} ms at width {width}" for width in widths])
    device = _of_gpu(folder, "checks.json")["conditions"]["device"]
    return f"On an {device} a recorded forward of an 8B model in bfloat16 took {times}.\n"


def gpu_speed(words: Sequence[str]) -> str:
    """ReFusion by the paper's algorithm and with fused forwards, beside the autoregressive decoder on a GPU."""
    (folder,) = words
    speed = _figures(folder)["speed"]
    names = {"refusion": "refusion unfused", "refusion fused": "refusion fused"}
    times = [speed["ratios"][f"{name} / our autoregressive"] for name in names.values()]
    standings = speed["standings"]
    forwards = [standings[name]["num_forwards"] for name in (*names, "autoregressive")]
    prompts, rounds = standings["refusion"]["num_prompts"], len(standings["refusion"]["tokens_per_second"])
    return (
        f"There ReFusion decoded {times[0]:.1f} times as many tokens per second as the autoregressive decoder by the "
        f"paper's algorithm, and {times[1]:.1f} times with fused forwards, an addition of this "
        f"project. They took {forwards[0]} and {forwards[1]} forwards, and the autoregressive decoder took "
        f"{forwards[2]}. These are figures of {prompts} prompts in {rounds} rounds, too few for an interval.\n"
    )


def gpu_variants(words: Sequence[str]) -> str:
    """What other ways to compute a forward gained on a GPU; of 1 and 40 rows."""
    (folder,) = words
    gains = _figures(folder)["overlap"]["gains"]
    slower = {width: 100 / gain - 100 for width, gain in gains.items()}
    forward = _of_gpu(folder, "variants.json")["forward_ms"]
    before = forward["as before"]

    def longer(name: str) -> list[float]:
        return [100 * (forward[name][width] / before[width] - 1) for width in before]

    prefetched = longer("4 MiB prefetched") + longer("8 MiB prefetched")
    early, warps = longer("kernels launched early"), longer("attention with 4 warps")[-1]
    return (
        f"With both, as the check `overlap` measured them, a forward of one row took {slower['1']:.0f} % longer and "
        f"one of 40 rows {slower['40']:.0f} % longer. Alone, bringing the weights of the next product to the L2 cache "
        f"inside the small kernels made forwards slower by {min(prefetched):.1f} to {max(prefetched):.1f} %, and "
        "launching small kernels before the kernel before them has ended made them faster by "
        f"{-max(early):.1f} to {-min(early):.1f} %. The table was measured before attention got half as many warps, "
        f"which saves {-warps:.1f} % of a forward of 40 rows (`results/gpu/{folder}/variants.json`).\n"
    )


FAMILY = {
    "family": family,
    "speed_range": speed_range,
    "memory": memory,
    "grid": grid,
    "most_accurate": most_accurate,
    "equal_parallelism": equal_parallelism,
    "training": training,
    "courses": courses,
    "trials": trials,
    "orders": orders,
    "letters": letters,
    "gpu_forwards": gpu_forwards,
    "gpu_speed": gpu_speed,
    "gpu_variants": gpu_variants,
}
