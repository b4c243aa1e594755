import json
from pathlib import Path
from typing import Annotated, Any

import typer

from refusion_eval.cli import options_from, prepare, say
from refusion_eval.runs.model_args import ModelArgs


@options_from(ModelArgs, "dtype device")
def bench(
    given: dict[str, Any],
    model: Annotated[
        str, typer.Option(help="Checkpoint folder, hub id, embedded, or a shape: 0.6B, 8B, 0.6B-inflated, 8B-inflated.")
    ] = "embedded",
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Interleaved rounds. The default is 3; 2 for a shape on a CPU.")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each round. The default is 14; 2 for a shape on a CPU.")
    ] = None,
    gen_length: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a response. The default is 128; 32 for a shape on a CPU.")
    ] = None,
    slot_size: Annotated[int, typer.Option(min=1, help="Slot size k of ReFusion.")] = 8,
    block_size: Annotated[int, typer.Option(min=1, help="Block size b of ReFusion.")] = 32,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. The default is torch's choice.")] = None,
    baseline: Annotated[
        bool | None,
        typer.Option(
            "--baseline/--no-baseline",
            help="Also run the plain baseline on stock transformers. The default is yes; no for a shape on a CPU.",
        ),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also print how the time of a decoding is spent.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write all figures to this JSON file.")] = None,
) -> None:
    """Measure decoding speed. It is compared with a plain baseline and with the memory limit, by width and batch."""
    from refusion_eval.bench.bench import run_bench
    from refusion_eval.store.atomic_write import write_output

    prepare(out)
    extent = {"num_prompts": prompts, "num_rounds": rounds, "gen_length": gen_length, "with_baseline": baseline}
    report, text = run_bench(
        model,
        extent={name: value for name, value in extent.items() if value is not None},
        settings={"slot_size": slot_size, "block_size": block_size},
        threads=threads,
        with_profile=profile,
        progress=say,
        **given,
    )
    print(text)
    if out is not None:
        write_output(out, json.dumps(report.to_json(), indent=2) + "\n")
