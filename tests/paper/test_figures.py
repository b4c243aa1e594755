import itertools
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.errors import ConfigError, DataError, StoreError
from refusion_eval.metrics import paired_difference
from refusion_eval.paper.draw_baseline import Label, draw_against_baseline, place_labels
from refusion_eval.paper.draw_curves import draw_swept, sweet_spot, unbeaten, widened
from refusion_eval.paper.draw_text import lay_out
from refusion_eval.paper.figures import FIGURES, rows_of, write_figure
from refusion_eval.paper.formulas import MARGIN
from refusion_eval.paper.locality.study import COLUMNS
from refusion_eval.paper.names import caption, system_label
from refusion_eval.paper.points import (
    DELTA_SCORE,
    DELTA_TPS,
    LOCALITY_COLUMNS,
    against_baseline,
    frontier,
    locality_points,
    only_task,
    scaling_points,
    swept,
)
from refusion_eval.paper.rows import BASELINE, OPERATING_POINT, REFERENCE, Point, TokenCell, read_rows, write_rows
from refusion_eval.paper.style import COLUMN_WIDTH, ORDERED, TEXT_WIDTH, in_order, new_figure, panel_title
from refusion_eval.results.cautions import CARDS_SENTENCE
from refusion_eval.results.compare import compare_runs
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.published import system_key
from refusion_eval.results.render import latex_text
from refusion_eval.results.results_file import read_csv, write_csv
from tests.paper.conftest import write_sweep
from tests.results.conftest import sample

POINT = {"label": "ReFusion", "origin": "measured", "metric": "delta_score", "panel": "tau_slot"}


def token(position, text, state="fixed", *, panel=1, order=1):
    return TokenCell(
        panel=panel,
        title="forward 1 of 2: accepted",
        position=position,
        text=text if state != "mask" else "",
        final=text,
        state=state,
        order=order if state == "fixed" else 0,
        forward=order if state == "fixed" else -1,
        slot=position - position % 2,
        task="mini_mbpp",
        item="3",
        system="ReFusion",
        settings="slot_size=2",
        mini=True,
    )


TOKENS = [
    *(token(place, text, state) for place, (text, state) in enumerate([("def ", "fixed"), ("f\n", "draft")])),
    *(token(place, text, panel=2, order=place + 1) for place, text in enumerate(["def ", "f\n"])),
]


@pytest.fixture
def sources(tmp_path, made):
    """What every figure can be drawn from."""
    sweep = made["sweep"](tmp_path / "sweep", "tau_slot", [0.5, 0.7, 0.9], operating=0.7)
    blocks = made["sweep"](tmp_path / "blocks", "block_size", [8, 16, 32], operating=16)
    rows = read_csv(sweep / "sweep.csv")
    write_csv([row for row in rows if row.run_id in ("ar-table", "refusion-table")], tmp_path / "results.csv")
    write_rows(tmp_path / "figure5.csv", TokenCell, TOKENS[2:])
    write_rows(tmp_path / "figure9.csv", TokenCell, TOKENS)
    return {
        "figure1": tmp_path / "results.csv",
        "figure3": made["locality"](tmp_path / "locality.csv"),
        "figure4": sweep,
        "figure5": tmp_path / "figure5.csv",
        "figure6": sweep,
        "figure7": made["scaling"](tmp_path / "scaling.csv"),
        "figure8": blocks,
        "figure9": tmp_path / "figure9.csv",
    }


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_written_in_both_formats_with_equal_bytes(name, sources, tmp_path):
    first = write_figure(name, rows_of(name, [sources[name]]), tmp_path / "one")
    of_one = {"figure1": "_mbpp", "figure5": "_mbpp_3", "figure9": "_mbpp_3"}
    stem = name if name == "figure7" else f"{name}_mini{of_one.get(name, '')}"
    assert [path.name for path in first] == [f"{stem}.{ending}" for ending in ("csv", "png", "pdf", "txt", "tex")]
    again = write_figure(name, rows_of(name, [first[0]]), tmp_path / "two")  # from the CSV that it wrote
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    assert first[2].read_bytes().startswith(b"%PDF")
    assert b"CreationDate" not in first[2].read_bytes()
    with Image.open(first[1]) as picture:
        assert picture.width > 900
        dark = sum(picture.convert("L").histogram()[:128])
        assert 0.002 < dark / (picture.width * picture.height) < 0.4


@pytest.mark.parametrize("name", ["figure1", "figure4", "figure6", "figure8"])
def test_a_caption_names_the_benchmark_that_was_measured(name, sources):
    points = [
        replace(point, task="math", panel=point.panel.replace("mbpp", "math"))
        for point in rows_of(name, [sources[name]])
    ]
    figure, caption = FIGURES[name].draw(points, None)
    texts = [caption, *(text.get_text() for text in figure.findobj(Text))]
    assert any("mini MATH" in text for text in texts)
    assert not any("mini MBPP" in text for text in texts)


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("width", ["one", "two"])
def test_a_figure_is_as_wide_as_its_columns_and_has_no_sentences(name, width, sources):
    figure, caption = FIGURES[name].draw(rows_of(name, [sources[name]]), width)
    assert figure.get_figwidth() == {"one": COLUMN_WIDTH, "two": TEXT_WIDTH}[width]
    FigureCanvasAgg(figure).draw()
    texts = [text.get_text() for text in figure.findobj(Text)]
    assert max(map(len, texts)) < 60
    assert "." in caption
    assert not any(sentence in text for sentence in caption.split(". ") for text in texts)


def test_a_figure_in_latex_has_its_caption(sources, tmp_path):
    paths = {path.suffix: path for path in write_figure("figure6", rows_of("figure6", [sources["figure6"]]), tmp_path)}
    latex, caption = (paths[ending].read_text(encoding="utf-8") for ending in (".tex", ".txt"))
    assert rf"\includegraphics[width=\linewidth]{{{paths['.pdf'].name}}}" in latex
    assert latex_text(caption.strip()) in latex


def test_figures_of_several_items_do_not_replace_each_other(tmp_path):
    for item in ("3", "HumanEval/4"):
        write_figure("figure5", [replace(cell, item=item) for cell in TOKENS[2:]], tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == {"figure5_mini_mbpp_3", "figure5_mini_mbpp_HumanEval-4"}


def test_figure_5_counts_tokens_and_slots_in_reading_order(tmp_path):
    orders = (2, 2, 1, 3, 3, 3)  # slots of two tokens, of which the second began first
    cells = [token(place, "a ", order=order) for place, order in enumerate(orders)]
    write_figure("figure5", cells, tmp_path)
    text = (tmp_path / "figure5_mini_mbpp_3.txt").read_text()
    assert "4 of 5 neighbouring tokens and 1 of 2 neighbouring slots came in reading order." in text
    write_figure("figure5", [replace(cell, slot=cell.position) for cell in cells], tmp_path)
    assert "4 of 5 neighbouring tokens came in" in (tmp_path / "figure5_mini_mbpp_3.txt").read_text()


def test_systems_have_one_order_with_refusion_last():
    names = ["refusion", "llada", "strange", "refusion+serial", "qwen3", "bd3lm", "autoregressive"]
    assert in_order(names) == ["autoregressive", "qwen3", "bd3lm", "llada", "strange", "refusion", "refusion+serial"]


def test_the_difference_to_the_baseline_comes_with_an_interval_of_both(sources):
    measured = [point for point in rows_of("figure1", [sources["figure1"]]) if point.origin == "measured"]
    by_series = {point.series: point for point in measured}
    refusion = by_series["refusion"]
    assert (refusion.x, refusion.y) == (20.0, 0.0)
    assert refusion.y_high == pytest.approx(math.sqrt(2), abs=0.15)  # two intervals of 1 on either side
    assert (by_series["autoregressive"].x, by_series["autoregressive"].mark) == (0.0, "baseline")
    assert math.isnan(by_series["autoregressive"].x_low)


def test_a_checkpoint_of_another_backbone_is_no_published_system_in_figure_1(sources, tmp_path):
    rows = [
        replace(row, mini=False, task="refusion_mbpp", settings={"fuse": "null"})
        for row in read_csv(sources["figure1"])
    ]
    write_csv(rows, tmp_path / "real.csv")
    measured = {point.series: point for point in against_baseline([tmp_path / "real.csv"]) if point.n}
    assert set(measured) == {"autoregressive", "refusion on tiny"}
    assert measured["refusion on tiny"].label == "ReFusion on tiny"
    assert any("Fused: fewer forwards" in sentence for sentence in caption(list(measured.values())))


def test_published_points_are_exact_and_hollow_grey_measured_ones_filled(sources):
    points = rows_of("figure1", [sources["figure1"]])
    published = {point.series: (point.x, point.y) for point in points if point.origin == "published"}
    assert published["refusion"] == (62.02, 4.4)
    left, right = draw_against_baseline(points).figure.axes
    faces = [
        {line.get_markerfacecolor() for line in axes.get_lines() if line.get_marker() not in ("None", "|", "_", "")}
        for axes in (left, right)
    ]
    assert faces[0] == {"white"}
    assert "white" not in faces[1]
    assert len(faces[1]) == 2


def gaps(axes):
    """Of every name in axes with the points of Figure 1: pixels to its own point, and to the nearest other one."""
    points = {point.label: axes.transData.transform((point.x, point.y)) for point in rows_of("figure1", [])}
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts if text.get_text() in points}
    for name, box in boxes.items():
        far = {other: math.dist(place, place.clip(box.min, box.max)) for other, place in points.items()}
        yield name, far.pop(name), min(far.values())


def test_a_name_in_figure_1_is_nearer_to_its_own_point_than_to_any_other():
    figure = draw_against_baseline(rows_of("figure1", [])).figure
    found = list(gaps(figure.axes[0]))
    assert len(found) == len(rows_of("figure1", [])) > 10
    assert all(own < other for _, own, other in found), found


def test_names_keep_off_the_frame_and_their_lines_do_not_cross():
    root = Path(__file__).resolve().parents[2]
    points = read_rows(root / "results/embedded/artefacts/figure1_mini_parts.csv", Point)
    axes = draw_against_baseline(points).figure.axes[0]
    frame = axes.get_window_extent().padded(-1)
    assert all(frame.containsx(x) for text in axes.texts for x in text.get_window_extent().intervalx)
    leaders = [line.get_path() for line in axes.get_lines() if line.get_label() == "leader"]
    assert len(leaders) > 3
    assert not any(one.intersects_path(other) for one, other in itertools.combinations(leaders, 2))


def test_a_name_without_room_beside_its_point_gets_a_line_to_it():
    _, axes = plt.subplots(figsize=(2, 2))
    places = [(x / 10, y / 10) for x in range(-3, 4) for y in range(-3, 4)]
    axes.set(xlim=(-2, 2), ylim=(-2, 2))
    place_labels(axes, [Label(f"name {x} {y}", x, y) for x, y in places], size=6)
    assert any(line.get_label() == "leader" for line in axes.get_lines())
    plt.close("all")


def test_a_name_keeps_off_the_error_bar_of_another_point():
    _, axes = plt.subplots(figsize=(4, 2))
    axes.set(xlim=(0, 1), ylim=(0, 1))
    labels = [Label("first", 0.1, 0.5), Label("second", 0.6, 0.5)]
    bar = Bbox(axes.transData.transform([(0.65, 0.5), (0.95, 0.5)]))  # where the second name would stand
    for bars, is_beside in (([], True), ([bar], False)):
        place_labels(axes, labels, size=6, bars=bars)
        _, second = (text.get_window_extent() for text in axes.texts)
        assert second.overlaps(bar) == is_beside
        for text in list(axes.texts):
            text.remove()
    plt.close("all")


def test_figures_may_have_more_panels_than_those_of_the_paper():
    axes = new_figure(2, 2).subplots()
    assert [panel_title(axes, number, "GSM8K").get_text() for number in (0, 12)] == ["(a) GSM8K", "(m) GSM8K"]


def test_a_sweep_gives_a_point_a_value_and_one_operating_point(sources):
    points = rows_of("figure4", [sources["figure4"]])
    scores = [point for point in points if point.metric == DELTA_SCORE]
    assert [(point.x, point.y, point.mark) for point in scores] == [
        (0.5, -1.0, ""),
        (0.7, 0.0, OPERATING_POINT),
        (0.9, 1.0, ""),
    ]
    assert {point.n for point in points} == {100}


def delta(x, score, tps, mark=""):
    common = {**POINT, "series": "refusion", "x": x, "mark": mark}
    yield Point(**{**common, "y": score, "y_low": score - 1, "y_high": score + 1})
    yield Point(**{**common, "metric": "delta_tps", "y": tps, "y_low": tps - 1, "y_high": tps + 1})


def test_the_shade_of_a_sweet_spot_covers_no_value_beyond_it():
    assert widened(0.05, 0.99, [0.05, 0.99, 1.0], is_size=False) == pytest.approx((0.03, 0.995))
    assert widened(0.5, 0.5, [0.49, 0.5, 0.9], is_size=False) == pytest.approx((0.495, 0.52))
    assert widened(8, 8, [4, 8, 16], is_size=True) == pytest.approx((6.727, 9.514), abs=1e-3)
    assert widened(8, 32, [8, 32, 36], is_size=True) == pytest.approx((6.727, 33.941), abs=1e-3)


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        ([(0.5, -5, 9), (0.7, -0.5, 9), (0.9, 1, 9), (0.95, 1, 0.5)], ((0.7, 0.9), (0.7, 0.95))),
        ([(0.5, 3, 9), (0.7, -5, 9), (0.9, 1, 9)], ((0.9, 0.9), (0.9, 0.9))),
        ([(0.5, 3, 9), (0.9, -1.5, 9)], (None, (0.5, 0.9))),
        ([(0.5, 3, 9), (0.9, -5, 9)], (None, None)),
    ],
)
def test_the_sweet_spot_is_the_run_of_good_values_around_the_operating_point(deltas, expected):
    points = [one for x, score, tps in deltas for one in delta(x, score, tps, OPERATING_POINT if x == 0.9 else "")]
    shown, possible = (sweet_spot(points, "tau_slot", "refusion", undecided=undecided) for undecided in (False, True))
    assert (shown, possible) == expected


@pytest.mark.parametrize(("margin", "shown"), [(0.0, None), (2.0, (0.9, 0.9)), (7.0, (0.5, 0.9))])
def test_a_larger_margin_allows_a_larger_loss(margin, shown):
    points = [*delta(0.5, -5, 9), *delta(0.9, 0, 9, OPERATING_POINT)]
    assert sweet_spot(points, "tau_slot", "refusion", margin) == shown


def test_what_has_no_interval_is_not_decided():
    points = [replace(one, y_low=math.nan, y_high=math.nan) for one in delta(0.9, 5, 9, OPERATING_POINT)]
    assert sweet_spot(points, "tau_slot", "refusion") is None
    assert sweet_spot(points, "tau_slot", "refusion", undecided=True) == (0.9, 0.9)


def swept_runs(write_run, folder, gained, lost, num_items):
    """A sweep with its runs: at tau_slot 0.9 ReFusion is twice as fast, gains the first items and loses the next."""
    half = num_items // 2  # the other items are wrong in all runs
    before = {str(item) for item in range(gained, half)}
    after = {str(item) for item in range(half) if not gained <= item < gained + lost}
    made = [
        ("ar-table", "AR", "autoregressive", before, {"tau_slot": None}, 0.5),
        ("refusion-table", "ReFusion", "refusion", after, {"tau_slot": 0.9, "slot_size": 4}, 0.25),
        ("refusion-tau_slot=0.5", "ReFusion", "refusion", after, {"tau_slot": 0.5, "slot_size": 4}, 0.25),
        ("sft-table", "AR-SFT", "autoregressive", {str(item) for item in range(half)}, {"tau_slot": None}, 0.5),
    ]
    lines = ["run_id,system,decoder,task,origin,varied,operating_point"]
    runs = []
    for name, system, decoder, right, settings, seconds in made:
        samples = [sample(item, settings=settings, seconds=seconds) for item in range(num_items)]
        settings_of_run = {"system": system, "decoder": decoder}
        runs.append(write_run(f"{folder.name}/runs/{name}", samples, right=right, **settings_of_run))
        varied = name.partition("-")[2].replace("table", "")
        lines.append(f"{name},{system},{decoder},mini_gsm8k,table,{varied},{'no' if varied else 'yes'}")
    (folder / "points.csv").write_text("\n".join(lines) + "\n")
    write_csv(run_measurements(runs), folder / "sweep.csv")
    return folder


def test_figure_1_compares_runs_on_the_items_that_both_have(write_run, tmp_path):
    def run(name, system, decoder, items, right):
        samples = [sample(item, seconds=0.5 if item < 12 else 0.3) for item in items]
        return write_run(name, samples, right={str(item) for item in right}, system=system, decoder=decoder)

    # The first twelve items are the slow ones, and all right answers are among them.
    whole = run("whole", "AR", "autoregressive", range(40), range(10))
    part = run("part", "ReFusion", "refusion", range(12), [*range(9), 11])
    (task,) = compare_runs(whole, part, common_items=True).tasks
    point = next(one for one in rows_of("figure1", [whole, part], task="gsm8k") if one.label == "ReFusion")
    found = task.difference
    assert (point.y, point.y_low, point.y_high) == pytest.approx((found.value, found.low, found.high))
    assert (point.x, point.n) == (0, 12)
    assert "Differences are paired by item, on the items that both have." in caption([point])
    write_csv([replace(one, num_rounds=2) for one in run_measurements([whole, part])], tmp_path / "results.csv")
    (point,) = (one for one in rows_of("figure1", [tmp_path / "results.csv"], task="gsm8k") if one.label == "ReFusion")
    assert point.pairing == "unpaired, over different items"


def test_figure_1_of_runs_without_a_common_item_says_so(write_run):
    runs = [
        write_run("one", [sample(i) for i in range(4)], system="AR", decoder="autoregressive"),
        write_run("two", [sample(i) for i in range(4, 8)]),
    ]
    (point,) = (one for one in rows_of("figure1", runs, task="gsm8k") if one.label == "ReFusion")
    assert point.pairing == "unpaired, over different items"


def test_a_sweep_with_its_runs_is_paired_as_compare_is_and_its_files_alone_are_not(write_run, tmp_path):
    folder = swept_runs(write_run, tmp_path / "sweep", gained=2, lost=5, num_items=40)
    points = rows_of("figure4", [folder])
    (task,) = compare_runs(*(folder / "runs" / name for name in ("ar-table", "refusion-table"))).tasks
    (score,) = [one for one in points if one.metric == DELTA_SCORE and one.x == 0.9]
    bounds = (score.y, score.y_low, score.y_high)
    assert bounds == pytest.approx((task.difference.value, task.difference.low, task.difference.high))
    assert {one.pairing for one in points} == {"paired by item"}
    runs = [folder / "runs" / name for name in ("ar-table", "refusion-table")]
    (one,) = [one for one in against_baseline(runs, "gsm8k") if one.pairing]
    assert (one.y, one.y_low, one.y_high, one.pairing) == (*bounds, "paired by item")
    shutil.rmtree(folder / "runs")
    alone = rows_of("figure4", [folder])
    assert {one.pairing for one in alone} == {"unpaired"}
    (unpaired,) = [one for one in alone if one.metric == DELTA_SCORE and one.x == 0.9]
    assert unpaired.y_high - unpaired.y_low > 1.3 * (score.y_high - score.y_low)
    captions = [FIGURES["figure4"].draw(rows, None).caption for rows in (points, alone)]
    assert "Differences are paired by item." in captions[0]
    assert "Differences are unpaired." in captions[1]
    assert all("n = 40 items a point" in text and "no worse by more than 2 points" in text for text in captions)


def test_a_further_autoregressive_run_of_a_sweep_is_a_second_line(write_run, tmp_path):
    folder = swept_runs(write_run, tmp_path / "sweep", gained=2, lost=5, num_items=40)
    found = compare_runs(*(folder / "runs" / name for name in ("ar-table", "sft-table"))).tasks[0].difference
    csv, *_ = write_figure("figure4", rows_of("figure4", [folder]), tmp_path)
    further = [point for point in rows_of("figure4", [csv]) if point.mark == REFERENCE]
    assert {(point.series, point.metric, point.pairing) for point in further} == {
        ("autoregressive_sft", metric, "paired by item") for metric in (DELTA_SCORE, DELTA_TPS)
    }
    (score,) = [point for point in further if point.metric == DELTA_SCORE]
    assert (score.y, score.y_low, score.y_high) == pytest.approx((found.value, found.low, found.high), rel=1e-5)
    assert math.isnan(score.x)
    figure, caption = draw_swept(read_rows(csv, Point))
    assert "AR-SFT" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert any(list(line.get_ydata()) == [score.y] * 2 for line in figure.axes[0].get_lines())
    assert f"{score.y:.2f} [{score.y_low:.2f}, {score.y_high:.2f}] points of score" in caption
    alone = [point for point in read_rows(csv, Point) if point.mark != REFERENCE]  # as older files have it
    assert "AR-SFT" not in draw_swept(alone).caption


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (0, 1), (2, 1), (3, 0), (1, 4)])
def test_fewer_items_of_the_same_kind_never_show_what_more_do_not(gained, lost):
    def low(times, num_equal):
        verdicts = [0.0] * gained + [1.0] * (lost + num_equal), [1.0] * gained + [0.0] * lost + [1.0] * num_equal
        return paired_difference(*(np.repeat(one, times) for one in verdicts)).low

    for num_equal in (5, 20, 100):
        bounds = [low(times, num_equal) for times in range(1, 12)]
        assert bounds == sorted(bounds)


def test_a_value_that_is_worse_is_hardly_ever_called_good_on_fewer_items():
    rng = np.random.default_rng(0)
    before, after = np.ones(400), np.ones(400)
    before[:20], after[20:60] = 0, 0  # 5% gained and 10% lost: worse by 5 points
    for num_items in (5, 15, 50, 150):
        lows = []
        for _ in range(200):
            drawn = rng.choice(400, num_items, replace=False)
            lows.append(paired_difference(before[drawn], after[drawn]).low)
        assert np.mean(100 * np.array(lows) > -MARGIN) <= 0.025


def test_the_margin_is_an_option_and_undecided_values_are_hatched(sources, tmp_path):
    def caption_of(*options):
        command = ["plot", "figure4", str(sources["figure4"]), "--out", str(tmp_path), *options]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        return (tmp_path / "figure4_mini.txt").read_text(encoding="utf-8")

    assert "Shaded" in caption_of("--margin", "3")
    undecided = caption_of("--margin", "0.5")
    assert "Hatched" in undecided
    assert "by more than 0.5 points" in undecided
    figure = draw_swept(rows_of("figure4", [sources["figure4"]]), None, margin=0.5).figure
    assert "not decided" in [text.get_text() for text in figure.legends[0].get_texts()]
    refused = CliRunner().invoke(app, ["plot", "figure1", "--margin", "3", "--out", str(tmp_path)])
    assert "figure1 has no sweet spot" in str(refused.exception)


def test_only_points_that_no_other_beats_are_joined():
    places = [(1, 5), (2, 6), (3, 4), (4, 4), (2, 6)]
    points = [Point(**{**POINT, "x": x, "y": y}, series="refusion") for x, y in places]
    assert [(point.x, point.y) for point in unbeaten(points)] == [(2, 6), (4, 4)]


@pytest.mark.parametrize("name", [name for name in FIGURES if name not in ("figure5", "figure9")])
def test_a_caption_begins_with_what_is_plotted_on_which_axes_and_n(name, sources):
    first = FIGURES[name].draw(rows_of(name, [sources[name]]), None).caption.partition(". ")[0]
    assert "axis" in first
    assert re.search(r"n = \d+", first)
    if name in ("figure1", "figure4", "figure8"):
        assert "minus those of the autoregressive baseline" in first


@pytest.mark.parametrize("name", ["figure5", "figure9"])
def test_a_caption_of_a_text_begins_with_whose_it_is(name, sources):
    caption = FIGURES[name].draw(rows_of(name, [sources[name]]), None).caption
    assert caption.startswith("Response of ReFusion to item 3 of mini_mbpp (slot_size=2), ")


def test_names_in_figure_1_leave_error_bars_free_where_there_is_room():
    points = [
        Point(**{**POINT, "panel": "measured", "label": "AR", "x": 0.0, "y": 0.0}, series="qwen3", mark=BASELINE),
        Point(
            **{**POINT, "panel": "measured", "x": 20.0, "y": 20.0},
            series="refusion",
            x_low=0,
            x_high=40,
            y_low=0,
            y_high=40,
        ),
    ]
    axes = draw_against_baseline(points).figure.axes[0]
    (name,) = [text.get_window_extent() for text in axes.texts if text.get_text() == "ReFusion"]
    for collection in axes.collections:
        for ends in getattr(collection, "get_segments", list)():
            if len(ends):
                assert not name.overlaps(Bbox(axes.transData.transform(ends)).padded(1))


def test_half_written_runs_are_noted(made, tmp_path):
    folder = made["sweep"](tmp_path / "s", "tau_slot", [0.5, 0.7], operating=0.7, note="unfinished: 1 of 2")
    assert {point.note for point in frontier([folder])} == {
        "refusion-0.5 lacks samples (1 of 2)",
        "refusion-0.7 lacks samples (1 of 2)",
        "refusion-table lacks samples (1 of 2)",
    }


def test_a_setting_that_is_off_is_drawn_beyond_its_largest_value(made, tmp_path):
    folder = made["sweep"](tmp_path / "s", "threshold", [0.5, 0.7, 0.9], operating=0.7)
    for name in ("sweep.csv", "points.csv"):
        text = (folder / name).read_text(encoding="utf-8")
        (folder / name).write_text(text.replace("threshold=0.9", "threshold=null").replace(",0.9,", ",null,"), "utf-8")
    points = rows_of("figure4", [folder])
    assert [point.x for point in points if point.metric == DELTA_SCORE] == [0.5, 0.7, math.inf]
    csv, *_ = write_figure("figure4", points, tmp_path / "out")
    axes = FIGURES["figure4"].draw(read_rows(csv, Point), None).figure.get_axes()[-1]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0.5", "0.7", "off"]
    assert axes.get_xlim()[1] > axes.get_xticks()[-1] > 0.7


def test_a_sweep_of_several_machines_is_refused_by_name(made, tmp_path):
    folder = made["sweep"](tmp_path / "s", "tau_slot", [0.5, 0.7], operating=0.7, hardware=lambda v: f"CPU {v}")
    with pytest.raises(StoreError, match=r"speeds from different machines .*CPU 0\.5 in refusion-0\.5"):
        swept([folder])
    points = frontier([folder])  # without a time on its axes it may, and the caption says that scores move too
    assert CARDS_SENTENCE in caption(points)
    assert CARDS_SENTENCE not in caption([replace(point, scored_on="CPU") for point in points])


def test_scaling_of_several_machines_is_refused_by_name(made, tmp_path):
    path = made["scaling"](tmp_path / "s.csv", hardware=("GPU A", "GPU B"))
    with pytest.raises(DataError, match="GPU A, GPU B"):
        scaling_points([path])


def test_a_sweep_of_one_task_needs_no_name_of_it(tmp_path):
    folder = write_sweep(tmp_path / "sweep", "tau_slot", [0.5, 0.7], operating=0.5)
    for path in folder.iterdir():
        path.write_text(path.read_text().replace("mbpp", "gsm8k"))
    assert only_task([folder]) == "gsm8k"
    assert len(rows_of("figure4", [folder])) == 4
    assert only_task([folder, tmp_path]) is None


def test_what_is_missing_is_named(made, tmp_path, sources):
    with pytest.raises(DataError, match=r"none has no points\.csv and no sweep\.csv.* refusion-eval sweep SPEC"):
        swept([tmp_path / "none"])
    with pytest.raises(DataError, match="no figures of gsm8k; its tasks are mini_mbpp"):
        swept([sources["figure4"]], "gsm8k")
    broken = tmp_path / "broken.csv"
    broken.write_text("samples,task\n1,gsm8k\n", encoding="utf-8")
    with pytest.raises(DataError, match="lacks the columns metric, value"):
        scaling_points([broken])
    broken.write_text("samples,task,metric,value,ci_low,ci_high,n\n10,gsm8k,tps\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 2 has too few cells"):
        scaling_points([broken])
    with pytest.raises(DataError, match="is there twice"):
        locality_points([sources["figure3"], sources["figure3"]])
    with pytest.raises(ConfigError, match="figure4 is drawn from folders of sweeps"):
        rows_of("figure4", [])


def test_without_an_autoregressive_run_there_is_no_difference(sources, tmp_path):
    rows = [row for row in read_csv(sources["figure1"]) if row.run_id != "ar-table"]
    write_csv(rows, tmp_path / "alone.csv")
    with pytest.raises(DataError, match="no autoregressive run of mbpp"):
        against_baseline([tmp_path / "alone.csv"])


def test_a_figure_of_the_paper_alone_needs_no_source():
    assert {point.origin for point in rows_of("figure1", [])} == {"published"}


def test_rows_survive_their_file(tmp_path):
    points = [Point(**POINT, series="refusion", x=0.5, y=1.0, n=3, mini=True)]
    write_rows(tmp_path / "points.csv", Point, points)
    (read,) = read_rows(tmp_path / "points.csv", Point)
    assert (read.x, read.n, read.mini, math.isnan(read.y_low)) == (0.5, 3, True, True)


def test_locality_is_read_by_the_names_that_its_command_writes():
    assert set(LOCALITY_COLUMNS) <= set(COLUMNS)


def test_a_text_is_laid_out_as_it_runs_and_keeps_its_places():
    final = [token(0, "ab"), token(1, "\n"), token(2, "cdefg")]
    masked = [token(0, "ab"), token(1, "\n", "mask"), token(2, "cdefg", "mask")]
    places = [[(one.line, one.column, one.length) for one in lay_out(cells, 4)] for cells in (final, masked)]
    assert places[0] == places[1] == [(0, 0, 2), (0, 2, 1), (1, 0, 4), (2, 0, 1)]
    assert [one.text for one in lay_out(masked, 4)] == ["ab", "", "", ""]
    assert "".join(one.text for one in lay_out(final, 4)) == "ab\u21b5cdefg"


def test_ordered_series_differ_without_colour():
    luminance = [
        sum(w * c for w, c in zip((0.299, 0.587, 0.114), to_rgb(look.colour), strict=True)) for look in ORDERED
    ]
    assert len({(look.marker, str(look.line)) for look in ORDERED}) == len(ORDERED)
    assert luminance[:4] == sorted(luminance[:4])


def test_there_is_one_script_a_table_and_figure():
    plots = Path(__file__).resolve().parents[2] / "plots"
    for name in [*FIGURES, *(f"table{number}" for number in range(1, 8))]:
        assert (plots / f"{name}.py").is_file()


def test_variants_of_a_system_have_names_of_their_own(made):
    cells = made["system"]("refusion+left_to_right", 50.0, 90.0, mini=True)
    assert system_label(cells[0]) == "ReFusion left-to-right"
    random = made["cell"]("refusion+slots_at_random", "mbpp", "tps", 1.0, mini=True)
    assert system_label(random) == f"{random.label}, slots at random"
    assert system_label(made["cell"]("refusion", "mbpp", "tps", 1.0, mini=True)) == "ReFusion"


ODD_NAMES = ["M$x_{1$ v2", "$a$ b", r"a\$b$ 50% & #1 ^2 ~ {x}", "_hidden_", r"$\frac{1$"]


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        *((name, ODD_NAMES) for name in ("figure1", "figure4", "figure6", "figure7", "figure8")),
    ],
)
def test_names_stand_in_a_figure_as_they_are(name, labels, sources, tmp_path):
    of_file = rows_of(name, [sources[name]])
    if name == "figure1":  # it looks for a place among all points for the name of each, so each has one name, in turn
        named = [(row, labels[number % len(labels)]) for number, row in enumerate(of_file)]
    else:
        named = [(row, label) for label in labels for row in of_file]
    rows = [replace(row, label=label, series=label) for row, label in named]
    write_figure(name, rows, tmp_path)
    figure, _ = FIGURES[name].draw(rows, None)
    FigureCanvasAgg(figure).draw()
    for label in labels:
        shown = [text for text in figure.findobj(Text) if text.get_text().strip() == label]
        assert shown
        assert not any(text.get_parse_math() for text in shown)


def test_a_model_with_dollar_signs_stands_above_its_panel_as_it_is(sources, tmp_path):
    rows = [replace(row, panel="$a$ model$_{") for row in rows_of("figure3", [sources["figure3"]])]
    figure, _ = FIGURES["figure3"].draw(rows, None)
    FigureCanvasAgg(figure).draw()
    (title,) = [text for text in figure.findobj(Text) if text.get_text() == "$a$ model$_{"]
    assert not title.get_parse_math()
    assert any(text.get_text().startswith("$t$ = ") and text.get_parse_math() for text in figure.findobj(Text))


@pytest.mark.parametrize("values", [[300.0, 500.0], [7.0, 8.0]])
def test_no_label_of_an_axis_shows_the_signs_of_a_formula(values, sources):
    points = rows_of("figure7", [sources["figure7"]])
    distinct = sorted({point.x for point in points})[: len(values)]
    of = dict(zip(distinct, values, strict=True))
    narrow = [replace(point, x=of[point.x]) for point in points if point.x in of]
    figure, _ = FIGURES["figure7"].draw(narrow, None)
    FigureCanvasAgg(figure).draw()
    drawn = [text for text in figure.findobj(Text) if text.get_visible() and not text.get_parse_math()]
    assert not any("$" in text.get_text() for text in drawn)


def renamed(rows, run_id, decoder, label):
    key = system_key(label, "tiny", {}, loop="")
    return [replace(row, decoder=decoder, label=label, system=key) for row in rows if row.run_id == run_id]


def test_the_baseline_is_the_system_that_decodes_from_left_to_right_whatever_its_name(sources, tmp_path):
    rows = read_csv(sources["figure4"] / "sweep.csv")
    named = renamed(rows, "ar-table", "autoregressive", "My base") + renamed(rows, "refusion-table", "refusion", "AR")
    write_csv(named, tmp_path / "named.csv")
    points = rows_of("figure1", [tmp_path / "named.csv"], "mbpp")
    marks = {point.label: point.mark for point in points if point.origin == "measured"}
    assert marks == {"My base": BASELINE, "AR": ""}
    write_csv(renamed(rows, "refusion-table", "refusion", "Qwen3-8B"), tmp_path / "none.csv")
    with pytest.raises(DataError, match="no autoregressive run of mbpp lies among the sources; add one"):
        rows_of("figure1", [tmp_path / "none.csv"], "mbpp")


def test_a_file_says_the_decoder_only_where_the_name_does_not(sources, tmp_path):
    rows = read_csv(sources["figure1"])
    write_csv(renamed(rows, "ar-table", "autoregressive", "AR"), tmp_path / "usual.csv")
    assert "decoder" not in (tmp_path / "usual.csv").read_text().splitlines()[0].split(",")


@pytest.mark.parametrize("name", ["figure1", "figure4", "figure6"])
def test_a_task_may_be_named_as_tables_name_it(name, sources):
    as_named = [rows_of(name, [sources[name]], task) for task in ("mbpp", "mini_mbpp")]
    measured = [[point for point in points if point.origin == "measured"] for points in as_named]
    assert repr(measured[0]) == repr(measured[1])
    with pytest.raises(DataError, match=r"no figures of mini_mbp; (its|their) tasks are mini_mbpp"):
        rows_of(name, [sources[name]], "mini_mbp")
