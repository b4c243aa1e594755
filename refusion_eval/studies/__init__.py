"""Studies: measurements of one question each."""
