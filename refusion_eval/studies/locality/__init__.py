"""The locality study of the paper's Figure 3."""
