"""Content of the leaderboard: measured figures of runs and exports by task and machine, and published ones apart."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from refusion_eval.benchmarks import BENCHMARKS, is_sealed
from refusion_eval.errors import StoreError
from refusion_eval.report.collect import (
    Look,
    encoded,
    encoded_marks,
    mark_fewer,
    metrics_of,
    no_look,
    of_protocol,
    page_cell,
    warnings,
)
from refusion_eval.results.measured import read_measurements
from refusion_eval.results.measurement import Measurement, notes_of
from refusion_eval.results.metric_list import SCORES
from refusion_eval.results.published import read_published

# Published figures that are shown.
_PUBLISHED = ("score", "tps", "tpf")


class Placed(NamedTuple):
    """A measurement and the file or run directory that it was read from."""

    measurement: Measurement
    source: str


def read_placed(sources: Sequence[Path], *, baseline: str | None = None) -> list[Placed]:
    """The measurements of runs, results files and exports, each once although several sources may hold it.

    Raises:
        StoreError: a source cannot be read, or none of them has a figure.
    """
    directories = [path for path in sources if not path.is_file()]
    measured = read_measurements(directories, baseline=baseline, hash_records=True)
    placed = [Placed(entry, entry.run_id) for entry in measured]
    for path in sources:
        if path.is_file():
            placed += [Placed(entry, path.name) for entry in read_measurements([path])]
    once: dict[tuple[Any, ...], Placed] = {}
    for one in placed:
        once.setdefault((*_point_of(one), one.measurement.metric), one)
    if not once:
        raise StoreError("there is no figure in these runs and files; name others, or let the runs go on")
    return list(once.values())


def _point_of(one: Placed) -> tuple[Any, ...]:
    """What the figures of one point agree in: a task of a run under its settings, from the same records."""
    entry = one.measurement
    origin = entry.records or one.source
    return entry.run_id, entry.label, entry.row._replace(settings_hash=""), entry.hardware, origin


def leaderboard(placed: Sequence[Placed], *, look: Look = no_look) -> dict[str, Any]:
    """The JSON value that the page reads when it opens; its runs and cells are as those of a report."""
    points: dict[tuple[Any, ...], list[Placed]] = {}
    for one in placed:
        points.setdefault(_point_of(one), []).append(one)
    runs: dict[tuple[str, ...], dict[str, Any]] = {}
    placed_cells = []
    for own in points.values():
        entry = own[0].measurement
        run = {name: getattr(entry, name) for name in ("backbone", "dtype", "device", "attention")}
        run |= {"id": entry.run_id, "system": entry.label, "decoder": entry.decoded_by}
        key = tuple(run.values())
        shown = look(entry.system, entry.decoded_by)
        runs.setdefault(key, {**run, "hardware": [], **shown, "number": len(runs)})
        placed_cells.append((entry.row, _point(own) | {"run": runs[key]["number"]}))
    mark_fewer(placed_cells)
    cells = [cell for _, cell in placed_cells]
    published = published_figures()
    return {
        "kind": "leaderboard",
        "title": "refusion_eval leaderboard",
        "runs": list(runs.values()),
        "cells": cells,
        "questions": {},
        **metrics_of(cells),
        "states": {},
        "warnings": [*warnings(cells, []), *notes_of((one.measurement for one in placed), marked=True)],
        "published": published,
        "differing": differing(published),
    }


def _point(own: Sequence[Placed]) -> dict[str, Any]:
    by_metric = {one.measurement.metric: one.measurement for one in own}
    entry = next((by_metric[name] for name in SCORES if name in by_metric), own[0].measurement)
    timed = by_metric.get("tps", entry)
    facts = {
        "Protocol": entry.protocol.replace("|", ", "),
        "Records": entry.records,
        "Run": entry.run_id,
        "Read from": own[0].source if own[0].source != entry.run_id else "",
        "Machine": entry.hardware,
        "Decoder": entry.decoded_by,
        "Backbone": entry.backbone,
        "Numbers": " on ".join(filter(None, (entry.dtype, entry.device))),
        "Attention": entry.attention,
        "Requests at once": entry.batch_size.replace("|", ", "),
        "Rounds": str(timed.num_rounds),
        "Prompts": entry.prompts.replace("|", ", "),
        "Task version": entry.task_version.replace("|", ", "),
        "Samples": str(entry.samples),
        "Command": entry.command,
    }
    return page_cell(
        **{name: getattr(entry, name) for name in ("task", "benchmark", "mini")},
        system=entry.full_label,
        version=entry.task_version,
        mean=entry.is_mean,
        sealed=is_sealed(entry.task, entry.benchmark),
        settings={**entry.settings, **of_protocol(entry.protocol)},
        hardware=[entry.hardware],
        items=entry.n,
        samples=entry.samples,
        marks=encoded_marks(caution for one in own for caution in one.measurement.cautions),
        metrics={metric: encoded(measurement) for metric, measurement in by_metric.items()},
        facts={name: text for name, text in facts.items() if text},
        notes=list(dict.fromkeys(f"{note[0].upper()}{note[1:]}" for one in own for note in one.measurement.notes)),
    )


def published_figures() -> list[dict[str, Any]]:
    """The published figures of one system in one place, in a row each, in the order of the benchmarks and systems.

    A row has its `values` as they are printed, by metric, and what the source says beside them.
    """
    sources = {row["artefact"]: row["source"] for row in read_published("sources.csv")}
    order = {name: place for place, name in enumerate(BENCHMARKS)}
    rows: list[dict[str, Any]] = []
    of_place: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in read_published("published.csv"):
        metric = "score" if row["metric"] in SCORES else row["metric"]
        if not row["value"] or metric not in _PUBLISHED:
            continue
        identity = {name: row[name] for name in ("task", "system", "label", "backbone")}
        key = (*identity.values(), *(row[name] for name in ("artefact", "version", "location", "note")))
        if metric in of_place.get(key, {"values": {metric}})["values"]:
            source = _source_of(sources.get(row["artefact"], ""), row["location"])
            of_place[key] = {**identity, "source": source, "values": {}, "said": {}}
            rows.append(of_place[key])
        said = [*row["settings"].split("; "), row["note"], row["defect"] and f"defect {row['defect']} of the source"]
        of_place[key]["values"][metric] = row["value"]
        of_place[key]["said"] |= dict.fromkeys(filter(None, said))
    rows.sort(key=lambda row: (order.get(row["task"], len(order)), row["label"]))
    return [{**row, "said": "; ".join(row["said"])} for row in rows]


def _source_of(source: str, location: str) -> str:
    if source.startswith("as each row"):
        return location
    return source if not location or location in source else f"{source}; {location}"


def differing(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where rows of `published_figures` have different numbers for one system, task and metric, by their places."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for place, row in enumerate(rows):
        for metric in row["values"]:
            groups.setdefault((row["task"], row["system"], metric), []).append(place)
    return [
        {"task": task, "metric": metric, "places": places}
        for (task, _, metric), places in groups.items()
        if len({float(rows[place]["values"][metric]) for place in places}) > 1
    ]
