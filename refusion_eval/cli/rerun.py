from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli import EXIT_INCOMPLETE, Data, Sandbox, log_to_stderr, tell


def rerun(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a recorded run.")],
    out: Annotated[Path | None, typer.Option(help="Directory of the second run. The default is RUN-again.")] = None,
    data: Data = None,
    sandbox: Sandbox = "auto",
) -> None:
    """Repeat a recorded run and compare every sample. Compared are tokens, texts and verdicts."""
    log_to_stderr()
    from refusion_eval.evaluation.rerun import rerun as repeat
    from refusion_eval.runs.terminal import Interruption, resume_hint

    second = out or run_dir.with_name(f"{run_dir.name}-again")
    with Interruption(lambda: resume_hint(second), finish_first=False):
        result = repeat(run_dir, second, data=data, sandbox=sandbox)
    tell(result.in_words())
    if not result.is_same:
        raise typer.Exit(EXIT_INCOMPLETE)
