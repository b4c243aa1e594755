"""Run directories as the tests of results write them."""

from tests.results.conftest import write_run

__all__ = ["write_run"]
