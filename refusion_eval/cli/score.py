"""The command `score`."""

from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli.options import Data, Sandbox, Workers


def score(
    task: Annotated[str, typer.Option(help="Task whose rules judge the texts: gsm8k, mini_gsm8k, ...")],
    outputs: Annotated[str, typer.Option(help='JSON lines {"id": ..., "text": ...}, or gold for the gold answers.')],
    data: Data = None,
    split: Annotated[str | None, typer.Option(help="Another split of the rows than the evaluated one.")] = None,
    csv: Annotated[
        Path | None,
        typer.Option(help="CSV with one line a text. The default is OUTPUTS.scores.csv, of gold TASK.gold.csv here."),
    ] = None,
    filter_name: Annotated[str | None, typer.Option("--filter", help="Another rule that extracts the answer.")] = None,
    allow_partial: Annotated[bool, typer.Option(help="Leave rows without a text out of the score.")] = False,
    workers: Workers = None,
    sandbox: Sandbox = "auto",
) -> None:
    """Judge texts that were generated anywhere by the rules of a task."""
    from refusion_eval.scoring.texts import score_command

    score_command(
        task,
        outputs,
        data=data,
        split=split,
        csv_path=csv,
        filter_name=filter_name,
        allow_partial=allow_partial,
        workers=workers,
        sandbox=sandbox,
    )
