"""Numbers of examples of the property tests."""

from typing import Any

from hypothesis import settings


def examples(count: int, **others: Any) -> settings:
    """Settings of a property test with this many examples, where hypothesis by itself would try 100.

    A quick run (see tests/conftest.py) tries a quarter of them.
    """
    return settings(max_examples=max(1, count * settings.default.max_examples // 100), **others)
