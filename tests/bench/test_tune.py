"""The tuning of a card (`refusion_eval.bench.tune`): its steps, run as a rehearsal on the CPU, and what they decide."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from typer.testing import CliRunner

from refusion_eval.bench import tune as tuning
from refusion_eval.bench import tune_choices, tune_kernels, tune_steps
from refusion_eval.bench.child import in_process
from refusion_eval.bench.gpu_report import conditions
from refusion_eval.bench.tune import STEPS, Step, tune
from refusion_eval.bench.tune_choices import (
    BASE,
    DECIDED,
    EARLY,
    TOGETHER,
    WHOLE_WIDTHS,
    confirmed,
    decide,
    own_products,
    skipped_of,
    summary,
    table_of,
    table_with,
    variants,
    with_early,
)
from refusion_eval.bench.tune_steps import Tuning
from refusion_eval.cli import app
from refusion_eval.errors import ConfigError
from refusion_eval.models.choices import NO_CHOICES, Product, Switches, read_choices
from refusion_eval.store import manifest

FACTS = {"device": "cpu", "shape": "small", "hardware": {}, "torch": "2", "commit": "aaaa", "driver": "", "started": ""}
OWN = {"kernel": "dot", "block_n": 32, "block_k": 128, "splits": 2, "num_stages": 6}


def first(given):
    return {"until": given.until, "done": list(given.done)}


def second(given):
    return {"of the first": given.done.get("first", {}).get("done")}


def sleeping(given):
    time.sleep(600)


def failing(given):
    raise ValueError("no such instruction")


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "table_of", lambda done, facts: (None, None))
    monkeypatch.setattr(tuning, "summary", lambda done, table: ["the last line"])

    def here(call, seconds):
        """In this process, as the start of one takes seconds."""
        try:
            return call(), ""
        except ValueError as error:
            return None, str(error)

    def run(seconds=60.0, steps=None, shape=None, code="", own_processes=False, **facts):
        monkeypatch.setattr(tuning, "in_process", in_process if own_processes else here)
        monkeypatch.setattr(tuning, "hash_of_package", lambda: code)
        made = {name: step if isinstance(step, Step) else Step(1, step) for name, step in steps.items()}
        monkeypatch.setattr(tuning, "STEPS", made)
        return tune(tmp_path, "cpu", shape, FACTS | facts, seconds, lambda text: None)

    return run


def written(tmp_path):
    return json.loads((tmp_path / "tune.json").read_text())["steps"]


def test_a_step_sees_those_before_it_and_a_later_call_makes_only_those_that_are_missing(call, tmp_path) -> None:
    result = call(steps={"first": first, "second": failing})
    assert result.text == "1 of 2 steps; the last line; the same command makes the others: second"
    made = written(tmp_path)["first"]
    assert made["figures"]["done"] == []
    assert (made["commit"], made["code"], made["torch"]) == ("aaaa", "", "2")
    call(steps={"first": failing, "second": second})  # the first is not made again
    assert written(tmp_path)["first"] == made
    assert written(tmp_path)["second"]["figures"] == {"of the first": []}


def test_a_step_of_other_code_or_another_torch_is_made_again(call, tmp_path) -> None:
    call(steps={"first": first})
    before = written(tmp_path)["first"]["figures"]
    for change in ({"code": "bbbb"}, {"code": "bbbb", "torch": "3"}):
        call(steps={"first": first}, **change)
        after = written(tmp_path)["first"]["figures"]
        assert after != before
        before = after


def test_a_checkout_that_its_own_results_changed_makes_nothing_again(call, tmp_path) -> None:
    call(steps={"first": first})
    before = written(tmp_path)
    call(steps={"first": failing}, commit="aaaa-dirty")
    assert written(tmp_path) == before


def test_the_hash_of_the_code_changes_with_every_file_of_the_package_and_with_no_other(tmp_path, monkeypatch) -> None:
    inner, seen = tmp_path / "package" / "store", []
    inner.mkdir(parents=True)
    monkeypatch.setattr(manifest, "__file__", str(inner / "manifest.py"))
    for name in ("package/store/one.py", "package/two.py", "package/notes.txt", "package.py"):
        (tmp_path / name).write_text("text")
        seen.append(manifest.hash_of_package())
    assert seen[0] != seen[1] == seen[2] == seen[3]


def test_it_ends_within_its_seconds_and_keeps_what_was_made(call, tmp_path) -> None:
    begun = time.monotonic()
    result = call(20.0, {"first": first, "sleeps": sleeping, "second": second}, own_processes=True)
    assert time.monotonic() - begun < 60
    assert list(written(tmp_path)) == ["first"]
    assert "makes the others: sleeps, second" in result.text


def test_what_reads_the_figures_of_a_step_is_made_after_it_and_again_if_it_is(call, tmp_path) -> None:
    reader = Step(1, second, ("first",))
    result = call(steps={"first": failing, "second": reader})
    assert result.text.endswith("the others: first, second")  # without a first step there is nothing to read
    call(steps={"second": second})
    call(steps={"first": first, "second": reader})
    assert written(tmp_path)["second"]["figures"] == {"of the first": []}


def test_what_was_made_from_other_figures_is_not_on_the_disk_any_more(call, tmp_path) -> None:
    """A call that ends after a step leaves nothing that a later call would take for made from that step."""
    steps = {"first": Step(1, first), "second": Step(1, second, ("first",)), "third": Step(1, second, ("second",))}
    call(steps={"second": second, "third": second})
    assert set(written(tmp_path)) == {"second", "third"}
    call(
        steps={
            name: step._replace(measure=step.measure if name == "first" else failing) for name, step in steps.items()
        }
    )
    assert set(written(tmp_path)) == {"first"}
    call(steps=steps)
    assert set(written(tmp_path)) == {"first", "second", "third"}


def hurried(given):
    return {"seconds": given.until - time.monotonic(), "left_out": ["joins", "8 of 10 rounds"]}


def test_a_step_whose_time_ended_is_made_again_with_the_time_that_the_others_leave(call, tmp_path) -> None:
    steps = {"first": Step(10, hurried), "second": Step(20, second, ("first",)), "third": Step(10, second)}
    result = call(300, steps, shape="8B")
    assert result.text.endswith("the same command makes the others: first")
    made = written(tmp_path)["first"]
    assert made["left_out"] == ["joins", "8 of 10 rounds"]
    call(100, steps, shape="8B")
    assert written(tmp_path)["first"]["figures"]["seconds"] == pytest.approx(80, abs=10)  # 20 are for the second
    late = {"first": Step(1000, hurried), "second": Step(20, second, ("first",))}
    before = written(tmp_path)
    call(100, late, shape="8B")
    assert written(tmp_path) == before  # what it found in its time stays until it is replaced


def test_a_step_names_what_it_had_no_time_for() -> None:
    found = tune_kernels.attention_by_case(Tuning("cpu", None, 0.0, {}))
    assert list(found) == ["1/30", "left_out"]
    assert found["left_out"] == ["8/30"]


def test_batches_are_measured_with_the_table_that_was_decided(monkeypatch) -> None:
    recorded, seen = SimpleNamespace(choices=None), []
    model = SimpleNamespace(engine=SimpleNamespace(recorded=recorded))
    monkeypatch.setattr(tune_steps, "loaded", lambda _: model)
    monkeypatch.setattr(tune_steps.bench, "mini_prompts", lambda *_: [])
    monkeypatch.setattr(tune_steps.bench, "resolved", lambda *_: None)
    monkeypatch.setattr(tune_steps, "speeds_by_way", lambda *_: seen.append(recorded.choices) or {})
    tune_steps.batches(Tuning("cpu", None, time.monotonic() + 60, finished(w1=["joins"])))
    assert [table.switches_of(1).joins for table in seen] == [True] * 3


def test_whole_forwards_decide_nothing_before_three_rounds(monkeypatch) -> None:
    on_gpu = type("OnGpu", (Tuning,), {"on_gpu": True, "is_over": property(lambda given: next(given.done))})
    monkeypatch.setattr(tune_steps, "replayed", lambda *_: None)
    monkeypatch.setattr(tune_steps, "seconds_of_calls", lambda *_: [1.0])
    model = SimpleNamespace(device=None)
    message = r"its time ended after 2 of at least 3 rounds of base; left out were joins; run the same command again"
    with pytest.raises(ConfigError, match=message):
        tune_steps.in_turns(on_gpu("cuda", "8B", 0.0, iter([False, True])), model, {BASE: None}, ["joins"])
    left_out = ["joins"]
    times = tune_steps.in_turns(on_gpu("cuda", "8B", 0.0, iter([False, False, True])), model, {BASE: None}, left_out)
    assert times == {BASE: dict.fromkeys(WHOLE_WIDTHS, [1.0] * 3)}
    assert left_out == ["joins", "7 of 10 rounds of base"]


def test_what_was_made_without_a_step_stays_if_the_step_fails_again(call, tmp_path) -> None:
    call(steps={"second": second})
    before = written(tmp_path)
    call(steps={"first": failing, "second": Step(1, failing, ("first",))})
    assert written(tmp_path) == before


def test_a_step_for_which_too_little_time_is_left_waits_and_those_after_it_wait_too(call) -> None:
    result = call(steps={"first": Step(200, first), "second": second}, shape="8B")
    assert result.text.endswith("the others: first, second")


def test_steps_of_another_device_are_refused(call) -> None:
    call(steps={"first": first})
    with pytest.raises(ConfigError, match=r"tune\.json is of device cpu, not NVIDIA H100; name another --out"):
        call(steps={"first": first}, device="NVIDIA H100")


OF_CPU = '{"device": "cpu", "shape": "small", "steps": {"first": %s}}'


@pytest.mark.parametrize("text", ["{", "[]", "{}", OF_CPU % "1", OF_CPU % '{"figures": 1}', "\xff"])
def test_a_damaged_file_of_steps_is_one_clear_error(call, tmp_path, text) -> None:
    (tmp_path / "tune.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"tune\.json holds no steps: .*; remove it, or name another --out"):
        call(steps={"first": failing})


def test_a_damaged_table_is_named_before_the_time_is_spent(call, tmp_path) -> None:
    (tmp_path / "choices.json").write_text("{")
    with pytest.raises(ConfigError, match=r"choices\.json is no table of choices"):
        call(steps={"first": first})
    assert not (tmp_path / "tune.json").exists()


def test_a_step_of_an_earlier_version_is_made_again(call, tmp_path) -> None:
    (tmp_path / "tune.json").write_text('{"device": "cpu", "shape": "small", "steps": {"first": {"figures": {}}}}')
    call(steps={"first": first})
    assert written(tmp_path)["first"]["figures"]["done"] == []


def test_the_steps_take_the_seconds_that_the_command_has_by_default() -> None:
    assert sum(step.seconds for step in STEPS.values()) <= tuning.SECONDS
    assert next(iter(STEPS)) == "card"
    assert list(STEPS).index("sweep") < list(STEPS).index("whole") < list(STEPS).index("tokens")


TIMES = {"1": 30e-6, "8": 31e-6, "16": 29e-6, "40": 28e-6, "64": 27e-6}
BEST = {"product": OWN, "name": "dot", "gain": 1.1}
DONE = {
    "products": {"out": TIMES, "down": dict.fromkeys(TIMES, 50e-6)},
    "sweep": {"best": {"down": {"16": BEST, "40": BEST | {"gain": 1.005}}, "out": {"16": BEST}}},
}


def seconds(**gains):
    """Times of three rounds by variant and width; a variant is so many times as fast as the base."""
    found = {BASE: {width: [1.0, 2.0, 4.0] for width in WHOLE_WIDTHS}}
    for name, gain in gains.items():
        by_width = gain if isinstance(gain, dict) else dict.fromkeys(WHOLE_WIDTHS, gain)
        found[name.replace("_", " ")] = {
            width: [time / by_width.get(width, 1.0) for time in found[BASE][width]] for width in WHOLE_WIDTHS
        }
    return found


def test_own_products_that_gain_too_little_are_left_out() -> None:
    assert own_products(DONE["sweep"]) == {"down": {16: Product(**OWN)}, "out": {16: Product(**OWN)}}


def test_changes_are_measured_alone_and_together() -> None:
    found = variants(DONE)
    assert list(found) == [BASE, "rows", "own out, down", "joins", "rotates", TOGETHER]
    assert table_with(found[BASE], DONE) == NO_CHOICES
    alone = table_with(found["own out, down"], DONE)
    assert alone.product("out", 16) == alone.product("down", 1) == Product(**OWN)
    assert alone.product("out", 40) == Product()
    assert not alone.switches
    together = table_with(with_early(found[TOGETHER]), DONE)
    assert together.switches_of(64) == Switches(joins=True, rotates=True, early=True)
    assert together.product("out", 40) == Product(padded_to=64)  # no own product has so many rows


def test_a_change_is_on_at_the_widths_where_it_gained() -> None:
    decided = decide(DONE, seconds(joins={1: 1.02, 8: 1.005}, rows={40: 1.03}, rotates=0.9))
    assert decided == {1: {"joins"}, 8: set(), 16: set(), 40: {"rows"}, 64: set()}
    table = table_with(decided, DONE)
    assert [table.switches_of(rows).joins for rows in (1, 8, 64)] == [True, False, False]
    assert [table.product("out", rows).padded_to for rows in (16, 40, 64)] == [0, 64, 0]


def test_an_own_product_is_the_same_up_to_sixteen_rows_or_nowhere_there() -> None:
    name = "own out, down"
    times = {BASE: seconds()[BASE], name: seconds(x={1: 1.1, 8: 1.05, 16: 0.95})["x"]}
    assert {width for width, names in decide(DONE, times).items() if names} == {1, 8, 16}
    times[name] = seconds(x={1: 1.1, 8: 0.95, 16: 0.95})["x"]
    assert not any(decide(DONE, times).values())


@pytest.fixture
def whole(monkeypatch):
    """The decision of whole forwards from how many times as fast each variant is, by width."""

    def run(until=None, **gains):
        def turns(tuning, model, forwards, left_out):
            by_name = {name.replace("_", " "): gain for name, gain in gains.items()}
            return {name: seconds(x=by_name.get(name, 1.0))["x"] for name in forwards}

        monkeypatch.setattr(tune_steps, "in_turns", turns)
        monkeypatch.setattr(tune_steps, "made", lambda *_: None)
        monkeypatch.setattr(tune_steps, "recorded_forwards", lambda *_: Mock())
        return tune_steps.whole(Tuning("cpu", None, time.monotonic() + 60 if until is None else until, DONE))

    return run


def test_early_launches_count_on_top_of_what_was_decided(whole) -> None:
    early = dict.fromkeys(WHOLE_WIDTHS, 1.1) | {1: 1.2, 8: 1.105, 40: 0.9}
    found = whole(joins=1.1, decided=1.1, **{EARLY: early})
    expected = {str(width): ["joins"] for width in WHOLE_WIDTHS} | {"1": ["early", "joins"]}
    assert found["changes"] == expected
    assert found["gains"][DECIDED] == pytest.approx(dict.fromkeys(WHOLE_WIDTHS, 1.1) | {1: 1.2})
    assert found["gains"]["early"][8] == pytest.approx(1.105 / 1.1)
    assert found["left_out"] == []
    assert whole(joins=1.1)["changes"] == {str(width): [] for width in WHOLE_WIDTHS}  # not faster, measured again


def test_variants_for_which_the_time_ended_are_named(whole) -> None:
    assert whole(until=0.0)["left_out"] == ["rows", "own out, down", "joins", "rotates", TOGETHER]


def test_what_is_not_faster_together_is_left_out_again() -> None:
    own, gains = "own out, down", {1: 1.06, 8: 0.98, 16: 1.0, 40: 1.0, 64: 1.02}
    decided = {width: frozenset({"joins", own}) for width in WHOLE_WIDTHS}
    # An own product is the same up to 16 rows; what may differ between widths is left out where it is slower.
    assert confirmed(decided, gains) == {1: {"joins", own}, 8: {own}, 16: {own}, 40: set(), 64: {"joins", own}}
    assert confirmed(decided, gains | {1: 1.03}) == {1: {"joins"}, 8: set(), 16: set(), 40: set(), 64: {"joins", own}}


def finished(**changes):
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    names = {str(width): changes.get(f"w{width}", []) for width in WHOLE_WIDTHS}
    whole = {"changes": names, "sizes": sizes | {"dtype": "bfloat16"}, "gains": {DECIDED: {"1": 1.04}}}
    whole["skipped"] = changes.get("skipped", [])
    return DONE | {"whole": whole, "tokens": {"same": {"refusion": [14, 14], "long": [4, 5]}, "repeated": 1.0}}


def test_there_is_no_table_before_the_tokens_are_right() -> None:
    done = finished(w1=["joins"], skipped=[8])
    table, passed = table_of(done, FACTS | {"device": "NVIDIA H100"})
    assert (table.device, table.sizes.hidden_size, passed) == ("NVIDIA H100", 4096, True)
    assert table.skipped == (8,)
    text = "decided: joins, no forwards of 8 rows; what gained alone, together, times as fast: 1.040 at width 1"
    assert summary(done, table)[-1] == text
    assert table_of({name: done[name] for name in ("products", "whole")}, FACTS) == (None, None)
    for same, repeated in (({"a": [12, 14]}, 1.0), ({"a": [14, 14]}, 0.9), ({"a": [40, 40], "long": [2, 5]}, 1.0)):
        assert table_of(done | {"tokens": {"same": same, "repeated": repeated}}, FACTS) == (None, False)


def test_a_width_is_not_recorded_where_the_next_one_is_faster() -> None:
    assert skipped_of({1: 4.80, 8: 5.10, 16: 4.98, 40: 5.34, 64: 5.20}) == (8,)  # 48 rows were not timed
    assert skipped_of({8: 5.0, 16: 4.98}) == ()


def test_a_table_replaces_that_of_its_card_and_sizes_alone(tmp_path) -> None:
    table, _ = table_of(finished(w1=["joins"]), FACTS)
    other = replace(table, sizes=replace(table.sizes, hidden_size=1024))
    path = tmp_path / "choices.json"
    for given in (other, table, replace(table, switches={})):
        tuning._write_table(path, given)
    assert read_choices(path) == (other, replace(table, switches={}))


def test_a_table_that_no_forward_reads_is_said_to_be_one(call, tmp_path, monkeypatch, capsys) -> None:
    table, _ = table_of(finished(w1=["joins"]), FACTS | {"device": "NVIDIA H100"})
    monkeypatch.setattr(tuning, "table_of", lambda done, facts: (table, True))
    folder = tmp_path / "gpu"
    folder.mkdir()
    monkeypatch.setattr(tuning, "shipped_folders", lambda: [tmp_path / "none", folder])
    for files, is_read in (([], False), ([(tmp_path / "choices.json").resolve()], True)):
        monkeypatch.setattr(tuning, "shipped_files", lambda files=files: files)
        text = call(steps={"first": first}).text
        advice = f"no forward reads {tmp_path}/choices.json: copy it to {folder}/CARD/choices.json"
        assert (advice in text, advice in capsys.readouterr().out) == (not is_read, not is_read)


@pytest.mark.slow
def test_the_rehearsal_makes_every_step_writes_a_table_and_says_why_in_few_lines(tmp_path) -> None:
    command = ["gpu-check", "--device", "cpu", "--out", str(tmp_path), "--checks", "tune", "--seconds", "900"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert list(written(tmp_path)) == list(STEPS)
    (table,) = read_choices(tmp_path / "choices.json")
    assert table.device == "cpu"
    found = {name: step["figures"] for name, step in written(tmp_path).items()}
    lines = summary(found, table)
    assert len(lines) <= 25
    assert all(line in result.output for line in lines)
    assert found["tokens"]["repeated"] == 1
    assert found["sweep"]["compiled_by"] == 1
    assert all(by_rows["16"]["gain"] > 0 for by_rows in found["sweep"]["best"].values())
    begun = {name: step["started"] for name, step in written(tmp_path).items()}
    assert CliRunner().invoke(app, command).exit_code == 0
    assert begun == {name: step["started"] for name, step in written(tmp_path).items()}  # nothing is made again


def test_the_facts_of_a_call_are_those_that_its_steps_keep() -> None:
    facts = {"code", *conditions(torch.device("cpu"), None)}
    assert {*tuning.SAME, *tuning.CURRENT, *tuning.OWN_CONDITIONS} <= facts
    assert set(tune_choices.OWN) == {"own qkv", "own out, down", "own gate_up"}
