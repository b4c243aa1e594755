"""Hand-made cells, sweeps and runs."""

import math

import pytest

from refusion_eval.results.measurement import TASKS, Measurement
from refusion_eval.results.published import published_backbone
from refusion_eval.results.results_file import write_csv
from tests.results.conftest import write_run

__all__ = ["write_run"]

CODE = ("humaneval", "mbpp")


def make_cell(system, task, metric, value, **changes):
    fields = {
        "origin": "measured",
        "label": {"refusion": "ReFusion", "autoregressive": "AR", "qwen3": "Qwen3-8B"}.get(system, system),
        "backbone": published_backbone(system) or "tiny",
        "ci_low": value - 1,
        "ci_high": value + 1,
        "n": 200,
        "hardware": "Test CPU",
        "run_id": f"run-{system}",
        "task_version": "1",
    }
    return Measurement(system=system, task=task, benchmark=task, metric=metric, value=value, **{**fields, **changes})


def make_system(system, score, tps, tasks=TASKS, **changes):
    """Score and throughput of a system on some tasks."""
    cells = []
    for task in tasks:
        cells.append(make_cell(system, task, "pass@1" if task in CODE else "accuracy", score, **changes))
        cells.append(make_cell(system, task, "tps", tps, **changes))
    return cells


def make_row(run_id, metric, value, *, decoder_label="ReFusion", settings=(), hardware="Test CPU", note="", mini=True):
    return Measurement(
        origin="measured",
        run_id=run_id,
        system=decoder_label,
        label=decoder_label,
        backbone="tiny",
        task="mini_mbpp" if mini else "refusion_mbpp",
        n=100,
        metric=metric,
        value=value,
        ci_low=value - 1,
        ci_high=value + 1,
        unit="",
        batch_size="1",
        dtype="float32",
        device="cpu",
        forwards=10,
        tokens=20,
        num_rounds=2,
        seconds=1.0,
        benchmark="mbpp",
        mini=mini,
        samples=100,
        errors=0,
        attention="sdpa",
        hardware=hardware,
        card=hardware,
        notes=(note,) if note else (),
        unfinished="1 of 2" if note.startswith("unfinished") else "",
        settings=dict(settings),
    )


def write_sweep(
    folder, setting, values, *, operating, mini=True, hardware=lambda value: "Test CPU", note="", further=None
):
    """A sweep of one setting; the score rises by 1 a step and the throughput by 10, from the baseline's.

    A number as `further` is the score of AR-SFT, which is as fast as the baseline and measured after it.
    """
    rows, lines = [], []
    for label, score in {"AR": 50.0, **({} if further is None else {"AR-SFT": further})}.items():
        run_id = f"{label.lower()}-table"
        rows.append(make_row(run_id, "pass@1", score, decoder_label=label, mini=mini))
        rows.append(make_row(run_id, "tps", 100.0, decoder_label=label, mini=mini))
        lines.append(f"{run_id},{label},autoregressive,mini_mbpp,table,,yes")
    runs = [("refusion-table", operating, "")] + [(f"refusion-{v:g}", v, f"{setting}={v:g}") for v in values]
    for run_id, value, varied in runs:
        step = values.index(value) - values.index(operating)
        settings = {setting: f"{value:g}"}
        for metric, figure in (("pass@1", 50.0 + step), ("tps", 120.0 + 10 * step), ("tpf", 4.0 + step)):
            rows.append(
                make_row(run_id, metric, figure, settings=settings, mini=mini, hardware=hardware(value), note=note)
            )
        mark = "yes" if value == operating else "no"
        lines.append(f"{run_id},ReFusion,refusion,mini_mbpp,{'around' if varied else 'table'},{varied},{mark}")
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(rows, folder / "sweep.csv")
    header = "run_id,system,decoder,task,origin,varied,operating_point"
    (folder / "points.csv").write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return folder


def write_locality(path, *, distances=(-2, -1, 1, 2), model="tiny"):
    header = "model,dataset,mini,masking_ratio,distance,n_pairs,n_responses,jsd_mean,ci_low,ci_high,unit,reading"
    lines = [
        f"{model},mini_gsm8k,yes,{ratio},{distance},10,5,{0.1 / abs(distance)},{0.05 / abs(distance)},0.2,nats,refusion"
        for ratio in (0.2, 0.8)
        for distance in distances
    ]
    path.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return path


def write_scaling(path, *, hardware=("Test GPU", "Test GPU")):
    header = "samples,task,metric,value,ci_low,ci_high,n,hardware"
    lines = [
        f"{samples},gsm8k,{metric},{value},{value - 1},{value + 1},100,{machine}"
        for samples, machine in zip((1000, 20000), hardware, strict=True)
        for metric, value in (("accuracy", 50 + samples / 1000), ("tps", 60))
    ]
    path.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def made():
    """The makers of this file, by name."""
    return {
        "cell": make_cell,
        "system": make_system,
        "sweep": write_sweep,
        "locality": write_locality,
        "scaling": write_scaling,
        "nan": math.nan,
    }
