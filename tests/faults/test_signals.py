"""SIGINT and SIGTERM: the sample in flight is finished and recorded, one line says how to go on, and it goes on."""

import itertools
import signal

import pytest
import yaml

from tests.faults.runs import NUM_ITEMS, NUM_SAMPLES, SETTINGS, assert_same, command, num_recorded, records

AGAIN = "run the same command again to continue"


def during_forward(number, **more):
    """A signal just before a forward of the run, counted from 1."""
    return {"place": "forward", "count": 2 * number - 1, **more}


def forwards_until(calm, sample):
    """Forwards of a run, one request at a time, up to and including those of a sample."""
    return list(itertools.accumulate(one.num_forwards for one in records(calm)[0]))[sample]


def last_line(output):
    """The line that an interrupted run ends with."""
    assert "Traceback" not in output
    return output.rstrip().splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("sample", [0, 3])
def test_the_sample_in_flight_is_finished_and_no_other_is_begun(server, calm, tmp_path, number, sample):
    fault = during_forward(forwards_until(calm, sample), signal=number)
    status, output = server.run(command(tmp_path / "run"), fault=fault)
    assert status == 128 + number
    assert last_line(output) == (
        f"stopped by {number.name}: {sample + 1} of {NUM_SAMPLES} samples are recorded in {tmp_path / 'run'}; {AGAIN}"
    )
    assert num_recorded(tmp_path / "run") == sample + 1
    assert server.run(command(tmp_path / "run"))[0] == 0
    assert_same(tmp_path / "run", calm)


def test_a_second_signal_does_not_wait_and_loses_nothing_recorded(server, calm, tmp_path):
    fault = during_forward(forwards_until(calm, 1) + 1, signal=signal.SIGTERM, times=2)
    status, output = server.run(command(tmp_path / "run"), fault=fault)
    assert status == 128 + signal.SIGTERM
    assert last_line(output).startswith(f"stopped by SIGTERM: 2 of {NUM_SAMPLES} samples are recorded")
    assert num_recorded(tmp_path / "run") == 2
    assert server.run(command(tmp_path / "run"))[0] == 0
    assert_same(tmp_path / "run", calm)


def test_of_a_batch_all_that_are_in_flight_are_finished(server, calm, tmp_path):
    arguments = command(tmp_path / "run", batch_size=3)
    status, output = server.run(arguments, fault=during_forward(2, signal=signal.SIGINT))
    assert status == 128 + signal.SIGINT
    assert last_line(output).startswith(f"stopped by SIGINT: 3 of {NUM_SAMPLES} samples are recorded")
    assert server.run(command(tmp_path / "run"))[0] == 0
    assert [sample.tokens for sample in records(tmp_path / "run")[0]] == [s.tokens for s in records(calm)[0]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_text_is_judged_ends_the_run_before_the_next_request(server, calm, tmp_path, number):
    status, output = server.run(command(tmp_path / "run"), fault={"place": "verdict", "count": 2, "signal": number})
    assert status == 128 + number
    assert f"{NUM_ITEMS + 1} of {NUM_SAMPLES} samples are recorded" in last_line(output)  # the first program's
    samples, scores = records(tmp_path / "run")
    assert {score.key for score in scores} == {sample.key for sample in samples}
    assert server.run(command(tmp_path / "run"))[0] == 0
    assert_same(tmp_path / "run", calm)


def test_before_the_first_sample_there_is_nothing_to_finish(server, calm, tmp_path):
    fault = {"place": "file", "count": 3, "signal": signal.SIGTERM}
    status, output = server.run(command(tmp_path / "run"), fault=fault)
    assert status == 128 + signal.SIGTERM
    assert last_line(output).startswith(f"stopped by SIGTERM: nothing is recorded in {tmp_path / 'run'} yet")
    assert server.run(command(tmp_path / "run"))[0] == 0
    assert_same(tmp_path / "run", calm)


@pytest.mark.slow  # lm-eval reads its thousands of task files, twice
def test_under_lm_eval_itself_the_sample_in_flight_is_finished_too(server, tmp_path):
    settings = ",".join(f"{name}={value}" for name, value in SETTINGS.items())
    model = f"pretrained=embedded,warmup=0,run_dir={tmp_path / 'run'},{settings}"
    arguments = ["lm-eval", "--model", "refusion", "--model_args", model, "--tasks", "mini_gsm8k", "--include_path"]
    arguments += ["tasks", "--limit", str(NUM_ITEMS), "--apply_chat_template", "--device", "cpu"]
    status, output = server.run(arguments, fault=during_forward(2, signal=signal.SIGTERM))
    assert status == 128 + signal.SIGTERM, output
    assert last_line(output) == (
        f"stopped by SIGTERM: 1 of {NUM_ITEMS} samples are recorded in {tmp_path / 'run'}; {AGAIN}"
    )
    status, output = server.run(arguments)
    assert status == 0, output
    assert num_recorded(tmp_path / "run") == NUM_ITEMS


def test_a_sweep_keeps_its_finished_points_and_goes_on(server, tmp_path):
    arguments = {"pretrained": "embedded", "decoder": "refusion", "warmup": 0}
    of_system = {"arguments": arguments, "settings": SETTINGS, "around": {"tau_slot": [0.1]}}
    spec = {"tasks": ["gsm8k"], "limit": NUM_ITEMS, "systems": {"refusion": of_system}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(spec))
    sweep = ["sweep", str(tmp_path / "mine.yaml"), "--rounds", "1", "--out", str(tmp_path / "out")]
    assert server.run([*sweep], counts=str(tmp_path / "counts"))[0] == 0
    forwards = server.read(tmp_path / "counts")["forward"] // 2
    whole = {path.name: records(path) for path in (tmp_path / "out" / "runs").iterdir()}
    assert len(whole) == 2
    again = [*sweep[:-1], str(tmp_path / "again")]
    status, output = server.run(again, fault=during_forward(forwards - 1, signal=signal.SIGTERM))
    assert status == 128 + signal.SIGTERM, output
    assert "points.csv" in {path.name for path in (tmp_path / "again").iterdir()}
    assert len((tmp_path / "again" / "points.csv").read_text().splitlines()) == 2
    assert AGAIN in last_line(output)
    status, output = server.run(again)
    assert status == 0, output
    assert {path.name: records(path) for path in (tmp_path / "again" / "runs").iterdir()} == whole
