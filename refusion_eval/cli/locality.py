from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from refusion_eval.cli import Data, console, numbers_of, options_from
from refusion_eval.runs.model_args import ModelArgs


@options_from(ModelArgs, "dtype device revision")
def locality(
    given: dict[str, Any],
    out: Annotated[Path, typer.Option(help="CSV with every ratio and distance.")],
    model: Annotated[
        str, typer.Option(help="Checkpoint folder, hub id, or embedded[:NAME], which is measured on the mini task.")
    ] = "embedded",
    reading: Annotated[
        Literal["auto", "bidirectional", "bidirectional_shifted", "refusion"],
        typer.Option(help="How predictions at masks are read. auto takes what the checkpoint's card says."),
    ] = "auto",
    data: Data = None,
    responses: Annotated[int, typer.Option(help="Number of gold responses, from the first of the benchmark.")] = 100,
    max_length: Annotated[
        int | None,
        typer.Option(help="Skip texts with more tokens, prompt included. The default is the model's length."),
    ] = None,
    ratios: Annotated[str, typer.Option(help="Shares of the response that are masked.")] = "0.2,0.4,0.6,0.8",
    reveals: Annotated[int, typer.Option(help="Tokens that are revealed in a masked response, one at a time.")] = 8,
    distances: Annotated[
        str, typer.Option(help="Distances of the printed table, on both sides. The CSV holds all up to 128.")
    ] = "1,2,4,8,16,32,64,128",
    seed: Annotated[int, typer.Option(help="Seed of masks and revealed positions.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Texts in one forward.")] = 16,
) -> None:
    """Measure how far a revealed token changes predictions. By distance, this is the paper's Figure 3."""
    from refusion_eval.paper.locality.study import LocalitySettings, locality_command

    settings = LocalitySettings(
        ratios=numbers_of(ratios, "--ratios", float),
        reveals=reveals,
        num_responses=responses,
        max_length=max_length,
        seed=seed,
        batch_size=batch_size,
    )
    locality_command(
        model,
        settings,
        out=out,
        reading=reading,
        data=data,
        distances=list(numbers_of(distances, "--distances", int)),
        console=console(),
        **given,
    )
