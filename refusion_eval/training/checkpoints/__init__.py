"""Checkpoints of a training: the backbone to start from, saving, adapters and conversion."""
