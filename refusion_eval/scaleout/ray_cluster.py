"""The connection to a Ray cluster, without Ray's own output and with clear errors."""

import logging
import os
import signal
import threading
from dataclasses import dataclass
from typing import Any

from refusion_eval.errors import ConfigError, ScaleOutError

log = logging.getLogger(__name__)

# Requests and records are small; Ray's own default takes a third of the memory.
OBJECT_STORE_BYTES = 200 * 2**20

# Ray reads these when it is imported. It sends no usage statistics, keeps the output of workers in its log files, and
# gives workers of a cluster that starts here the normal priority instead of the lowest one.
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": ".", "RAY_worker_niceness": "0"}


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster."""

    node_id: str
    label: str
    num_gpus: int
    num_cpus: int


def import_ray() -> Any:
    """Imports ray; raises ConfigError if it is not installed."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise ConfigError(
            "engine=ray needs Ray, which is not installed here: in a checkout, pip install '.[ray]', on every machine"
        ) from error
    return ray


class Cluster:
    """A connection to a Ray cluster, shared by all runs of this process.

    Args:
        address: "HOST:PORT", or "auto" for the cluster that this machine belongs to; None starts one on this machine,
            unless RAY_ADDRESS names a cluster, as in a job that Ray itself started.

    Raises:
        ConfigError: ray is missing.
        ScaleOutError: the cluster cannot be reached.
    """

    def __init__(self, address: str | None) -> None:
        self.ray = import_ray()
        self._owns_connection = not self.ray.is_initialized()
        if not self._owns_connection:
            return
        target = address or os.environ.get("RAY_ADDRESS") or "local"
        memory = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False} if target == "local" else {}
        handler = signal.getsignal(signal.SIGTERM)
        try:
            self.ray.init(address=target, log_to_driver=False, logging_level=logging.ERROR, **memory)
        except Exception as error:  # ray raises a plain Exception if a start takes too long
            raise ScaleOutError(
                f"no Ray cluster at {target} ({error}); start one with `ray start`, give its HOST:PORT as ray_address, "
                "and the same token (RAY_AUTH_TOKEN) on every machine where Ray asks for one"
            ) from error
        finally:
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # ray replaces it
        log.info("connected to the Ray cluster at %s", self.ray.get_runtime_context().gcs_address)

    def nodes(self) -> list[Node]:
        """The machines that are alive now."""
        return [
            Node(node["NodeID"], _label(node), *(int(node["Resources"].get(kind, 0)) for kind in ("GPU", "CPU")))
            for node in self.ray.nodes()
            if node["Alive"]
        ]

    def close(self) -> None:
        """Disconnects from the cluster, which ends a cluster that was started here."""
        if self._owns_connection and self.ray.is_initialized():
            self.ray.shutdown()
        self._owns_connection = False


def _label(node: dict[str, Any]) -> str:
    host, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
    return str(host) if host == address else f"{host} ({address})"
