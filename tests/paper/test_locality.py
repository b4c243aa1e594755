"""The pilot study: what is sampled, what is averaged, and the CSV."""

import csv
import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from miniature.data import held_out_items
from refusion_eval.benchmarks import BENCHMARKS, Task
from refusion_eval.cli import app
from refusion_eval.cli.parameters import numbers_of
from refusion_eval.errors import ConfigError, DataError
from refusion_eval.models.card import CARDS
from refusion_eval.paper.locality import study as locality
from refusion_eval.paper.locality.study import (
    COLUMNS,
    MAX_DISTANCE,
    MINI_BENCHMARK,
    GoldResponse,
    LocalitySettings,
    choose_reading,
    gold_pairs,
    locality_command,
    mask_response,
    mask_responses,
    measure_locality,
)

RUNNER = CliRunner()
FEW = LocalitySettings(num_responses=3, reveals=4)
RESPONSE = GoldResponse(7, (1, 2, 3, 4), tuple(range(10, 40)))


def run(out, settings=FEW, **options):
    console = Console(width=140, record=True, quiet=True)
    return locality_command("embedded", settings, out=out, console=console, **options)


def read(path):
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize(("ratio", "num_masked"), [(0.2, 6), (0.4, 12), (0.8, 24)])
def test_exactly_the_share_of_the_response_is_masked(ratio, num_masked):
    text = mask_response(RESPONSE, ratio, 8, seed=0)
    assert text.tokens == RESPONSE.prompt + RESPONSE.response
    assert len(set(text.masked)) == len(text.masked) == num_masked
    assert text.masked == sorted(text.masked)
    assert min(text.masked) >= len(RESPONSE.prompt)
    assert max(text.masked) < len(text.tokens)
    assert len(set(text.revealed)) == min(8, num_masked)
    assert set(text.revealed) <= set(text.masked)


def test_masks_depend_on_seed_row_and_ratio():
    def masked(gold=RESPONSE, ratio=0.5, seed=0):
        return tuple(mask_response(gold, ratio, 3, seed).masked)

    assert masked() == masked()
    others = [masked(seed=1), masked(gold=dataclasses.replace(RESPONSE, number=8)), masked(ratio=0.51)]
    assert masked() not in others


def test_masks_and_reveals_are_uniform():
    drawn = [mask_response(RESPONSE, 0.5, 5, seed) for seed in range(2000)]
    for counts, expected in (
        (Counter(position for text in drawn for position in text.masked), 1000),
        (Counter(position for text in drawn for position in text.revealed), 2000 * 5 / 30),
    ):
        assert len(counts) == 30
        assert all(abs(count - expected) < 5.5 * expected**0.5 for count in counts.values())


def test_a_response_with_one_masked_token_has_no_pair():
    assert mask_response(dataclasses.replace(RESPONSE, response=(5, 6, 7)), 0.4, 8, seed=0) is None


def test_pairs_are_averaged_by_signed_distance(checkpoint, monkeypatch):
    """A divergence of 1000 + i - j at ratio 0.8 and half of it at 0.5 has to come out at distance i - j."""

    def scripted(model, texts, reading, mask_id, batch_size):
        for text in texts:
            distance = np.array(text.masked)[None, :] - np.array(text.revealed)[:, None]
            values = (1000.0 + distance) * (1 if len(text.masked) == 24 else 0.5)
            yield np.where(distance == 0, np.nan, values)

    monkeypatch.setattr(locality, "reveal_divergences", scripted)
    model = locality.LoadedModel.open(checkpoint)
    settings = LocalitySettings(ratios=(0.8, 0.5), reveals=6)
    responses = [dataclasses.replace(RESPONSE, number=number) for number in range(5)]
    found = measure_locality(model, mask_responses(responses, settings), 2, "refusion", 1)
    assert found.counts[0].sum() == 5 * 6 * 23
    assert found.counts[1].sum() == 5 * 6 * 14
    for ratio_index, factor in enumerate((1, 0.5)):
        for distance in (-12, -1, 1, 12):
            interval, num_pairs = found.mean(ratio_index, distance, seed=0)
            assert interval.value == pytest.approx(factor * (1000 + distance))
            assert num_pairs == found.counts[ratio_index, :, distance + MAX_DISTANCE].sum()
        assert found.mean(ratio_index, 0, seed=0) is None
        assert found.mean(ratio_index, 31, seed=0) is None


def test_pairs_beyond_the_largest_distance_are_left_out(checkpoint, monkeypatch):
    def scripted(model, texts, reading, mask_id, batch_size):
        yield from (np.ones((len(text.revealed), len(text.masked))) for text in texts)

    monkeypatch.setattr(locality, "reveal_divergences", scripted)
    long = GoldResponse(0, (1, 2), (5,) * 400)
    text = mask_response(long, 0.5, 4, seed=0)
    distances = np.subtract.outer(text.masked, text.revealed)
    model = locality.LoadedModel.open(checkpoint)
    found = measure_locality(
        model, mask_responses([long], LocalitySettings(ratios=(0.5,), reveals=4)), 2, "refusion", 1
    )
    assert found.counts.sum() == ((distances != 0) & (abs(distances) <= MAX_DISTANCE)).sum() < distances.size


def test_the_csv_is_tidy_and_says_what_it_is(tmp_path):
    rows = run(tmp_path / "a.csv")
    lines = read(tmp_path / "a.csv")
    assert tuple(lines[0]) == COLUMNS
    assert len(lines) == len(rows) == len({(line["masking_ratio"], line["distance"]) for line in lines})
    assert {line["masking_ratio"] for line in lines} == {"0.2", "0.4", "0.6", "0.8"}
    expected = {
        "model": "embedded",
        "decoder": "refusion",
        "reading": "refusion",
        "dataset": "mini_math",
        "mini": "yes",
        "unit": "nats",
        "seed": "0",
        "device": "cpu",
        "dtype": "float32",
    }
    for line in lines:
        assert expected.items() <= line.items()
        assert int(line["n_pairs"]) >= int(line["n_responses"]) >= 1
        assert 0 < float(line["jsd_mean"]) < np.log(2)
        if line["n_responses"] == "1":
            assert line["ci_low"] == line["ci_high"] == ""
        else:
            assert float(line["ci_low"]) <= float(line["jsd_mean"]) <= float(line["ci_high"])


def test_an_embedded_model_is_named_as_in_a_run_and_read_as_its_card_says(tmp_path):
    console = Console(width=140, quiet=True)
    locality_command(
        "embedded:llada", LocalitySettings(num_responses=1, reveals=2), out=tmp_path / "a.csv", console=console
    )
    (first, *_) = read(tmp_path / "a.csv")
    assert [first[name] for name in ("model", "decoder", "reading", "mini")] == [
        "embedded:llada",
        "llada",
        "bidirectional",
        "yes",
    ]


def test_the_seed_decides_and_the_batch_does_not(tmp_path):
    first = run(tmp_path / "a.csv")
    run(tmp_path / "b.csv")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    batched = run(tmp_path / "c.csv", dataclasses.replace(FEW, batch_size=5))
    for ours, other in zip(first, batched, strict=True):
        assert (ours["distance"], ours["n_pairs"]) == (other["distance"], other["n_pairs"])
        assert ours["jsd_mean"] == pytest.approx(other["jsd_mean"], abs=1e-6)
    reseeded = run(tmp_path / "d.csv", dataclasses.replace(FEW, seed=1))
    assert [mean["jsd_mean"] for mean in reseeded] != [mean["jsd_mean"] for mean in first]


def test_an_interrupted_run_leaves_the_old_file(tmp_path, monkeypatch):
    out = tmp_path / "a.csv"
    out.write_text("old")

    def interrupted(*_):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(locality, "reveal_divergences", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(out)
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_responses_to_the_mini_task_are_those_that_the_embedded_models_were_trained_on():
    user = BENCHMARKS[MINI_BENCHMARK].prompts.user
    trained_on = [(user(item.prompt_row), item.response) for item in held_out_items(MINI_BENCHMARK)]
    assert gold_pairs(Task(BENCHMARKS[MINI_BENCHMARK], mini=True)) == trained_on


def test_gold_responses_have_no_calculator_annotations(tmp_path):
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    row = {"question": "How much is 2 and 3?", "answer": "Add: 2+3=<<2+3=5>>5.\n#### 5"}
    (folder / "test.jsonl").write_text(json.dumps(row) + "\n")
    ((query, response),) = gold_pairs(Task(BENCHMARKS["gsm8k"]), tmp_path)
    assert "How much is 2 and 3?" in query
    assert response == "Add: 2+3=5.\nThe answer is 5."


@pytest.mark.parametrize(
    ("name", "reading"),
    [
        ("GSAI-ML/LLaDA-8B-Instruct", "bidirectional"),
        ("Dream-org/Dream-v0-Instruct-7B", "bidirectional_shifted"),
        ("GSAI-ML/ReFusion", "refusion"),
    ],
)
def test_the_card_decides_how_a_checkpoint_is_read(name, reading):
    card = CARDS[name]
    assert choose_reading(card, 200_000) == (reading, card.mask_id)
    assert choose_reading(card, 200_000, "bidirectional") == ("bidirectional", card.mask_id)


def test_models_that_fill_no_masks_are_refused():
    with pytest.raises(ConfigError, match="has no mask token"):
        choose_reading(CARDS["Qwen/Qwen3-8B"], 200_000, "refusion")
    causal = dataclasses.replace(CARDS["Qwen/Qwen3-8B"], mask_id=5)
    with pytest.raises(ConfigError, match=r"is causal.*name a --reading"):
        choose_reading(causal, 200_000)
    with pytest.raises(ConfigError, match="made for decoder=bd3lm"):
        choose_reading(dataclasses.replace(causal, decoders=("bd3lm",)), 200_000)
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        choose_reading(causal, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratios": (0.2, 1.0)}, "locality: ratios=1.0; it must be below 1"),
        ({"ratios": (0.0,)}, "ratios=0.0; it must be above 0"),
        ({"ratios": (float("nan"),)}, "ratios=nan is not a number"),
        ({"ratios": ()}, "at least one"),
        ({"ratios": (0.2, 0.2)}, "each once"),
        ({"reveals": 0}, "reveals=0; it must be at least 1"),
        ({"num_responses": 0}, "num_responses=0; it must be at least 1"),
        ({"batch_size": 0}, "batch_size=0; it must be at least 1"),
        ({"seed": -1}, "seed=-1; it must be at least 0"),
        ({"max_length": 1}, "max_length=1; it must be at least 2"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        LocalitySettings(**changes)


def test_what_leaves_nothing_to_measure_is_refused(tmp_path):
    out = tmp_path / "a.csv"
    with pytest.raises(ConfigError, match=r"ratio 0.01 no response has 2 masked tokens"):
        run(out, dataclasses.replace(FEW, ratios=(0.5, 0.01)))
    with pytest.raises(DataError, match="raise --max-length"):
        run(out, dataclasses.replace(FEW, max_length=5))
    with pytest.raises(ConfigError, match="reads at most 2048 tokens"):
        run(out, dataclasses.replace(FEW, max_length=9999))
    with pytest.raises(ConfigError, match="--distances 129"):
        run(out, distances=[1, 129])
    with pytest.raises(ConfigError, match="write numbers separated by commas"):
        numbers_of("1,x", "--ratios", float)
    assert not out.exists()


def test_the_command_prints_both_sides_and_says_mini(tmp_path):
    out = tmp_path / "deep" / "a.csv"
    arguments = ["--responses", "2", "--reveals", "2", "--ratios", "0.5", "--distances", "1,4", "--out", str(out)]
    result = RUNNER.invoke(app, ["locality", *arguments])
    assert result.exit_code == 0, result.output
    for word in ("t = 0.5", "-4", "-1", "+1", "+4", "nats", "mini"):
        assert word in result.output
    assert "+16" not in result.output
    assert out.is_file()
