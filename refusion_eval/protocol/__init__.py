"""Protocols: files that say everything that decides the numbers of an evaluation, and the hash that stands for it."""
