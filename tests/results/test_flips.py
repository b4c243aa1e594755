"""Flips of tokens and verdicts between runs of one system, by hand; and the sweep of their configurations."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.errors import ConfigError
from refusion_eval.paths import embedded_systems
from refusion_eval.results.cautions import CARDS_SENTENCE
from refusion_eval.results.compare import compare_runs
from refusion_eval.results.flips import flips_between, flips_cells, flips_table
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.results_file import read_csv, write_csv
from refusion_eval.results.tables import summary, summary_table
from refusion_eval.runs.systems import choose_systems
from refusion_eval.store.manifest import Hardware
from refusion_eval.sweep.configurations import configurations, spec_of
from tests.results.conftest import sample

REFERENCE, OTHER = "float32-b1", "bfloat16-b1"


def ten(changed=(), task="mini_gsm8k", last=(1, 2, 9)):
    """Ten items of three tokens; those that changed have others from the third on."""
    tokens = {item: list(last) if item in changed else [1, 2, 3] for item in range(10)}
    return [sample(n, task=task, tokens=kept, num_tokens=len(kept)) for n, kept in tokens.items()]


@pytest.fixture
def flips(write_run):
    def make(reference, other, right=(set(), set())):
        names = zip((REFERENCE, OTHER), (reference, other), right, strict=True)
        runs = [(name, write_run(name, samples, right={str(item) for item in of})) for name, samples, of in names]
        return flips_between("refusion", *runs)

    return make


def test_flips_of_tokens_and_verdicts_are_counted_apart(flips):
    (found,) = flips(ten(), ten(changed={0, 1, 2}), ({0, 1, 4, 5}, {1, 4, 5, 6, 7}))
    assert (found.num_samples, found.num_differing, found.first_positions) == (10, 3, [2, 2, 2])
    assert found.tokens.value == pytest.approx(30)
    assert found.tokens.low < 30 < found.tokens.high
    assert {name: len(items) for name, items in found.comparison.flips.items() if items} == {"gained": 2, "lost": 1}
    assert found.comparison.difference.value == pytest.approx(10)


def test_another_number_of_forwards_is_counted_with_equal_tokens(flips):
    (found,) = flips(ten(), [replace(one, num_forwards=3 + (one.item_id == "2")) for one in ten()])
    assert (found.num_differing, found.num_other_forwards) == (0, 1)


def test_a_text_that_ends_earlier_differs_after_its_last_token(flips):
    (found,) = flips(ten(), ten(changed={3}, last=(1, 2)))
    assert (found.num_differing, found.first_positions) == (1, [2])


def test_texts_whose_tokens_are_withheld_are_compared_as_texts(flips):
    hidden = [replace(one, tokens=None, text=f"[withheld] {one.item_id}") for one in ten()]
    other = [replace(one, text="other") if one.item_id == "4" else one for one in hidden]
    (found,) = flips(hidden, other)
    assert (found.num_differing, found.first_positions) == (1, [])


def test_a_sample_that_failed_in_one_configuration_is_left_out(write_run):
    failed = {"error": "no room", "num_tokens": 0, "num_forwards": 0, "trace": None, "prefill_seconds": None}
    good = ten(changed={0})[:9]
    runs = [write_run(REFERENCE, ten()), write_run(OTHER, [*good, sample(9, **failed)], scored=good)]
    (found,) = flips_between("refusion", *zip((REFERENCE, OTHER), runs, strict=True))
    assert (found.num_samples, found.num_differing, len(found.comparison.items)) == (9, 1, 9)


def test_the_table_has_a_line_for_all_tasks_and_the_csv_one_for_each(flips):
    tasks = ("mini_gsm8k", "mini_parts")
    both = [one for task in tasks for one in ten(task=task)], [one for task in tasks for one in ten({0, 1}, task=task)]
    found = flips(*both)
    table = flips_table(found, "a machine", "There is no GPU here.")
    ((system, configuration, num, tokens, first, *_),) = table.rows
    assert (system, configuration, num, first) == ("refusion", OTHER, "20", "2 [2, 2]")
    assert tokens.startswith("20.0 [")
    for said in ("Against float32-b1", "mini_gsm8k, mini_parts", "Measured on a machine.", "There is no GPU here."):
        assert said in table.caption
    columns, rows = flips_cells(found)
    assert [dict(zip(columns, row, strict=True))["task"] for row in rows] == [*tasks, "mean"]
    assert {row[columns.index("reference")] for row in rows} == {REFERENCE}


def test_the_embedded_family_is_decoded_under_every_configuration():
    named = configurations(8, with_graphs=True)
    assert len(named) == 8
    assert next(iter(named)) == REFERENCE
    systems = choose_systems([])
    spec = spec_of(systems, dict.fromkeys(systems, configurations(8, with_graphs=False)), limit=2)
    assert len(spec.systems) == 4 * len(embedded_systems())
    first = spec.systems[0]
    assert first.name == f"{next(iter(embedded_systems()))}-{REFERENCE}"
    differing = {name: {system.arguments[name] for system in spec.systems} for name in first.arguments}
    assert [name for name, values in differing.items() if len(values) > 1] == [
        *("pretrained", "decoder", "dtype", "batch_size"),
    ]


def test_of_a_server_only_the_number_of_requests_at_once_is_changed(monkeypatch, tmp_path):
    swept = []

    def stop(spec, *others, **more):
        swept.extend(spec.systems)
        raise ConfigError("this is enough")

    monkeypatch.setattr("refusion_eval.sweep.run.run_sweep", stop)
    systems = "server:http://127.0.0.1:8000,qwen3_0.6b"
    CliRunner().invoke(app, ["flips", "--system", systems, "--batch-size", "4", "--out", str(tmp_path)])
    served = [one for one in swept if one.arguments["loop"] == "server"]
    assert [one.name for one in served] == ["server-http-127.0.0.1-8000-b1", "server-http-127.0.0.1-8000-b4"]
    differing = {name for name in served[0].arguments if len({one.arguments[name] for one in served}) > 1}
    assert differing == {"batch_size"}
    assert not {"dtype", "cuda_graphs", "attention"} & served[0].arguments.keys()
    assert len(swept) > 4


def test_systems_are_published_ones_or_one_on_a_checkpoint():
    spec = spec_of(choose_systems(["dream"]), {"dream": {"a": {}}})
    (arguments,) = {one.arguments["pretrained"] for one in spec.systems}
    assert arguments == "Dream-org/Dream-v0-Instruct-7B"
    assert choose_systems(["llada"], "my/copy") == {"llada": {"system": "llada", "model": "my/copy"}}
    assert choose_systems(["llada"], "embedded") == {"llada": {"pretrained": "embedded", "decoder": "llada"}}
    for names, model in ((["lada"], "embedded"), (["llada", "dream"], "my/copy")):
        with pytest.raises(ConfigError):
            choose_systems(names, model)


def test_an_accuracy_of_another_card_says_so(write_run):
    card = Hardware(cpu="Test CPU", cores=2, threads=1, gpu="NVIDIA H200", num_gpus=1)
    here = write_run("a", ten(), right={"1"})
    # Samples of a batch have no speed, so that nothing but the score is of the other card.
    there = write_run("b", [replace(one, batch_size=8) for one in ten()], right={"2"}, hardware=card)
    table = summary_table(summary(run_measurements([here, there])))
    labels = [row.cells[1].text for row in table.lines]
    assert [label for label in labels if "measured on another card" in label] == [
        "ReFusion (b) [measured on another card]"
    ]
    assert CARDS_SENTENCE in table.caption
    alone = summary_table(summary(run_measurements([here])))
    assert CARDS_SENTENCE not in alone.caption


def test_the_same_processor_with_other_threads_or_a_server_is_no_other_card(write_run):
    answers = {"samples": ten(), "right": {"1"}}
    one = write_run("one", **answers, hardware=Hardware(cpu="Test CPU", cores=2, threads=1))
    two = write_run("two", **answers, hardware=Hardware(cpu="Test CPU", cores=2, threads=2))
    served = write_run("served", **answers, hardware=Hardware(cpu="Client CPU", server="server x at h"))
    found = run_measurements([one, two, served])
    text = summary_table(summary(found)).markdown()
    assert "another card" not in text
    assert all(f"Test CPU, {threads} threads" in text for threads in (1, 2))  # speeds keep the comparison with threads
    assert {entry.card for entry in found} == {"Test CPU", ""}
    assert "another card" not in " ".join(compare_runs(one, two).notes)


def test_the_card_is_in_the_csv(write_run, tmp_path):
    runs = [write_run(name, ten(), hardware=Hardware(cpu=f"CPU {name}", threads=1)) for name in "ab"]
    write_csv(run_measurements(runs), tmp_path / "results.csv")
    assert CARDS_SENTENCE in summary_table(summary(read_csv(tmp_path / "results.csv"))).caption
