"""Makes the mini tasks and the tiny models that are trained for them.

The tasks are seven synthetic look-alikes of the benchmarks and a task of independent parts. This folder is for those
who maintain the project and is not part of the installed package. Its commands are run in the root of a checkout:
`python -m miniature.data` and `python -m miniature.train`.
"""
