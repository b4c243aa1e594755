"""Throughput and latency by the number of requests at once."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.errors import ConfigError, StoreError
from refusion_eval.results.concurrency import busy_seconds, load_cells, load_points, load_tables
from refusion_eval.store.manifest import Hardware, Manifest
from refusion_eval.store.records import Sample, SampleKey
from refusion_eval.store.run_store import RunStore


@pytest.mark.parametrize(
    ("intervals", "seconds"),
    [([(0, 2)], 2), ([(0, 2), (1, 3)], 3), ([(0, 9), (1, 2), (3, 4)], 9), ([(5, 6), (0, 2)], 3), ([(0, 1), (1, 2)], 2)],
)
def test_time_counts_once_however_many_requests_are_in_flight(intervals, seconds):
    starts, ends = np.array(intervals, dtype=float).T
    assert busy_seconds(starts, ends) == pytest.approx(seconds)


HERE = Hardware(cpu="c", threads=1)


def run_with(directory, samples, hardware=HERE, system="s"):
    names = dict.fromkeys(("backbone", "decoder", "checkpoint", "dtype", "device", "attention", "package_version"), "x")
    manifest = Manifest(system=system, settings={}, tasks={}, seed=0, hardware=hardware, **names)
    with RunStore.open(directory, manifest) as store:
        for number, sample in enumerate(samples):
            key = SampleKey("t", "1", str(number), "p", 0, "d")
            store.append(Sample(key=key, benchmark="t", item_id=str(number), **sample))
    return directory


def ended(second, seconds, tokens, **more):
    created = f"2026-01-31T12:00:{second:06.3f}+00:00"
    return {"created": created, "seconds": seconds, "num_tokens": tokens, "batch_size": 2, **more}


def test_a_point_sums_over_requests_and_has_quantiles_of_them(tmp_path):
    # Two requests in flight from 0 to 2, then none for a while, then one from 10 to 12.
    samples = [ended(2, 2.0, 10), ended(2, 1.0, 30), ended(12, 2.0, 20), ended(50, 9.0, 0, error="failed")]
    (point,) = load_points([run_with(tmp_path / "a", samples)])
    assert (point.concurrency, point.n) == (2, 3)
    assert point.tokens_per_second == pytest.approx(60 / 4)
    assert point.requests_per_second == pytest.approx(3 / 4)
    assert (point.latency_p50, point.request_tps_p50) == (2.0, 10.0)
    assert point.first_byte_p50 is None


def test_a_server_and_this_engine_stand_in_tables_of_their_own(tmp_path):
    served = ended(2, 1.0, 5, server={"first_byte_seconds": 0.25})
    own = run_with(tmp_path / "own", [ended(2, 1.0, 5)])
    server = run_with(tmp_path / "server", [served], Hardware(server="server x at h"))
    points = load_points([own, server])
    tables = load_tables(points)
    assert [table.title.partition(" on ")[2] for table in tables] == ["c, 1 threads", "server x at h"]
    assert ["First byte s p50" in table.columns for table in tables] == [False, True]
    columns, rows = load_cells(points)
    assert [dict(zip(columns, row, strict=True))["first_byte_p50"] for row in rows] == [None, 0.25]


def runs_of(folder):
    """Runs as `--concurrency 1,2` makes them of folder/a, of folder/b with 2 only, and one that it did not make."""
    samples = [ended(2, 2.0, 10), ended(3, 1.0, 30)]
    return [
        run_with(folder / name, [{**sample, "batch_size": number} for sample in samples], system=name[0])
        for name, number in (("a-c1", 1), ("a-c2", 2), ("b-c2", 2), ("other", 1))
    ]


def test_points_are_read_from_the_folder_that_was_given_to_the_run_or_from_its_parent(tmp_path):
    runs = runs_of(tmp_path)
    points = {name: [point.run_id for point in load_points([tmp_path / name])] for name in ("a", "b", "other", ".")}
    assert points == {"a": ["a-c1", "a-c2"], "b": ["b-c2"], "other": ["other"], ".": ["a-c1", "a-c2", "b-c2"]}
    (tmp_path / "a").mkdir()  # as somebody may have made it before the run
    assert load_points([tmp_path / "a"]) == load_points(runs[:2])
    with pytest.raises(StoreError, match="none holds no records"):
        load_points([tmp_path / "none"])


def test_the_command_writes_the_files_that_it_is_asked_for_and_ignores_no_option(tmp_path):
    runs_of(tmp_path)
    csv, markdown = tmp_path / "x.csv", tmp_path / "x.md"
    words = ["speed", "--concurrency", str(tmp_path / "a")]
    done = CliRunner().invoke(app, [*words, "--csv", str(csv), "--markdown", str(markdown)])
    assert done.exit_code == 0, done.output
    assert [line.split(",")[0] for line in csv.read_text().splitlines()] == ["run_id", "a-c1", "a-c2"]
    assert markdown.read_text().startswith("## Several requests at once, on ")
    refused = CliRunner().invoke(app, [*words, "--steps"])
    assert isinstance(refused.exception, ConfigError)


@pytest.mark.figures
def test_the_plot_and_its_caption_are_written_from_the_folder_that_was_given_to_the_run(tmp_path, monkeypatch):
    runs_of(tmp_path)
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure) or path.write_bytes(b"x"))
    monkeypatch.setattr(
        sys, "argv", ["concurrency.py", *(str(tmp_path / name) for name in "ab"), "--out", str(tmp_path / "x.png")]
    )
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "plots" / "concurrency.py"), run_name="__main__")
    (figure,) = drawn
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    texts = [[text.get_text() for text in legend.get_texts()] for legend in legends]
    assert texts == [["a", "b"], ["median", "up to the 95th percentile"]]
    assert "n = 2 requests a point" in (tmp_path / "x.txt").read_text()
