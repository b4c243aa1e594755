import json
from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli import prepare


def export(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories, finished or not.")],
    out: Annotated[
        Path | None, typer.Option(help="File of JSON lines. Without it, they go to standard output.")
    ] = None,
) -> None:
    """Write every sample as a line of JSON. The keys are the columns of `refusion_eval.results.load`."""
    from refusion_eval.results.data_frames import sample_rows
    from refusion_eval.store.atomic_write import write_output

    prepare(out)
    # A data frame groups by settings and so has them as text; in JSON they are an object like the scores.
    lines = (json.dumps(row | {"settings": json.loads(row["settings"])}) for row in sample_rows(run_dirs))
    if out is None:
        for line in lines:
            print(line)
        return
    written = [f"{line}\n" for line in lines]
    write_output(out, "".join(written))
    print(f"{out} ({len(written)} samples)")
