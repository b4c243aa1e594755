"""How much Python runs for a forward, counted as calls: while it runs, a GPU waits."""

from host_time import host_work

from refusion_eval.decoders import DECODERS
from refusion_eval.decoders.autoregressive import AutoregressiveSettings
from refusion_eval.decoders.refusion import RefusionSettings
from refusion_eval.engine import recorded
from tests.engine.random_model import VOCAB_SIZE, random_transformer

SLOTS = {"gen_length": 64, "slot_size": 8, "block_size": 32, "mask_id": VOCAB_SIZE - 1, "row_cost": 0.002}
# System -> its settings, and the most calls of Python functions for a forward.
SYSTEMS = {
    "autoregressive": (AutoregressiveSettings(gen_length=32), 49),
    "refusion": (RefusionSettings(**SLOTS, tau_token=0.05), 149),
    "refusion, not fused": (RefusionSettings(**SLOTS, tau_token=0.05, fuse=False), 89),
}


def test_calls_of_python_functions_for_a_forward(monkeypatch):
    monkeypatch.setattr(recorded, "CHECKED_CONTEXT", 5)
    monkeypatch.setattr(recorded, "WIDTHS", (1, 8, 16, 32, 64, 96))
    systems = {name: (DECODERS[name.split(",")[0]].decode, settings) for name, (settings, _) in SYSTEMS.items()}
    works = host_work(random_transformer(), systems, [[3, 1, 4, 1, 5, 9, 2, 6]])
    found = {name: work.calls for name, work in works.items()}
    assert all(found[name] <= bound for name, (_, bound) in SYSTEMS.items()), found
    assert works["refusion"].rows > 2 * works["refusion, not fused"].rows  # branches travel with verifications
