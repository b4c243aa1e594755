"""The command line. Each command imports what it needs when it is called: `--help` loads no torch."""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import refusion_eval
from refusion_eval.errors import ConfigError, RefusionEvalError

# Exit status of a run that finished, but with samples that failed.
EXIT_INCOMPLETE = 3
WIDTH_WITHOUT_TERMINAL = 140

app = typer.Typer(
    name="refusion-eval",
    help="Accuracy and batch-1 speed of ReFusion and of the systems it competes with.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Sandbox = Annotated[
    Literal["auto", "none"],
    typer.Option(help="How model-written code is run: isolated, or none for no isolation at all."),
]
Data = Annotated[Path | None, typer.Option(help="Folder with benchmark rows: <benchmark>/<split>.jsonl[.gz].")]


def main() -> None:
    """Runs the command line; what this project refuses is one line on stderr and exit status 1."""
    try:
        app()
    except RefusionEvalError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


@app.command()
def run(
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder, hub id, or embedded; that of --system, else embedded.")
    ] = None,
    decoder: Annotated[str | None, typer.Option(help="Name of the decoder; refusion if not given.")] = None,
    system: Annotated[
        str | None, typer.Option(help="A published system instead: its decoder, checkpoint and adapter.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="LoRA adapter, folder or hub id.")] = None,
    preset: Annotated[
        str | None, typer.Option(help="Settings table of the decoder, where it has several; the first if not given.")
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Benchmarks or task names, separated by commas; all seven if not given.")
    ] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first items of every task.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where samples are recorded and found again; by default under results/runs.")
    ] = None,
    data: Data = None,
    sandbox: Sandbox = "auto",
    batch_size: Annotated[str, typer.Option(help="Requests decoded together, or auto; speed is measured at 1.")] = "1",
    tps_samples: Annotated[
        int, typer.Option(min=0, help="Items of every task decoded alone, to measure speed beside a batch.")
    ] = 0,
    kv_budget_gib: Annotated[
        float | None, typer.Option(min=0, help="GiB for the keys and values of a batch; what is free if not given.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    attention: Annotated[str, typer.Option(help="auto, sdpa or flash.")] = "auto",
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="Record the forwards of a request decoded alone as CUDA graphs.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    thinking: Annotated[
        bool | None, typer.Option(help="What the chat template is told about thinking; yes if nobody says.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="A Jinja file instead of the checkpoint's template, or none for plain prompts.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Decodings thrown away before the first measured one.")] = 1,
    seed: Annotated[int | None, typer.Option(min=0, help="Of everything random; 0 if not given.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A decoder setting, KEY=VALUE; outranks the settings table.")
    ] = None,
) -> None:
    """Run tasks with one system, record every sample, score them, print the table and write it beside the records."""
    _log_to_stderr()
    from refusion_eval.evaluate.model_args import parse_model_args
    from refusion_eval.evaluate.run import evaluate, task_names

    chosen = _system(system, model, decoder)
    run_dir = run_dir or default_run_dir(Path("results/runs"), str(chosen["pretrained"]), system or chosen["decoder"])
    args = parse_model_args(
        {
            **chosen,
            **({} if adapter is None else {"adapter": adapter}),
            **({} if chat_template is None else {"chat_template": chat_template}),
            **({} if thinking is None else {"enable_thinking": thinking}),
            "preset": preset,
            "run_dir": str(run_dir),
            "data_dir": None if data is None else str(data),
            "batch_size": batch_size,
            "tps_samples": tps_samples,
            "kv_budget_gib": kv_budget_gib,
            "dtype": dtype,
            "device": device,
            "attention": attention,
            "cuda_graphs": cuda_graphs,
            "revision": revision,
            "warmup": warmup,
            **({} if seed is None else {"seed": seed}),
            **dict(_pair(text) for text in settings or []),
        }
    )
    names = task_names([name.strip() for name in tasks.split(",") if name.strip()], args.pretrained)
    outcome = evaluate(args, names, limit=limit, sandbox=sandbox)
    table([run_dir], csv=run_dir / "results.csv", markdown=run_dir / "table.md")
    if not outcome.is_complete:
        print(
            f"error: {len(outcome.failed)} samples could not be decoded and {outcome.unscored} not be judged; "
            "they are missing from the table. Run the same command again to retry them",
            file=sys.stderr,
        )
        raise typer.Exit(EXIT_INCOMPLETE)


@app.command("systems")
def list_systems() -> None:
    """List the published systems that --system names."""
    from refusion_eval.evaluate.systems import published_systems

    for system in published_systems().values():
        checkpoint = system.pretrained or "no published checkpoint; give --model"
        adapter = f" + {system.adapter}" if system.adapter else ""
        print(f"{system.name:<16} {system.label:<22} {system.decoder:<16} {checkpoint}{adapter}")


@app.command()
def check(
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder, hub id, or embedded; that of --system, else embedded.")
    ] = None,
    decoder: Annotated[str | None, typer.Option(help="Name of the decoder; refusion if not given.")] = None,
    system: Annotated[str | None, typer.Option(help="A published system instead.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
) -> None:
    """Say whether a decoder can run a checkpoint: reads its configuration, not its weights."""
    from refusion_eval.evaluate.model_args import parse_model_args
    from refusion_eval.evaluate.system import System

    opened = System(parse_model_args({**_system(system, model, decoder), "revision": revision}))
    config = opened.model.config
    brought = "".join(f", {key}={value}" for key, value in opened.checkpoint_settings.items())
    name, decoder = opened.args.pretrained, opened.args.decoder
    print(f"{name}: {config.family}, {config.num_layers} layers{brought}; {decoder} can run it")


@app.command()
def table(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories; speed-up needs the baseline's beside.")],
    csv: Annotated[Path | None, typer.Option(help="Also write every figure as CSV, one row each.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the table as Markdown.")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Folder name of the run that speed-ups are relative to; found if not given.")
    ] = None,
) -> None:
    """Print the table of one or more runs: accuracy, TPS, TPF, speed-up, each with its interval."""
    from refusion_eval.store import summary
    from refusion_eval.store.atomic_write import prepare_output, write_output
    from refusion_eval.store.tables import tidy_rows, write_csv

    for path in filter(None, (csv, markdown)):
        prepare_output(path)
    rows = tidy_rows(run_dirs, baseline=baseline)
    lines = summary.summary(rows)
    _console().print(summary.rich_table(lines))
    if csv is not None:
        write_csv(rows, csv)
    if markdown is not None:
        write_output(markdown, summary.markdown(lines))


@app.command()
def score(
    task: Annotated[str, typer.Option(help="gsm8k, mini_gsm8k, ...")],
    outputs: Annotated[str, typer.Option(help='JSON lines {"id": ..., "text": ...}, or gold for the gold answers.')],
    data: Data = None,
    split: Annotated[str | None, typer.Option(help="Another split than the evaluated one.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="One line a text; OUTPUTS.scores.csv, or TASK.gold.csv here, if not given.")
    ] = None,
    filter_name: Annotated[str | None, typer.Option("--filter", help="Another extraction rule.")] = None,
    allow_partial: Annotated[bool, typer.Option(help="Leave rows without a text out of the score.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes for code and mathematics.")] = None,
    sandbox: Sandbox = "auto",
) -> None:
    """Score texts that were generated anywhere, by the same rules as the tasks."""
    from refusion_eval.evaluate.score_cli import score_command

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


@app.command()
def rescore(
    run_dirs: Annotated[list[Path] | None, typer.Argument(help="Run directories, finished or not.")] = None,
    filter_name: Annotated[
        str, typer.Option("--filter", help="A public answer filter, your own as module:function, or list.")
    ] = "ours",
    list_filters: Annotated[bool, typer.Option("--list-filters", help="Print the filters, as --filter list.")] = False,
    tasks: Annotated[str, typer.Option(help="Tasks or benchmarks, separated by commas; all if not given.")] = "",
    data: Data = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results, one folder a run; RUN/rescored if not given.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes for code and mathematics.")] = None,
    sandbox: Sandbox = "auto",
) -> None:
    """Score the recorded texts of runs with another answer filter; decodes nothing and changes no record."""
    from refusion_eval.evaluate import rescore_filters
    from refusion_eval.evaluate.rescore_report import rescore_command

    if list_filters or filter_name == rescore_filters.LIST:
        print("\n".join(rescore_filters.describe()))
        return
    if not run_dirs:
        raise ConfigError("no run directory is given; name one or more, as refusion-eval rescore RUN --filter NAME")
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    num_differing = rescore_command(
        run_dirs, filter_name, tasks=names, data=data, out=out, workers=workers, sandbox=sandbox, console=_console()
    )
    if num_differing:
        print(f"error: {num_differing} verdicts are not the recorded ones", file=sys.stderr)
        raise typer.Exit(1)


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
    from refusion_eval.evaluate.locality import LocalitySettings, parse_numbers
    from refusion_eval.evaluate.locality_report import locality_command
    from refusion_eval.training.mini.generate import held_out_pairs

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
        console=_console(),
    )


@app.command("tasks-path")
def print_tasks_path() -> None:
    """Print the folder of task files, for lm_eval's --include_path."""
    from refusion_eval.evaluate.paths import tasks_path

    print(tasks_path())


@app.command(
    "lm-eval",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def lm_eval_command(context: typer.Context) -> None:
    """Run lm_eval with the models of this project registered, for where the start-up hook is not read."""
    import lm_eval.models  # noqa: F401 - lm-eval lists its own models only while no other is registered
    from lm_eval.__main__ import cli_evaluate

    from refusion_eval.evaluate import lm_eval_adapter  # noqa: F401 - registers the model

    sys.argv = ["lm_eval", *context.args]
    cli_evaluate()


@app.command()
def version() -> None:
    """Print the version."""
    print(refusion_eval.__version__)


def default_run_dir(runs: Path, model: str, decoder: str) -> Path:
    """Where a system's records lie unless the user says otherwise, for example runs/ReFusion-refusion."""
    return runs / f"{Path(model).name}-{decoder}"


def _system(name: str | None, model: str | None, decoder: str | None) -> dict[str, Any]:
    """Checkpoint and decoder: of a published system, or as given."""
    from refusion_eval.evaluate.systems import system_arguments

    if name is None:
        return {"pretrained": model or "embedded", "decoder": decoder or "refusion"}
    if decoder is not None:
        raise ConfigError(f"--system {name} brings its decoder; leave out --decoder {decoder}")
    return system_arguments(name, model)


def _console() -> Any:
    """Where tables are printed."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)


def _pair(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--set {text}: write it as KEY=VALUE, for example --set tau_slot=0.8")
    return key.strip(), value.strip()


class _StderrHandler(logging.Handler):
    """Writes to whatever stderr is at that moment: the live display puts itself in between."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def _log_to_stderr() -> None:
    """Our own lines; of lm-eval only errors, and none of its many small progress bars."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("refusion_eval")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
