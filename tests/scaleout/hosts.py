"""Separate hosts on one machine: a network, process and file namespace each, joined by a cable. Needs root."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

# Folders of Ray's session and of shared memory, which hosts must not share.
OWN_FOLDERS = ("/tmp/ray", "/dev/shm")


@dataclass
class Host:
    """A namespace with a network card.

    Attributes:
        name: name of the network namespace.
        address: IP address.
    """

    name: str
    address: str
    _processes: list[subprocess.Popen] = field(default_factory=list)

    def start(self, *command, environment, **options):
        """Starts a program on the host; programs that share files must be started by one script."""
        mounts = "".join(f"mount -t tmpfs none {folder} && " for folder in OWN_FOLDERS)
        inside = ["sh", "-c", mounts + 'exec "$@"', "sh", *map(str, command)]
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *namespaces, *inside], env={**os.environ, **environment}, **options
        )
        self._processes.append(process)
        return process

    def unplug(self):
        """Cuts the network before the processes end, so that the other host learns nothing of their end."""
        ip("-n", self.name, "link", "set", "wire", "down")
        self.power_off()

    def power_off(self):
        """Kills the first process of each process namespace, and all others with it."""
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_hosts():
    """Two hosts with a cable between them; skips where they cannot be made."""
    if os.geteuid() != 0 or sys.platform != "linux" or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("separate hosts are network namespaces: they need Linux, root, ip and unshare")
    for folder in OWN_FOLDERS:
        os.makedirs(folder, exist_ok=True)
    mark = f"rt{os.getpid()}"
    hosts = [Host(f"{mark}a", "10.213.7.1"), Host(f"{mark}b", "10.213.7.2")]
    try:
        try:
            for host in hosts:
                ip("netns", "add", host.name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        first, second = hosts
        ip("-n", first.name, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", second.name)
        for host in hosts:
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "wire")
            for card in ("lo", "wire"):
                ip("-n", host.name, "link", "set", card, "up")
        yield hosts
    finally:
        for host in hosts:
            host.power_off()
            subprocess.run(["ip", "netns", "delete", host.name], check=False, capture_output=True)
