"""What a watcher sees: in place on a terminal, line by line elsewhere, and always the text at the end."""

import io
import os
import re
from itertools import chain

import pytest
import torch
from rich.console import Console

from refusion_eval.hf.streamer import FinishedPrefix, SlotListener, SlotStreamer
from tests.hf.test_generate import Parts

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Bytes:
    """A tokenizer with one byte a token; 0 is special."""

    def decode(self, tokens, skip_special_tokens=False, **_):
        kept = bytes(token for token in tokens if token or not skip_special_tokens)
        return kept.decode("utf-8", errors="replace")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def size(monkeypatch):
    # rich keeps the mapping that was there when it was imported, which another test may have replaced meanwhile.
    monkeypatch.setattr(Console, "_environ", os.environ)
    for name, value in {"COLUMNS": "40", "LINES": "10", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)


def play(streamer, text="naïve slots", order=(4, 0, 8)):
    """Drafts and fixes the slots of four tokens at these positions; the rest of the last one is special."""
    tokens = text.encode().ljust(12, b"\0")
    streamer.put(torch.tensor([[1, 2]]))
    streamer.begin(12)
    for slot in order:
        streamer.update(range(slot, slot + 4), tokens[slot : slot + 4], final=False)
        streamer.update(range(slot, slot + 4), tokens[slot : slot + 4], final=True)
    streamer.finish(list(tokens))
    streamer.end()


def test_elsewhere_every_step_is_a_line_and_the_text_comes_last():
    file = io.StringIO()
    play(SlotStreamer(Bytes(), file))
    assert file.getvalue().splitlines() == ["4-7: 've s'", "0-3: 'naï'", "8-11: 'lots'", "naïve slots"]


def test_a_terminal_is_redrawn_and_keeps_the_text_alone():
    file = Terminal()
    streamer = SlotStreamer(Bytes(), file)
    play(streamer)
    raw = file.getvalue()
    assert "\x1b[2K" in raw  # lines are taken back
    assert raw.endswith("naïve slots\n")
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")  # the cursor is back
    plain = ESCAPE.sub("", raw)
    assert "············" in plain  # all masked at first
    assert "····ve s····" in plain  # the first slot fills in the middle
    assert streamer.text == "naïve slots"


def test_states_differ_on_a_terminal():
    file = Terminal()
    streamer = SlotStreamer(Bytes(), file)
    streamer.begin(6)
    streamer.update([0, 1], b"ab", final=True)
    streamer.update([4], b"e", final=True)
    streamer.update([2], b"c", final=False)
    last = file.getvalue().rsplit("\x1b[2K", 1)[-1]
    streamer.end()
    assert re.search(r"ab\x1b\[2;3mc\x1b\[0m\x1b\[90m·\x1b\[0m\x1b\[1;32me\x1b\[0m", last), repr(last)


def test_new_drafts_replace_the_old_ones():
    file = Terminal()
    streamer = SlotStreamer(Bytes(), file)
    streamer.begin(4)
    streamer.update([0, 1], b"ab", final=False)
    streamer.update([2], b"c", final=False)
    assert "··c·" in ESCAPE.sub("", file.getvalue())
    streamer.end()


def test_a_character_split_over_tokens_of_one_run_is_whole():
    file = io.StringIO()
    streamer = SlotStreamer(Bytes(), file)
    streamer.begin(4)
    streamer.update([1], "é".encode()[:1], final=True)
    streamer.update([2], "é".encode()[1:], final=True)
    assert streamer.text == "é"
    streamer.end()


def test_a_response_taller_than_the_terminal_shows_the_part_at_work():
    file = Terminal()
    streamer = SlotStreamer(Bytes(), file)
    streamer.begin(4000)
    streamer.update(range(3000, 3004), b"here", final=True)
    frame = ESCAPE.sub("", file.getvalue().rsplit("\x1b[2K", 1)[-1])
    streamer.end()
    assert "here" in frame
    assert len(frame.splitlines()) <= 10


def test_it_serves_one_response_after_another():
    file = io.StringIO()
    streamer = SlotStreamer(Bytes(), file)
    play(streamer, "one")
    play(streamer, "two")
    assert [line for line in file.getvalue().splitlines() if ":" not in line] == ["one", "two"]


def test_other_generations_show_their_tokens_in_order():
    file = io.StringIO()
    streamer = SlotStreamer(Bytes(), file)
    for tokens in ([[1, 2]], [ord("a")], [ord("b")]):
        streamer.put(torch.tensor(tokens))
    streamer.end()
    assert file.getvalue().splitlines() == ["0-0: 'a'", "1-1: 'b'", "ab"]
    with pytest.raises(ValueError, match="one response, not 2"):
        streamer.put(torch.ones(2, 3))


def test_it_is_a_listener_and_a_plain_streamer_is_not():
    assert isinstance(SlotStreamer(Bytes(), io.StringIO()), SlotListener)
    assert not isinstance(Parts(), SlotListener)


@pytest.mark.parametrize(("eos_ids", "length", "expected"), [((), 6, 6), ((), 5, 5), ((12,), 6, 3)])
def test_the_prefix_stops_where_the_response_does(eos_ids, length, expected):
    streamer = Parts()
    prefix = FinishedPrefix(streamer, eos_ids, length)
    prefix.begin(6)
    prefix.update([3, 4, 5], [13, 14, 15], final=True)
    prefix.update([0, 1], [1, 1], final=False)
    assert streamer.parts == []
    prefix.update([0, 1], [10, 11], final=True)
    prefix.update([2], [12], final=True)
    prefix.finish([10, 11, 12, 13, 14, 15][:expected])
    assert list(chain(*streamer.parts)) == [10, 11, 12, 13, 14, 15][:expected]
    assert streamer.parts[0] == [10, 11]


def test_a_response_with_gaps_is_put_whole_in_the_end():
    streamer = Parts()
    prefix = FinishedPrefix(streamer, (), 8)
    prefix.update([0, 4], [10, 14], final=True)
    prefix.finish([10, 14])
    assert list(chain(*streamer.parts)) == [10, 14]
