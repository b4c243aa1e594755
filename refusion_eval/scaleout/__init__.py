"""Several processes, several machines: one driver holds lm-eval and the run store, workers send it records."""
