"""Commands that decode: run, what can be run, and lm-eval's own."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from refusion_eval.cli.root import Data, Sandbox, app, log_to_stderr, names_of
from refusion_eval.errors import ConfigError

# Exit status of a run that finished, but with samples that failed.
EXIT_INCOMPLETE = 3


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
    name: Annotated[
        str | None, typer.Option(help="What tables call the system, for a checkpoint of your own; else the decoder's.")
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="Model that the checkpoint was made from, where its config.json does not say.")
    ] = None,
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
    loop: Annotated[
        Literal["engine", "generate"],
        typer.Option(help="Who runs the autoregressive decoder: this engine, or transformers' generate."),
    ] = "engine",
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option(
            help="Where requests are decoded: by this process and its launcher's, or by a Ray cluster's workers."
        ),
    ] = "local",
    workers: Annotated[int | None, typer.Option(min=1, help="Most Ray workers; as many as fit if not given.")] = None,
    worker_cpus: Annotated[int, typer.Option(min=1, help="Cores of a Ray worker without a GPU.")] = 1,
    ray_address: Annotated[
        str | None, typer.Option(help="HOST:PORT of a Ray cluster, or auto; one is started here if not given.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of everything random; 0 if not given.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A decoder setting, KEY=VALUE; outranks the settings table.")
    ] = None,
) -> None:
    """Run tasks with one system, record every sample, score them, print the table and write it beside the records."""
    log_to_stderr()
    from refusion_eval.cli.scoring import table
    from refusion_eval.evaluate.run import evaluate, task_names
    from refusion_eval.runs.interrupt import Interruption, resume_hint
    from refusion_eval.runs.model_args import parse_model_args

    chosen = _system(system, model, decoder)
    run_name = "-".join(filter(None, (system or chosen["decoder"], preset, loop if loop != "engine" else None)))
    run_dir = run_dir or default_run_dir(Path("results/runs"), str(chosen["pretrained"]), run_name)
    args = parse_model_args(
        {
            **chosen,
            **({} if adapter is None else {"adapter": adapter}),
            **({} if name is None else {"system": name}),
            **({} if backbone is None else {"backbone": backbone}),
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
            "loop": loop,
            "engine": engine,
            "workers": workers,
            "worker_cpus": worker_cpus,
            "ray_address": ray_address,
            **({} if seed is None else {"seed": seed}),
            **_pairs(settings or []),
        }
    )
    names = task_names(names_of(tasks), args.pretrained)
    with Interruption(lambda: resume_hint(run_dir), finish_first=False):
        outcome = evaluate(args, names, limit=limit, sandbox=sandbox)
        table([run_dir], csv=run_dir / "results.csv", markdown=run_dir / "table.md")
    if not outcome.is_complete:
        print(
            f"error: {len(outcome.failed)} samples could not be decoded and {outcome.unscored} not be judged; "
            "they are missing from the table. Run the same command again to retry them",
            file=sys.stderr,
        )
        raise typer.Exit(EXIT_INCOMPLETE)


@app.command()
def rerun(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a recorded run.")],
    out: Annotated[Path | None, typer.Option(help="Directory of the second run; RUN-again if not given.")] = None,
    data: Data = None,
    sandbox: Sandbox = "auto",
) -> None:
    """Make a recorded run again from its record and compare every sample: tokens, text, verdict."""
    log_to_stderr()
    from refusion_eval.evaluate.rerun import in_words
    from refusion_eval.evaluate.rerun import rerun as make_again
    from refusion_eval.runs.interrupt import Interruption, resume_hint

    again = out or run_dir.with_name(f"{run_dir.name}-again")
    with Interruption(lambda: resume_hint(again), finish_first=False):
        result = make_again(run_dir, again, data=data, sandbox=sandbox)
    print(in_words(result))
    if not result.is_same:
        raise typer.Exit(EXIT_INCOMPLETE)


@app.command("systems")
def list_systems() -> None:
    """List the published systems that --system names."""
    from refusion_eval.runs.published import published_systems

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
    adapter: Annotated[str | None, typer.Option(help="LoRA adapter, folder or hub id.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
) -> None:
    """Say whether a decoder can run a checkpoint: reads its configuration, not its weights."""
    from refusion_eval.runs.model_args import parse_model_args
    from refusion_eval.runs.system import System

    adapted = {} if adapter is None else {"adapter": adapter}
    opened = System(parse_model_args({**_system(system, model, decoder), **adapted, "revision": revision}))
    config = opened.model.config
    brought = "".join(f", {key}={value}" for key, value in opened.checkpoint_settings.items())
    name, decoder = opened.args.pretrained, opened.args.decoder
    print(f"{name}: {config.family}, {config.num_layers} layers{brought}; {decoder} can run it")


@app.command("tasks-path")
def print_tasks_path() -> None:
    """Print the folder of task files, for lm_eval's --include_path."""
    from refusion_eval.paths import tasks_path

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

    from refusion_eval.lm_eval_plugin import adapter as lm_eval_adapter  # noqa: F401 - registers the model

    sys.argv = ["lm_eval", *context.args]
    cli_evaluate()


def default_run_dir(runs: Path, model: str, name: str) -> Path:
    """Where a system's records lie unless the user says otherwise, for example runs/ReFusion-refusion."""
    return runs / f"{Path(model).name.replace(':', '-')}-{name}"


def _system(name: str | None, model: str | None, decoder: str | None) -> dict[str, Any]:
    """Checkpoint and decoder: of a published system, or as given."""
    from refusion_eval.runs.published import system_arguments

    if name is None:
        return {"pretrained": model or "embedded", "decoder": decoder or "refusion"}
    if decoder is not None:
        raise ConfigError(f"--system {name} brings its decoder; leave out --decoder {decoder}")
    return system_arguments(name, model)


def _pairs(texts: list[str]) -> dict[str, Any]:
    """What --set gives; a key that is set twice is refused."""
    values: dict[str, Any] = {}
    for key, value in map(_pair, texts):
        if key in values:
            raise ConfigError(f"--set {key} is given twice ({values[key]}, {value}); several values go in one: A+B")
        values[key] = value
    return values


def _pair(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--set {text}: write it as KEY=VALUE, for example --set tau_slot=0.8")
    return key.strip(), value.strip()
