"""The filter as data: every call it names is one call, and the program says for each what the tables say."""

import errno
import os
import struct

import pytest

from refusion_eval.sandbox import seccomp

_ALLOW, _KILL, _EPERM = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM

pytestmark = pytest.mark.skipif(not seccomp.supported(), reason=f"no call numbers for {os.uname().machine}")


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
    programs = {kind: seccomp.deny_program(with_landlock=kind) for kind in (False, True)}
    return column, lambda number, *arguments, with_landlock=False: _verdict(
        programs[with_landlock], architecture, number, *arguments
    )


@pytest.mark.parametrize("column", [0, 1])
def test_no_number_stands_for_two_calls(column):
    tables = [*seccomp.DENIED.values(), *seccomp.DENIED_WITH_LANDLOCK.values()]
    numbers = [numbers[column] for numbers in tables if numbers[column] is not None]
    assert len(set(numbers)) == len(numbers)
    assert not {refused.numbers[column] for refused in seccomp.REFUSED_ARGUMENTS} & set(numbers)


def test_every_named_call_is_refused(ask):
    column, verdict = ask
    assert all(verdict(numbers[column]) == _EPERM for numbers in seccomp.DENIED.values() if numbers[column] is not None)


def test_properties_of_files_are_refused_with_landlock_alone(ask):
    column, verdict = ask
    numbers = [both[column] for both in seccomp.DENIED_WITH_LANDLOCK.values() if both[column] is not None]
    assert {verdict(number) for number in numbers} == {_ALLOW}
    assert {verdict(number, with_landlock=True) for number in numbers} == {_EPERM}


def test_another_machines_calls_kill(ask):
    assert _verdict(seccomp.deny_program(with_landlock=False), 0x40000003, 1) == _KILL


@pytest.mark.parametrize(
    ("call", "arguments", "refused"),
    [
        ((56, 220), (17,), False),
        ((56, 220), (0x3D0F00,), False),  # a thread
        ((56, 220), (0x10000000,), True),
        ((56, 220), (0x8000 | 17,), True),
        ((13, 134), (17,), True),
        ((13, 134), (14,), False),
        ((302, 261), (0, 7), False),
        ((302, 261), (1234, 7), True),
        ((53, 199), (1, 1 | 0o2000000), False),
        ((53, 199), (1, 2 | 0o2000000), True),
        ((53, 199), (1, 5), True),
        ((9, 222), (0, 4096, 3, 0x22), False),
        ((9, 222), (0, 4096, 3, 0x21), True),
        ((9, 222), (0, 4096, 3, 0x01), False),
        ((9, 222), (0, 4096, 3, 0x23), True),
        ((9, 222), (0, 4096, 3, 0x40022), True),
        ((157, 167), (1,), True),
        ((157, 167), (15,), False),
    ],
)
def test_arguments_decide(ask, call, arguments, refused):
    column, verdict = ask
    assert verdict(call[column], *arguments) == (_EPERM if refused else _ALLOW)
