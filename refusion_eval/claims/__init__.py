"""Judges the statements of the paper by its own tables and by measured figures."""
