from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from refusion_eval.cli import console, log_to_stderr, prepare
from refusion_eval.errors import ConfigError

if TYPE_CHECKING:
    from refusion_eval.report.replay import Replay, Speller

# For a prompt of the user on the embedded model: as short as its texts, eight slots to choose from in every block.
SETTINGS: dict[str, Any] = {"gen_length": 96, "slot_size": 4, "block_size": 32, "tau_slot": 0.6, "tau_token": 0.4}


def replay(
    run_dir: Annotated[Path | None, typer.Argument(help="Run directory, finished or not.")] = None,
    task: Annotated[str | None, typer.Option(help="Task or benchmark. The default is the first of the run.")] = None,
    sample: Annotated[
        str | None, typer.Option(help="Id of the item in the benchmark. The default is the first item.")
    ] = None,
    number: Annotated[int | None, typer.Option(min=0, help="Number of the sample, if the item has several.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write an animation, x.gif or x.png, instead of playing on the terminal.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.02, max=60, help="Time that each step is shown.")] = 0.5,
    prompt: Annotated[
        str | None, typer.Option(help="Decode this prompt with the embedded ReFusion model instead of reading a run.")
    ] = None,
) -> None:
    """Show step by step how one sample was decoded. It plays on the terminal or becomes an animated picture."""
    from refusion_eval.report.frames import frames, play
    from refusion_eval.report.picture import check_format, write_animation

    if (run_dir is None) == (prompt is None):
        raise ConfigError(
            "name a run directory or a --prompt, one of the two: refusion-eval replay RUN --task mini_gsm8k"
        )
    if prompt is not None and (task, sample, number) != (None, None, None):
        raise ConfigError("--task, --sample and --number choose from a run; leave them out with --prompt")
    if out is not None:
        check_format(out)
        prepare(out)
    log_to_stderr()
    title, steps, speller = _from_prompt(prompt) if run_dir is None else _from_run(run_dir, task, sample, number)
    if out is None:
        play(steps, speller, console(), title, seconds)
        return
    shown = list(frames(steps, speller))
    write_animation(shown, out, title, seconds=seconds)
    print(f"{out} ({len(shown)} frames, {out.stat().st_size / 2**10:.0f} KiB)")


def _from_run(run_dir: Path, task: str | None, item: str | None, number: int | None) -> "tuple[str, Replay, Speller]":
    from refusion_eval.cli.sources import FoundSources
    from refusion_eval.report.sample import find_sample, sample_replay, speller_of

    run, sample = find_sample(run_dir, task, item, number)
    title = f"{run.manifest.system} · {sample.key.task} · {sample.item_id}"
    return title, sample_replay(sample), speller_of(sample, FoundSources(None).spell(run))


def _from_prompt(prompt: str | None) -> "tuple[str, Replay, Speller]":
    from refusion_eval import api
    from refusion_eval.paths import EMBEDDED
    from refusion_eval.report.replay import Speller, replay_of
    from refusion_eval.runs.model_args import parse_model_args
    from refusion_eval.runs.system import System

    system = System(parse_model_args({"pretrained": EMBEDDED, "decoder": "refusion"}))
    turn = [{"role": "user", "content": prompt or ""}]
    ids = system.model.tokenizer.encode(system.model.tokenizer.render_chat(turn))
    decoded = api.generate(system.model, ids, "refusion", **SETTINGS)
    steps = replay_of(decoded.trace, slot_size=SETTINGS["slot_size"])
    return "ReFusion · embedded model", steps, Speller(system.detokenizer.spelled)
