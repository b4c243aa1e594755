"""Programs that try to reach something outside; solve(20) is 6765 only if one could."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ESCAPES = {
    "kill_parent": "import os, signal\ndef solve(n):\n    os.kill(os.getppid() or 2, signal.SIGKILL)\n    return 6765",
    "kill_all": "import os, signal\ndef solve(n):\n    os.kill(-1, signal.SIGKILL)\n    return 0",
    "ptrace": "import ctypes\ndef solve(n):\n    return 6765 if ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0 else 0",
    "init_memory": "def solve(n):\n    open('/proc/1/mem', 'r+b')\n    return 6765",
    "init_environment": "def solve(n):\n    open('/proc/1/environ', 'rb').read()\n    return 6765",
    "own_environment": "import os\ndef solve(n):\n    return 6765 if os.environ else 0",
    "environment_of_libc": "import ctypes\n"
    "def solve(n):\n"
    "    libc = ctypes.CDLL(None)\n"
    "    libc.getenv.restype = ctypes.c_char_p\n"
    "    return 6765 if libc.getenv(b'PATH') or libc.getenv(b'HOME') else 0",
    "core_pattern": "def solve(n):\n    open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')\n    return 6765",
    "swappiness": "def solve(n):\n    open('/proc/sys/vm/swappiness', 'w').write('60')\n    return 6765",
    "home": "import os\ndef solve(n):\n    os.listdir('/root')\n    return 6765",
    "passwords": "def solve(n):\n    open('/etc/passwd').read()\n    return 6765",
    "root_folder_write": "def solve(n):\n    open('/x', 'w')\n    return 6765",
    "library_write": "import os\ndef solve(n):\n    open(os.__file__, 'a')\n    return 6765",
    "installed_packages": "import os\n"
    "def solve(n):\n"
    "    found = os.listdir(os.path.dirname(os.__file__) + '/site-packages')\n"
    "    return 6765 if found else 0",
    "tcp": "import socket\ndef solve(n):\n    socket.socket()\n    return 6765",
    "udp": "import socket\ndef solve(n):\n    socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n    return 6765",
    "unix_socket": "import socket\ndef solve(n):\n    socket.socket(socket.AF_UNIX)\n    return 6765",
    "name_service": "import socket\n"
    "def solve(n):\n"
    "    socket.getaddrinfo('localhost.localdomain', 80)\n"
    "    return 6765",
    "become_root": "import os\ndef solve(n):\n    os.setuid(0)\n    return 6765 if os.getuid() == 0 else 0",
    "new_user_namespace": "import ctypes\n"
    "def solve(n):\n"
    "    return 6765 if ctypes.CDLL(None).unshare(0x10000000) == 0 else 0",
    "mount": "import ctypes\n"
    "def solve(n):\n"
    "    return 6765 if ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, 0) == 0 else 0",
    "shell": "import subprocess\n"
    "def solve(n):\n"
    "    subprocess.run(['/bin/sh', '-c', 'true'], check=True)\n"
    "    return 6765",
    "reset_death_signal": "import ctypes\n"
    "def solve(n):\n"
    "    return 6765 if ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0 else 0",
    "anonymous_file": "import os\ndef solve(n):\n    os.memfd_create('x')\n    return 6765",
    "shared_memory": "import ctypes\n"
    "def solve(n):\n"
    "    return 6765 if ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0 else 0",
    "raise_limits": "import resource\n"
    "def solve(n):\n"
    "    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
    "    return 6765",
    "open_descriptors": "import os\n"
    "def solve(n):\n"
    "    found = []\n"
    "    for fd in range(4, 1024):\n"
    "        try:\n"
    "            os.fstat(fd)\n"
    "            found.append(fd)\n"
    "        except OSError:\n"
    "            pass\n"
    "    return 6765 if found else 0",
    "standard_input": "import sys\ndef solve(n):\n    return 6765 if sys.stdin.read() else 0",
    "terminal": "import os\ndef solve(n):\n    os.open('/dev/tty', os.O_RDWR)\n    return 6765",
    "big_file": "def solve(n):\n"
    "    with open('/tmp/x', 'wb') as file:\n"
    "        for _ in range(40):\n"
    "            file.write(bytes(1 << 20))\n"
    "    return 6765",
    "many_files": "def solve(n):\n"
    "    for number in range(10000):\n"
    "        open(f'/tmp/{number}', 'w').close()\n"
    "    return 6765",
    "full_disk": "def solve(n):\n"
    "    for number in range(5):\n"
    "        with open(f'/tmp/{number}', 'wb') as file:\n"
    "            file.write(bytes(20 << 20))\n"
    "    return 6765",
    "dev_shm": "def solve(n):\n    open('/dev/shm/x', 'w')\n    return 6765",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_outside_can_be_reached(every_judge, name):
    verdict = every_judge.all(ESCAPES)[name]
    assert verdict.status in ("failed", "killed"), verdict


def test_a_worker_survives_all_escapes(every_judge):
    every_judge.all(ESCAPES)
    assert every_judge("def solve(n):\n    return 6765").passed


_AS_USER = """
import json, sys
from refusion_eval.evaluate.sandbox import Program
from refusion_eval.evaluate.sandbox.pool import check_all
candidates = json.load(sys.stdin)
programs = [Program(candidate=text, test="assert solve(20) == 6765", memory_mb=256) for text in candidates.values()]
verdicts = check_all(programs, {profile!r}, "", None, None)
print(json.dumps({{name: verdict.status for name, verdict in zip(candidates, verdicts)}}))
"""


@pytest.mark.parametrize("profile", ["user-namespaces", "landlock"])
def test_nothing_outside_can_be_reached_where_an_unprivileged_user_runs_the_check(profile):
    python = "/usr/bin/python3"
    if os.geteuid() != 0 or not Path(python).exists():
        pytest.skip(f"needs root to become another user, and {python}")
    done = subprocess.run(
        [python, "-B", "-c", _AS_USER.format(profile=profile)],
        user=54321,
        group=54321,
        extra_groups=[],
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "HOME": "/nonexistent"},
        input=json.dumps({**ESCAPES, "honest": "def solve(n):\n    return 6765"}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"{profile} is not to be had for an unprivileged user: {done.stderr.strip()[-200:]}")
    statuses = json.loads(done.stdout)
    assert statuses.pop("honest") == "passed"
    assert {name: status for name, status in statuses.items() if status not in ("failed", "killed")} == {}
