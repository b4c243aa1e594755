import refusion_eval


def version() -> None:
    """Print the version, as --version does."""
    print(refusion_eval.__version__)
