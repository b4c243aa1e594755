"""A child process that compares mathematical expressions; run as a script by `math_judge`, one pair a line.

Reads JSON lines `[gold, answer, whole]` and writes JSON lines `true` or `false`. It may hang or use up its memory on a
hostile expression: the parent kills it. It imports nothing of this project, so that it starts quickly.
"""

import json
import logging
import resource
import sys
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

_MEMORY_BYTES = 4 << 30


@lru_cache(maxsize=4096)
def parsed(answer: str) -> tuple[Any, ...]:
    """Expressions read from one boxed answer, without a timeout of the library's own (it needs SIGALRM)."""
    return tuple(parse(f"\\boxed{{{answer}}}", parsing_timeout=None))


def equal_in_texts(solution: str, text: str) -> bool:
    """Whether the answers that the library finds in a solution and in a text are equal, as `minerva_math` asks it."""
    gold, target = (list(parse(whole, parsing_timeout=None)) for whole in (solution, text))
    return bool(verify(gold, target, timeout_seconds=None))


def equal(gold: str, answer: str) -> bool:
    """Whether the library calls the two equal.

    Its comparison is not symmetrical: it reads `x = 5` as 5 in an answer, and an inequality as an interval in a right
    answer. Both directions count, but an answer that is no equation never equals a right answer that is one.
    """
    left, right = list(parsed(gold)), list(parsed(answer))
    if verify(left, right, timeout_seconds=None):
        return True
    return bool(("=" in answer or "=" not in gold) and verify(right, left, timeout_seconds=None))


def main() -> None:
    """Answers until standard input ends."""
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    for line in sys.stdin:
        gold, answer, whole = json.loads(line)
        sys.stdout.write(json.dumps((equal_in_texts if whole else equal)(gold, answer)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
