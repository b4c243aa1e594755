"""Commands about machines and models: doctor, the benchmarks, soak, locality, version."""

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
def bench_train(
    shape: Annotated[str, typer.Option(help="small, 0.6B or 8B: random weights of this shape.")] = "small",
    samples: Annotated[int, typer.Option(min=1, help="Synthetic samples a round.")] = 32,
    batch_sizes: Annotated[
        str, typer.Option("--batch-size", help="Samples a step, one or several numbers with commas; the release has 4.")
    ] = "4,8,16",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 3,
    mean_length: Annotated[int, typer.Option(help="Mean tokens of a sample, lognormal.")] = 330,
    max_length: Annotated[int, typer.Option(help="Most tokens of a sample.")] = 4096,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's choice if not given.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    seed: Annotated[int, typer.Option(help="Of lengths, tokens, weights and draws.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write everything as JSON.")] = None,
) -> None:
    """Measure training steps against a plain loop with padding and all logits: tokens per second, peak memory."""
    import json

    from refusion_eval.bench.train import measure_training, summary, table
    from refusion_eval.bench.train_contestant import TrainBenchSettings
    from refusion_eval.store.atomic_write import prepare_output, write_output
    from refusion_eval.studies.locality.measure import parse_numbers

    settings = [
        TrainBenchSettings(
            shape=shape,
            num_samples=samples,
            batch_size=batch_size,
            num_rounds=rounds,
            mean_length=mean_length,
            max_length=max_length,
            device=device,
            dtype=dtype,
            threads=threads,
            seed=seed,
        )
        for batch_size in parse_numbers(batch_sizes, "--batch-size", int)
    ]
    if out is not None:
        prepare_output(out)
    reports = [measure_training(some, lambda text: print(text, file=sys.stderr)) for some in settings]
    print("\n\n".join([summary(reports), *map(table, reports)]))
    if out is not None:
        write_output(out, json.dumps([report.to_json() for report in reports], indent=2) + "\n")


@app.command()
def soak(
    model: Annotated[str, typer.Option(help="Checkpoint folder, hub id, or embedded.")] = "embedded",
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 10_000,
    max_batch: Annotated[int, typer.Option(min=1, help="Most requests decoded together.")] = 16,
    max_prompt: Annotated[int, typer.Option(min=1, help="Most tokens of a prompt.")] = 256,
    max_gen: Annotated[int, typer.Option(min=1, help="Most tokens of a response.")] = 128,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and settings.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Also write everything as JSON.")] = None,
) -> None:
    """Decode thousands of random requests in one process: does memory grow, does any result drift?"""
    import json

    from refusion_eval.bench.soak import Moment, SoakSettings
    from refusion_eval.bench.soak import soak as run_soak
    from refusion_eval.loading import LoadedModel
    from refusion_eval.runs.model_args import parse_model_args
    from refusion_eval.store.atomic_write import prepare_output, write_output

    settings = SoakSettings(
        num_requests=requests, max_batch=max_batch, max_prompt=max_prompt, max_gen=max_gen, seed=seed
    )
    if out is not None:
        prepare_output(out)

    def tell(moment: Moment) -> None:
        memory = moment.host_bytes / 2**20
        print(f"{moment.requests}/{requests} requests, {moment.seconds:.0f} s, {memory:.0f} MiB", file=sys.stderr)

    checkpoint = parse_model_args({"pretrained": model}).checkpoint
    report = run_soak(LoadedModel.open(checkpoint, dtype=dtype, device=device), settings, tell)
    print(report.in_words())
    if out is not None:
        write_output(out, json.dumps(report.to_json(), indent=2) + "\n")
    if report.failed or report.drifted or report.leaks:
        raise typer.Exit(1)


@app.command()
def bench_scaleout(
    model: Annotated[str, typer.Option(help="Checkpoint folder, hub id, or embedded.")] = "embedded",
    decoder: Annotated[str, typer.Option(help="Name of the decoder.")] = "refusion",
    processes: Annotated[int, typer.Option(help="Processes of the run, on this machine.")] = 2,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts a round, of the mini tasks in turn.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="How often one process and all are timed.")] = 3,
    gen_length: Annotated[int, typer.Option(min=1, help="Most tokens of a response.")] = 128,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each process.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that each process decodes together.")] = 1,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Processes that torchrun starts, or workers on a Ray cluster.")
    ] = "local",
    out: Annotated[Path | None, typer.Option(help="Also write everything as JSON.")] = None,
) -> None:
    """Measure how much faster several processes of one run decode the same requests than one of them."""
    import json

    from refusion_eval.bench.scaleout import ScaleOutSettings, measure_scaleout
    from refusion_eval.store.atomic_write import prepare_output, write_output

    settings = ScaleOutSettings(
        model=model,
        decoder=decoder,
        num_processes=processes,
        num_prompts=prompts,
        num_rounds=rounds,
        gen_length=gen_length,
        threads=threads,
        batch_size=batch_size,
        engine=engine,
    )
    if out is not None:
        prepare_output(out)
    report = measure_scaleout(settings)
    print(report.text())
    if out is not None:
        write_output(out, json.dumps(report.to_json(), indent=2) + "\n")


@app.command()
def bench_sandbox(
    benchmark: Annotated[
        Literal["humaneval", "mbpp"], typer.Option(help="Whose references are checked.")
    ] = "humaneval",
    mini: Annotated[bool, typer.Option("--mini", help="Those of its synthetic look-alike.")] = False,
    data: Data = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way is timed.")] = 3,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Programs at a time; by default what an evaluation takes.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write everything as JSON.")] = None,
) -> None:
    """Measure how many programs a second the sandbox checks."""
    import json

    from refusion_eval.bench.sandbox import measure_sandbox
    from refusion_eval.benchmarks.rows import load_rows
    from refusion_eval.store.atomic_write import prepare_output, write_output

    rows = load_rows(benchmark, mini=mini, data_dir=data)
    if out is not None:
        prepare_output(out)
    report = measure_sandbox(
        benchmark,
        rows,
        mini=mini,
        num_rounds=rounds,
        workers=workers,
        progress=lambda text: print(text, file=sys.stderr),
    )
    print(report.text())
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
