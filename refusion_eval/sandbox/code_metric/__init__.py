"""A metric for the `evaluate` library with the interface of its code_eval, over our sandbox."""
