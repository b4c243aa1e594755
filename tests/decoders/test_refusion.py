"""ReFusion's control flow on scripted readouts: event lists worked out by hand from Eq. 4-8."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.decoders.refusion import RefusionSettings, decode
from refusion_eval.errors import ConfigError
from refusion_eval.types import Fix, Forward, Read, Readout, Select, causal, draw_key, groups
from tests.decoders.scripted import readout, run_scripted

MASK, EOS = 99, 98
PROMPT = [1, 2, 3]
TEXT = [10, 11, 12, 13, 14, 15, 16, 17]
IN_ORDER = ({"order": "left_to_right"}, {"left_to_right": True})


class Script:
    """Answers from a text: drafts are its tokens; certainty by slot, acceptance by response position."""

    def __init__(
        self, text: Sequence[int], certainty: dict[int, float], rejected: Sequence[int] = (), slot_size: int = 2
    ):
        self.text, self.certainty, self.rejected, self.k = text, certainty, set(rejected), slot_size
        self.doubted: dict[int, float] = {}  # response position -> probability of its draft, if not the slot's

    def __call__(self, forward: Forward, read: Read) -> Readout:
        where = [forward.positions[row] - len(PROMPT) for row in read.rows]
        if read.given is not None:
            probs = [0.0 if position + 1 in self.rejected else 1.0 for position in where]
            return readout([0] * len(where), 0.5, probs)
        tokens = [self.text[position] for position in where]
        slots = [position // self.k * self.k for position in where]
        certain = [self.certainty.get(slot, 0.5) for slot in slots]
        return readout(tokens, [self.doubted.get(p, c) for p, c in zip(where, certain, strict=True)])


def settings(**changes: object) -> RefusionSettings:
    base = {"gen_length": 8, "slot_size": 2, "block_size": 8, "tau_slot": 0.9, "tau_token": 0.4, "mask_id": MASK}
    return RefusionSettings(**{**base, "eos_ids": (EOS,), "fuse": False, **changes})


def test_confident_slots_are_accepted_in_two_forwards():
    answer = Script(TEXT, {0: 1.0, 2: 1.0, 4: 1.0, 6: 1.0})
    response, _trace, forwards = run_scripted(decode, PROMPT, settings(), answer)
    assert response.tokens == tuple(TEXT)
    assert response.stop == "length"
    assert [forward.kind for forward in forwards] == ["plan", "verify"]


def test_first_plan_carries_the_prompt_and_commits_only_the_prompt():
    _, _, forwards = run_scripted(decode, PROMPT, settings(), Script(TEXT, {0: 1.0}))
    assert list(forwards[0].tokens) == PROMPT + [MASK] * 8
    assert list(forwards[1].commit.rows) == [0, 1, 2]


def test_slots_above_the_threshold_are_selected_strictly():
    answer = Script(TEXT, {0: 0.91, 2: 0.9, 4: 0.95, 6: 0.2})
    _, trace, _ = run_scripted(decode, PROMPT, settings(tau_slot=float(np.float32(0.9))), answer)
    first = next(trace.of(Select))
    assert first.candidates == (0, 2, 4, 6)
    assert first.chosen == (0, 4)


def test_without_a_certain_slot_the_best_one_is_selected_and_ties_go_to_the_lowest_position():
    answer = Script(TEXT, {0: 0.3, 2: 0.6, 4: 0.6, 6: 0.1})
    _, trace, _ = run_scripted(decode, PROMPT, settings(), answer)
    assert [event.chosen for event in trace.of(Select)] == [(2,), (4,), (0,), (6,)]


def test_left_to_right_selects_the_first_masked_slot_each_time():
    answer = Script(TEXT, {0: 0.1, 2: 1.0, 4: 1.0, 6: 1.0})
    _, trace, _ = run_scripted(decode, PROMPT, settings(left_to_right=True), answer)
    assert [event.chosen for event in trace.of(Select)] == [(0,), (2,), (4,), (6,)]


def test_slots_in_order_go_by_either_name():
    answer = Script(TEXT, {0: 0.1, 2: 1.0, 4: 1.0, 6: 1.0})
    named, former = (run_scripted(decode, PROMPT, settings(**name), answer)[1] for name in IN_ORDER)
    assert named.events == former.events


def test_random_order_selects_one_slot_at_a_time_by_the_seed_alone():
    def chosen(seed: int, certainty: float) -> list[int]:
        answer = Script(TEXT, dict.fromkeys(range(0, 8, 2), certainty))
        _, trace, _ = run_scripted(decode, PROMPT, settings(order="random", seed=seed), answer)
        return [slot for event in trace.of(Select) for slot in event.chosen]

    orders = {tuple(chosen(seed, 1.0)) for seed in range(40)}
    assert len(orders) > 12
    assert all(sorted(order) == [0, 2, 4, 6] for order in orders)
    assert chosen(3, 1.0) == chosen(3, 0.1)


def test_serial_takes_one_forward_a_token_and_reads_the_first_of_a_slot_from_a_mask():
    answer = Script([10, 11, 12, EOS, *TEXT[4:]], {})

    def next_token(forward: Forward, read: Read) -> Readout:
        (row,) = read.rows
        where = forward.positions[row] - len(PROMPT)
        return readout([answer.text[where if forward.tokens[row] == MASK else where + 1]], 0.1)

    response, trace, forwards = run_scripted(decode, PROMPT, settings(serial=True), next_token)
    assert response.tokens == (10, 11, 12, EOS)
    assert [list(forward.tokens) for forward in forwards] == [[*PROMPT, MASK], [10], [11, MASK], [12]]
    assert [list(forward.positions) for forward in forwards] == [[0, 1, 2, 3], [3], [4, 5], [5]]
    assert [list(forward.commit.rows) for forward in forwards] == [[], [0, 1, 2], [0], [0]]
    assert trace.num_forwards == 4


def test_a_rejected_token_leaves_its_slot_and_the_later_ones_masked():
    answer = Script(TEXT, {0: 1.0, 2: 1.0, 4: 1.0, 6: 1.0}, rejected=[5])
    _, trace, forwards = run_scripted(decode, PROMPT, settings(), answer)
    fixes = [event.positions for event in trace.of(Fix)]
    assert fixes[0] == (0, 1, 2, 3)
    assert [forward.kind for forward in forwards[:3]] == ["plan", "verify", "plan"]
    assert list(forwards[2].commit.rows) == [0, 1, 2, 3]
    assert len(forwards[2].tokens) == 4


def test_a_first_slot_that_fails_sends_all_selected_slots_into_independent_completion():
    answer = Script(TEXT, {0: 1.0, 4: 1.0}, rejected=[1])
    response, _trace, forwards = run_scripted(decode, PROMPT, settings(), answer)
    assert [forward.kind for forward in forwards[:4]] == ["plan", "verify", "predict", "verify"]
    # Slot 4 was already valid: it is only fed again for its keys and values.
    assert forwards[2].attention == groups([2])
    assert forwards[3].attention == groups([2, 2])
    assert list(forwards[2].tokens) == [10, MASK]
    assert forwards[3].reads == ()
    assert list(forwards[4].commit.rows) == [0, 1, 2, 3]
    assert response.tokens == tuple(TEXT)


def test_the_token_behind_the_valid_prefix_is_accepted_whatever_its_probability():
    answer = Script(TEXT, {0: 1.0}, rejected=range(8), slot_size=8)
    response, _trace, forwards = run_scripted(decode, PROMPT, settings(slot_size=8), answer)
    assert response.tokens == tuple(TEXT)
    assert len(forwards) == 2 * 8  # the worst case: two forwards a token


class Verifier(Script):
    """As `Script`, with a verifier whose own tokens are those of another text."""

    def __init__(self, *args: object, own: Sequence[int], **changes: object):
        super().__init__(*args, **changes)
        self.own = own

    def __call__(self, forward: Forward, read: Read) -> Readout:
        answer = super().__call__(forward, read)
        if read.given is None:
            return answer
        own = [self.own[forward.positions[row] - len(PROMPT) + 1] for row in read.rows]
        return readout(own, 0.5, answer.given)


def test_the_verifiers_token_is_kept_and_the_slot_is_drafted_anew_after_it():
    own = [0, 21, 22, 23]
    answer = Verifier(TEXT[:4], {0: 1.0}, rejected=[1], slot_size=4, own=own)
    chosen = settings(gen_length=4, slot_size=4, block_size=4, completion="verifier")
    response, _trace, forwards = run_scripted(decode, PROMPT, chosen, answer)
    assert [forward.kind for forward in forwards] == ["plan", "verify", "predict", "verify"]
    assert list(forwards[2].tokens) == [10, 21, MASK, MASK]
    assert response.tokens == (10, 21, 12, 13)


def test_a_draft_that_is_the_verifiers_own_choice_passes_below_tau_token():
    answer = Verifier(TEXT[:4], {0: 1.0}, rejected=[1, 2, 3], slot_size=4, own=TEXT)
    chosen = settings(gen_length=4, slot_size=4, block_size=4, completion="verifier")
    response, _trace, forwards = run_scripted(decode, PROMPT, chosen, answer)
    assert len(forwards) == 2
    assert response.tokens == tuple(TEXT[:4])


def test_a_slot_that_the_verifier_ends_is_final_and_the_next_plan_computes_its_last_token():
    own = [*TEXT[:3], 23, *TEXT[4:]]
    answer = Verifier(TEXT, {0: 1.0}, rejected=[3], slot_size=4, own=own)
    chosen = settings(slot_size=4, completion="verifier")
    response, _trace, forwards = run_scripted(decode, PROMPT, chosen, answer)
    assert [forward.kind for forward in forwards] == ["plan", "verify", "plan", "verify"]
    assert list(forwards[2].commit.rows) == [0, 1, 2]
    assert list(forwards[2].tokens) == [23, *[MASK] * 4]
    assert response.tokens == (10, 11, 12, 23, 14, 15, 16, 17)


def test_an_eos_of_the_verifier_ends_the_response():
    answer = Verifier(TEXT, {0: 1.0}, rejected=[2], slot_size=4, own=[10, 11, EOS, 13])
    response, _trace, forwards = run_scripted(decode, PROMPT, settings(slot_size=4, completion="verifier"), answer)
    assert response.tokens == (10, 11, EOS)
    assert (response.stop, len(forwards)) == ("eos", 2)


def test_eos_in_the_accepted_prefix_ends_even_when_the_slot_is_not_filled():
    text = [10, 11, EOS, 13, 14, 15, 16, 17]
    answer = Script(text, {0: 1.0, 2: 1.0, 4: 1.0, 6: 1.0}, rejected=[3])
    response, _trace, forwards = run_scripted(decode, PROMPT, settings(), answer)
    assert response.tokens == (10, 11, EOS)
    assert response.stop == "eos"
    assert len(forwards) == 2


def test_slots_before_an_early_eos_are_still_decoded():
    text = [10, 11, 12, 13, EOS, 15, 16, 17]
    answer = Script(text, {4: 1.0})
    response, trace, _ = run_scripted(decode, PROMPT, settings(), answer)
    assert response.tokens == (10, 11, 12, 13, EOS)
    assert [event.chosen for event in trace.of(Select)] == [(4,), (0,), (2,)]


def test_eos_found_in_completion_keeps_unselected_slots_before_it_unless_release_compatible():
    text = [10, 11, 12, 13, 14, EOS, 16, 17]
    answer = Script(text, {4: 1.0}, rejected=[5])
    right, _, _ = run_scripted(decode, PROMPT, settings(), answer)
    released, _, _ = run_scripted(decode, PROMPT, settings(release_compatible=True), answer)
    assert right.tokens == (10, 11, 12, 13, 14, EOS)
    assert released.tokens == (14, EOS)


def test_tokens_after_eos_are_cut_unless_release_compatible():
    text = [10, EOS, 12, 13, 14, 15, 16, 17]
    answer = Script(text, {6: 1.0})
    right, _, _ = run_scripted(decode, PROMPT, settings(), answer)
    released, _, _ = run_scripted(decode, PROMPT, settings(release_compatible=True), answer)
    assert right.tokens == (10, EOS)
    assert released.tokens == (10, EOS, 16, 17)


def test_length_is_rounded_up_for_decoding_and_cut_back_unless_release_compatible():
    answer = Script(TEXT, {0: 1.0, 2: 1.0, 4: 1.0, 6: 1.0})
    right, _, forwards = run_scripted(decode, PROMPT, settings(gen_length=7), answer)
    released, _, _ = run_scripted(decode, PROMPT, settings(gen_length=7, release_compatible=True), answer)
    assert len(right.tokens) == 7
    assert right.stop == "length"
    assert len(released.tokens) == 8
    assert len(forwards[0].tokens) == len(PROMPT) + 8


def test_an_eos_in_the_surplus_is_no_eos_of_the_response():
    answer = Script([*TEXT[:7], EOS], {0: 1.0, 2: 1.0, 4: 1.0, 6: 1.0})
    response, _, _ = run_scripted(decode, PROMPT, settings(gen_length=7), answer)
    assert response.tokens == tuple(TEXT[:7])
    assert response.stop == "length"


def test_the_last_block_is_shorter_when_blocks_do_not_divide_the_length():
    answer = Script(TEXT, {0: 1.0, 2: 1.0, 4: 1.0, 6: 1.0})
    response, _, forwards = run_scripted(decode, PROMPT, settings(block_size=6), answer)
    assert response.tokens == tuple(TEXT)
    assert [len(forward.tokens) for forward in forwards] == [9, 6, 2, 2]


def test_a_block_that_meets_eos_is_the_last_one():
    answer = Script([10, 11, 12, EOS, 14, 15, 16, 17], {0: 1.0, 2: 1.0, 4: 1.0, 6: 1.0})
    response, _, forwards = run_scripted(decode, PROMPT, settings(block_size=4), answer)
    assert response.tokens == (10, 11, 12, EOS)
    assert len(forwards) == 2


def test_recompute_kv_runs_slots_completed_together_once_more_as_one_sequence():
    answer = Script(TEXT, {0: 1.0, 4: 1.0}, rejected=[1])
    response, _, forwards = run_scripted(decode, PROMPT, settings(recompute_kv=True), answer)
    assert [forward.kind for forward in forwards[:6]] == ["plan", "verify", "predict", "verify", "refresh", "plan"]
    refresh, plan = forwards[4], forwards[5]
    assert refresh.attention == causal(4)
    assert list(refresh.tokens) == [10, 11, 14, 15]
    assert not refresh.commit.rows
    assert list(plan.commit.rows) == [0, 1, 2, 3]
    assert response.tokens == tuple(TEXT)


def test_recompute_kv_makes_its_forward_for_accepted_slots_and_in_the_last_iteration_too():
    answer = Script([10, EOS, *TEXT[2:]], {0: 1.0})
    _, _, forwards = run_scripted(decode, PROMPT, settings(block_size=2, recompute_kv=True), answer)
    assert [forward.kind for forward in forwards] == ["plan", "verify", "refresh"]
    refresh = forwards[2]
    assert (list(refresh.tokens), list(refresh.positions)) == ([10, EOS], [len(PROMPT), len(PROMPT) + 1])
    assert not refresh.commit.rows


def test_verify_independently_judges_each_slot_on_its_own_first():
    answer = Script(TEXT, {0: 1.0, 4: 1.0}, rejected=[1])
    _, _, forwards = run_scripted(decode, PROMPT, settings(verify_independently=True), answer)
    assert [forward.kind for forward in forwards[:4]] == ["plan", "verify", "verify", "predict"]
    assert forwards[2].attention == groups([2, 2])


def test_the_mask_token_is_never_drafted_unless_release_compatible():
    _, _, forwards = run_scripted(decode, PROMPT, settings(), Script(TEXT, {0: 1.0}, rejected=[1]))
    _, _, released = run_scripted(
        decode, PROMPT, settings(release_compatible=True), Script(TEXT, {0: 1.0}, rejected=[1])
    )
    choosing = {"plan", "predict"}
    assert {read.suppress for f in forwards if f.kind in choosing for read in f.reads} == {(MASK,)}
    assert {read.suppress for f in released if f.kind in choosing for read in f.reads} == {()}


def test_sampling_draws_depend_on_seed_iteration_and_position_only():
    def draws(seed: int) -> list[tuple[int, ...]]:
        _, _, forwards = run_scripted(decode, PROMPT, settings(temperature=1.0, seed=seed), Script(TEXT, {0: 0.99}))
        return [forward.reads[0].draws for forward in forwards if forward.kind == "plan"]

    assert draws(1) == draws(1) != draws(2)
    assert draws(1)[0] == tuple(draw_key(1, 0, len(PROMPT) + position) for position in range(8))


def test_a_stop_rule_ends_decoding_once_it_holds_for_the_gapless_prefix():
    answer = Script(TEXT, {0: 0.6, 2: 0.7})
    response, _trace, _ = run_scripted(decode, PROMPT, settings(stop_rule=lambda tokens: 11 in tokens), answer)
    assert response.stop == "stop_string"
    assert response.tokens == (10, 11, 12, 13)


@st.composite
def random_cases(draw: st.DrawFn) -> tuple[RefusionSettings, int]:
    slot_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    chosen = RefusionSettings(
        gen_length=draw(st.integers(1, 40)),
        slot_size=slot_size,
        block_size=slot_size * draw(st.integers(1, 5)),
        tau_slot=draw(st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0])),
        tau_token=draw(st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0])),
        mask_id=MASK,
        eos_ids=(EOS,),
        order=draw(st.sampled_from(["confidence", "left_to_right", "random"])),
        recompute_kv=draw(st.booleans()),
        verify_independently=draw(st.booleans()),
        fuse=draw(st.booleans()),
        completion=draw(st.sampled_from(["paper", "verifier"])),
        row_cost=draw(st.sampled_from([0.0, 0.01, 0.05])),
    )
    return chosen, draw(st.integers(0, 2**32 - 1))


@given(random_cases())
def test_any_readouts_give_a_gapless_response_whose_positions_are_fixed_once(case: tuple[RefusionSettings, int]):
    chosen, seed = case
    random = np.random.default_rng(seed)

    def answer(forward: Forward, read: Read) -> Readout:
        tokens = random.choice([*range(10, 20), EOS], size=len(read.rows))
        return readout(tokens, random.random(len(tokens)), None if read.given is None else random.random(len(tokens)))

    response, trace, forwards = run_scripted(decode, PROMPT, chosen, answer)
    fixed_positions = [position for event in trace.of(Fix) for position in event.positions]
    assert len(set(fixed_positions)) == len(fixed_positions)
    fixed = trace.fixed_tokens()
    assert response.tokens == tuple(fixed[position] for position in range(len(response.tokens)))
    assert 1 <= len(response.tokens) <= chosen.gen_length
    assert EOS not in response.tokens[:-1]
    assert (response.tokens[-1] == EOS) == (response.stop == "eos")
    if response.stop == "length":
        assert len(response.tokens) == chosen.gen_length
    assert trace.num_forwards == len(forwards) <= 2 * chosen.num_positions * 2


FREE = {"fuse": True, "row_cost": 0.0}  # rows cost nothing: every branch is attached


def test_fused_an_accepted_draft_brings_its_next_plan_along():
    answer = Script(TEXT, {0: 1.0, 2: 0.5, 4: 0.5, 6: 0.5})
    response, trace, forwards = run_scripted(decode, PROMPT, settings(**FREE), answer)
    assert response.tokens == tuple(TEXT)
    assert [forward.kind for forward in forwards] == ["plan", "verify", "verify", "verify", "verify"]
    assert [event.chosen for event in trace.of(Select)] == [(0,), (2,), (4,), (6,)]
    first = forwards[1]
    assert list(first.tokens[:2]) == [10, 11]
    plan = first.attention[1]
    assert (plan.size, plan.sees, plan.causal) == (6, ((0, 2),), True)
    assert list(first.positions[2:8]) == [len(PROMPT) + position for position in range(2, 8)]
    assert list(forwards[2].commit.rows) == [0, 1]


def test_fused_each_likely_number_of_accepted_slots_has_a_plan_of_its_own():
    answer = Script(TEXT, {0: 1.0, 2: 1.0, 4: 0.5, 6: 0.5}, rejected=[3])
    answer.doubted = {3: 0.5}
    _, trace, forwards = run_scripted(decode, PROMPT, settings(**FREE), answer)
    branches = [segment for segment in forwards[1].attention[1:] if segment.sees]
    assert {(segment.size, segment.sees) for segment in branches} >= {(4, ((0, 4),)), (6, ((0, 2),))}
    assert [forward.kind for forward in forwards[:3]] == ["plan", "verify", "verify"]
    assert [event.candidates for event in trace.of(Select)][1] == (2, 4, 6)


def test_fused_the_plan_of_the_next_block_rides_along_at_the_end_of_a_block():
    answer = Script(TEXT, {0: 1.0, 2: 1.0, 4: 1.0, 6: 1.0})
    _, _, forwards = run_scripted(decode, PROMPT, settings(block_size=4, **FREE), answer)
    assert [forward.kind for forward in forwards] == ["plan", "verify", "verify"]


def test_fused_a_rejected_token_finds_its_next_prediction_computed():
    answer = Script(TEXT, {0: 1.0}, rejected=[2], slot_size=4)
    answer.doubted = {1: 0.9, 2: 0.1, 3: 0.9}
    response, _, forwards = run_scripted(decode, PROMPT, settings(slot_size=4, gen_length=4, **FREE), answer)
    assert response.tokens == tuple(TEXT[:4])
    assert [forward.kind for forward in forwards] == ["plan", "verify", "verify"]


def test_fused_later_slots_are_predicted_from_an_independent_copy():
    answer = Script(TEXT, {0: 1.0, 4: 1.0}, rejected=[1, 5])
    answer.doubted = {1: 0.1, 5: 0.1}
    _, _, forwards = run_scripted(decode, PROMPT, settings(**FREE), answer)
    copy = forwards[1].attention[1]
    assert (copy.size, copy.sees) == (2, ())
    assert list(forwards[1].tokens[4:6]) == [14, 15]
    assert ((4, 5),) in [segment.sees for segment in forwards[1].attention]
    assert [forward.kind for forward in forwards[:3]] == ["plan", "verify", "verify"]


def test_fused_the_refresh_and_the_plan_behind_it_are_one_forward():
    answer = Script(TEXT, {0: 1.0, 4: 1.0}, rejected=[1])
    chosen = settings(recompute_kv=True, fuse=True, row_cost=10.0)
    _, _, forwards = run_scripted(decode, PROMPT, chosen, answer)
    assert [forward.kind for forward in forwards[:5]] == ["plan", "verify", "predict", "verify", "plan"]
    assert list(forwards[4].tokens) == [10, 11, 14, 15, *[MASK] * 4]
    assert list(forwards[5].commit.rows) == [0, 1, 2, 3]


def test_fused_nothing_uncertain_rides_along_where_rows_are_dear():
    answer = Script(TEXT, {0: 0.95, 2: 0.5, 4: 0.5})
    answer.doubted = {3: 0.9, 5: 0.9, 7: 0.9}
    _, _, plain = run_scripted(decode, PROMPT, settings(), answer)
    _, _, fused = run_scripted(decode, PROMPT, settings(fuse=True, row_cost=1e6), answer)
    assert fused == plain


def test_fusing_is_on_by_default_except_where_the_release_is_reproduced():
    assert settings(fuse=None).fused
    assert not settings(fuse=None, release_compatible=True).fused
    assert settings(fuse=True, release_compatible=True).fused
    assert not settings(fuse=None, serial=True).fused


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gen_length": 0}, "gen_length=0"),
        ({"slot_size": 0}, "slot_size=0"),
        ({"block_size": 1}, "block_size is 1 and slot_size 2"),
        ({"block_size": 7}, "for example 8"),
        ({"tau_slot": 1.5}, "tau_slot=1.5"),
        ({"tau_token": float("nan")}, "tau_token=nan"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"gen_length": True}, "gen_length=True"),
        ({"mask_id": -1}, "mask_id=-1"),
        ({"mask_id": EOS}, "also an end-of-sequence id"),
        ({"left_to_right": 2}, "left_to_right=2"),
        ({"order": "best"}, "choose one of confidence, left_to_right, random"),
        ({"order": "random", "left_to_right": True}, "give order alone"),
        ({"serial": True, "order": "random", "recompute_kv": True}, "leave out recompute_kv=true, order=random"),
        ({"fuse": 2}, "fuse=2"),
        ({"free_rows": -1}, "free_rows=-1"),
        ({"row_cost": -0.1}, "row_cost=-0.1"),
    ],
)
def test_bad_settings_are_refused_with_the_offending_value(changes: dict[str, object], named: str):
    with pytest.raises(ConfigError, match=named.replace("(", r"\(")):
        settings(**changes)
