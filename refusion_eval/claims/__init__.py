"""The statements of the paper, judged by measured results."""
