"""The candidate's side: loads the program, then answers the judge's requests with data, one at a time.

Everything here shares its process with untrusted code, which may take the process over. It can then lie about its own
values and do nothing else, because the judge reads data only.
"""

import operator
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

from refusion_eval.sandbox import wire

MODULE_NAME = "candidate"  # not "__main__": blocks that read input() must not run
RECURSION_LIMIT = 2000  # room for a program that recurses 1000 deep below our own frames
_MAX_MESSAGE_CHARS = 300


class Guest:
    """Objects of the candidate that the judge, at the other end of `sock`, knows by number, and operations on them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._objects: list[Any] = []
        self._number_of: dict[int, int] = {}
        self._module = types.ModuleType(MODULE_NAME)
        self._operations: dict[str, Callable[..., Any]] = {
            "load": self._load,
            "call": self._call,
            "getattr": getattr,
            "setattr": setattr,
            "delattr": delattr,
            "getitem": operator.getitem,
            "setitem": operator.setitem,
            "len": len,
            "iter": iter,
            "next": next,
            "str": str,
            "repr": repr,
            "bool": bool,
            "hash": hash,
            "eq": operator.eq,
            "lt": operator.lt,
            "isinstance": isinstance,
        }

    def serve(self) -> None:
        """Answer requests until the judge closes the connection."""
        wire.send(self._sock, ["ready"])
        while True:
            try:
                nonce, name, packed = wire.receive(self._sock)
            except wire.PeerGone:
                return
            try:
                wire.send(self._sock, self._answer(nonce, name, packed))
            except wire.FrameTooLarge as error:
                wire.send(self._sock, [nonce, "oversized", "", "", str(error)])

    def _answer(self, nonce: str, name: str, packed: list[Any]) -> list[Any]:
        try:
            operands = [wire.unpack(item, self._objects.__getitem__) for item in packed]
            result = self._operations[name](*operands)
            answer = self._pack_result(name, operands, result)
            changes = [
                [index, after]
                for index, (before, operand) in enumerate(zip(packed, operands, strict=True))
                if name == "call" and (after := wire.pack(operand, self._handle_of)) != before
            ]
            return [nonce, "ok", answer, changes]
        except Exception as error:  # noqa: BLE001 - a failure of the candidate becomes a record
            return [nonce, "raised", *_describe(error)]
        except BaseException as error:  # noqa: BLE001 - sys.exit() and the like
            return [nonce, "exited", *_describe(error)]

    def _pack_result(self, name: str, operands: list[Any], result: Any) -> Any:
        """Pack a result; what calling a class of the candidate made stays an object, even if it is a tuple."""
        if name == "call" and isinstance(operands[0], type) and operands[0].__module__ != "builtins":
            return ["h", self._handle_of(result)]
        return wire.pack(result, self._handle_of)

    def _handle_of(self, value: Any) -> int:
        number = self._number_of.get(id(value))
        if number is None:
            number = self._number_of[id(value)] = len(self._objects)
            self._objects.append(value)  # keeps it alive, so its id() stays its own
        return number

    def _load(self, source: str, names: list[str]) -> list[tuple[str, Any]]:
        """Run the program; returns pairs of name and object for those of the names that it defines."""
        try:
            code = compile(source, f"{MODULE_NAME}.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise SyntaxError(str(error)) from None
        sys.modules[MODULE_NAME] = self._module
        sys.setrecursionlimit(RECURSION_LIMIT)
        exec(code, self._module.__dict__)  # the purpose of this process
        known = self._module.__dict__
        return [(name, known[name]) for name in names if name in known]

    @staticmethod
    def _call(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)


def _describe(error: BaseException) -> list[str]:
    """Class name, nearest builtin class name and message of an exception."""
    builtin = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
    try:
        text = str(error)[:_MAX_MESSAGE_CHARS]
    except Exception:  # noqa: BLE001 - a hostile __str__
        text = ""
    return [str(type(error).__name__), builtin.__name__, text]
