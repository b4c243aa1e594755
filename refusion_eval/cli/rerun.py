"""The command `rerun`."""

from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli.options import Data, Sandbox
from refusion_eval.cli.terminal import EXIT_INCOMPLETE, log_to_stderr


def rerun(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a recorded run.")],
    out: Annotated[Path | None, typer.Option(help="Directory of the second run. The default is RUN-again.")] = None,
    data: Data = None,
    sandbox: Sandbox = "auto",
) -> None:
    """Repeat a recorded run from its record and compare every sample: tokens, text, verdict."""
    log_to_stderr()
    from refusion_eval.evaluate.rerun import in_words
    from refusion_eval.evaluate.rerun import rerun as repeat
    from refusion_eval.runs.interrupt import Interruption, resume_hint

    second = out or run_dir.with_name(f"{run_dir.name}-again")
    with Interruption(lambda: resume_hint(second), finish_first=False):
        result = repeat(run_dir, second, data=data, sandbox=sandbox)
    print(in_words(result))
    if not result.is_same:
        raise typer.Exit(EXIT_INCOMPLETE)
