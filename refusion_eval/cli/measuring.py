"""Commands about machines and models: doctor, bench, locality, version."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

import refusion_eval
from refusion_eval.cli.root import Data, app, console


@app.command()
def doctor(data: Data = None) -> None:
    """Say what this machine can do: versions, device, attention, sandbox, tasks, data, the lm_eval hook."""
    from refusion_eval.doctor import report

    for line in report(data):
        print(line)


@app.command()
def bench(
    model: Annotated[
        str, typer.Option(help="Checkpoint folder, hub id, embedded, or a shape: 0.6B, 8B, 0.6B-inflated, 8B-inflated.")
    ] = "embedded",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds of the contest.")] = 3,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts a round.")] = 14,
    gen_length: Annotated[int, typer.Option(min=1, help="Most tokens of a response.")] = 128,
    slot_size: Annotated[int, typer.Option(min=1, help="k.")] = 8,
    block_size: Annotated[int, typer.Option(min=1, help="b.")] = 32,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's choice if not given.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    baseline: Annotated[bool, typer.Option(help="Also run the plain baseline on stock transformers.")] = True,
    profile: Annotated[bool, typer.Option("--profile", help="Also print where the time of a decode goes.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write everything as JSON.")] = None,
) -> None:
    """Measure decoding speed: against a plain baseline, by width and batch, and against the memory's limit."""
    import json

    from refusion_eval.bench.command import run_bench
    from refusion_eval.store.atomic_write import prepare_output, write_output

    if out is not None:
        prepare_output(out)
    report, text = run_bench(
        model,
        num_prompts=prompts,
        num_rounds=rounds,
        settings={"gen_length": gen_length, "slot_size": slot_size, "block_size": block_size},
        threads=threads,
        dtype=dtype,
        device=device,
        with_baseline=baseline,
        with_profile=profile,
        progress=lambda text: print(text, file=sys.stderr),
    )
    print(text)
    if out is not None:
        write_output(out, json.dumps(report.to_json(), indent=2) + "\n")


@app.command()
def locality(
    out: Annotated[Path, typer.Option(help="CSV with every ratio and distance.")],
    model: Annotated[str, typer.Option(help="Checkpoint folder, hub id, or embedded (mini task).")] = "embedded",
    reading: Annotated[
        Literal["auto", "bidirectional", "bidirectional_shifted", "refusion"],
        typer.Option(help="How masks are read; auto asks the checkpoint's card."),
    ] = "auto",
    data: Data = None,
    responses: Annotated[int, typer.Option(help="Gold responses, the first of the benchmark.")] = 100,
    max_length: Annotated[
        int | None, typer.Option(help="Pass over longer texts, prompt and response in tokens; what the model reads.")
    ] = None,
    ratios: Annotated[str, typer.Option(help="Shares of the response that are masked.")] = "0.2,0.4,0.6,0.8",
    reveals: Annotated[int, typer.Option(help="Tokens revealed in a masked response, one at a time.")] = 8,
    distances: Annotated[
        str, typer.Option(help="Distances of the printed table, either side; the CSV has all to 128.")
    ] = "1,2,4,8,16,32,64,128",
    seed: Annotated[int, typer.Option(help="Of masks and reveals.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Texts in one forward.")] = 16,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
) -> None:
    """Measure how far one revealed token moves the predictions at masks, by distance (the paper's Figure 3)."""
    from refusion_eval.benchmarks.mini.generate import held_out_pairs
    from refusion_eval.studies.locality.measure import LocalitySettings, parse_numbers
    from refusion_eval.studies.locality.report import locality_command

    settings = LocalitySettings(
        ratios=parse_numbers(ratios, "--ratios", float),
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
        mini_pairs=lambda: held_out_pairs("gsm8k"),
        reading=reading,
        data=data,
        distances=[int(distance) for distance in parse_numbers(distances, "--distances", int)],
        dtype=dtype,
        device=device,
        revision=revision,
        console=console(),
    )


@app.command()
def version() -> None:
    """Print the version."""
    print(refusion_eval.__version__)
