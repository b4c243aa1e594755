def tasks_path() -> None:
    """Print the folder of the task files. lm_eval takes it as --include_path."""
    from refusion_eval.paths import tasks_path

    print(tasks_path())
