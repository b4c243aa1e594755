"""Assigns the records that workers send to the processes that made them."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

from refusion_eval.scaleout.wire import sample_from_json
from refusion_eval.store.environment import Hardware
from refusion_eval.store.records import Sample

# Records a process that generates samples, from its hardware and process number, and returns the id that its records
# carry; the id is empty where nothing is recorded.
Register = Callable[[Hardware, int], str]


class WorkerRegistry:
    """Process ids of the workers of a run in the run store.

    Args:
        register: records a process in the run store and returns its id.
    """

    def __init__(self, register: Register) -> None:
        self._register = register
        self._process_ids: dict[Hashable, str] = {}

    def add(self, worker: Hashable, hardware: Mapping[str, Any], pid: int) -> None:
        """Registers a worker unless it is registered already.

        Args:
            worker: rank or name, unique in this run.
            hardware: the worker's machine, as `dataclasses.asdict` gives it.
            pid: process number on that machine.
        """
        if worker not in self._process_ids:
            self._process_ids[worker] = self._register(Hardware.from_json(hardware), pid)

    def sample(self, worker: Hashable, fields: Mapping[str, Any]) -> Sample:
        """Decodes a worker's record from JSON and adds the worker's process id."""
        return replace(sample_from_json(fields), process_id=self._process_ids[worker])
