import contextlib
import io
import os
import re
import signal
import threading
import time

import pytest

from refusion_eval.lm_eval_plugin.adapter import RefusionLM
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.terminal import SIGNALS, Interrupted, Interruption, ProgressDisplay, RunningScore, resume_hint
from refusion_eval.store.records import Sample, SampleKey
from refusion_eval.store.run_store import RunStore
from tests.store.conftest import make_manifest, make_sample


@pytest.fixture(autouse=True)
def handlers():
    """Those of a process that was started from a terminal."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield [signal.getsignal(number) for number in SIGNALS]
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.default_int_handler, signal.SIG_DFL]
    for number, handler in before.items():
        signal.signal(number, handler)


def items_of(block, signals, taken=None):
    """Takes ten numbers inside a block; `signals` says which signals come while a number is worked on."""
    taken = [] if taken is None else taken
    with block:
        for number in block.stoppable(range(10)):
            for one in signals.get(number, ()):
                signal.raise_signal(one)
            taken.append(number)
    return taken


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_lets_the_item_end_and_then_the_process(number, capfd):
    taken = []
    block = Interruption(lambda: "two of ten", finish_first=True)
    with pytest.raises(Interrupted) as stop:
        items_of(block, {1: [number]}, taken)
    assert taken == [0, 1]
    assert stop.value.code == 128 + number
    first, last = capfd.readouterr().err.splitlines()
    assert first == f"{number.name}: what is in flight is finished first; a second signal stops at once"
    assert last == f"stopped by {number.name}: two of ten"


def test_a_second_signal_ends_the_block_where_it_is():
    taken = []
    with pytest.raises(Interrupted) as stop:
        items_of(Interruption(str, finish_first=True), {1: [signal.SIGINT, signal.SIGTERM]}, taken)
    assert taken == [0]
    assert stop.value.code == 128 + signal.SIGTERM


def test_where_nothing_has_to_be_finished_the_first_signal_ends_the_block(capfd):
    taken = []
    with pytest.raises(Interrupted):
        items_of(Interruption(lambda: "so far", finish_first=False), {2: [signal.SIGTERM]}, taken)
    assert taken == [0, 1]
    assert capfd.readouterr().err == "stopped by SIGTERM: so far\n"


@pytest.mark.parametrize("instead", [SystemExit(1), KeyboardInterrupt()])
@pytest.mark.parametrize("finish_first", [True, False])
def test_what_a_library_makes_of_a_signal_is_taken_for_it(instead, finish_first, capfd):
    def end_in_its_own_way():
        with Interruption(lambda: "so far", finish_first=finish_first):
            with contextlib.suppress(Interrupted):
                signal.raise_signal(signal.SIGTERM)
            raise instead

    with pytest.raises(Interrupted) as stop:
        end_in_its_own_way()
    assert stop.value.code == 128 + signal.SIGTERM
    assert capfd.readouterr().err.splitlines()[-1] == "stopped by SIGTERM: so far"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_without_a_signal_an_end_by_the_block_itself_stays_what_it_is(error, capfd):
    with pytest.raises(type(error)) as stop, Interruption(str, finish_first=False):
        raise error
    assert stop.value is error
    assert capfd.readouterr().err == ""


def test_of_nested_blocks_the_inner_one_answers_alone(capfd):
    outer = Interruption(lambda: "outer", finish_first=False)
    inner = Interruption(lambda: "inner", finish_first=True)
    with pytest.raises(Interrupted), outer, inner:
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err.splitlines()[-1] == "stopped by SIGINT: inner"


def test_without_a_signal_nothing_is_changed(capfd):
    assert items_of(Interruption(str, finish_first=True), {}) == list(range(10))
    assert capfd.readouterr().err == ""


def test_another_error_comes_through_as_it_is(capfd):
    def fail():
        with Interruption(str, finish_first=True):
            signal.raise_signal(signal.SIGINT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "stopped by" not in capfd.readouterr().err


def test_a_signal_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert items_of(Interruption(str, finish_first=True), {3: [signal.SIGINT]}) == list(range(10))
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_thread_of_its_own_leaves_signals_alone():
    taken = []
    thread = threading.Thread(target=lambda: taken.extend(items_of(Interruption(str, finish_first=True), {})))
    thread.start()
    thread.join()
    assert taken == list(range(10))


def test_a_model_in_use_as_a_library_installs_nothing_outside_of_generation(checkpoint, handlers):
    lm = RefusionLM(parse_model_args({"pretrained": checkpoint, "warmup": 0}))
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    lm.close()


def test_the_hint_how_to_resume_counts_what_is_recorded(tmp_path):
    assert "nothing is recorded" in resume_hint(tmp_path / "none")
    assert "no run directory" in resume_hint(None)
    with RunStore.open(tmp_path, make_manifest()) as store:
        store.expect({"mini_gsm8k": 3})
        store.append(make_sample(1, tokens=None, error="out of memory"))
        assert resume_hint(tmp_path).startswith("nothing is recorded")
        store.append(make_sample(2))
        assert resume_hint(tmp_path).startswith(f"1 of 3 samples are recorded in {os.fspath(tmp_path)}; ")


def sample(task="gsm8k", **fields):
    return Sample(key=SampleKey(task, "1", "d", "p", 0, "s"), benchmark="gsm8k", item_id="0", **fields)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_name_system_task_count_and_speed():
    stream = io.StringIO()
    with ProgressDisplay("ReFusion", {"gsm8k": 3}, stream) as progress:
        progress.decoded(sample(num_tokens=30, num_forwards=10, seconds=2.0))
        progress.decoded(sample(num_tokens=10, num_forwards=10, seconds=2.0))
        progress.decoded(sample(num_tokens=60, num_forwards=0, seconds=1.0))  # of a server that does not tell them
    assert stream.getvalue().splitlines()[-1] == "ReFusion gsm8k: 3/3  20.0 tokens/s, TPF 2.00"


def test_lines_have_the_running_score_once_there_is_a_verdict():
    stream = io.StringIO()
    scores = iter([RunningScore(0, 0), RunningScore(1, 2)])
    with ProgressDisplay("AR", {"gsm8k": 1, "math": 1}, stream, score_of=lambda task: next(scores)) as progress:
        progress.stored("math")
        progress.decoded(sample(num_tokens=3, num_forwards=3, seconds=1.0))
    first, second = stream.getvalue().splitlines()
    assert "accuracy" not in first
    assert second == "AR gsm8k: 1/1  3.0 tokens/s, TPF 1.00, accuracy 50.0 % of 2"


@pytest.mark.parametrize(
    ("total", "samples", "left"), [(15, 5, ", about 10 min left in all"), (8, 6, ", about 2 min left in all")]
)
def test_lines_say_how_long_all_tasks_still_take_without_the_time_before_the_first_sample(
    monkeypatch, total, samples, left
):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    with ProgressDisplay("AR", {"gsm8k": total, "math": 1}, stream) as progress:
        now = 100.0
        progress.stored("gsm8k")
        now = 7200.0  # two hours of loading, compiling and warming up, then a sample a minute
        while now < 7200.0 + 60 * samples:
            progress.decoded(sample(num_tokens=3, num_forwards=3, seconds=1.0))
            now += 60
    stored, *decoded = stream.getvalue().splitlines()
    assert "left" not in stored
    assert not any("left" in line for line in decoded[:4])  # too few samples to tell
    assert decoded[-1].endswith(left)


def test_stored_and_failed_samples_are_told_apart_from_decoded_ones():
    stream = io.StringIO()
    with ProgressDisplay("AR", {"gsm8k": 2}, stream) as progress:
        progress.stored("gsm8k")
        progress.decoded(sample(error="out of memory"))
    assert stream.getvalue().splitlines()[-1] == "AR gsm8k: 2/2  1 from the run directory, 1 FAILED"


def test_a_narrow_terminal_has_room_for_time_left_and_score(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    with ProgressDisplay("ReFusion", {"gsm8k": 1}, stream, score_of=lambda task: RunningScore(1, 2)) as progress:
        progress.decoded(sample(num_tokens=3, num_forwards=3, seconds=1.0))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert re.search(r"1/1 +0:00:00 left 3.0 tokens/s, TPF 1.00, accuracy 50.0 % of 2", text)
    assert "…" not in text


def test_a_terminal_gets_a_live_display():
    stream = Terminal()
    with ProgressDisplay("AR", {"gsm8k": 1, "math": 1}, stream) as progress:
        progress.decoded(sample(num_tokens=3, num_forwards=3, seconds=1.0))
    text = stream.getvalue()
    assert "AR gsm8k" in text
    assert "AR math" in text
    assert "3.0 tokens/s" in text
