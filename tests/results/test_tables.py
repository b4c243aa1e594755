"""Fair speed: every factor by hand, and both autoregressive loops."""

import csv
import re
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from transformers import Qwen3ForCausalLM
from typer.testing import CliRunner

from refusion_eval import api
from refusion_eval.cli import app
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError, DecodeError, StoreError
from refusion_eval.results.measured import read_measurements, run_measurements
from refusion_eval.results.render import csv_text
from refusion_eval.results.tables import speed_cells, speed_rows, speed_table, summary, summary_table
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.stock_loop import StockLoop
from refusion_eval.store.manifest import Hardware
from refusion_eval.store.run_store import Run, RunReader
from tests.models import tiny
from tests.results.conftest import sample

PROMPT = [1, 2, 3, 4, 5]


def ar_samples(seconds, count=4):
    """Six tokens in six forwards."""
    trace = [["forward", 0, "prefill", 5, 0], ["fix", 0, [0], [1]]]
    for number in range(1, 6):
        trace += [["forward", number, "decode", 1, 4 + number], ["fix", number, [number], [1]]]
    return [sample(i, seconds=seconds, num_forwards=6, trace=trace, prefill_seconds=0.1) for i in range(count)]


@pytest.fixture
def runs(write_run):
    return [
        write_run("ours", [sample(i) for i in range(4)]),
        write_run("engine", ar_samples(1.0), system="AR", decoder="autoregressive"),
        write_run("stock", ar_samples(2.0), system="AR (generate)", decoder="stock_generate"),
    ]


def test_every_factor_by_hand(runs):
    rows = {
        row.of.run_id: {name: one.value for name, one in row.measurements.items()}
        for row in speed_rows(read_measurements(runs))
    }
    ours = {
        "tps": 12.0,  # 6 tokens in 0.5 s
        "forwards_per_second": 6.0,
        "tpf": 2.0,
        "mbu": 100 * (3 * 1000 + 2 * 5 * 10) / (0.5 * 100_000),  # 3 x weights and 2 x 5 rows of the cache
        "one_token_share": 12.0,  # of 100 forwards/s that the weights alone allow
        "prefill_seconds": 0.2,
        "decode_tps": 4 / 0.3,  # without the two tokens of the first forward
        "tokens_mean": 6.0,
        "speedup": 2.0,
        "speedup_stock": 4.0,
    }
    assert rows["ours"] == pytest.approx(ours)
    assert (rows["engine"]["speedup_stock"], rows["stock"]["speedup"]) == (2.0, 0.5)
    assert "speedup" not in rows["engine"]
    assert "speedup_stock" not in rows["stock"]
    assert rows["stock"]["decode_tps"] == pytest.approx(5 / 1.9)


def test_runs_of_one_system_are_told_apart(runs, write_run):
    again = write_run("ours-recompute", [sample(i, seconds=0.6) for i in range(4)])
    table = speed_table(speed_rows(read_measurements([*runs, again])))
    assert {row[1] for row in table.rows} == {"ReFusion [ours]", "ReFusion [ours-recompute]", "AR", "AR (generate)"}


def test_records_without_prefill_have_all_but_the_phases(write_run):
    run = write_run("old", [sample(i, prefill_seconds=None) for i in range(3)])
    (row,) = speed_rows(read_measurements([run]))
    assert "tps" in row.measurements
    assert not {"prefill_seconds", "decode_tps"} & row.measurements.keys()


def test_energy_has_columns_only_where_it_was_measured(runs, write_run):
    without = speed_rows(read_measurements(runs))
    assert "J/token" not in speed_table(without).columns
    assert "joules" not in csv_text(*speed_cells(without))
    run = write_run("counted", [sample(i, joules=30.0 * (i + 1)) for i in range(4)], system="Counted")
    rows = speed_rows(read_measurements([*runs, run]))
    figures = {row.of.run_id: row.measurements for row in rows}["counted"]
    assert figures["joules_mean"].value == pytest.approx(75)
    assert figures["joules_per_token"].value == pytest.approx(75 / 6)
    table = speed_table(rows)
    assert table.columns[-2:] == ("J/response", "J/token")
    assert {row[1]: tuple(row[-2:]) for row in table.rows}["Counted"] == ("75.0", "12.500")
    assert {row[1]: tuple(row[-2:]) for row in table.rows}["AR"] == ("", "")
    assert speed_cells(rows)[0][-2:] == ["joules_per_token_ci_low", "joules_per_token_ci_high"]


def test_machines_are_not_mixed_and_untimed_runs_are_refused(write_run):
    here = write_run("here", [sample(0), sample(1)])
    there = write_run("there", [sample(0), sample(1)], hardware=Hardware(cpu="Other CPU"))
    with pytest.raises(StoreError, match=r"speeds from different machines .*Other CPU.* in there"):
        speed_rows(read_measurements([here, there]))
    batch = write_run("batch", [sample(i, batch_size=8) for i in range(2)])
    with pytest.raises(StoreError, match="nothing was timed"):
        speed_rows(read_measurements([batch]))


def test_the_command_prints_and_writes(runs, tmp_path):
    outputs = ["--csv", str(tmp_path / "speed.csv"), "--markdown", str(tmp_path / "speed.md")]
    result = CliRunner().invoke(app, ["speed", *map(str, runs), *outputs])
    assert result.exit_code == 0, result.output
    with (tmp_path / "speed.csv").open(newline="") as stream:
        rows = {row["run_id"]: row for row in csv.DictReader(stream)}
    assert (rows["ours"]["speedup"], rows["ours"]["speedup_stock"], rows["engine"]["speedup"]) == ("2", "4", "")
    assert "| gsm8k (mini) | ReFusion | 4 | 12.0 [12.0, 12.0] | 6.0 | 2.00 |" in (tmp_path / "speed.md").read_text()


def test_half_written_runs_are_marked(write_run, tmp_path):
    run = write_run("half", [sample(0), sample(1)], expected={"mini_gsm8k": 9})
    result = CliRunner().invoke(app, ["speed", str(run), "--markdown", str(tmp_path / "speed.md")])
    assert result.exit_code == 0, result.output
    assert "ReFusion [unfinished 2 of 9]" in (tmp_path / "speed.md").read_text()


def test_runs_with_fewer_items_and_fused_forwards_are_marked(write_run, tmp_path):
    runs = [
        write_run("all", [sample(i) for i in range(4)]),
        write_run("some", [sample(i, settings={"fuse": None, "release_compatible": False}) for i in range(2)]),
        write_run("paper", [sample(i, settings={"fuse": False}) for i in range(4)]),
    ]
    outputs = ["--csv", str(tmp_path / "speed.csv"), "--markdown", str(tmp_path / "speed.md")]
    result = CliRunner().invoke(app, ["speed", *map(str, runs), *outputs])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "speed.md").read_text()
    assert "| ReFusion [all] | 4 |" in text
    assert "| ReFusion [paper] | 4 |" in text
    assert "| ReFusion [some, fewer items, fused] | 2 |" in text
    assert "Fused: fewer forwards for the same tokens" in text
    with (tmp_path / "speed.csv").open(newline="") as stream:
        rows = {row["run_id"]: (row["n"], row["fewer"], row["fused"]) for row in csv.DictReader(stream)}
    assert rows == {"all": ("4", "no", "no"), "some": ("2", "yes", "yes"), "paper": ("4", "no", "no")}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    tiny.save_checkpoint(directory)
    stock = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return api.load_model(str(directory), dtype="float32", device="cpu"), StockLoop(stock)


def test_the_stock_loop_gives_the_engines_tokens_forwards_and_trace(both):
    model, stock = both
    settings = api.decoder_settings(model, "autoregressive", gen_length=12)
    ours = model.engine.run(DECODERS["autoregressive"].decode, PROMPT, settings)
    theirs = stock.run(PROMPT, settings)
    assert (theirs.tokens, theirs.num_forwards, theirs.stop) == (ours.tokens, ours.num_forwards, ours.stop)
    assert theirs.trace.to_json() == ours.trace.to_json()
    for decoded in (ours, theirs):
        assert 0 < decoded.prefill_seconds <= decoded.seconds


def test_the_stock_loop_ends_where_the_engine_does(both):
    model, stock = both
    free = api.decoder_settings(model, "autoregressive", gen_length=12)
    tokens = stock.run(PROMPT, free).tokens
    third = tokens[2]
    ends = {
        "eos": replace(free, eos_ids=(third,)),
        "stop_string": replace(free, stop_rule=lambda so_far: third in so_far),
    }
    for reason, settings in ends.items():
        ours = model.engine.run(DECODERS["autoregressive"].decode, PROMPT, settings)
        theirs = stock.run(PROMPT, settings)
        assert (theirs.tokens, theirs.stop) == (ours.tokens, ours.stop) == (tokens[: tokens.index(third) + 1], reason)


def test_the_stock_loop_refuses_what_it_does_not_do(both):
    model, stock = both
    with pytest.raises(DecodeError, match="greedy"):
        stock.run(PROMPT, api.decoder_settings(model, "autoregressive", gen_length=2, temperature=1.0))
    with pytest.raises(ConfigError, match="decoder=autoregressive only, not refusion"):
        ModelArgs(pretrained="embedded", loop="generate")
    with pytest.raises(ConfigError, match="batch_size=1 only"):
        ModelArgs(pretrained="embedded", decoder="autoregressive", loop="generate", batch_size=4)


def test_a_run_by_the_stock_loop_says_so(checkpoint, tmp_path):
    options = ["--decoder", "autoregressive", "--set", "gen_length=4", "--warmup", "1", "--limit", "2"]
    options += ["--round", "1/1"]
    command = ["run", "--model", checkpoint, "--tasks", "mini_gsm8k", *options]
    for name, loop in (("engine", "engine"), ("stock", "generate")):
        result = CliRunner().invoke(app, [*command, "--loop", loop, "--run-dir", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
    with RunReader.open(tmp_path / "stock") as reader:
        manifest, samples = reader.run.manifest, list(reader.samples())
        assert reader.run.expected == {"mini_gsm8k": 2}
    assert (manifest.system, manifest.decoder, manifest.attention) == (
        "AR (generate)",
        "stock_generate",
        "transformers",
    )
    with RunReader.open(tmp_path / "engine") as reader:
        assert [one.tokens for one in reader.samples()] == [one.tokens for one in samples]
    rows = {
        row.of.run_id: row.measurements
        for row in speed_rows(read_measurements([tmp_path / "engine", tmp_path / "stock"]))
    }
    assert rows["engine"]["speedup_stock"].value == pytest.approx(1 / rows["stock"]["speedup"].value)


def test_speeds_of_other_threads_and_of_fewer_items_are_marked(write_run):
    few = [sample(i) for i in range(2)]
    many = [sample(i) for i in range(4)]
    machine = {"cpu": "Test CPU", "cores": 2}
    runs = [
        write_run("one", many, hardware=Hardware(**machine, threads=1)),
        write_run("two", few, hardware=Hardware(**machine, threads=2)),
    ]
    table = summary_table(summary(run_measurements(runs)))
    assert table.columns[-1] == "Machine"
    assert [line.cells[-1].text for line in table.lines] == ["1", "2"]
    assert ["fewer items" in line.cells[1].text for line in table.lines] == [False, True]
    assert "1: Test CPU, 1 threads; 2: Test CPU, 2 threads" in table.caption
    assert "Machine" not in summary_table(summary(run_measurements(runs[:1]))).columns


def test_a_caption_says_whether_intervals_of_speed_cover_rounds(write_run, monkeypatch):
    def caption():
        return summary_table(summary(run_measurements([run]))).caption

    run = write_run("run", [sample(i) for i in range(6)])
    assert "of one round has an interval that leaves out changes of the machine's own speed" in caption()
    turns = cycle((1, 2))
    monkeypatch.setattr(Run, "round", lambda *_: next(turns))
    assert "also cover the rounds" in caption()
    assert "of one round" not in caption()


def test_a_table_without_speeds_says_nothing_of_speed(write_run):
    samples = [sample(i) for i in range(3)]
    machine = {"cpu": "Test CPU", "cores": 2}
    runs = [write_run(f"on {n}", samples, hardware=Hardware(**machine, threads=n)) for n in (1, 2)]
    tables = {
        metrics: summary_table(summary(run_measurements(runs)), metrics.split(","))
        for metrics in ("accuracy,tps", "accuracy,tpf", "accuracy")
    }
    assert {metrics: table.caption_title for metrics, table in tables.items()} == {
        "accuracy,tps": "Scores and speeds of one request at a time",
        "accuracy,tpf": "Scores and tokens per forward",
        "accuracy": "Scores",
    }
    assert ["A speed of one round" in table.caption for table in tables.values()] == [True, False, False]
    assert [bool(re.search("speed|TPS", table.caption, re.IGNORECASE)) for table in tables.values()] == [
        *(True, False, False)
    ]
    assert all("Machine 1: Test CPU, 1 threads; 2: Test CPU, 2 threads." in table.caption for table in tables.values())


def test_runs_with_equally_many_other_items_have_letters_at_n(write_run):
    def rows(*runs):
        table = summary_table(summary(run_measurements(runs)))
        return [line.cells[2].text for line in table.lines], "Letters at n" in table.caption

    first, again = (write_run(name, [sample(i) for i in range(3)]) for name in ("first", "again"))
    other = write_run("other", [sample(i) for i in range(1, 4)])
    few = write_run("few", [sample(i) for i in range(2)])
    assert rows(again, first) == (["3", "3"], False)
    assert rows(again, first, other) == (["3 a", "3 a", "3 b"], True)
    assert rows(few, first) == (["2", "3"], False)


def test_a_run_without_samples_says_so(write_run):
    assert summary_table(summary(run_measurements([write_run("none", [])]))).caption == "There are no samples."
