import json

import pytest

from refusion_eval.cli import run_command
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import StoreError
from refusion_eval.exports import every_eval_ever
from refusion_eval.exports.source import read_exported
from refusion_eval.paper.style import page_look, style_of
from refusion_eval.report.collect import collect
from refusion_eval.report.leaderboard import differing, leaderboard, published_figures, read_placed
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.render import csv_text
from refusion_eval.results.results_file import measurement_cells

from .conftest import LetterSources, make_sample, make_score, write_run

CREATED = "2026-11-01T10:00:00+00:00"


def fast_run(folder, name, **changes):
    samples = [make_sample(item, created=CREATED, seconds=0.1) for item in "1234"]
    scores = [make_score(sample, float(sample.item_id != "2")) for sample in samples]
    return write_run(folder / name, samples, scores, **changes)


def export_csv(run, path, **changes):
    """The CSV of a run as another machine would have written it; `changes` are of texts."""
    text = csv_text(*measurement_cells(run_measurements([run], hash_records=True)))
    for old, new in changes.items():
        text = text.replace(old.replace("_", " "), new)
    path.write_text(text)
    return path


def test_a_point_has_its_figures_its_settings_and_the_hash_of_its_records(tmp_path):
    run = fast_run(tmp_path, "run", command=["refusion-eval", "run"], expected={"mini_gsm8k": 8}, load=8.0)
    index = leaderboard(read_placed([run]), look=page_look)
    (cell,) = index["cells"]
    measured = {entry.metric: entry for entry in run_measurements([run], hash_records=True)}
    assert cell["metrics"]["accuracy"]["value"] == 75
    assert cell["metrics"]["tps"]["value"] == pytest.approx(measured["tps"].value)
    assert cell["facts"]["Records"] == measured["tps"].records
    assert (cell["facts"]["Command"], cell["facts"]["Machine"]) == ("refusion-eval run", "Test CPU, 1 threads")
    assert cell["settings"] == {"slot_size": "2", "tau_slot": "0.6"}
    assert [mark["label"] for mark in cell["marks"]] == ["unfinished 4 of 8", "4 cut short", "slowed"]
    look = DECODERS["refusion"].style
    assert {name: index["runs"][cell["run"]][name] for name in ("colour", "marker", "dashes")} == {
        "colour": look.colour,
        "marker": look.marker,
        "dashes": [],
    }


def test_a_variant_has_its_own_look_on_the_leaderboard_and_on_the_report(tmp_path):
    settings = {"plain": {"slot_size": 2}, "verifier": {"slot_size": 2, "completion": "verifier"}}
    runs = [write_run(tmp_path / name, [make_sample("1", settings=of)]) for name, of in settings.items()]
    for index in (
        leaderboard(read_placed(runs), look=page_look),
        collect(runs, LetterSources(), look=page_look).index,
    ):
        markers = [index["runs"][cell["run"]]["marker"] for cell in index["cells"]]
        assert markers == [style_of("refusion").marker, style_of("refusion+verifier").marker]


def test_a_point_names_its_protocol(tmp_path):
    samples = [make_sample(item, created=CREATED, protocol="mine@aaaaaaaaaaaa") for item in "12"]
    (cell,) = leaderboard(read_placed([write_run(tmp_path / "run", samples)]))["cells"]
    assert cell["facts"]["Protocol"] == "mine@aaaaaaaaaaaa"


def test_runs_and_their_exports_are_one_point_and_other_machines_another(tmp_path):
    run = fast_run(tmp_path, "run")
    exported = every_eval_ever.write(read_exported([run], LetterSources()), tmp_path / "eee")
    same = export_csv(run, tmp_path / "same.csv")
    elsewhere = export_csv(run, tmp_path / "elsewhere.csv", Test_CPU="Other CPU")
    placed = read_placed([run, same, elsewhere, *(path for path in exported if path.suffix == ".json")])
    cells = leaderboard(placed)["cells"]
    assert [(cell["hardware"], cell["facts"].get("Read from")) for cell in cells] == [
        (["Test CPU, 1 threads"], None),
        (["Other CPU, 1 threads"], "elsewhere.csv"),
    ]
    assert cells[0]["metrics"].keys() == cells[1]["metrics"].keys()


def test_an_export_alone_gives_the_point_that_its_run_gives(tmp_path):
    run = fast_run(tmp_path, "run")
    exported = every_eval_ever.write(read_exported([run], LetterSources()), tmp_path / "eee")
    file = next(path for path in exported if path.suffix == ".json")
    (of_run,), (of_file,) = (leaderboard(read_placed([source]))["cells"] for source in (run, file))
    assert of_file["facts"].pop("Read from") == file.name
    assert {**of_file, "metrics": None} == {**of_run, "metrics": None}
    assert {name: pytest.approx(figure["value"], rel=1e-5) for name, figure in of_file["metrics"].items()} == {
        name: figure["value"] for name, figure in of_run["metrics"].items()
    }


def test_a_file_without_hashes_of_records_is_shown_without_one(tmp_path):
    run = fast_run(tmp_path, "run")
    file = tmp_path / "results.csv"
    file.write_text(csv_text(*measurement_cells(run_measurements([run]))))
    (cell,) = leaderboard(read_placed([file]))["cells"]
    assert "Records" not in cell["facts"]


def test_a_mean_over_tasks_is_a_point_with_short_marks(tmp_path):
    tasks = {"mini_gsm8k": "1", "mini_math": "1"}
    samples = [make_sample(item, task=task, stop="eos") for task in tasks for item in "12"]
    run = write_run(tmp_path / "run", samples, tasks=tasks, expected=dict.fromkeys(tasks, 2), whole={"mini_math": 9})
    mean = next(cell for cell in leaderboard(read_placed([run]))["cells"] if cell["mean"])
    assert (mean["task"], mean["metrics"]["accuracy"]["value"], mean["facts"]["Records"]) == (
        "mean",
        100,
        run_measurements([run], hash_records=True)[-1].records,
    )
    assert [(mark["label"], mark["sentence"]) for mark in mean["marks"]] == [
        ("limited", "mini_math 2 of 9 samples of the task were asked for.")
    ]


def test_published_figures_keep_their_digits_and_what_is_said_beside_them():
    rows = published_figures()
    qwen = [row for row in rows if (row["task"], row["system"]) == ("gsm8k", "qwen3")]
    assert any(row["values"] == {"score": "81.96", "tps": "31.20"} and "gpu=A100" in row["said"] for row in qwen)
    assert all(row["source"] for row in rows)


def test_different_numbers_for_one_system_and_task_stand_together_with_their_settings():
    rows = published_figures()
    groups = {(group["task"], rows[group["places"][0]]["system"], group["metric"]): group for group in differing(rows)}
    numbers = {rows[place]["values"]["score"]: rows[place] for place in groups["gsm8k", "qwen3", "score"]["places"]}
    assert {"81.96", "93.63"} <= numbers.keys()
    assert "SGLang" in numbers["93.63"]["said"]
    assert len({row["source"] for row in numbers.values()}) > 1
    equal = [{"task": "t", "system": "s", "values": {"score": text}} for text in ("63.80", "63.8")]
    assert differing(equal) == []


def test_texts_of_samples_are_not_on_the_page(tmp_path):
    run = write_run(tmp_path / "run", [make_sample("1", task="refusion_gpqa", text="photosynthesis")])
    assert "photosynthesis" not in json.dumps(leaderboard(read_placed([run])))


def test_sources_without_a_figure_are_refused(tmp_path):
    with pytest.raises(StoreError, match="no figure"):
        read_placed([])
    with pytest.raises(StoreError, match="holds no records"):
        read_placed([tmp_path])


def test_the_command_writes_a_folder_whose_figures_it_reads_again(tmp_path, capsys):
    run = fast_run(tmp_path, "run")
    assert run_command("leaderboard", str(run), "--out", str(tmp_path / "site")) == 0
    site = tmp_path / "site"
    assert capsys.readouterr().out.splitlines() == [
        str(site / name) for name in ("index.html", "figures.csv", "published.csv")
    ]
    first, second = read_placed([run]), read_placed([site / "figures.csv"])
    assert [one.measurement.records for one in second] == [one.measurement.records for one in first]
