"""Runs many settings of some systems on some tasks, each as a run of its own that can be resumed."""
