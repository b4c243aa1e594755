"""A replay as frames, and on a terminal."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from refusion_eval.report.replay import Position, Replay, Speller, Step, apply, final_pieces

MASK = "·"
NEW = "new"
# What a terminal shows of each state; without styles, words are printed instead.
STYLES: Mapping[str, str] = {
    "mask": "bright_black",
    "planned": "blue underline",
    "draft": "italic yellow",
    NEW: "bold reverse",
    "fixed": "",
    "rejected": "red strike",
    "dropped": "bright_black strike",
}
REASONS = {"eos": "end of sequence", "length": "length reached", "stop_string": "stop string"}


class TextRun(NamedTuple):
    """Neighbouring positions that look alike."""

    state: str
    text: str


class Frame(NamedTuple):
    """The text after one step; the first frame is the text before all steps.

    Attributes:
        runs: the text in order.
        headline: what happened.
        detail: how far the decoding is.
    """

    runs: Sequence[TextRun]
    headline: str
    detail: str


def frames(replay: Replay, speller: Speller) -> Iterator[Frame]:
    """Every frame of a replay, in order."""
    final = final_pieces(replay, speller)
    canvas = [Position() for _ in range(replay.num_positions)]
    num_steps, num_fixed = len(replay.steps), 0
    yield Frame(_runs(canvas, -1, final, speller), "Nothing is decoded yet.", f"step 0/{num_steps}")
    for number, step in enumerate(replay.steps):
        apply(canvas, step, number)
        num_fixed += _count(step, "fixed")
        num_forwards = step.forward + 1
        detail = f"step {number + 1}/{num_steps}   forward {num_forwards}/{len(replay.forwards)}"
        if 0 <= step.forward < len(replay.forwards):
            kind, rows, cached = replay.forwards[step.forward]
            detail += f" {kind}: {rows} rows, {cached} cached"
        if num_forwards > 0:
            detail += f"   {num_fixed} final, {num_fixed / num_forwards:.2f} a forward"
        newest = number if step.action != "stop" else -1
        yield Frame(_runs(canvas, newest, final, speller), sentence(step), detail)


def sentence(step: Step) -> str:
    """One sentence on what a step did."""
    fixed, rejected = _count(step, "fixed"), _count(step, "rejected")
    rejections = f", rejected {_counted(rejected, 'draft')}" if rejected else ""
    match step.action:
        case "plan":
            return f"Planned {len(step.scores)} of {_counted(step.num_candidates, 'slot')}."
        case "draft":
            return f"Drafted {_counted(_count(step, 'draft'), 'token')}{rejections}."
        case "fix" if step.num_candidates:
            return f"Fixed {fixed} of {_counted(step.num_candidates, 'candidate')}{rejections}."
        case "fix":
            return f"Accepted {_counted(fixed, 'token')}{rejections}."
        case "stop":
            return f"Stopped: {REASONS.get(step.reason, step.reason)}."
        case _:
            return "Nothing became final in this forward."


def legend() -> Text:
    """One line that explains the styles."""
    names = {
        "planned": "planned",
        "draft": "drafted",
        NEW: "just accepted",
        "rejected": "rejected",
        "dropped": "not kept",
    }
    text = Text(f"{MASK} masked", STYLES["mask"])
    for state, name in names.items():
        text.append("  ").append(name, STYLES[state])
    return text


def play(replay: Replay, speller: Speller, console: Console, title: str, seconds: float) -> None:
    """Plays a replay on a terminal, each step for some seconds. Elsewhere it prints one line for each step."""
    all_frames = list(frames(replay, speller))
    if not console.is_terminal or console.is_dumb_terminal:
        for frame in all_frames:
            console.print(Text(f"{frame.detail}  {frame.headline}"), soft_wrap=True)
            console.print(_text(frame.runs, words=True), soft_wrap=True)
        return
    with Live(console=console, auto_refresh=False) as live:
        for number, frame in enumerate(all_frames):
            live.update(_panel(frame, console, title), refresh=True)
            if number + 1 < len(all_frames):
                time.sleep(seconds)


def _panel(frame: Frame, console: Console, title: str) -> Group:
    """A frame with as many of its lines as fit on the terminal, including the newest ones."""
    width, height = console.width - 4, max(3, console.height - 7)
    lines = list(_text(frame.runs, words=False).wrap(console, width, overflow="fold"))
    newest = 0
    seen = Text()
    for run in frame.runs:
        seen.append(run.text)
        if run.state in (NEW, "draft", "planned", "rejected"):
            newest = len(seen.wrap(console, width, overflow="fold"))
    first = max(0, min(newest - height // 2, len(lines) - height))
    shown = Text("\n").join(lines[first : first + height])
    return Group(
        Panel(shown, title=Text(title), subtitle=Text(frame.headline), title_align="left", subtitle_align="left"),
        Text(frame.detail, "bright_black"),
        legend(),
    )


def _text(runs: Sequence[TextRun], words: bool) -> Text:
    """The runs in their styles; with `words`, states are named instead, because a pipe has no styles."""
    text = Text()
    for run in runs:
        if words and run.state not in ("fixed", "mask"):
            text.append(f"<{run.state}:{run.text}>")
        else:
            text.append(run.text, "" if words else STYLES[run.state])
    return text


def joined(letters: Iterable[tuple[str, str]]) -> list[TextRun]:
    """Neighbouring (state, text) of one state as one run."""
    return [TextRun(state, "".join(text for _, text in group)) for state, group in groupby(letters, lambda one: one[0])]


def _runs(canvas: Sequence[Position], newest: int, final: Mapping[int, str], speller: Speller) -> list[TextRun]:
    looks = []
    for index, position in enumerate(canvas):
        is_new = position.state == "fixed" and position.step == newest
        if position.state in ("fixed", "dropped"):
            text = final[index]
        else:
            text = MASK if position.token is None else speller.piece(position.token)
        looks.append((NEW if is_new else position.state, text))
    return joined(looks)


def _count(step: Step, state: str) -> int:
    return sum(len(change.positions) for change in step.changes if change.state == state)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
