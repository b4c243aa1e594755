"""What a reader of the paper sees, from published and measured figures: cells, claims, fair speed, comparisons."""
