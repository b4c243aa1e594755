"""`python -m miniature.frontier`: accuracy and tokens a forward of every system at many settings, and its own choice.

The items come from the test stream with another seed than the committed test items, and none of them is a test item, so
no setting is chosen on what it is later measured on. A system's choice on a task is the setting with most tokens a
forward among those whose accuracy is within `TOLERANCE` of the system's best. All systems get the same number of
tokens, and ReFusion decodes as in the paper, without fused forwards. Its settings in reading order, which are ablations
of the paper's algorithm, have points of their own and are never the choice.

    python -m miniature.frontier --out results/embedded/frontiers.csv --settings tasks/settings

A CSV that exists is continued. Accuracy and tokens a forward do not depend on the speed of the machine.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas
import yaml

from miniature.family import EMBEDDED, Family
from miniature.measure import draws, measure
from miniature.panels import panels
from miniature.systems import System
from refusion_eval import api
from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.paper.style import style_of

TOLERANCE = 1.0  # percentage points of accuracy
IN_READING_ORDER = {"order", "serial"}  # settings of ReFusion without slots chosen by certainty
COLUMNS = ("system", "task", "settings", "n", "accuracy", "tpf", "forwards", "tokens")


def measured(
    family: Family, models: str, systems: Sequence[System], tasks: Sequence[str], count: int, out: Path
) -> pandas.DataFrame:
    """Measures all settings that the CSV lacks, and appends each to it at once.

    Args:
        family: the family of the checkpoints.
        models: what the names of the checkpoints follow: "embedded:", or a folder with a slash.
        systems: the systems to measure.
        tasks: benchmarks whose mini tasks are measured.
        count: number of items of each task.
        out: the CSV.
    """
    rows = pandas.read_csv(out) if out.exists() else pandas.DataFrame(columns=COLUMNS)
    done = set(rows[["system", "task", "settings"]].itertuples(index=False, name=None))
    for benchmark in tasks:
        all_draws = draws(family, benchmark, count)
        for system in systems:
            chosen = all_draws[: system.most_draws]
            open_points = [
                point for point in system.grid if (system.name, benchmark, json.dumps(dict(point))) not in done
            ]
            if not open_points:
                continue
            model = api.load_model(f"{models}{system.model}")
            for point in open_points:
                settings = {"gen_length": family.gen_length} | dict(point)
                found = measure(model, system.decoder, BENCHMARKS[benchmark], chosen, **settings)
                row = {
                    "system": system.name,
                    "task": benchmark,
                    "settings": json.dumps(dict(point)),
                    "n": len(chosen),
                    "accuracy": found.accuracy,
                    "tpf": found.tpf,
                    "forwards": found.forwards,
                    "tokens": found.tokens,
                }
                rows = pandas.DataFrame([*rows.to_dict("records"), row], columns=COLUMNS)
                rows.to_csv(out, index=False, float_format="%.6g")
            print(f"{benchmark}: {system.name}, {len(open_points)} settings", flush=True)
    return rows


def is_ablation(settings: str) -> bool:
    """Whether settings, as JSON, are an ablation of a system's algorithm, which is never its choice."""
    return not IN_READING_ORDER.isdisjoint(json.loads(settings))


def choices(rows: pandas.DataFrame) -> Iterator[pandas.Series]:
    """The chosen row of each system and task."""
    for _, points in rows[~rows.settings.map(is_ablation)].groupby(["system", "task"], sort=False):
        near = points[points.accuracy >= points.accuracy.max() - TOLERANCE]
        yield near.sort_values(["tpf", "accuracy"]).iloc[-1]


def write_settings(family: Family, rows: pandas.DataFrame, folder: Path) -> None:
    """Writes the chosen settings of all tasks into `mini_<decoder>.yaml`, or `mini_<decoder>_<variant>.yaml`.

    A variant runs with the settings of the plain system unless its file is named.
    """
    files = {system.name: "_".join(filter(None, ("mini", system.decoder, system.variant))) for system in family.systems}
    decoders = {system.name: system.decoder for system in family.systems}
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for row in choices(rows):
        settings = {name: value for name, value in json.loads(row.settings).items() if name != "fuse"}
        table.setdefault(row.system, {})[row.task] = {"gen_length": family.gen_length} | settings
    for system, tasks in table.items():
        counts = sorted({int(count) for count in rows[rows.system == system].n})
        number = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        lines = [
            f"# Settings of {system} for the mini tasks, chosen by `python -m miniature.frontier`: of all points in",
            "# results/embedded/frontiers.csv the one with most tokens a forward among those within",
            f"# {TOLERANCE:g} point of the best accuracy on {number} held-out draws, which are no test items.",
            f'source: "this project: chosen on {number} held-out draws of each mini task"',
            f"decoder: {decoders[system]}",
            "benchmarks:",
            *(
                f"  {task}: {yaml.safe_dump(tasks[task], default_flow_style=True, width=1000, sort_keys=False).strip()}"
                for task in family.draws
                if task in tasks
            ),
        ]
        (folder / f"{files[system]}.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw(family: Family, rows: pandas.DataFrame, target: Path) -> None:
    """Draws one panel a task: all points of each system, its frontier as a line, and its choice as a ring."""
    tasks = [task for task in family.draws if task in set(rows.task)]
    chosen = {(row.system, row.task): row for row in choices(rows)}
    series = {system.name: system.series for system in family.systems}
    with panels(tasks, "Tokens per forward", target) as drawn:
        for (task, axes), system in itertools.product(drawn.items(), dict.fromkeys(rows.system)):
            points = rows[(rows.system == system) & (rows.task == task)].sort_values("tpf", ascending=False)
            style = style_of(series[system])
            best = points[points.accuracy.cummax() <= points.accuracy]
            axes.scatter(points.tpf, points.accuracy, s=4, color=style.colour, alpha=0.25, linewidths=0)
            axes.plot(
                best.tpf,
                best.accuracy,
                color=style.colour,
                marker=style.marker,
                linestyle=style.line,
                markersize=3,
                label=system,
            )
            if (system, task) in chosen:
                ring = chosen[system, task]
                axes.scatter([ring.tpf], [ring.accuracy], s=60, facecolors="none", edgecolors=style.colour)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m miniature.frontier", description="Each system at its own frontier."
    )
    parser.add_argument("--models", default="embedded:", help="prefix of the checkpoints, such as runs/miniature/out/")
    parser.add_argument("--out", type=Path, required=True, help="CSV of all points; the picture is written beside it")
    parser.add_argument("--settings", type=Path, help="also write the choices into this folder of settings files")
    parser.add_argument("--tasks", help="tasks, by benchmark and separated by commas (default: all of the family)")
    parser.add_argument("--items", type=int, default=100, help="held-out draws of each task (default: %(default)s)")
    given = parser.parse_args()
    family = EMBEDDED
    tasks = given.tasks.split(",") if given.tasks else list(family.draws)
    rows = measured(family, given.models, family.systems, tasks, given.items, given.out)
    draw(family, rows, given.out.with_suffix(".png"))
    for row in choices(rows):
        print(f"{row.task:14} {row.system:18} {row.accuracy:5.1f} % {row.tpf:5.2f} tokens a forward  {row.settings}")
    if given.settings is not None:
        write_settings(family, rows, given.settings)


if __name__ == "__main__":
    main()
