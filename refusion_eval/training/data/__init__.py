"""Training data: rows of files, their token ids, and the batches of a run."""
