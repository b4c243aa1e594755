import io

from refusion_eval.runs.progress import ProgressDisplay
from refusion_eval.store.records import Sample, SampleKey


def sample(task="gsm8k", **fields):
    return Sample(key=SampleKey(task, "1", "d", "p", 0, "s"), benchmark="gsm8k", item_id="0", **fields)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_name_system_task_count_and_speed():
    stream = io.StringIO()
    with ProgressDisplay("ReFusion", {"gsm8k": 2}, stream) as progress:
        progress.decoded(sample(num_tokens=30, num_forwards=10, seconds=2.0))
        progress.decoded(sample(num_tokens=10, num_forwards=10, seconds=2.0))
    assert stream.getvalue().splitlines()[-1] == "ReFusion gsm8k: 2/2  10.0 tokens/s, TPF 2.00"


def test_stored_and_failed_samples_are_told_apart_from_decoded_ones():
    stream = io.StringIO()
    with ProgressDisplay("AR", {"gsm8k": 2}, stream) as progress:
        progress.stored("gsm8k")
        progress.decoded(sample(error="out of memory"))
    assert stream.getvalue().splitlines()[-1] == "AR gsm8k: 2/2  1 from the run directory, 1 FAILED"


def test_a_terminal_gets_a_live_display():
    stream = Terminal()
    with ProgressDisplay("AR", {"gsm8k": 1, "math": 1}, stream) as progress:
        progress.decoded(sample(num_tokens=3, num_forwards=3, seconds=1.0))
    text = stream.getvalue()
    assert "AR gsm8k" in text
    assert "AR math" in text
    assert "3.0 tokens/s" in text
