import io

import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from refusion_eval import api
from refusion_eval.cli import app
from refusion_eval.cli.results import _from_prompt
from refusion_eval.errors import ConfigError
from refusion_eval.report.frames import LOOKS, NEW, frames, play
from refusion_eval.report.picture import write_animation
from refusion_eval.report.replay import Speller, replay_of
from refusion_eval.types import Trace

from .conftest import TRACE, make_sample, spell, write_run

REPLAY = replay_of(Trace.from_json(TRACE), slot_size=2)


def test_frames_show_every_state_in_its_turn():
    shown = list(frames(REPLAY, Speller(spell)))
    assert [frame.runs for frame in shown[:4]] == [
        [("mask", "····")],
        [("mask", "··"), ("planned", "··")],
        [("mask", "··"), ("draft", "cd")],
        [("mask", "··"), (NEW, "c"), ("rejected", "d")],
    ]
    assert shown[3].headline == "Accepted 1 token, rejected 1 draft."
    assert shown[-1].runs == [("fixed", "abce")]
    assert len(shown) == len(REPLAY.steps) + 1


@pytest.mark.parametrize(("name", "kind"), [("a.gif", "GIF"), ("a.png", "PNG"), ("deep/a.apng", "PNG")])
def test_an_animation_has_a_picture_for_every_frame(tmp_path, name, kind):
    shown = list(frames(REPLAY, Speller(spell)))
    write_animation(shown, tmp_path / name, "Title \ud800 \x07", seconds=0.25)
    with Image.open(tmp_path / name) as image:
        assert (image.format, image.n_frames) == (kind, len(shown))
        image.seek(4)
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    ground = tuple(bytes.fromhex(LOOKS[NEW].ground.removeprefix("#")))
    assert min(sum(abs(a - b) for a, b in zip(ground, colour, strict=True)) for colour in colours) < 12


def test_an_animation_begins_with_the_decoded_text_which_a_preview_shows(tmp_path):
    shown = list(frames(REPLAY, Speller(spell)))
    for name, states in (("all.png", shown), ("last.png", shown[-1:])):
        write_animation(states, tmp_path / name, "Title")
    with Image.open(tmp_path / "all.png") as animation, Image.open(tmp_path / "last.png") as last:
        assert animation.info["duration"] == 3000
        assert animation.convert("RGB").tobytes() == last.convert("RGB").tobytes()


def test_states_differ_in_grey():
    def grey(colour):
        red, green, blue = bytes.fromhex(colour.removeprefix("#"))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    for look in LOOKS.values():
        assert abs(grey(look.ink) - grey(look.ground or "#ffffff")) > 80
    assert len({(look.line, look.ground is None) for look in LOOKS.values()}) >= 5


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="mp4"):
        write_animation(list(frames(REPLAY, Speller(spell))), tmp_path / "a.mp4", "")


def test_a_terminal_plays_and_a_pipe_gets_lines():
    for terminal in (True, False):
        stream = io.StringIO()
        play(
            frames(REPLAY, Speller(spell)),
            Console(file=stream, force_terminal=terminal, width=60, height=20),
            "Title",
            0.0,
        )
        text = stream.getvalue()
        assert "abce" in text
        assert "Accepted 2 tokens." in text
        assert ("\x1b[" in text) == terminal
    assert "<rejected:d>" in text


def test_the_commands_write_page_and_animation(tmp_path):
    run = write_run(tmp_path / "run", [make_sample("1")])
    outcome = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "page.html")])
    assert outcome.exit_code == 0, outcome.output
    assert (tmp_path / "page.html").read_text("utf-8").startswith("<!doctype html>")
    outcome = CliRunner().invoke(app, ["replay", str(run), "--out", str(tmp_path / "a.gif")])
    assert outcome.exit_code == 0, outcome.output
    assert (tmp_path / "a.gif").stat().st_size > 1000


def test_no_token_and_no_title_acts_on_a_terminal():
    for terminal in (True, False):
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=terminal, width=60, height=20, color_system=None)
        play(frames(REPLAY, Speller(lambda tokens: "\x1b]0;t\x07\x9b" * len(tokens))), console, "\x1b]0;t\x07", 0.0)
        assert "\x1b]" not in stream.getvalue()
        assert not {"\x07", "\x9b"} & set(stream.getvalue())


def test_replay_wants_a_run_or_a_prompt():
    with pytest.raises(ConfigError, match="one of the two"):
        CliRunner().invoke(app, ["replay"], catch_exceptions=False)


def test_replay_says_that_it_decodes_a_prompt_before_it_does(monkeypatch, caplog):
    def generate(*_arguments, **_settings):
        said.extend(caplog.messages)
        raise ConfigError("not decoded")

    said = []
    monkeypatch.setattr(api, "generate", generate)
    with caplog.at_level("INFO", "refusion_eval"), pytest.raises(ConfigError, match="not decoded"):
        _from_prompt("2 + 2")
    assert said[-1].startswith("decoding the prompt")
