"""What may be written, what is refused, and what comes back."""

import json
import sqlite3
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_eval.errors import StoreError
from refusion_eval.store.manifest import Hardware
from refusion_eval.store.records import Sample, SampleKey, ScoreRow, from_stored, pack, unpack
from refusion_eval.store.run_files import DATABASE_NAME
from refusion_eval.store.run_store import RunReader, RunStore
from tests.examples import examples
from tests.store.conftest import make_manifest, make_sample

any_text = st.text(st.characters(exclude_categories=()), max_size=40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=12,
)


@st.composite
def any_samples(draw):
    tokens = draw(st.none() | st.lists(st.integers(0, 200_000), max_size=20))
    key = SampleKey(*(draw(any_text) for _ in range(4)), draw(st.integers(0, 100)), draw(any_text))
    return Sample(
        key=key,
        benchmark=draw(any_text),
        item_id=draw(any_text),
        text=draw(any_text),
        tokens=tokens,
        num_tokens=len(tokens) if tokens is not None else draw(st.integers(0, 9999)),
        num_forwards=draw(st.integers(0, 9999)),
        seconds=draw(st.floats(0, 1e6)),
        stop=draw(st.sampled_from(["eos", "length", ""])),
        settings=draw(st.dictionaries(any_text, json_values, max_size=4)),
        trace=draw(st.none() | st.lists(st.lists(json_values, max_size=4), max_size=4)),
        batch_size=draw(st.integers(1, 64)),
        warm=draw(st.booleans()),
        joules=draw(st.none() | st.floats(0, 1e6)),
        error=draw(st.none() | any_text),
        created="2026-01-01T00:00:00+00:00",
    )


@given(any_samples())
def test_a_record_has_energy_only_where_it_was_measured(sample):
    assert ("joules" in json.loads(sample.body())) == (sample.joules is not None)


@examples(40)
@given(samples=st.lists(any_samples(), max_size=5, unique_by=lambda sample: sample.key))
def test_samples_come_back_as_they_were_written(tmp_path_factory, make_manifest, samples):
    run_dir = tmp_path_factory.mktemp("run")
    with RunStore.open(run_dir, make_manifest()) as store:
        for sample in samples:
            store.append(sample)
            assert store.get(sample.key) == replace(sample, process_id=store.process_id)
        written = {replace(sample, process_id=store.process_id).key: sample for sample in samples}
    with RunReader.open(run_dir) as reader:
        found = list(reader.samples())
    assert {sample.key: replace(sample, process_id="") for sample in found} == written


scorable_samples = any_samples().map(lambda sample: replace(sample, error=None))


@st.composite
def any_scores(draw, key):
    return ScoreRow(
        key=key,
        item_id=draw(any_text),
        scorer=draw(any_text),
        metric=draw(any_text),
        value=draw(st.floats(allow_nan=False, allow_infinity=False)),
        extracted=draw(st.none() | any_text),
        verdict=draw(any_text),
        reason=draw(any_text),
        tier=draw(st.sampled_from(["A", "B", "C", "none", ""])),
    )


@examples(40)
@given(data=st.data(), samples=st.lists(scorable_samples, min_size=1, max_size=3, unique_by=lambda sample: sample.key))
def test_scores_come_back_as_they_were_written_and_the_last_of_a_judge_counts(
    tmp_path_factory, make_manifest, data, samples
):
    run_dir = tmp_path_factory.mktemp("run")
    keys = st.sampled_from([sample.key for sample in samples])
    scores = data.draw(st.lists(keys.flatmap(any_scores), max_size=6))
    with RunStore.open(run_dir, make_manifest()) as store:
        for sample in samples:
            store.append(sample)
        for score in scores:
            assert from_stored(ScoreRow, score.body()) == score
            store.append_scores([score])
        last = {(score.key, score.scorer, score.metric): score for score in scores}
        assert {(score.key, score.scorer, score.metric): score for score in store.scores()} == last
    with RunReader.open(run_dir) as reader:
        assert {(score.key, score.scorer, score.metric): score for score in reader.scores()} == last


def test_a_lone_surrogate_survives_in_text_item_and_task(tmp_path, make_manifest, make_sample):
    sample = make_sample("q\udc80", task="mini_\ud83d", text="half of an emoji: \ud83d")
    with RunStore.open(tmp_path, make_manifest()) as store:
        store.append(sample)
        store.append_scores([ScoreRow(key=sample.key, item_id="q\udc80", scorer="s\ud800", value=1.0, reason="\udfff")])
        assert store.get(sample.key).text == sample.text
        assert next(store.scores()).reason == "\udfff"


@given(trace=st.lists(st.lists(json_values, max_size=5), max_size=50))
@settings(deadline=None)
def test_a_trace_survives_packing(trace):
    assert unpack(pack(trace)) == trace


def test_a_long_trace_is_stored_smaller_than_its_json():
    trace = [["forward", number, "plan", 128, 4 * number] for number in range(200)]
    assert len(pack(trace)) < len(json.dumps(trace)) / 4


def test_a_recorded_sample_is_final(tmp_path, make_manifest, make_sample):
    with RunStore.open(tmp_path, make_manifest()) as store:
        store.append(make_sample(1))
        with pytest.raises(StoreError, match=r"mini_gsm8k 1 sample 0 is already recorded"):
            store.append(make_sample(1, text="another"))
        assert store.get(make_sample(1).key).text == "The answer to 1."


def test_an_error_is_replaced_by_a_later_attempt(tmp_path, make_manifest, make_sample):
    with RunStore.open(tmp_path, make_manifest()) as store:
        store.append(make_sample(1, text="", error="first failure"))
        store.append(make_sample(1, text="", error="second failure"))
        assert store.get(make_sample(1).key).error == "second failure"
        store.append(make_sample(1))
        assert store.get(make_sample(1).key).error is None
        assert len(list(store.samples())) == 1


def test_keys_that_differ_in_one_field_are_different_requests(tmp_path, make_manifest, make_sample):
    base = make_sample(1)
    with RunStore.open(tmp_path, make_manifest()) as store:
        store.append(base)
        for name in ("task", "task_version", "doc_hash", "prompt_hash", "settings_hash"):
            store.append(replace(base, key=replace(base.key, **{name: "other"})))
        store.append(replace(base, key=replace(base.key, sample=1)))
        assert len(list(store.samples())) == 7


def test_the_order_of_samples_does_not_depend_on_when_they_finished(tmp_path, make_manifest, make_sample):
    orders = []
    for number, items in enumerate(([3, 1, 2], [2, 3, 1])):
        with RunStore.open(tmp_path / str(number), make_manifest()) as store:
            for item in items:
                store.append(make_sample(item))
            orders.append([sample.item_id for sample in store.samples()])
    assert orders[0] == orders[1] == ["1", "2", "3"]


@pytest.mark.parametrize(
    "changes",
    [{"num_tokens": -1}, {"seconds": float("nan")}, {"batch_size": 0}, {"num_tokens": 2}, {"num_forwards": -1}],
)
def test_impossible_counts_are_refused(make_sample, changes):
    with pytest.raises(StoreError, match=next(iter(changes))):
        make_sample(1, **changes)


def test_values_that_json_cannot_carry_are_refused_and_nothing_is_written(tmp_path, make_manifest, make_sample):
    with RunStore.open(tmp_path, make_manifest()) as store:
        with pytest.raises(StoreError, match="JSON"):
            store.append(make_sample(1, settings={"dtype": object()}))
        assert store.get(make_sample(1).key) is None
        store.append(make_sample(1))


def test_an_unregistered_process_is_refused(tmp_path, make_manifest, make_sample):
    with RunStore.open(tmp_path, make_manifest()) as store:
        with pytest.raises(StoreError, match="register_process"):
            store.append(make_sample(1, process_id="4711"))
        worker = store.register_process(Hardware(cpu="Other CPU"))
        store.append(make_sample(1, process_id=worker))
    with RunReader.open(tmp_path) as reader:
        assert reader.run.hardware(worker).cpu == "Other CPU"


def test_scores_are_replaced_by_scorer_and_metric(tmp_path, make_manifest, make_sample):
    sample = make_sample(1)

    def score(value, **changes):
        fields = {"key": sample.key, "item_id": "1", "scorer": "gsm8k 1", "value": value}
        return ScoreRow(**{**fields, **changes})

    with RunStore.open(tmp_path, make_manifest()) as store:
        store.append(sample)
        store.append_scores([score(0.0), score(0.5, metric="length")])
        store.append_scores([score(1.0, extracted="7", verdict="correct")])
        store.append_scores([score(0.0, scorer="gsm8k 2")])
        found = [(row.scorer, row.metric, row.value) for row in store.scores()]
    assert found == [("gsm8k 1", "length", 0.5), ("gsm8k 1", "passed", 1.0), ("gsm8k 2", "passed", 0.0)]


@pytest.mark.parametrize("error", [None, "out of memory"])
def test_only_a_recorded_answer_can_be_scored_and_a_batch_is_all_or_nothing(
    tmp_path, make_manifest, make_sample, error
):
    with RunStore.open(tmp_path, make_manifest()) as store:
        store.append(make_sample(1))
        if error:
            store.append(make_sample(2, error=error))
        rows = [ScoreRow(key=make_sample(i).key, item_id=str(i), scorer="s", value=1.0) for i in (1, 2)]
        with pytest.raises(StoreError, match="cannot be scored"):
            store.append_scores(rows)
        assert list(store.scores()) == []


def test_a_resumed_run_keeps_its_records_and_lists_both_processes(tmp_path, make_manifest, make_sample):
    with RunStore.open(tmp_path, make_manifest()) as store:
        store.append(make_sample(1))
    with RunStore.open(tmp_path, make_manifest(tasks={"mini_arc": "2"}, batch_size=8, command=["x"])) as store:
        assert store.get(make_sample(1).key) is not None
    run = json.loads((tmp_path / "run.json").read_text())
    assert len(run["processes"]) == 2
    assert run["manifest"]["tasks"] == {"mini_gsm8k": "1", "mini_arc": "2"}
    assert run["run_id"] == tmp_path.name


def test_a_run_is_continued_by_the_command_that_worked_on_it_last(tmp_path, make_manifest, make_sample):
    for command in (["refusion-eval", "run", "--limit", "1"], ["refusion-eval", "run", "--limit", "40"]):
        with RunStore.open(tmp_path, make_manifest(command=command)) as store:
            store.register_process(Hardware())  # a worker, whose command nobody gave
    with RunReader.open(tmp_path) as reader:
        assert reader.run.command == "refusion-eval run --limit 40"


def test_a_task_is_continued_by_the_command_that_asked_for_most_of_its_samples(tmp_path, make_manifest):
    asked = [(60, "gsm8k"), (1, "gsm8k"), (2, "mbpp"), (3, "math")]
    for number, (limit, task) in enumerate(asked):
        command = ["refusion-eval", "run", "--tasks", task, "--limit", str(limit)]
        with RunStore.open(tmp_path, make_manifest(command=command)) as store:
            store.register_process(Hardware())  # a worker, whose command nobody gave
            if number < 3:  # the last one is killed before it says how much it wants
                store.expect({f"mini_{task}": limit})
    with RunReader.open(tmp_path) as reader:
        limits = {task: reader.run.command_for(f"mini_{task}").partition("--tasks ")[2] for _, task in asked}
    assert limits == {"gsm8k": "gsm8k --limit 60", "mbpp": "mbpp --limit 2", "math": "math --limit 3"}
    assert json.loads((tmp_path / "run.json").read_text())["asked_by"].keys() == {"mini_gsm8k", "mini_mbpp"}


def test_a_run_that_was_stopped_before_its_records_says_what_to_do(tmp_path):
    (tmp_path / "run.lock").write_text("pid 1 on here\n")
    said = "no sample yet, the run was stopped before it began; run its command again"
    with pytest.raises(StoreError, match=said), RunReader.open(tmp_path):
        pass


def test_other_code_of_a_decoder_does_not_continue_a_run(tmp_path, make_manifest, make_sample):
    codes = [f"sure.py:DECODER@{digit * 12}" for digit in "ab"]
    for name in ("new", "old"):  # version 1.0 recorded no code
        with RunStore.open(
            tmp_path / name, make_manifest(decoder="sure.py:DECODER" if name == "old" else codes[0])
        ) as one:
            one.append(make_sample(1))
    RunStore.open(tmp_path / "new", make_manifest(decoder=codes[0])).close()
    RunStore.open(tmp_path / "old", make_manifest(decoder=codes[1])).close()
    with pytest.raises(
        StoreError, match=f"the code of sure.py:DECODER changed .{'a' * 12} .* {'b' * 12}.* Restore that"
    ):
        RunStore.open(tmp_path / "new", make_manifest(decoder=codes[1]))
    with pytest.raises(StoreError, match="decoder: recorded"):
        RunStore.open(tmp_path / "new", make_manifest(decoder=codes[0].replace("sure", "other")))


def test_another_fingerprint_is_refused_with_every_differing_key_and_both_values(tmp_path, make_manifest, make_sample):
    with RunStore.open(tmp_path, make_manifest()) as store:
        store.append(make_sample(1))
    other = make_manifest(seed=7, settings={"refusion": {"tau_slot": 0.8, "slot_size": 4}, "extra": 1})
    with pytest.raises(StoreError) as refusal:
        RunStore.open(tmp_path, other)
    message = str(refusal.value)
    assert "seed: recorded 0, now 7" in message
    assert "settings.refusion.tau_slot: recorded 0.9, now 0.8" in message
    assert "settings.extra: recorded nothing, now 1" in message
    assert "slot_size" not in message
    assert "remove the folder, or give another one: --results DIR of eval.sh, --run-dir DIR of" in message
    RunStore.open(tmp_path, make_manifest()).close()


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 16},
        {"hardware": Hardware(cpu="Other")},
        {"command": ["other"]},
        {"checkpoint": "/moved"},
        {"git_commit": "abc"},
        {"settings": {"refusion": {"slot_size": 4, "tau_slot": 0.9}}},
    ],
)
def test_what_cannot_change_a_text_does_not_stop_a_resume(tmp_path, make_manifest, changes):
    RunStore.open(tmp_path, make_manifest()).close()
    RunStore.open(tmp_path, make_manifest(**changes)).close()


def test_a_run_can_be_read_while_it_is_written(tmp_path, make_manifest, make_sample):
    with RunStore.open(tmp_path, make_manifest()) as store:
        store.append(make_sample(1))
        with RunReader.open(tmp_path) as reader:
            assert len(list(reader.samples())) == 1
            store.append(make_sample(2))
            assert len(list(reader.samples())) == 2


def test_reading_without_traces_leaves_only_them_out(tmp_path, make_manifest, make_sample):
    with RunStore.open(tmp_path, make_manifest()) as store:
        store.append(make_sample(1))
        (full,), (light,) = list(store.samples()), list(store.samples(traces=False))
    assert light == replace(full, trace=None)


def test_threads_of_one_process_can_append(tmp_path, make_manifest, make_sample):
    with RunStore.open(tmp_path, make_manifest()) as store:
        threads = [threading.Thread(target=store.append, args=(make_sample(item),)) for item in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(list(store.samples())) == 16


def test_every_commit_is_forced_to_the_disk(tmp_path, make_manifest):
    with RunStore.open(tmp_path, make_manifest()) as store:
        assert store._connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert store._connection.execute("PRAGMA synchronous").fetchone()[0] == 2


def test_the_database_can_be_queried_by_hand(tmp_path, make_manifest, make_sample):
    with RunStore.open(tmp_path, make_manifest()) as store:
        store.append(make_sample(1))
    connection = sqlite3.connect(tmp_path / DATABASE_NAME)
    query = "SELECT task, item_id, json_extract(body, '$.seconds') FROM samples"
    assert connection.execute(query).fetchall() == [("mini_gsm8k", "1", 0.5)]
    connection.close()


def test_a_settled_fact_is_made_once_and_read_back_by_later_processes(tmp_path, make_manifest):
    with RunStore.open(tmp_path, make_manifest()) as store:
        assert store.get_or_compute("cost", lambda: {"free_rows": 4}) == {"free_rows": 4}
        assert store.get_or_compute("cost", lambda: pytest.fail("made twice")) == {"free_rows": 4}
    with RunStore.open(tmp_path, make_manifest()) as store:
        assert store.get_or_compute("cost", lambda: pytest.fail("made again")) == {"free_rows": 4}
    assert json.loads((tmp_path / "run.json").read_text())["settled"] == {"cost": {"free_rows": 4}}


def test_a_folder_without_samples_may_become_another_run(tmp_path, make_manifest, make_sample):
    with RunStore.open(tmp_path, make_manifest(system="first")) as store:
        store.get_or_compute("fact", lambda: 1)
    with RunStore.open(tmp_path, make_manifest(system="second")) as store:
        assert store.get_or_compute("fact", lambda: 2) == 2
        store.append(make_sample(1))
    with RunReader.open(tmp_path) as reader:
        assert reader.run.manifest.system == "second"
        assert len(reader.run.processes) == 1
    with pytest.raises(StoreError, match=r'belongs to a different run; .*system: recorded "second", now "first"'):
        RunStore.open(tmp_path, make_manifest(system="first"))


def test_a_refusal_names_only_some_of_many_differences(tmp_path, make_manifest, make_sample):
    with RunStore.open(tmp_path, make_manifest(settings={f"s{n}": n for n in range(9)})) as store:
        store.append(make_sample(1))
    with pytest.raises(StoreError, match=r"settings.s3: recorded 3, now nothing; 5 more\. Use the recorded"):
        RunStore.open(tmp_path, make_manifest(settings={}))


def manifest_with_tables(mini, real, decoder="refusion", **model_args):
    tables = {
        f"tasks/settings/mini_{decoder}.yaml": {"gsm8k": {"slot_size": mini}},
        f"tasks/settings/{decoder}.yaml": {"gsm8k": {"slot_size": real, "tau_slot": 0.9}},
    }
    return make_manifest(decoder=decoder, settings={"model_args": model_args, "tables": tables})


@pytest.mark.parametrize(
    ("task", "before", "now", "refused"),
    [
        ("refusion_gsm8k", manifest_with_tables(8, 32), manifest_with_tables(4, 32), ""),
        ("refusion_gsm8k", manifest_with_tables(8, 32), manifest_with_tables(8, 16), "recorded 32, now 16"),
        ("mini_gsm8k", manifest_with_tables(8, 32), manifest_with_tables(8, 16), ""),
        ("mini_gsm8k", manifest_with_tables(8, 32), manifest_with_tables(4, 32), "recorded 8, now 4"),
        ("mini_gsm8k", manifest_with_tables(8, 32, slot_size=2), manifest_with_tables(4, 32, slot_size=2), ""),
    ],
)
def test_a_table_that_did_not_decide_a_text_may_change(tmp_path, task, before, now, refused):
    with RunStore.open(tmp_path / "run", before) as store:
        store.append(make_sample(0, task=task))
    if not refused:
        RunStore.open(tmp_path / "run", now).close()
        return
    with pytest.raises(StoreError, match=refused):
        RunStore.open(tmp_path / "run", now)


def test_a_task_that_is_only_called_like_a_look_alike_is_under_no_table(tmp_path):
    with RunStore.open(tmp_path / "run", manifest_with_tables(8, 32)) as store:
        store.append(make_sample(0, task="mini_golf", benchmark="mini_golf"))
    RunStore.open(tmp_path / "run", manifest_with_tables(4, 16)).close()


def test_a_decoder_that_is_called_mini_has_a_table_for_all_other_tasks(tmp_path):
    with RunStore.open(tmp_path / "run", manifest_with_tables(8, 32, "mini_foo")) as store:
        store.append(make_sample(0, task="refusion_gsm8k"))
    RunStore.open(tmp_path / "run", manifest_with_tables(4, 32, "mini_foo")).close()
    with pytest.raises(StoreError, match="recorded 32, now 16"):
        RunStore.open(tmp_path / "run", manifest_with_tables(8, 16, "mini_foo"))
