"""Measures what a decoding costs on the host, beside the forwards of its model.

    python performance/host_time.py [--model embedded] [--tokens 128]

A GPU waits while Python reads the answers of a forward, decodes, and sends the numbers of the next one. Here forwards
are recorded as on CUDA, and replayed on the CPU. What runs from the answers of one replay to the start of the next is
counted as calls of Python functions, which no other work on the machine changes; what runs beside a replay is not.
`refusion-eval bench --predict` measures its time.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Annotated, Any, NamedTuple

import typer
from command import Model, run_script

from refusion_eval import api
from refusion_eval.bench.bench import mini_prompts
from refusion_eval.decoders import DECODERS
from refusion_eval.engine.engine import Engine
from refusion_eval.engine.readout import Collect
from refusion_eval.engine.width import SHIPPED_COSTS
from refusion_eval.models.device import cpu_threads
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import Decode, ForwardDone, Readout

FREE_ROWS, ROW_COST = SHIPPED_COSTS["cuda"]
SLOTS = {"slot_size": 8, "block_size": 32}
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "autoregressive": ("autoregressive", {}),
    "refusion, not fused": ("refusion", SLOTS | {"fuse": False}),
    "refusion": ("refusion", SLOTS | {"fuse": True, "free_rows": FREE_ROWS, "row_cost": ROW_COST}),
}


class HostWork(NamedTuple):
    """Work for which replays wait, a forward on average."""

    calls: float  # of Python functions
    rows: float  # of a forward


class CallCounter:
    """Records forwards so that what runs from one replay's answers to the next replay can be counted."""

    def __init__(self) -> None:
        self.calls = 0
        self._counts = False

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Stands in for a recording of a CUDA graph (`refusion_eval.engine.recorded.Record`)."""

        def replay() -> None:
            sys.setprofile(None)
            compute()

        return replay

    def go_on(self) -> None:
        """Counts again, because the answers of a replay are awaited."""
        if self._counts:
            sys.setprofile(self._count)

    def _count(self, _frame: FrameType, event: str, _argument: object) -> None:
        self.calls += event == "call"

    def count(self, work: Callable[[], Any]) -> Any:
        """Counts the calls of Python functions of some work, and returns its result."""
        self.calls, self._counts = 0, True
        sys.setprofile(self._count)
        try:
            return work()
        finally:
            sys.setprofile(None)
            self._counts = False


class WatchedEngine(Engine):
    """An engine whose calls are counted while no forward runs."""

    def __init__(self, model: Transformer, counter: CallCounter) -> None:
        super().__init__(model, "sdpa", record=counter.record)
        self._counter = counter

    def _launch(self, *call: Any) -> Collect:
        collect = super()._launch(*call)
        assert collect is not None  # nothing is fed

        def counted() -> list[Readout]:
            self._counter.go_on()
            return collect()

        return counted


def host_work(
    model: Transformer, systems: Mapping[str, tuple[Decode, Any]], prompts: Sequence[Sequence[int]]
) -> dict[str, HostWork]:
    """Decodes prompts with each system, a decoder and its settings, and counts calls."""
    counter = CallCounter()
    engine = WatchedEngine(model, counter)
    works = {}
    for name, (decode, settings) in systems.items():
        calls = 0
        forwards: list[ForwardDone] = []
        for prompt in prompts:
            run = partial(engine.run, decode, prompt, settings)
            run()  # records forwards, and grows what has to grow
            forwards += counter.count(run).trace.of(ForwardDone)
            calls += counter.calls
        rows = sum(forward.rows for forward in forwards)
        works[name] = HostWork(calls / len(forwards), rows / len(forwards))
    return works


@cpu_threads(1)  # on a busy machine, the replays would take minutes with more
def main(
    model: Model = "embedded",
    tokens: Annotated[int, typer.Option(help="Most tokens of a response.")] = 128,
) -> None:
    """Prints one line for each system."""
    loaded = api.load_model(model, device="cpu", dtype="float32", attention="sdpa")
    systems = {
        system: (DECODERS[name].decode, api.decoder_settings(loaded, name, gen_length=tokens, **changes))
        for system, (name, changes) in SYSTEMS.items()
    }
    works = host_work(loaded.transformer, systems, mini_prompts(loaded, 4))
    for system, work in works.items():
        print(f"{system:20} {work.rows:6.1f} rows a forward: {work.calls:4.0f} calls")


if __name__ == "__main__":
    run_script(main)
