"""The command that writes a checkpoint in another layout: convert."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from refusion_eval.cli.root import app


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Checkpoint folder or hub id, in either layout.")],
    target: Annotated[Path, typer.Argument(help="Folder to be made.")],
    to: Annotated[
        Literal["release", "stock"],
        typer.Option(help="The published ReFusion's layout, or the backbone's, which any transformers opens."),
    ],
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: float32, bfloat16 or float16; unchanged if not given.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="With --to stock: rows of the vocabulary; the backbone's if not given.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
) -> None:
    """Write a checkpoint in the layout of the public release, or back: the same weights, other files around them."""
    from refusion_eval.training import convert as conversion

    conversion.convert(source, target, to, dtype=dtype, rows=rows, revision=revision)
    print(f"{target}: {source} in the layout {to}")
