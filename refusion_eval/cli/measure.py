import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from refusion_eval import cli
from refusion_eval.cli import parameters
from refusion_eval.errors import ConfigError
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.systems import choose_systems
from refusion_eval.store.atomic_write import write_output


@parameters.options_from(ModelArgs, "dtype device")
def bench(
    given: dict[str, Any],
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint folder, hub id, embedded (the default without --system), or a shape: 0.6B, 8B, "
            "0.6B-inflated, 8B-inflated."
        ),
    ] = None,
    predict: Annotated[
        Literal["A100", "H100", "H200"] | None,
        typer.Option(help="Measure nothing, and print an estimate of a forward of --model (8B) on this GPU."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Interleaved rounds. The default is 3; 2 for a shape on a CPU.")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each round. The default is 14; 2 for a shape on a CPU.")
    ] = None,
    gen_length: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a response. The default is 128; 32 for a shape on a CPU.")
    ] = None,
    slot_size: Annotated[
        int | None, typer.Option(min=1, help="Slot size k of ReFusion. The default is 8; its own for --system.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Block size b of ReFusion. The default is 32; its own for --system.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. The default is torch's choice.")] = None,
    baseline: Annotated[
        bool | None,
        typer.Option(
            "--baseline/--no-baseline",
            help="Also run the plain baseline on stock transformers. The default is yes; no for a shape on a CPU.",
        ),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also print how the time of a decoding is spent.")] = False,
    prompt_lengths: Annotated[
        str,
        typer.Option(help="Measure whole systems on prompts of so many tokens, such as 128,1k,4k, and nothing else."),
    ] = "",
    suite: Annotated[
        Literal["speed"] | None,
        typer.Option(help="Measure whole systems on SPEED-Bench, by category, and nothing else; --data has its rows."),
    ] = None,
    split: Annotated[
        str, typer.Option(help="Of SPEED-Bench: qualitative (the default), or throughput_1k to _32k.")
    ] = "",
    system: Annotated[
        str, typer.Option(help="Systems for --prompt-lengths and --suite. The default is the decoders of --model.")
    ] = "",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="For these two: no token ends an answer, so all are --gen-length long.")
    ] = False,
    data: parameters.Data = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write all figures to this JSON file; single answers, to continue, to FILE.answers."),
    ] = None,
    as_json: parameters.Json = False,
) -> None:
    """Measure decoding speed. It is compared with a plain baseline and with the memory limit, by width and batch."""
    from refusion_eval.bench.bench import run_bench
    from refusion_eval.bench.checkpoints import SHAPES, config_of

    if predict is not None:
        from refusion_eval.api import LoadedModel
        from refusion_eval.bench.gpu_report import measured_curves
        from refusion_eval.bench.predict import prediction

        cli.refuse_unused("measurements, and --predict makes none", out=out, json=as_json, data=data, system=system)
        name = "8B" if model is None or model == "embedded" else model
        if name in SHAPES:
            config = config_of(SHAPES[name])
        elif (opened := LoadedModel.open(name, device="cpu")).is_stock:
            raise ConfigError(f"--predict is for forwards of this project, and transformers computes {name}")
        else:
            config = opened.config
        print(prediction(predict, config, name, measured_curves(Path("results"), predict, name)))
        return
    cli.prepare(out)
    sizes = {"slot_size": slot_size, "block_size": block_size, "gen_length": gen_length}
    given_sizes = {name: size for name, size in sizes.items() if size is not None}
    if prompt_lengths and suite:
        raise ConfigError("--prompt-lengths and --suite are two measurements; give one of them")
    if prompt_lengths or suite:
        cli.refuse_unused("measurements of forwards", profile=profile, baseline=None if baseline is None else "given")
        cli.refuse_unused("--suite", split=split if prompt_lengths else None)
        from refusion_eval.bench.prompts import SPLITS, long_prompts, parse_lengths, speed_bench
        from refusion_eval.bench.workload import run_workload

        lengths = parse_lengths(prompt_lengths) if prompt_lengths else []
        value, text = run_workload(
            long_prompts(lengths, prompts or 3, data) if lengths else speed_bench(split or SPLITS[0], data, prompts),
            model,
            parameters.names_of(system),
            settings=given_sizes,
            arguments=given,
            threads=threads,
            num_rounds=rounds or 3,
            ignore_eos=ignore_eos,
            path=None if out is None else out.with_name(f"{out.name}.answers"),
            progress=cli.say,
        )
    else:
        cli.refuse_unused("--prompt-lengths and --suite", system=system, data=data, split=split, ignore_eos=ignore_eos)
        extent = {"num_prompts": prompts, "num_rounds": rounds, "gen_length": gen_length, "with_baseline": baseline}
        report, text = run_bench(
            model or "embedded",
            extent={name: value for name, value in extent.items() if value is not None},
            settings={"slot_size": slot_size or 8, "block_size": block_size or 32},
            threads=threads,
            with_profile=profile,
            progress=cli.say,
            **given,
        )
        value = report.to_json()
    if as_json:
        cli.print_value(value)
    else:
        print(text)
    if out is not None:
        write_output(out, json.dumps(value, indent=2) + "\n")


def flips(
    system: Annotated[
        str, typer.Option(help="Systems by name, separated by commas. The default is the embedded family.")
    ] = "",
    model: Annotated[
        str, typer.Option(help="With one --system: checkpoint, a folder or hub id. The default is the published one.")
    ] = "",
    tasks: parameters.Tasks = "",
    limit: parameters.Limit = None,
    batch_size: Annotated[int, typer.Option(min=2, help="Requests decoded together, against one at a time.")] = 8,
    out: parameters.Out = Path("results/flips"),
    data: parameters.Data = None,
    sandbox: parameters.Sandbox = "auto",
    as_json: parameters.Json = False,
) -> None:
    """Measure how far scores move with dtype, batch size and CUDA graphs; of a server, with requests at once alone.

    The same items are decoded under each. Counted are items whose tokens differ from those of the reference (float32,
    one at a time, no graphs; of a server, one at a time) and verdicts that turn. Each configuration is a run in
    OUT/runs, and the same command continues. OUT/flips.csv has the figures of every task.
    """
    import torch

    from refusion_eval.results.flips import flips_between, flips_cells, flips_table
    from refusion_eval.runs.terminal import Interruption
    from refusion_eval.sweep.configurations import configurations, folder_of, is_server, spec_of
    from refusion_eval.sweep.run import run_sweep

    cli.log_to_stderr()
    has_gpu = torch.cuda.is_available()
    systems = choose_systems(parameters.names_of(system), model)
    servers = {name for name, arguments in systems.items() if is_server(arguments)}
    named = {name: configurations(batch_size, with_graphs=has_gpu, of_server=name in servers) for name in systems}
    spec = spec_of(systems, named, tasks=tuple(parameters.names_of(tasks)), limit=limit)
    to_continue = f"the runs that are finished are in {out}; run the same command again to continue"
    with Interruption(lambda: to_continue, finish_first=False):
        result = run_sweep(spec, out, data=data, sandbox=sandbox, on_point=cli.say)
    found = []
    for name in systems:
        places = [(one, out / "runs" / f"{folder_of(name, one)}-table") for one in named[name]]
        found += [entry for other in places[1:] for entry in flips_between(name, places[0], other)]
    machine = " and ".join(sorted({figure.hardware for figure in result.figures}))
    has_compared = has_gpu or servers == systems.keys()
    missing = "" if has_compared else "CUDA graphs on and off were not compared, because there is no GPU here."
    cli.show(flips_table(found, machine, missing), flips_cells(found), as_json=as_json, csv=out / "flips.csv")
    if result.incomplete:
        cli.say("error: some samples failed; run the same command again to retry them")
        raise typer.Exit(cli.EXIT_INCOMPLETE)


@parameters.options_from(ModelArgs, "dtype device revision")
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
    data: parameters.Data = None,
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
        ratios=parameters.numbers_of(ratios, "--ratios", float),
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
        distances=list(parameters.numbers_of(distances, "--distances", int)),
        console=cli.console(),
        **given,
    )


def gpu_check(
    out: Annotated[
        Path,
        typer.Option(help="Folder for checks.json, checks.md, roofline.png, tune.json, choices.json."),
    ] = Path("results/local/gpu"),
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ...; cpu runs the checks at a small shape.")] = "cuda",
    shape: Annotated[str, typer.Option(help="Shape of the timed models: 8B (16 GB on the disk) or 0.6B.")] = "8B",
    checks: Annotated[
        str | None,
        typer.Option(
            help="Checks to make, in this order, separated by commas; the default is all but tune, which makes the "
            "table of kernels of this GPU. Those that an earlier call wrote to --out are kept."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            max=1800.0,
            help="Seconds for --checks tune; the default is 420. A later call goes on where this one ended.",
        ),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts of the mini tasks in each check; the default is 14.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Existing folder for temporary checkpoints, e.g. /dev/shm; the default is the system's."),
    ] = None,
    graphs: Annotated[
        bool, typer.Option("--cuda-graphs/--no-cuda-graphs", help="Whether forwards are recorded as CUDA graphs.")
    ] = True,
) -> None:
    """Check the GPU path on this machine. Speed, kernels and tokens each get a verdict."""
    import torch

    from refusion_eval.bench.checkpoints import SHAPES
    from refusion_eval.bench.gpu_check import CHECKS, TUNE, GpuCheck
    from refusion_eval.bench.gpu_report import conditions, earlier_checks, write_report
    from refusion_eval.bench.tune import SECONDS, tune
    from refusion_eval.runs.terminal import Interruption

    on_cpu = device == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        raise ConfigError("gpu-check: torch sees no CUDA device here; --device cpu runs the checks at a small shape")
    if shape not in SHAPES:
        raise ConfigError(f"--shape {shape} is unknown; choose {' or '.join(SHAPES)}")
    names = parameters.names_of(checks) if checks is not None else list(CHECKS)
    if not names or not {*CHECKS, TUNE} >= set(names):
        raise ConfigError(f"--checks {checks}: choose among {', '.join([*CHECKS, TUNE])}")
    if TUNE not in names:
        cli.refuse_unused(f"--checks {TUNE} alone", seconds=seconds)
    if TUNE in names and not graphs:
        raise ConfigError("--checks tune measures recorded forwards; leave out --no-cuda-graphs")
    if names == [TUNE] and (prompts is not None or folder is not None):
        raise ConfigError(
            "--checks tune has prompts of its own and writes no checkpoint; leave out --prompts, --folder"
        )
    timed_shape = None if on_cpu else shape
    out.mkdir(parents=True, exist_ok=True)
    facts = conditions(torch.device(device), timed_shape)
    known = {check.name: check for check in earlier_checks(out, facts)}
    kept = Interruption(
        lambda: f"{out}/checks.md has the checks that ended; --checks makes the others", finish_first=False
    )
    with kept, tempfile.TemporaryDirectory(dir=folder) as scratch:
        with_graphs = None if graphs else False
        tuning = partial(tune, out, device, timed_shape, facts, progress=cli.say), seconds or SECONDS
        check = GpuCheck(device, Path(scratch), timed_shape, prompts or 14, cli.say, with_graphs, tuning)
        for found in check.run(names, facts):
            known[found.name] = found
            name, took, result, _ = found
            print(f"{result.verdict:<8}  {name}: {result.text} ({took:.0f} s)", flush=True)
            write_report(out, facts, list(known.values()))
    print(f"{out}/checks.md")
    if any(known[name].result.passed is False for name in names):
        raise typer.Exit(cli.EXIT_INCOMPLETE)
