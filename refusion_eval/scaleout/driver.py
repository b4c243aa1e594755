"""What every way of scaling out shares on the side of the driver: telling whose record is whose."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

from refusion_eval.scaleout.wire import sample_from_json
from refusion_eval.store.environment import Hardware
from refusion_eval.store.records import Sample

# A worker's hardware and process number -> the id of its records; empty where nothing is recorded.
Register = Callable[[Hardware, int], str]


class Workforce:
    """The workers of a run, as the run store knows them.

    Args:
        register: records a process that generates samples, and names it.
    """

    def __init__(self, register: Register) -> None:
        self._register = register
        self._process_ids: dict[Hashable, str] = {}

    def join(self, worker: Hashable, hardware: Mapping[str, Any], pid: int) -> None:
        """Registers a worker, once, before its first record.

        Args:
            worker: what tells it from all others of this run.
            hardware: its machine, as `dataclasses.asdict` gives it.
            pid: its number on its machine.
        """
        if worker not in self._process_ids:
            self._process_ids[worker] = self._register(Hardware.from_json(hardware), pid)

    def signed(self, worker: Hashable, sample: Mapping[str, Any]) -> Sample:
        """A worker's record, off the wire, with the process that made it."""
        return replace(sample_from_json(sample), process_id=self._process_ids[worker])
