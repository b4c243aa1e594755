"""`python -m miniature.frontier`: accuracy and tokens a forward of every system at many settings, and its own choice.

The items come from the test stream with another seed than the committed test items, and none of them is a test item, so
no setting is chosen on what it is later measured on. A system's choice on a task is the setting with most tokens a
forward among those whose accuracy is within `TOLERANCE` of the system's best. All systems get the same number of
tokens, and ReFusion decodes as in the paper, without fused forwards.

    python -m miniature.frontier --out results/embedded/frontiers.csv --settings tasks/settings

A CSV that exists is continued. Accuracy and tokens a forward do not depend on the speed of the machine.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
import yaml

from miniature.data import DRAWS, TEST_SEED, held_out_items, items, normalised
from miniature.item import Item
from refusion_eval import api
from refusion_eval.benchmarks import BENCHMARKS, Task
from refusion_eval.figures.style import paper_style, style_of
from refusion_eval.scoring.judge import judge_texts

DRAW_SEED = TEST_SEED + 1
GEN_LENGTH = 64  # of every system; the longest answer of a mini task is shorter
TOLERANCE = 1.0  # percentage points of accuracy
COLUMNS = ("system", "task", "settings", "n", "accuracy", "tpf", "forwards", "tokens")


@dataclass(frozen=True, kw_only=True)
class System:
    """A system of the frontier.

    Attributes:
        model: name of the checkpoint.
        decoder: name of the decoder.
        name: the system's name in tables and figures.
        grid: settings that are tried, as dictionaries without what all systems share.
    """

    model: str
    decoder: str
    name: str
    grid: Sequence[Mapping[str, Any]]


def _products(**values: Sequence[Any]) -> list[dict[str, Any]]:
    return [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]


_THRESHOLDS = (0.6, 0.7, 0.8, 0.9, 0.95)
_REFUSION = [
    point | taus
    for point in _products(slot_size=(4, 8), block_size=(4, 8, 16, 32, 64), fuse=(False,))
    for taus in _products(tau_slot=(0.6, 0.8, 0.9), tau_token=(0.2, 0.4, 0.6, 0.9))
    # In blocks of one slot tau_slot changes nothing, so one of its values is enough.
    if point["block_size"] > point["slot_size"]
    or (point["block_size"] == point["slot_size"] and taus["tau_slot"] == 0.9)
]
SYSTEMS: tuple[System, ...] = (
    System(model="autoregressive_sft", decoder="autoregressive", name="AR-SFT", grid=({},)),
    System(
        model="bd3lm",
        decoder="bd3lm",
        name="BD3-LM",
        grid=_products(block_length=(8,), threshold=(None, *_THRESHOLDS)),
    ),
    System(
        model="llada",
        decoder="llada",
        name="LLaDA",
        grid=_products(block_length=(8, 16, 32, 64), steps=(64, 32, 16)),
    ),
    System(
        model="llada",
        decoder="fast_dllm_llada",
        name="Fast-dLLM (LLaDA)",
        grid=_products(block_length=(8, 16, 32), threshold=_THRESHOLDS, cache=("dual",)),
    ),
    System(model="refusion", decoder="refusion", name="ReFusion", grid=_REFUSION),
)


def draws(benchmark: str, count: int) -> list[Item]:
    """The first `count` distinct items of the test stream with another seed that are no test items."""
    prompts = BENCHMARKS[benchmark].prompts
    seen = {normalised(prompts.user(item.prompt_row)) for item in held_out_items(benchmark)}
    chosen: list[Item] = []
    for item in items(benchmark, test=True, seed=DRAW_SEED):
        prompt = normalised(prompts.user(item.prompt_row))
        if prompt not in seen:
            seen.add(prompt)
            chosen.append(item)
        if len(chosen) == count:
            break
    return chosen


def measure(
    model: api.LoadedModel, system: System, benchmark: str, chosen: Sequence[Item], **settings: Any
) -> dict[str, Any]:
    """One row of the CSV: a system at one setting on the draws of one task."""
    prompts = [
        model.tokenizer.encode(model.tokenizer.render_chat([{"role": "user", "content": text}]))
        for text in (BENCHMARKS[benchmark].prompts.user(item.prompt_row) for item in chosen)
    ]
    decoded = api.generate_many(model, prompts, system.decoder, gen_length=GEN_LENGTH, **settings)
    texts = [model.tokenizer.decode(one.tokens) for one in decoded]
    rows = [dict(item.prompt_row) for item in chosen]
    verdicts = judge_texts(BENCHMARKS[benchmark], list(zip(rows, texts, strict=True)))
    forwards, tokens = sum(one.num_forwards for one in decoded), sum(len(one.tokens) for one in decoded)
    return {
        "system": system.name,
        "task": benchmark,
        "settings": json.dumps(settings),
        "n": len(chosen),
        "accuracy": 100 * sum(verdict.passed for verdict in verdicts) / len(chosen),
        "tpf": tokens / forwards,
        "forwards": forwards,
        "tokens": tokens,
    }


def measured(models: str, systems: Sequence[System], tasks: Sequence[str], count: int, out: Path) -> pandas.DataFrame:
    """Measures all settings that the CSV lacks, and appends each to it at once.

    Args:
        models: what the names of the checkpoints follow: "embedded:", or a folder with a slash.
        systems: the systems to measure.
        tasks: benchmarks whose mini tasks are measured.
        count: number of items of each task.
        out: the CSV.
    """
    rows = pandas.read_csv(out) if out.exists() else pandas.DataFrame(columns=COLUMNS)
    done = set(rows[["system", "task", "settings"]].itertuples(index=False, name=None))
    for benchmark in tasks:
        chosen = draws(benchmark, count)
        for system in systems:
            open_points = [
                point for point in system.grid if (system.name, benchmark, json.dumps(dict(point))) not in done
            ]
            if not open_points:
                continue
            model = api.load_model(f"{models}{system.model}")
            for point in open_points:
                row = measure(model, system, benchmark, chosen, **point)
                rows = pandas.DataFrame([*rows.to_dict("records"), row], columns=COLUMNS)
                rows.to_csv(out, index=False, float_format="%.6g")
            print(f"{benchmark}: {system.name}, {len(open_points)} settings", flush=True)
    return rows


def choices(rows: pandas.DataFrame) -> Iterator[pandas.Series]:
    """The chosen row of each system and task."""
    for _, points in rows.groupby(["system", "task"], sort=False):
        near = points[points.accuracy >= points.accuracy.max() - TOLERANCE]
        yield near.sort_values(["tpf", "accuracy"]).iloc[-1]


def write_settings(rows: pandas.DataFrame, folder: Path) -> None:
    """Writes the chosen settings of all tasks into `mini_<decoder>.yaml`, which must exist for a decoder."""
    decoders = {system.name: system.decoder for system in SYSTEMS}
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for row in choices(rows):
        settings = {name: value for name, value in json.loads(row.settings).items() if name != "fuse"}
        table.setdefault(row.system, {})[row.task] = {"gen_length": GEN_LENGTH} | settings
    for system, tasks in table.items():
        number = int(rows[rows.system == system].n.min())
        lines = [
            f"# Settings of {system} for the mini tasks, chosen by `python -m miniature.frontier`: of all points in",
            "# results/embedded/frontiers.csv the one with most tokens a forward among those within",
            f"# {TOLERANCE:g} point of the best accuracy on {number} held-out draws, which are no test items.",
            f'source: "this project: chosen on {number} held-out draws of each mini task"',
            f"decoder: {decoders[system]}",
            "benchmarks:",
            *(
                f"  {task}: {yaml.safe_dump(tasks[task], default_flow_style=True, width=1000, sort_keys=False).strip()}"
                for task in DRAWS
                if task in tasks
            ),
        ]
        (folder / f"mini_{decoders[system]}.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw(rows: pandas.DataFrame, target: Path) -> None:
    """Draws one panel a task: all points of each system, its frontier as a line, and its choice as a ring."""
    import matplotlib.pyplot as plt

    tasks = [task for task in DRAWS if task in set(rows.task)]
    chosen = {(row.system, row.task): row for row in choices(rows)}
    with paper_style():
        figure, panels = plt.subplots(2, -(-len(tasks) // 2), figsize=(11, 5.6), layout="constrained", squeeze=False)
        for axes, task in itertools.zip_longest(panels.flat, tasks):
            if task is None:
                axes.set_visible(False)
                continue
            for system in dict.fromkeys(rows.system):
                points = rows[(rows.system == system) & (rows.task == task)].sort_values("tpf", ascending=False)
                style = style_of(system, list(dict.fromkeys(rows.system)))
                best = points[points.accuracy.cummax() <= points.accuracy]
                axes.scatter(points.tpf, points.accuracy, s=4, color=style.colour, alpha=0.25, linewidths=0)
                axes.plot(best.tpf, best.accuracy, color=style.colour, marker=style.marker, markersize=3, label=system)
                if (system, task) in chosen:
                    ring = chosen[system, task]
                    axes.scatter([ring.tpf], [ring.accuracy], s=60, facecolors="none", edgecolors=style.colour)
            axes.set_title(Task(BENCHMARKS[task], mini=True).title)
        figure.supxlabel("Tokens a forward")
        figure.supylabel("Accuracy on held-out draws (%)")
        handles, labels = panels.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.savefig(target, dpi=150, metadata={"Software": None})
        plt.close(figure)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m miniature.frontier", description="Each system at its own frontier."
    )
    parser.add_argument("--models", default="embedded:", help="prefix of the checkpoints, such as runs/miniature/out/")
    parser.add_argument("--out", type=Path, required=True, help="CSV of all points; the picture is written beside it")
    parser.add_argument("--settings", type=Path, help="also write the choices into this folder of settings files")
    parser.add_argument("--tasks", default=",".join(DRAWS), help="mini tasks, by benchmark (default: all)")
    parser.add_argument("--items", type=int, default=100, help="held-out draws of each task (default: %(default)s)")
    given = parser.parse_args()
    rows = measured(given.models, SYSTEMS, given.tasks.split(","), given.items, given.out)
    draw(rows, given.out.with_suffix(".png"))
    for row in choices(rows):
        print(f"{row.task:14} {row.system:18} {row.accuracy:5.1f} % {row.tpf:5.2f} tokens a forward  {row.settings}")
    if given.settings is not None:
        write_settings(rows, given.settings)


if __name__ == "__main__":
    main()
