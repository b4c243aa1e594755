import os
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval import api
from refusion_eval.report.frames import Keys, after_key
from refusion_eval.report.replay import Change, Position, Speller, apply, final_pieces, replay_of
from refusion_eval.types import Trace

from .conftest import TRACE, spell


def cells_at(replay, step):
    """What every position looks like after a step."""
    cells = [Position() for _ in range(replay.num_positions)]
    for number, one in enumerate(replay.steps[: step + 1]):
        apply(cells, one, number)
    return cells


def states(replay, step):
    return [cell.state for cell in cells_at(replay, step)]


def told(replay):
    return [
        (step.action, step.forward, [(change.state, change.positions) for change in step.changes])
        for step in replay.steps
    ]


def shown(replay, step):
    return spell([cell.token for cell in cells_at(replay, step) if cell.state == "fixed"])


def test_refusion_plans_drafts_accepts_rejects_and_draws_again():
    replay = replay_of(Trace.from_json(TRACE), slot_size=2)
    assert told(replay) == [
        ("plan", 0, [("planned", (2, 3))]),
        ("draft", 0, [("draft", (2, 3))]),
        ("fix", 1, [("rejected", (3,)), ("fixed", (2,))]),
        ("draft", 1, [("draft", (3,))]),
        ("fix", 2, [("fixed", (3,))]),
        ("plan", 3, [("planned", (0, 1))]),
        ("draft", 3, [("draft", (0, 1))]),
        ("fix", 4, [("fixed", (0, 1))]),
        ("stop", 4, []),
    ]
    assert replay.steps[0].scores == {2: 0.9}
    assert replay.steps[0].num_candidates == 2
    assert replay.kept == (0, 1, 2, 3)
    assert shown(replay, 99) == "abce"


def test_a_rejected_draft_is_shown_once_and_is_a_mask_then():
    trace = Trace()
    trace.forward("plan", 8, 0)
    trace.select("slot", [0, 2], [0.9, 0.8], [0, 2])
    trace.draft([0, 1, 2, 3], [1, 2, 3, 4])
    trace.forward("verify", 4, 4)
    trace.fix([0, 1], [1, 2])
    trace.forward("plan", 2, 6)
    trace.select("slot", [2], [0.9], [2])
    replay = replay_of(trace, slot_size=2)
    assert states(replay, 1) == ["draft"] * 4
    assert states(replay, 2) == ["fixed", "fixed", "rejected", "rejected"]
    assert states(replay, 3) == ["fixed", "fixed", "planned", "planned"]
    assert cells_at(replay, 3)[2].token is None


def test_autoregressive_fixes_one_position_a_forward():
    trace = Trace()
    for position, token in enumerate([7, 8, 9]):
        trace.forward("decode", 5 if position == 0 else 1, position)
        trace.fix([position], [token])
    trace.stop("eos", 3)
    replay = replay_of(trace)
    assert told(replay)[:3] == [("fix", number, [("fixed", (number,))]) for number in range(3)]
    assert [states(replay, step).count("fixed") for step in range(-1, 3)] == [0, 1, 2, 3]


def test_llada_tells_the_choice_together_with_what_it_fixed():
    trace = Trace()
    trace.forward("denoise", 9, 0)
    trace.select("token", [0, 1, 2, 3], [0.1, 0.9, 0.8, 0.2], [1, 2])
    trace.fix([1, 2], [5, 6])
    trace.forward("denoise", 9, 0)
    trace.select("token", [0, 3], [0.3, 0.4], [0, 3])
    trace.fix([0, 3], [4, 7])
    trace.stop("eos", 3)
    first, second, last = replay_of(trace).steps
    assert (first.action, first.num_candidates, first.scores) == ("fix", 4, {1: 0.9, 2: 0.8})
    assert (second.action, second.num_candidates) == ("fix", 2)
    assert last.changes == (Change("dropped", (3,)),)


def test_d2f_adds_up_the_choices_of_its_blocks_and_shows_forwards_that_fix_nothing():
    trace = Trace()
    trace.forward("denoise", 6, 0)
    trace.select("token", [0, 1], [0.95, 0.2], [0])
    trace.select("token", [2, 3], [0.1, 0.2], [])
    trace.fix([0], [1])
    trace.forward("denoise", 6, 0)
    trace.select("token", [1], [0.3], [])
    trace.forward("denoise", 5, 1)
    trace.fix([1, 2, 3], [2, 3, 4])
    replay = replay_of(trace)
    assert [(step.action, step.forward, step.num_candidates) for step in replay.steps] == [
        ("fix", 0, 4),
        ("forward", 1, 1),
        ("fix", 2, 0),
    ]
    assert shown(replay, 9) == "abcd"


def test_what_a_stop_string_cut_off_is_not_kept():
    replay = replay_of(Trace.from_json(TRACE), slot_size=2, num_kept=3)
    assert states(replay, 99) == ["fixed", "fixed", "fixed", "dropped"]


def test_a_trace_that_breaks_off_is_a_replay_too():
    replay = replay_of(Trace.from_json(TRACE[:4]), slot_size=2)
    assert [step.action for step in replay.steps] == ["plan", "draft", "forward"]
    assert replay_of(Trace()).steps == ()


def check_invariants(trace, replay, tokens):
    lit = Counter(
        position
        for step in replay.steps
        for change in step.changes
        if change.state == "fixed"
        for position in change.positions
    )
    assert lit == Counter(dict.fromkeys(trace.fixed_at(), 1))
    assert {step.forward for step in replay.steps if step.forward >= 0} == set(range(trace.num_forwards))
    end = cells_at(replay, len(replay.steps))
    assert [cell.token for cell in end if cell.state == "fixed"] == list(tokens)
    assert not {"draft", "planned", "rejected"} & {cell.state for cell in end}
    pieces = final_pieces(replay, Speller(spell))
    assert "".join(pieces[position] for position in replay.kept) == spell(tokens)


@st.composite
def decodings(draw):
    """Slots in any order; of each draft any prefix of the drafted tokens is accepted and the rest drawn again."""
    k, num_slots = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    trace, masked = Trace(), [k * slot for slot in range(num_slots)]
    while masked:
        chosen = sorted(draw(st.sets(st.sampled_from(masked), min_size=1)))
        trace.forward("plan", len(masked) * k, 0)
        trace.select("slot", masked, [0.5] * len(masked), chosen)
        left = [slot + column for slot in chosen for column in range(k)]
        while left:
            trace.draft(left, [draw(st.integers(0, 50)) for _ in left])
            trace.forward("verify", len(left), 0)
            if draw(st.booleans()):
                trace.forward("refresh", 1, 0)
            taken = draw(st.integers(1, len(left)))
            trace.fix(left[:taken], [position % 50 for position in left[:taken]])
            left = left[taken:]
            if draw(st.booleans()) and not any(position % k for position in left[:1]):
                break
        masked = sorted({position for slot in masked for position in [slot] if slot not in trace.fixed_at()})
    trace.stop("length", draw(st.integers(0, k * num_slots)))
    return trace, k


@given(decodings())
def test_every_fixed_position_lights_once_and_the_end_is_the_decoded_text(case):
    trace, k = case
    fixed = trace.fixed_tokens()
    kept = trace.events[-1].position
    check_invariants(trace, replay_of(trace, slot_size=k), [fixed[position] for position in sorted(fixed)[:kept]])


@pytest.mark.parametrize("decoder", ["refusion", "autoregressive", "llada", "bd3lm", "esolm"])
def test_real_decodings_end_in_their_text(decoder, checkpoint):
    model = api.load_model(checkpoint, device="cpu")
    prompt = model.tokenizer.encode(model.tokenizer.render_chat([{"role": "user", "content": "7 rows of 4 balls?"}]))
    settings = {"gen_length": 32} | ({"slot_size": 8, "block_size": 16} if decoder == "refusion" else {})
    decoded = api.generate(model, prompt, decoder, **settings)
    check_invariants(decoded.trace, replay_of(decoded.trace, slot_size=settings.get("slot_size", 1)), decoded.tokens)
    assert decoded.tokens


def test_a_character_of_several_tokens_stands_at_the_last_of_them():
    letters = {1: b"a", 2: b"\xf0\x9f", 3: b"\x98\x80", 4: b"\xff"}
    speller = Speller(lambda tokens: b"".join(letters[token] for token in tokens).decode("utf-8", "replace"))
    assert speller.pieces([1, 2, 3, 1]) == ["a", "", "😀", "a"]
    assert "".join(speller.pieces([1, 4, 1, 2])).startswith("a\ufffda")
    assert len(speller.pieces([2, 2, 2, 2, 2, 1])) == 6


def test_without_a_tokenizer_tokens_are_shown_by_number():
    assert Speller(None).pieces([5, 12]) == ["[5]", "[12]"]


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("", (3, False)),
        (" ", (2, True)),
        ("\x1b[C", (3, True)),
        ("\x1b[D", (1, True)),
        ("q", (10, False)),
        ("x", (2, False)),
    ],
)
def test_keys_pause_step_and_end_a_replay(key, shown):
    assert after_key(key, 2, is_paused=False, last=9) == shown


def test_steps_end_at_both_ends_and_the_space_bar_goes_on():
    assert after_key("\x1b[D", 0, is_paused=True, last=9) == (0, True)
    assert after_key("\x1b[C", 9, is_paused=True, last=9) == (9, True)
    assert after_key(" ", 4, is_paused=True, last=9) == (4, False)


def test_a_terminal_s_keys_are_read_at_once_and_its_settings_come_back(monkeypatch):
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    keyboard, terminal = pty.openpty()
    with os.fdopen(terminal, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        before = termios.tcgetattr(stdin)
        with Keys() as keys:
            assert keys.read(0.0) == ""
            os.write(keyboard, b" ")
            assert keys.read(5.0) == " "
            assert keys.hint
        assert termios.tcgetattr(stdin) == before
    os.close(keyboard)
