"""The filter as data: every call it names is one call, and the program says for each what the tables say."""

import errno
import os
import struct

import pytest

from refusion_eval.sandbox import seccomp
from tests.sandbox.refused import REFUSED

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _ENOTTY = (_ERRNO | number for number in (errno.EPERM, errno.ENOSYS, errno.ENOTTY))

pytestmark = pytest.mark.skipif(
    os.uname().machine not in seccomp.ARCHITECTURES, reason=f"no call numbers for {os.uname().machine}"
)


def _verdict(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Run the BPF program on one call."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = [struct.unpack_from("=HBBI", program, offset) for offset in range(0, len(program), 8)]
    register, position = 0, 0
    while True:
        operation, if_true, if_false, value = steps[position]
        position += 1
        if operation == 0x06:
            return value
        if operation == 0x20:
            register = struct.unpack_from("=I", data, value)[0]
        elif operation == 0x54:
            register &= value
        else:
            holds = {0x15: register == value, 0x35: register >= value, 0x45: bool(register & value)}[operation]
            position += if_true if holds else if_false


@pytest.fixture
def ask():
    column, architecture = seccomp.ARCHITECTURES[os.uname().machine]
    programs = {kind: seccomp.allow_program(with_landlock=kind) for kind in (False, True)}
    return column, lambda number, *arguments, with_landlock=False: _verdict(
        programs[with_landlock], architecture, number, *arguments
    )


@pytest.mark.parametrize("column", [0, 1])
def test_no_number_stands_for_two_calls(column):
    tables = [*seccomp.ALLOWED.values(), *seccomp.ALLOWED_WITHOUT_LANDLOCK.values(), *REFUSED.values()]
    tables += [restricted.numbers for restricted in seccomp.RESTRICTED.values()]
    numbers = [numbers[column] for numbers in tables if numbers[column] is not None]
    assert len(set(numbers)) == len(numbers)


def test_what_is_not_allowed_fails_and_recent_calls_as_if_the_kernel_had_none(ask):
    column, verdict = ask
    allowed = {numbers[column] for numbers in (seccomp.ALLOWED | seccomp.ALLOWED_WITHOUT_LANDLOCK).values()}
    restricted = {call.numbers[column] for call in seccomp.RESTRICTED.values()}
    for number in set(range(1000)) - restricted:
        unknown = _ENOSYS if number >= seccomp.FIRST_RECENT else _EPERM
        assert verdict(number) == (_ALLOW if number in allowed else unknown), number


def test_properties_of_files_are_refused_with_landlock_alone(ask):
    column, verdict = ask
    numbers = [both[column] for both in seccomp.ALLOWED_WITHOUT_LANDLOCK.values() if both[column] is not None]
    assert {verdict(number) for number in numbers} == {_ALLOW}
    assert {verdict(number, with_landlock=True) for number in numbers} == {_EPERM, _ENOSYS}


@pytest.mark.parametrize("with_landlock", [False, True])
def test_every_jump_stays_inside_the_program(with_landlock):
    program = seccomp.allow_program(with_landlock=with_landlock)
    steps = [struct.unpack_from("=HBBI", program, offset) for offset in range(0, len(program), 8)]
    jumps = [(at, step) for at, step in enumerate(steps) if step[0] in (0x15, 0x35)]
    assert all(at + 1 + max(if_true, if_false) < len(steps) for at, (_, if_true, if_false, _) in jumps)


def test_another_machines_calls_kill(ask):
    assert _verdict(seccomp.allow_program(with_landlock=False), 0x40000003, 1) == _KILL


@pytest.mark.parametrize(
    ("call", "arguments", "wanted"),
    [
        ("clone", (17,), _ALLOW),
        ("clone", (0x3D0F00,), _ALLOW),  # a thread
        ("clone", (0x3D0F00 & ~0x400,), _EPERM),  # a thread with open files of its own
        ("clone", (0x4111,), _ALLOW),  # as posix_spawn does
        ("clone", (0x10000000,), _EPERM),
        ("clone", (0x8000 | 17,), _EPERM),
        ("close_range", (4, 1 << 20, 0), _ALLOW),
        ("close_range", (4, 1 << 20, 2), _EPERM),  # the same
        ("rt_sigaction", (17,), _EPERM),
        ("rt_sigaction", (1,), _ALLOW),
        ("rt_sigaction", (14,), _ALLOW),
        ("rt_sigaction", (64,), _ALLOW),
        ("prlimit64", (0, 7), _ALLOW),
        ("prlimit64", (1234, 7), _EPERM),
        ("socketpair", (1, 1 | 0o2000000), _ALLOW),
        ("socketpair", (1, 2 | 0o2000000), _EPERM),
        ("socketpair", (1, 5), _EPERM),
        ("socketpair", (2, 1), _EPERM),
        ("mmap", (0, 4096, 3, 0x22), _ALLOW),
        ("mmap", (0, 4096, 3, 0x21), _EPERM),
        ("mmap", (0, 4096, 3, 0x01), _ALLOW),
        ("mmap", (0, 4096, 3, 0x23), _EPERM),
        ("mmap", (0, 4096, 3, 0x40022), _EPERM),
        ("madvise", (0, 4096, 4), _ALLOW),
        ("madvise", (0, 4096, 21), _EPERM),
        ("prctl", (1,), _EPERM),
        ("prctl", (15,), _ALLOW),
        ("fcntl", (0, 4, 0o4000), _ALLOW),  # F_SETFL
        ("fcntl", (0, 1030, 3), _ALLOW),  # F_DUPFD_CLOEXEC
        *[("fcntl", (0, command), _EPERM) for command in (5, 6, 7, 8, 10, 15, 36, 37, 38, 1024, 1026, 1031)],
        ("ioctl", (0, 0x5401), _ALLOW),
        ("ioctl", (0, 0x5452), _ENOTTY),  # FIOASYNC
    ],
)
def test_arguments_decide(ask, call, arguments, wanted):
    column, verdict = ask
    assert verdict(seccomp.RESTRICTED[call].numbers[column], *arguments) == wanted
