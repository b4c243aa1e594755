"""The model and the task functions that lm-eval calls; the only importer of lm_eval."""
