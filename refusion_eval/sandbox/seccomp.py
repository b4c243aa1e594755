"""A filter of system calls (`calls`), as a classic BPF program built with `struct`."""

import errno
import os
import struct

from refusion_eval.sandbox import calls

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_OFFSET_NUMBER, _OFFSET_ARCHITECTURE, _OFFSET_ARGUMENTS, _ARGUMENT_BYTES = 0, 4, 16, 8

Step = tuple[int, int, int, int]  # operation, steps to skip if true, if false, operand


def supported() -> bool:
    """Whether the numbers of this machine's system calls are known here."""
    return os.uname().machine in calls.ARCHITECTURES


def deny_program(with_landlock: bool) -> bytes:
    """BPF program for this machine: foreign call tables kill, denied calls fail with EPERM, the rest is allowed.

    Args:
        with_landlock: also deny the calls that Landlock leaves open (`calls.DENIED_WITH_LANDLOCK`).
    """
    column, architecture = calls.ARCHITECTURES[os.uname().machine]
    steps: list[Step] = [
        (_LOAD, 0, 0, _OFFSET_ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    if column == 0:
        steps += [(_JUMP_AT_LEAST, 0, 1, calls.X32_BIT), (_RETURN, 0, 0, _KILL)]
    denied = calls.DENIED | (calls.DENIED_WITH_LANDLOCK if with_landlock else {})
    for numbers in denied.values():
        number = numbers[column]
        if number is not None:
            steps += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    steps += [(_JUMP_EQUAL, 0, 1, calls.CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for refused in calls.REFUSED_ARGUMENTS:
        steps += _refuse_argument(refused, column)
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _refuse_argument(refused: calls.Refused, column: int) -> list[Step]:
    """Refuse a call by one argument; ends with the call's number loaded again."""
    tests: dict[str, list[Step]] = {
        calls.ANY_BIT: [(_JUMP_ANY_BIT, 0, 1, refused.value)],
        calls.EQUAL: [(_JUMP_EQUAL, 0, 1, refused.value)],
        calls.UNEQUAL: [(_JUMP_EQUAL, 1, 0, refused.value)],
        calls.ALL_BITS: [(_AND, 0, 0, refused.value), (_JUMP_EQUAL, 0, 1, refused.value)],
    }
    body = [
        (_LOAD, 0, 0, _OFFSET_ARGUMENTS + _ARGUMENT_BYTES * refused.argument),
        *tests[refused.test],
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    return [(_JUMP_EQUAL, 0, len(body), refused.numbers[column]), *body]
