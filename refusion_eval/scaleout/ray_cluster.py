"""The connection to a Ray cluster: made quietly, and told in this project's words when it fails."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from refusion_eval.errors import ConfigError, ScaleOutError

log = logging.getLogger(__name__)

# Requests and records are small, and Ray's own default takes a third of the memory.
OBJECT_STORE_BYTES = 200 * 2**20

# Read when ray is imported: nothing is sent to its makers, what it would print of workers stays in its log files, and
# workers of a cluster that starts here get processor time like any program (ray would let all others go first).
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": ".", "RAY_worker_niceness": "0"}


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster.

    Attributes:
        node_id: Ray's name of it.
        label: what people call it.
        num_gpus: GPUs that Ray gives out there.
        num_cpus: processor cores likewise.
    """

    node_id: str
    label: str
    num_gpus: int
    num_cpus: int


def import_ray() -> Any:
    """The ray package.

    Raises:
        ConfigError: it is not installed.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise ConfigError(
            "engine=ray needs Ray, which is not installed here: pip install 'refusion-eval[ray]', on every machine"
        ) from error
    return ray


class Cluster:
    """A connection to a Ray cluster, shared by all runs of this process.

    Args:
        address: "HOST:PORT", or "auto" for the cluster that this machine belongs to; None starts one on this machine,
            unless RAY_ADDRESS names another, as in a job that Ray itself started.

    Raises:
        ConfigError: ray is missing.
        ScaleOutError: the cluster cannot be reached.
    """

    def __init__(self, address: str | None) -> None:
        self.ray = import_ray()
        self._is_ours = not self.ray.is_initialized()
        if not self._is_ours:
            return
        where = address or os.environ.get("RAY_ADDRESS") or "local"
        memory = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False} if where == "local" else {}
        try:
            with _own_signals():
                self.ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR, **memory)
        except Exception as error:  # ray has no class for it: a start that takes too long is a plain Exception
            raise ScaleOutError(
                f"no Ray cluster at {where} ({error}); start one with `ray start`, give its HOST:PORT as ray_address, "
                "and the same token (RAY_AUTH_TOKEN) on every machine where Ray asks for one"
            ) from error
        log.info("connected to the Ray cluster at %s", self.ray.get_runtime_context().gcs_address)

    def nodes(self) -> list[Node]:
        """The machines that are there now."""
        return [
            Node(
                node["NodeID"],
                _label(node),
                int(node["Resources"].get("GPU", 0)),
                int(node["Resources"].get("CPU", 0)),
            )
            for node in self.ray.nodes()
            if node["Alive"]
        ]

    @property
    def own_node_id(self) -> str:
        """The machine of this process."""
        return str(self.ray.get_runtime_context().get_node_id())

    def close(self) -> None:
        """Leaves the cluster, or ends it if it was started here; harmless if already done."""
        if self._is_ours and self.ray.is_initialized():
            self.ray.shutdown()
        self._is_ours = False


def _label(node: dict[str, Any]) -> str:
    host, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
    return str(host) if host == address else f"{host} ({address})"


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps this process' answer to SIGTERM, which ray replaces by one of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
