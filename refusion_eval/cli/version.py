import refusion_eval


def version() -> None:
    """Print the version."""
    print(refusion_eval.__version__)
