"""Ray clusters on this machine for tests: small, quiet, and closed to other users of the machine."""

import contextlib
import importlib.util
import secrets

import pytest

MEMORY = 80 * 2**20
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}


def started(cluster, tries=3, **arguments):
    """A further machine of a cluster; Ray gives a node half a minute to start, which a busy machine may exceed."""
    try:
        return cluster.add_node(object_store_memory=MEMORY, **arguments)
    except Exception as error:
        if tries == 1 or "timed out" not in str(error):
            raise
        return started(cluster, tries - 1, **arguments)


@contextlib.contextmanager
def ray_here():
    """Ray under `ENVIRONMENT`, which it reads once, when the first test of a process imports it."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install -e '.[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        from refusion_eval.scaleout.ray_runner import import_ray

        yield import_ray()


@pytest.fixture(scope="module")
def cluster():
    """A cluster with two cores; `add_node` lets further machines join."""
    with ray_here() as ray:
        from ray.cluster_utils import Cluster

        local = Cluster()
        try:
            started(local, num_cpus=2, include_dashboard=False)
            ray.init(address=local.address, log_to_driver=False)
            yield local
        finally:
            ray.shutdown()
            local.shutdown()
