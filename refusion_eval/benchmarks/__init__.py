"""The benchmarks: what is asked of a model, and which answer is right."""
