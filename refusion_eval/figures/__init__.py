"""The tables and figures of the paper, drawn from published and measured results."""
