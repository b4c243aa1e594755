import base64
import gzip
import json
import re

import pytest

from refusion_eval.errors import ConfigError, StoreError
from refusion_eval.report.assemble import page
from refusion_eval.report.collect import Asked, collect, metrics_of
from refusion_eval.report.sample import find_sample
from refusion_eval.results.cautions import CARDS_SENTENCE
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.metric_list import ACCURACY, METRICS, UNSTATED, place_of
from refusion_eval.results.tables import summary
from refusion_eval.store.manifest import Hardware
from refusion_eval.store.run_store import RunStore

from .conftest import LetterSources, NoSources, make_manifest, make_sample, make_score, write_run

HOSTILE = (
    '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2"><!-- {{program}} \u2028 \ud800'
)


def unpacked(data):
    return {name: json.loads(gzip.decompress(base64.b64decode(text))) for name, text in data.chunks.items()}


def everything(data):
    """All that a page holds, in plain text."""
    return json.dumps([data.index, unpacked(data)], ensure_ascii=False)


def opened(data, cell=0, row=0):
    """A row of a task's list, the body behind it and what was asked."""
    chunks = unpacked(data)
    columns = chunks[data.index["cells"][cell]["list"]][0]
    (body, body_at), (asked, asked_at) = columns["bodies"][row], columns["asked"][row]
    return {name: column[row] for name, column in columns.items()}, chunks[body][body_at], chunks[asked][asked_at]


def marks(data, cell=0):
    return [mark["label"] for mark in data.index["cells"][cell]["marks"]]


def test_a_sample_has_all_that_was_recorded_and_found(small_run):
    row, body, asked = opened(collect([small_run], LetterSources()))
    assert (row["item_id"], row["state"], row["tokens"], row["forwards"], row["seconds"]) == ("1", "right", 4, 5, 0.25)
    assert (body["output"], body["extracted"], body["verdict"], body["reason"]) == (
        "abce",
        "abce",
        "correct",
        "statement",
    )
    assert body["settings"] == [["slot_size", "2", "table"], ["tau_slot", "0.6", ""]]
    assert asked == {"prompt": "What comes next?", "gold": "abce", "note": "as it was sent"}
    replay = body["replay"]
    assert [step[0] for step in replay["steps"]] == [
        "plan",
        "draft",
        "fix",
        "draft",
        "fix",
        "plan",
        "draft",
        "fix",
        "stop",
    ]
    assert (replay["positions"], replay["kept"], len(replay["forwards"])) == (4, 4, 5)
    _, rejected = replay["steps"][2][2][1], replay["steps"][2][2][0]
    assert [rejected[0], rejected[1], [replay["pieces"][number] for number in rejected[2]]] == ["rejected", [3], ["d"]]


def test_figures_and_failures_are_those_of_the_table(small_run):
    data = collect([small_run], LetterSources())
    cell = data.index["cells"][0]
    assert cell["metrics"]["accuracy"]["value"] == 50
    assert cell["metrics"]["accuracy"]["n"] == 2
    assert "1 errors" in marks(data)
    assert opened(data, row=2)[1]["error"] == "it broke"
    assert opened(data, row=2)[1]["replay"] is None


def test_without_questions_and_tokenizer_the_page_says_so(small_run):
    _, body, asked = opened(collect([small_run], NoSources()))
    assert asked["prompt"] is None
    assert "not at hand" in asked["note"]
    assert "[3]" in body["replay"]["pieces"]


def test_hostile_texts_stay_data(tmp_path):
    sample = make_sample("1", text=HOSTILE, settings={"slot_size": 2, "note": HOSTILE})
    run = write_run(tmp_path / "run", [sample], [make_score(sample, extracted=HOSTILE)], system=HOSTILE)
    data = collect([run], LetterSources(Asked(HOSTILE, HOSTILE)))
    html = page(data.index, data.chunks)
    assert "window.hacked" not in re.sub(r'<script type="application/json".*?</script>', "", html, flags=re.DOTALL)
    assert html.count("</script>") == 3 + len(data.chunks)
    index = re.search(r'<script type="application/json" id="index">(.*?)</script>', html, re.DOTALL).group(1)
    assert json.loads(index)["runs"][0]["system"] == HOSTILE
    assert opened(data)[1]["output"] == HOSTILE
    html.encode("ascii", "xmlcharrefreplace")


def test_the_page_asks_for_nothing_and_runs_only_its_own_scripts(small_run):
    data = collect([small_run], LetterSources())
    html = page(data.index, data.chunks)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html).group(1)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r'(?:src|href)="(?!#|data:,)', html)
    assert "sourceMappingURL" not in html
    assert not re.search(r"\{\{\w+\}\}", html)


def test_equal_records_give_equal_pages(small_run):
    pages = [page(data.index, data.chunks) for data in (collect([small_run], LetterSources()) for _ in range(2))]
    assert pages[0] == pages[1]


SECRET = "photosynthesis quantum banana"


@pytest.mark.parametrize("task", ["refusion_gpqa", "gpqa_main_zeroshot", "my_GPQA_variant"])
def test_questions_of_gpqa_are_nowhere_on_the_page(tmp_path, task):
    # Even if records and sources held them, which they do not.
    good = make_sample("rec1", task=task, text=SECRET)
    bad = make_sample("rec2", task=task, error=SECRET, trace=None, tokens=None, num_tokens=0)
    run = write_run(tmp_path / "run", [good, bad], [make_score(good, extracted="B", reason=SECRET)], tasks={task: "1"})
    data = collect([run], LetterSources(Asked(SECRET, "B", SECRET)))
    html, plain = page(data.index, data.chunks), everything(data)
    assert all(word not in text for word in SECRET.split() for text in (html, plain))
    row, body, asked = opened(data)
    assert (row["item_id"], row["extracted"], body["extracted"], asked["gold"]) == ("rec1", "B", "B", "B")
    assert body["output"] is None
    assert body["replay"]["pieces"] == []  # where and when, not what
    assert len(body["replay"]["steps"]) == 9
    quoted = collect(
        [write_run(tmp_path / "quoted", [good], [make_score(good, extracted=SECRET)], tasks={})], LetterSources()
    )
    assert SECRET not in everything(quoted)


def test_the_mini_look_alike_of_gpqa_is_shown(tmp_path):
    run = write_run(tmp_path / "run", [make_sample("1", task="mini_gpqa")])
    _, body, asked = opened(collect([run], LetterSources()))
    assert (body["output"], asked["prompt"]) == ("abce", "What comes next?")


def test_a_record_without_tokens_says_where_but_not_what(tmp_path):
    run = write_run(tmp_path / "run", [make_sample("1", tokens=None)])
    assert opened(collect([run], LetterSources()))[1]["replay"]["pieces"] == []


def ended(item, **changes):
    """A sample whose text is not cut short."""
    return make_sample(item, stop="eos", **changes)


def test_a_run_that_has_not_ended_says_so(tmp_path):
    tasks = {"mini_gsm8k": "1", "mini_math": "1"}
    expected = dict.fromkeys(tasks, 3)
    run = write_run(tmp_path / "run", [ended("1"), ended("2")], [], expected, tasks=tasks)
    data = collect([run], LetterSources())
    assert marks(data) == ["unfinished 2 of 3", "2 unscored"]
    assert data.index["cells"][1]["task"] == "mini_math"
    assert marks(data, 1) == ["unfinished 0 of 3"]


@pytest.mark.parametrize("command", [["python", "limited.py"], ["refusion-eval", "sweep"], ["refusion-eval", "rerun"]])
def test_a_complete_run_of_some_items_is_limited_whatever_command_limited_it(tmp_path, command):
    samples = [ended("1"), ended("2")]
    run = write_run(tmp_path / "run", samples, expected={"mini_gsm8k": 2}, whole={"mini_gsm8k": 200}, command=command)
    data = collect([run], LetterSources())
    assert marks(data) == ["limited 2 of 200"]
    assert "ended early" not in json.dumps(data.index)


def test_a_mean_over_tasks_has_the_marks_of_its_tasks(tmp_path):
    samples = [ended(number, task=task) for task in ("mini_gsm8k", "mini_math") for number in "123"]
    tasks = {"mini_gsm8k": "1", "mini_math": "1"}
    run = write_run(
        tmp_path / "run", samples, expected=dict.fromkeys(tasks, 3), whole=dict.fromkeys(tasks, 200), tasks=tasks
    )
    data = collect([run], LetterSources())
    mean = next(cell for cell in data.index["cells"] if cell["mean"])
    assert [mark["label"] for mark in mean["marks"]] == ["limited"]
    sentence = "mini_gsm8k 3 of 200, mini_math 3 of 200 samples of the task were asked for."
    assert mean["marks"][0]["sentence"] == sentence


def test_a_mark_that_concerns_speeds_alone_says_so_for_tasks_and_for_their_mean(tmp_path):
    samples = [ended("1", task=task) for task in ("mini_gsm8k", "mini_math")]
    tasks = {"mini_gsm8k": "1", "mini_math": "1"}
    run = write_run(
        tmp_path / "run",
        samples,
        whole=dict.fromkeys(tasks, 9),
        expected=dict.fromkeys(tasks, 1),
        load=8.0,
        tasks=tasks,
    )
    cells = collect([run], LetterSources()).index["cells"]
    assert [cell["mean"] for cell in cells] == [False, False, True]
    for cell in cells:
        assert {mark["kind"]: mark["of_speed"] for mark in cell["marks"]} == {"limited": False, "slowed": True}


def test_the_command_of_a_run_can_be_pasted_into_a_shell(tmp_path):
    command = ["/usr/bin/refusion-eval", "run", "--name", "a model"]
    run = write_run(tmp_path / "run", [make_sample("1")], command=command)
    assert collect([run], LetterSources()).index["runs"][0]["command"] == "refusion-eval run --name 'a model'"


def test_samples_of_several_machines_are_marked(tmp_path):
    run = tmp_path / "run"
    with RunStore.open(run, make_manifest()) as store:
        store.append(make_sample("1"))
        store.append(make_sample("2", process_id=store.register_process(Hardware(cpu="Other CPU", cores=4, threads=4))))
    data = collect([run], LetterSources())
    assert "mixed hardware" in marks(data)
    assert any("2 machines" in warning for warning in data.index["warnings"])


def test_scores_of_several_cards_have_a_caution(tmp_path):
    runs = [tmp_path / "a", tmp_path / "b"]
    for run, gpu in zip(runs, ("GPU A", "GPU B"), strict=True):
        with RunStore.open(run, make_manifest()) as store:
            card = store.register_process(Hardware(cpu="CPU", cores=2, threads=1, gpu=gpu))
            store.append(sample := make_sample("1", process_id=card))
            store.append_scores([make_score(sample)])
    assert CARDS_SENTENCE in collect(runs, LetterSources()).index["warnings"]
    assert CARDS_SENTENCE not in collect(runs[:1], LetterSources()).index["warnings"]


def test_programs_without_isolation_are_marked(tmp_path):
    sample = make_sample("1", task="mini_mbpp")
    run = write_run(tmp_path / "run", [sample], [make_score(sample, tier="none")], tasks={"mini_mbpp": "1"})
    assert "no isolation" in marks(collect([run], LetterSources()))


def test_systems_have_the_names_of_the_table(tmp_path):
    settings = {"slot_size": 2, "completion": "verifier", "fuse": False}
    sample = make_sample("1", settings=settings)
    tasks = {sample.key.task: "1", "mini_math": "1"}
    run = write_run(tmp_path / "run", [sample], expected=dict.fromkeys(tasks, 1), tasks=tasks)
    found = {cell["system"] for cell in collect([run], LetterSources()).index["cells"]}
    assert found == {"ReFusion, verifier"} <= {line.system for line in summary(run_measurements([run]))}


def test_two_versions_of_a_task_are_named(tmp_path):
    old, new = make_sample("1"), make_sample("1", version="2")
    runs = [
        write_run(tmp_path / "old", [old]),
        write_run(tmp_path / "new", [new], [make_score(new, 0.0)], tasks={"mini_gsm8k": "2"}),
    ]
    assert any("versions 1, 2" in warning for warning in collect(runs, LetterSources()).index["warnings"])
    both = write_run(tmp_path / "both", [old, new], [make_score(old), make_score(new, 0.0)], tasks={})
    cells = collect([both], LetterSources()).index["cells"]
    assert [(cell["version"], cell["metrics"]["accuracy"]["value"]) for cell in cells] == [("1", 100), ("2", 0)]


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(StoreError, match="holds no records"):
        collect([tmp_path], NoSources())
    run = write_run(tmp_path / "run", [make_sample("1")])
    with pytest.raises(StoreError, match="name each once"):
        collect([run, run], NoSources())
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "records.sqlite").touch()
    with pytest.raises(StoreError, match="stopped before it began"):
        collect([tmp_path / "begun"], NoSources())


def test_a_sample_is_found_by_its_names(small_run):
    assert find_sample(small_run)[1].item_id == "1"
    assert find_sample(small_run, "gsm8k", "2")[1].item_id == "2"
    with pytest.raises(ConfigError, match=r"no task 'math'.*mini_gsm8k"):
        find_sample(small_run, "math")
    with pytest.raises(ConfigError, match="no item '9'"):
        find_sample(small_run, None, "9")
    with pytest.raises(ConfigError, match="no sample 4"):
        find_sample(small_run, None, "1", 4)
    with pytest.raises(ConfigError, match="no item has a sample 4; its samples are 0 to 0"):
        find_sample(small_run, number=4)
    with pytest.raises(StoreError, match="no trace"):
        find_sample(small_run, None, "3")


def test_lists_have_item_2_before_item_10_and_what_is_asked_without_what_all_prompts_share(tmp_path):
    class Prompts(LetterSources):
        def asked(self, run, sample):
            return Asked(f"<user>\nSolve.\nHow  much is {sample.item_id}?\n", f"gold {sample.item_id}")

    run = write_run(tmp_path / "run", [make_sample(item) for item in ("10", "2", "1")])
    data = collect([run], Prompts())
    chunks = unpacked(data)
    columns = chunks[data.index["cells"][0]["list"]][0]
    questions = chunks[data.index["questions"]["mini_gsm8k"]][0]
    assert columns["item_id"] == ["1", "2", "10"]
    assert [questions["question"][number] for number in columns["question"]] == [
        "How much is 1?",
        "How much is 2?",
        "How much is 10?",
    ]
    assert [questions["gold"][number] for number in columns["question"]] == ["gold 1", "gold 2", "gold 10"]


def test_a_run_says_when_it_was_made_and_how_long_it_took(tmp_path):
    samples = [make_sample(item, created=f"2026-11-0{item}T10:00:00+00:00", seconds=1.5) for item in "21"]
    about = collect([write_run(tmp_path / "run", samples)], LetterSources()).index["runs"][0]
    assert (about["began"][:10], about["ended"][:10], about["seconds"]) == ("2026-11-01", "2026-11-02", 3.0)


def test_every_metric_of_the_list_has_a_name_on_the_page_a_meaning_and_one_place():
    assert [metric.name for metric in METRICS if not (metric.label and metric.meaning)] == []
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert sorted([UNSTATED, "tpf", "accuracy by last", ACCURACY], key=place_of) == [
        ACCURACY,
        "tpf",
        UNSTATED,
        "accuracy by last",
    ]
    assert metrics_of([{"metrics": {"tps": {}, ACCURACY: {}}}])["labels"] == {ACCURACY: "Accuracy, %", "tps": "TPS"}
