"""The study of locality, Figure 3 of the paper: what a revealed token changes, by distance."""
