"""A replay as frames, and on a terminal."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from refusion_eval.report.replay import Position, Replay, Speller, Step, apply, final_pieces
from refusion_eval.untrusted import visible

MASK = "·"
NEW = "new"


class Look(NamedTuple):
    """How a state is shown: its name, its style on a terminal, its colours and its line in a picture."""

    name: str
    terminal: str
    ink: str
    ground: str | None = None
    line: str = ""


# The states differ in brightness and in their lines, so that they can be told apart in grey.
LOOKS: Mapping[str, Look] = {
    "mask": Look("masked", "bright_black", "#98a4b0"),
    "planned": Look("planned", "blue underline", "#00558f", None, "box"),
    "draft": Look("drafted", "italic yellow", "#6b4700", "#fdf1d8", "dotted"),
    NEW: Look("accepted", "bold reverse", "#ffffff", "#00558f"),
    "fixed": Look("final", "", "#16202b"),
    "rejected": Look("rejected", "red strike", "#a33b00", "#fbe6da", "strike"),
    "dropped": Look("not kept", "bright_black strike", "#98a4b0", None, "strike"),
}
REASONS = {"eos": "end of sequence", "length": "length reached", "stop_string": "stop string", "gap": "gap filled"}


class TextRun(NamedTuple):
    state: str
    text: str


class Frame(NamedTuple):
    """The text after one step; the first frame is the text before all steps."""

    runs: Sequence[TextRun]
    headline: str
    detail: str


def frames(replay: Replay, speller: Speller) -> Iterator[Frame]:
    final = final_pieces(replay, speller)
    canvas = [Position() for _ in range(replay.num_positions)]
    num_steps = len(replay.steps)
    yield Frame(_runs(canvas, -1, final, speller), "Nothing is decoded yet.", f"step 0/{num_steps}")
    for number, step in enumerate(replay.steps):
        apply(canvas, step, number)
        num_forwards = step.forward + 1
        detail = f"step {number + 1}/{num_steps}   forward {num_forwards}/{len(replay.forwards)}"
        if 0 <= step.forward < len(replay.forwards):
            kind, rows, cached = replay.forwards[step.forward]
            detail += f" {kind}: {rows} rows, {cached} cached"
        if num_forwards > 0:
            detail += f"   {step.num_fixed} final, {step.num_fixed / num_forwards:.2f} a forward"
        newest = number if step.action != "stop" else -1
        yield Frame(_runs(canvas, newest, final, speller), sentence(step), detail)


def sentence(step: Step) -> str:
    fixed, rejected = step.number_of("fixed"), step.number_of("rejected")
    rejections = f", rejected {_counted(rejected, 'draft')}" if rejected else ""
    match step.action:
        case "plan":
            return f"Planned {len(step.scores)} of {_counted(step.num_candidates, 'slot')}."
        case "draft":
            return f"Drafted {_counted(step.number_of('draft'), 'token')}{rejections}."
        case "fix" if step.num_candidates:
            return f"Fixed {fixed} of {_counted(step.num_candidates, 'candidate')}{rejections}."
        case "fix":
            return f"Accepted {_counted(fixed, 'token')}{rejections}."
        case "stop":
            return f"Stopped: {REASONS.get(step.reason, step.reason)}."
        case _:
            return "Nothing became final in this forward."


def play(shown: Iterable[Frame], console: Console, title: str, seconds: float) -> None:
    """Plays frames on a terminal, where keys pause, step and end it; elsewhere prints one line for each step."""
    all_frames = list(map(_shown, shown))
    if not console.is_terminal or console.is_dumb_terminal:
        for frame in all_frames:
            console.print(Text(f"{frame.detail}  {frame.headline}"), soft_wrap=True)
            console.print(_text(frame.runs, words=True), soft_wrap=True)
        return
    number, is_paused, last = 0, False, len(all_frames) - 1
    with Keys() as keys, Live(console=console, auto_refresh=False) as live:
        while number <= last:
            live.update(_panel(all_frames[number], console, visible(title), keys.hint), refresh=True)
            if number == last and not is_paused:
                return
            number, is_paused = after_key(keys.read(None if is_paused else seconds), number, is_paused, last)


def _shown(frame: Frame) -> Frame:
    """A frame whose texts a terminal shows and does not obey; the tokens of a model may be any characters."""
    runs = [run._replace(text=visible(run.text, keep="\t\n")) for run in frame.runs]
    return Frame(runs, visible(frame.headline), visible(frame.detail))


def after_key(key: str, number: int, is_paused: bool, last: int) -> tuple[int, bool]:
    """The step that is shown after a key, and whether the replay is paused there; beyond the last step it has ended."""
    match key:
        case "":
            return number + 1, is_paused
        case " ":
            return number, not is_paused
        case "\x1b[C":  # the arrow to the right, as terminals send it
            return min(number + 1, last), True
        case "\x1b[D":
            return max(number - 1, 0), True
        case "q":
            return last + 1, is_paused
    return number, is_paused


class Keys:
    """Reads single keys from a terminal without echo, as a context manager; none where there is no such terminal."""

    _before: list[Any] | None = None

    def __enter__(self) -> Self:
        if sys.stdin is not None and sys.stdin.isatty():
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    @property
    def hint(self) -> str:
        return "" if self._before is None else "space: pause   arrows: step   q: end"

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def read(self, seconds: float | None) -> str:
        """The key that is pressed within some seconds, or ever if None; empty for none."""
        if self._before is None:
            time.sleep(seconds or 0.0)
            return ""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 8).decode(errors="replace") if ready else ""


def _panel(frame: Frame, console: Console, title: str, hint: str) -> Group:
    """A frame with as many of its lines as fit on the terminal, including the newest ones."""
    width, height = console.width - 4, max(3, console.height - 8)
    lines = list(_text(frame.runs, words=False).wrap(console, width, overflow="fold"))
    newest = 0
    seen = Text()
    for run in frame.runs:
        seen.append(run.text)
        if run.state in (NEW, "draft", "planned", "rejected"):
            newest = len(seen.wrap(console, width, overflow="fold"))
    first = max(0, min(newest - height // 2, len(lines) - height))
    shown = Text("\n").join(lines[first : first + height])
    legend = Text(f"{MASK} {LOOKS['mask'].name}", LOOKS["mask"].terminal)
    for state in ("planned", "draft", NEW, "rejected", "dropped"):
        legend.append("  ").append(LOOKS[state].name, LOOKS[state].terminal)
    return Group(
        Panel(shown, title=Text(title), subtitle=Text(frame.headline), title_align="left", subtitle_align="left"),
        Text(frame.detail, "bright_black"),
        legend,
        Text(hint, "bright_black"),
    )


def _text(runs: Sequence[TextRun], words: bool) -> Text:
    """The runs in their styles; with `words`, states are named instead, because a pipe has no styles."""
    text = Text()
    for run in runs:
        if words and run.state not in ("fixed", "mask"):
            text.append(f"<{run.state}:{run.text}>")
        else:
            text.append(run.text, "" if words else LOOKS[run.state].terminal)
    return text


def joined(letters: Iterable[tuple[str, str]]) -> list[TextRun]:
    """Neighbouring (state, text) of one state as one run."""
    return [TextRun(state, "".join(text for _, text in group)) for state, group in groupby(letters, itemgetter(0))]


def _runs(canvas: Sequence[Position], newest: int, final: Mapping[int, str], speller: Speller) -> list[TextRun]:
    looks = []
    for index, position in enumerate(canvas):
        state = NEW if position.state == "fixed" and position.step == newest else position.state
        if position.state in ("fixed", "dropped"):
            text = final[index]
        else:
            text = MASK if position.token is None else speller.piece(position.token)
        looks.append((state, text))
    return joined(looks)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
