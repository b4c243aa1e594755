"""Commands to look at runs: report, replay."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from refusion_eval.cli.root import Data, app, console, log_to_stderr
from refusion_eval.errors import ConfigError

if TYPE_CHECKING:
    from refusion_eval.report.pieces import Speller
    from refusion_eval.report.replay import Replay

# Of a prompt on the embedded model: as short as its texts are, in its own slots.
PROMPT_SETTINGS = {"gen_length": 64, "slot_size": 8, "block_size": 8}


@app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories, finished or not.")],
    out: Annotated[Path, typer.Option(help="The page; it needs no other file and no network.")] = Path("report.html"),
    baseline: Annotated[
        str | None, typer.Option(help="Folder name of the run that speed-ups are relative to; found if not given.")
    ] = None,
    data: Data = None,
) -> None:
    """Write one HTML page of runs: figures, frontier plots, every sample, and how each was decoded, step by step."""
    from refusion_eval.cli.sources import FoundSources
    from refusion_eval.report.assemble import page
    from refusion_eval.report.collect import collect
    from refusion_eval.store.atomic_write import prepare_output, write_output

    log_to_stderr()
    prepare_output(out)
    found = collect(run_dirs, FoundSources(data), baseline=baseline)
    for warning in found.index["warnings"]:
        print(f"note: {warning}", file=sys.stderr)
    write_output(out, page(found.index, found.chunks))
    print(f"{out} ({out.stat().st_size / 2**20:.1f} MiB)")


@app.command()
def replay(
    run_dir: Annotated[Path | None, typer.Argument(help="Run directory, finished or not.")] = None,
    task: Annotated[str | None, typer.Option(help="Task or benchmark; the first if not given.")] = None,
    sample: Annotated[
        str | None, typer.Option(help="The benchmark's name for the item; the first if not given.")
    ] = None,
    number: Annotated[int | None, typer.Option(min=0, help="Of several samples of the item, which.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write an animation instead of playing: x.gif, or x.png (animated).")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.02, max=60, help="How long a step is shown.")] = 0.5,
    prompt: Annotated[
        str | None, typer.Option(help="Instead of a run: decode this prompt with the embedded ReFusion model.")
    ] = None,
) -> None:
    """Show how one sample was decoded, step by step: on the terminal, or as an animated picture."""
    from refusion_eval.report.frames import frames, play
    from refusion_eval.report.picture import check_format, write_animation
    from refusion_eval.store.atomic_write import prepare_output

    if (run_dir is None) == (prompt is None):
        raise ConfigError(
            "name a run directory or a --prompt, one of the two: refusion-eval replay RUN --task mini_gsm8k"
        )
    if prompt is not None and (task, sample, number) != (None, None, None):
        raise ConfigError("--task, --sample and --number choose from a run; leave them out with --prompt")
    if out is not None:
        check_format(out)
        prepare_output(out)
    log_to_stderr()
    title, film, speller = _from_prompt(prompt) if run_dir is None else _from_run(run_dir, task, sample, number)
    if out is None:
        play(film, speller, console(), title, seconds)
        return
    shown = list(frames(film, speller))
    write_animation(shown, out, title, seconds=seconds)
    print(f"{out} ({len(shown)} frames, {out.stat().st_size / 2**10:.0f} KiB)")


def _from_run(run_dir: Path, task: str | None, item: str | None, number: int | None) -> "tuple[str, Replay, Speller]":
    from refusion_eval.cli.sources import FoundSources
    from refusion_eval.report.find import find_sample, sample_replay, speller_of

    run, found = find_sample(run_dir, task, item, number)
    title = f"{run.manifest.system} · {found.key.task} · {found.item_id}"
    return title, sample_replay(found), speller_of(found, FoundSources(None).spell(run))


def _from_prompt(prompt: str | None) -> "tuple[str, Replay, Speller]":
    from refusion_eval import api
    from refusion_eval.report.pieces import Speller
    from refusion_eval.report.replay import replay_of
    from refusion_eval.runs.model_args import EMBEDDED, parse_model_args
    from refusion_eval.runs.system import System

    system = System(parse_model_args({"pretrained": EMBEDDED, "decoder": "refusion"}))
    turn = [{"role": "user", "content": prompt or ""}]
    ids = system.model.tokenizer.encode(system.model.tokenizer.render_chat(turn))
    decoded = api.generate(system.model, ids, "refusion", **PROMPT_SETTINGS)
    film = replay_of(decoded.trace, slot_size=PROMPT_SETTINGS["slot_size"])
    return "ReFusion · embedded model", film, Speller(system.detokenizer.spelled)
