"""Benchmark harness for ReFusion and the systems it competes with."""

__version__ = "0.1.0"
