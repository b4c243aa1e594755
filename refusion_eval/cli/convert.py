from pathlib import Path
from typing import Annotated, Literal

import typer


def convert(
    source: Annotated[str, typer.Argument(help="Checkpoint folder or hub id, in either layout.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; it must not exist yet.")],
    to: Annotated[
        Literal["release", "stock"],
        typer.Option(help="Layout of the published ReFusion, or the backbone's, for any transformers."),
    ],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of the weights. The default is SOURCE's."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="Rows of the vocabulary, with --to stock. The default is the backbone's number.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
) -> None:
    """Write a checkpoint in the layout of the release, or back. The weights stay the same."""
    from refusion_eval.training.checkpoints import convert as conversion

    conversion.convert(source, target, to, dtype=dtype, rows=rows, revision=revision)
    print(f"{target}: {source} in the layout {to}")
