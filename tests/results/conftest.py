"""Small run directories, written as a run writes them."""

import pytest

from refusion_eval.results.measurement import Measurement
from refusion_eval.store.manifest import Hardware, Manifest
from refusion_eval.store.records import Sample, SampleKey, ScoreRow
from refusion_eval.store.run_store import RunStore
from tests.store import conftest as of_store

MACHINE = Hardware(cpu="Test CPU", cores=2, threads=1, memory_gib=8)
ROOFLINE = {"weight_bytes": 1000, "cache_bytes_per_row": 10, "copy_bytes_per_second": 100_000}


def cell(system="refusion", task="gsm8k", metric="tps", value=1.0, **changes):
    fields = {"origin": "measured", "label": system, "backbone": "", "run_id": system, "hardware": "one machine"}
    return Measurement(**{**fields, **changes}, system=system, task=task, benchmark=task, metric=metric, value=value)


def sample(item, *, task="mini_gsm8k", version="1", prompt=None, number=0, **changes):
    """Six tokens in three forwards and half a second; the first of them, of 0.2 s, fixes two."""
    fields = {
        "benchmark": task.removeprefix("mini_").removeprefix("refusion_"),
        "item_id": str(item),
        "text": f"The answer to {item}.",
        "num_tokens": 6,
        "num_forwards": 3,
        "seconds": 0.5,
        "prefill_seconds": 0.2,
        "stop": "eos",
        "settings": {"slot_size": 4},
        "trace": [
            *(["forward", 0, "plan", 9, 0], ["fix", 0, [0, 1], [1, 2]]),
            *(["forward", 1, "verify", 4, 5], ["forward", 2, "verify", 4, 5], ["fix", 2, [2, 3, 4, 5], [3, 4, 5, 6]]),
        ],
        **changes,
    }
    return Sample(key=SampleKey(task, version, f"doc-{item}", prompt or f"prompt-{item}", number, "settings"), **fields)


def run_writer(folder):
    """Writes runs into a folder: samples, which items are right, how many were asked for, and the scored samples (all).

    Its samples are one turn of a command that is this test process, so that all runs of a test took turns; `turn` None
    is a run in one go.
    """

    def write(name, samples, right=(), expected=None, scored=None, whole=None, turn=1, **changes):
        fields = {
            "system": "ReFusion",
            "backbone": "tiny",
            "decoder": "refusion",
            "settings": {},
            "checkpoint": "/weights/tiny",
            "checkpoint_hash": "c0ffee",
            "tasks": {},
            "seed": 0,
            "dtype": "float32",
            "device": "cpu",
            "attention": "sdpa",
            "package_version": "0.1",
            "hardware": MACHINE,
            "roofline": ROOFLINE,
        }
        with RunStore.open(folder / name, Manifest(**{**fields, **changes})) as store:
            store.expect(expected or {}, whole)
            if turn is not None:
                store.note(store.process_id, round=turn)
            for one in samples:
                store.append(one)
            store.append_scores(
                [
                    ScoreRow(key=one.key, item_id=one.item_id, scorer="test", value=float(one.item_id in right))
                    for one in (samples if scored is None else scored)
                ]
            )
        return folder / name

    return write


@pytest.fixture
def write_run(tmp_path):
    return run_writer(tmp_path)


@pytest.fixture(scope="session")
def make_manifest():
    return of_store.make_manifest


@pytest.fixture(scope="session")
def make_sample():
    return of_store.make_sample
