"""The version, in a module of its own, so that records name it without importing the package's interface."""

__version__ = "1.0.0"
