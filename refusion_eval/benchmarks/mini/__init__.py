"""Generators of the seven synthetic look-alike tasks ("mini"): test files and training items."""
