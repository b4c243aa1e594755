"""Looking at runs: the page of `refusion-eval report` and the replay of one decoding. Reads records, never a model."""
