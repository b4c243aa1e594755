"""Calls in a process of their own. Imports the standard library only, so that such a process starts at once."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def in_process(call: Callable[[], Any], seconds: float) -> tuple[Any, str]:
    """The value of a call and "", or None and what ended it: an error, a crash, or that it took so many seconds.

    Whatever the call did to a GPU or kept of its memory ends with the process.
    """
    context = multiprocessing.get_context("spawn")  # CUDA cannot be used in a process that was forked
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, call), daemon=True)
    process.start()
    sender.close()  # so that the end of the process is the end of the pipe
    try:
        return receiver.recv() if receiver.poll(seconds) else (None, f"stopped after {seconds:.0f} s")
    except EOFError:
        process.join()
        return None, f"its process ended without a result, with status {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _send(sender: Connection, call: Callable[[], Any]) -> None:
    try:
        sender.send((call(), ""))
    except Exception as error:  # noqa: BLE001 - of any kind, and it is reported
        sender.send((None, f"{type(error).__name__}: {error}"))
