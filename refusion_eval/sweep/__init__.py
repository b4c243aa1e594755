"""Many settings of some systems on some tasks, each a run of its own, resumable as runs are."""
