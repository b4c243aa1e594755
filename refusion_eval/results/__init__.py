"""From records to figures: metrics of runs, tables, comparisons, speed."""
