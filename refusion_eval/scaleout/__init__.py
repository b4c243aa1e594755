"""Runs in several processes or on several machines: one driver keeps the run store, and workers send it records."""
