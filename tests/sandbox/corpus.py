"""The attacks (and honest programs) as data: one text file per category, and the sources no text file can hold.

A file is a list of programs, each under a line `=== name [option=value ...]`; a line `--- test` or `--- helpers` begins
its test or helpers where it has its own. Without one, a program is called as solve(20) == 6765: an attack answers 6765
only if it reached what it was after. `$NAME` stands for a place of the scene (`scene.Scene.places`).
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.sandbox.strange import STRANGE

FOLDER = Path(__file__).parent / "attacks"
_HONEST = "honest"
_TEST = "assert solve(20) == 6765"
# A program that finds every descriptor and writes to it in the form that the judge reads.
_WRITE_EVERYWHERE = """
import json, os, struct
def frame(message):
    data = json.dumps(message).encode()
    return struct.pack(">I", len(data)) + data
def write_everywhere(data):
    for fd in range(64):
        try:
            os.write(fd, data)
        except OSError:
            pass
"""
# A program that speaks for its process from the first request on; FUNCTION is what it defines under the number 2.
_TAKEOVER = """
import json, os, struct, sys
def send(message):
    data = json.dumps(message).encode()
    os.write(3, struct.pack(">I", len(data)) + data)
def answer(nonce, value, entries=(), names=()):
    send([nonce, "ok", [["t", *names], value], list(entries), ""])
def receive():
    size = struct.unpack(">I", os.read(3, 4))[0]
    data = b""
    while len(data) < size:
        data += os.read(3, size - len(data))
    return json.loads(data)
FUNCTION = [[1, "k", "function", True, [], ["__call__"], []], [2, "h", ["@", 1]]]
SOLVE = [["t", "solve", ["@", 2]]]
found = sys._getframe()
while "nonce" not in found.f_locals:
    found = found.f_back
nonce = found.f_locals["nonce"]
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One program and what may become of it.

    Attributes:
        source: the program.
        test: what it is judged by.
        helpers: trusted text that the test needs.
        statuses: acceptable verdicts.
        timeout_s: limit.
        memory_mb: limit.
        tiers: tiers in which it is tried.
    """

    source: str
    test: str = _TEST
    helpers: str = ""
    statuses: frozenset[str] = frozenset({"failed", "killed"})
    timeout_s: float = 10.0
    memory_mb: int = 256
    tiers: str = "ABC"

    def placed(self, places: dict[str, object]) -> str:
        """The program with the places of a scene filled in."""
        source = self.source.replace("$WRITE_EVERYWHERE", _WRITE_EVERYWHERE).replace("$TAKEOVER", _TAKEOVER)
        return re.sub(r"\$([A-Z_]+)", lambda found: repr(places[found[1]]), source)


def cases() -> dict[str, Case]:
    """All programs by `category/name`."""
    found = {f"strange/{name}": Case(source=source, **options) for name, (source, options) in STRANGE.items()}
    for path in sorted(FOLDER.glob("*.txt")):
        for block in re.split(r"^=== ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            head, _, body = block.partition("\n")
            name, *options = head.split()
            key = f"{path.stem}/{name}"
            assert key not in found, f"two programs are called {key}"
            found[key] = _case(body, dict(option.split("=") for option in options), honest=path.stem == _HONEST)
    return found


def _case(body: str, options: dict[str, str], honest: bool) -> Case:
    source, *parts = re.split(r"^--- ", body, flags=re.MULTILINE)
    texts = {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}
    assert set(texts) <= {"test", "helpers"}, f"unknown parts {set(texts)}"
    assert set(options) <= {"statuses", "timeout_s", "memory_mb", "tiers"}, f"unknown options {set(options)}"
    statuses = options.get("statuses", "passed" if honest else "failed,killed")
    return Case(
        source=source,
        test=texts.get("test", _TEST),
        helpers=texts.get("helpers", ""),
        statuses=frozenset(statuses.split(",")),
        timeout_s=float(options.get("timeout_s", 10)),
        memory_mb=int(options.get("memory_mb", 256)),
        tiers=options.get("tiers", "ABC"),
    )
