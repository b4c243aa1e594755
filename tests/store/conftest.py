"""Small manifests and samples for the tests of the store."""

import pytest

from refusion_eval.store.manifest import Hardware, Manifest
from refusion_eval.store.records import Sample, SampleKey


def make_manifest(**changes):
    fields = {
        "system": "ReFusion",
        "backbone": "tiny",
        "decoder": "refusion",
        "settings": {"refusion": {"tau_slot": 0.9, "slot_size": 4}},
        "checkpoint": "/weights/tiny",
        "checkpoint_hash": "c0ffee",
        "tasks": {"mini_gsm8k": "1"},
        "seed": 0,
        "dtype": "float32",
        "device": "cpu",
        "attention": "sdpa",
        "package_version": "0.1",
        "hardware": Hardware(cpu="Test CPU", cores=2, threads=1, memory_gib=8),
    }
    return Manifest(**{**fields, **changes})


def make_key(item, *, task="mini_gsm8k", sample=0):
    return SampleKey(task, "1", f"doc-{item}", f"prompt-{item}", sample, "settings")


def make_sample(item, *, task="mini_gsm8k", sample=0, **changes):
    fields = {
        "benchmark": task.removeprefix("mini_").removeprefix("refusion_"),
        "item_id": str(item),
        "text": f"The answer to {item}.",
        "tokens": [1, 2, 3],
        "num_tokens": 3,
        "num_forwards": 2,
        "seconds": 0.5,
        "stop": "eos",
        "settings": {"tau_slot": 0.9, "slot_size": 4},
        "settings_source": {"tau_slot": "table", "slot_size": "default"},
        "trace": [["forward", 0, "plan", 4, 0], ["fix", 0, [0, 1], [1, 2]]],
        "prompt_num_tokens": 10,
    }
    return Sample(key=make_key(item, task=task, sample=sample), **{**fields, **changes})


@pytest.fixture(scope="session", name="make_manifest")
def _make_manifest():
    return make_manifest


@pytest.fixture(scope="session", name="make_key")
def _make_key():
    return make_key


@pytest.fixture(scope="session", name="make_sample")
def _make_sample():
    return make_sample
