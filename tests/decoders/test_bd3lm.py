"""Block diffusion: the tokens and forwards of dllm's sampler, and what must hold for any settings."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.decoders.bd3lm import Bd3lmSettings, decode
from refusion_eval.decoders.canvas import even_quotas, rounded_quotas
from refusion_eval.errors import ConfigError
from refusion_eval.models.attention import visible
from tests.decoders.baselines import (
    RECORDS_EACH,
    assert_equals_golden,
    decode_golden,
    decode_in_batch,
    forwards_of,
    golden_case,
)
from tests.decoders.scripted import answer_by_place, run_scripted
from tests.examples import examples

MASK, EOS, EOT = 31, 30, 29
COMMITS = ({}, {"separate_commit": True}, {"release_compatible": True})


def released(case):
    """A case's settings; its sampler stops at one id only."""
    wanted = case["settings"]
    return {
        "gen_length": wanted["max_new_tokens"],
        "block_length": wanted["block_size"],
        "steps": wanted["steps"],
        "steps_per_block": wanted["steps_per_block"],
        "temperature": wanted["temperature"],
        "remasking": wanted["remasking"],
        "mask_id": 191,
        "eos_ids": (190,),
    }


def without_cached_padding(case):
    """The case as it is where padding, which nobody sees, takes no room in the cache."""
    padding = case["left_padding"]
    forwards = [{**forward, "ctx": max(0, forward["ctx"] - padding)} for forward in case["forwards"]]
    return {**case, "forwards": forwards}


@pytest.mark.parametrize("number", range(RECORDS_EACH))
def test_tokens_and_forwards_are_those_of_the_public_code(shared: Path, number: int):
    case = golden_case(shared, "bd3lm", number)
    out = decode_golden(shared, case, "bd3lm", release_compatible=True, **released(case))
    assert_equals_golden(out, without_cached_padding(case))


@pytest.mark.parametrize("number", range(RECORDS_EACH))
def test_the_commit_is_exact_and_riding_saves_a_forward_a_block(shared: Path, number: int):
    case = golden_case(shared, "bd3lm", number)
    riding, apart, recomputed = (decode_golden(shared, case, "bd3lm", **released(case), **commit) for commit in COMMITS)
    commits = [forward["commit"] for forward in case["forwards"] if forward["commit"]]
    assert [forward["commit"] for forward in forwards_of(riding)] == commits
    assert riding.tokens == apart.tokens == recomputed.tokens
    num_blocks = len(case["forwards"]) - len(commits)
    assert riding.num_forwards + num_blocks == apart.num_forwards == recomputed.num_forwards == case["num_forwards"]
    rows = [sum(forward["q"] for forward in forwards_of(out)) for out in (riding, apart, recomputed)]
    assert rows[0] == rows[1] < rows[2]


@pytest.mark.parametrize("number", range(RECORDS_EACH))
def test_a_batch_changes_nothing(shared: Path, number: int):
    cases = [golden_case(shared, "bd3lm", other) for other in range(RECORDS_EACH)]
    requests = [(case["prompt_ids"], {"release_compatible": True, **released(case)}) for case in cases]
    requests += [(case["prompt_ids"], released(case)) for case in cases]
    own = {"gen_length": 20, "block_length": 8, "mask_id": 191}
    requests += [([7] * 45, {"threshold": 0.9, **own, **commit}) for commit in COMMITS]
    outs = decode_in_batch(shared, cases[number], "bd3lm", requests)
    assert_equals_golden(outs[number], without_cached_padding(cases[number]))
    assert outs[RECORDS_EACH + number].tokens == outs[number].tokens


answer = answer_by_place(MASK, most=1)  # some confidences are 1
sizes = st.fixed_dictionaries({"gen_length": st.integers(1, 24), "block_length": st.integers(1, 8)})
commits = st.sampled_from(COMMITS)
rules = st.sampled_from([{"threshold": 0.6}, {}, {"steps": 5}, {"steps_per_block": 2}, {"remasking": "random"}])
prompts = st.lists(st.integers(0, 20), min_size=1, max_size=20)


def run(prompt=(1, 2, 3), **chosen):
    return run_scripted(decode, prompt, Bd3lmSettings(mask_id=MASK, **chosen), answer)


@given(prompts, sizes, commits, rules)
@examples(150)
def test_every_row_sees_all_blocks_up_to_its_own_and_nothing_else(prompt, size, commit, rule):
    _, trace, forwards = run(prompt, **size, **commit, **rule)
    num_prompt, block_length = len(prompt), size["block_length"]
    final = [*prompt, *(trace.fixed_tokens()[position] for position in range(size["gen_length"]))]
    cached: list[tuple[int, int]] = []  # (position, token)
    previous: list[tuple[int, int]] = []
    for forward in forwards:
        if forward.commit.keep is not None:
            del cached[forward.commit.keep :]
        cached += [previous[row] for row in forward.commit.rows]
        previous = list(zip(forward.positions, forward.tokens, strict=True))
        num_padded = len(previous) - len(set(forward.positions))
        seen = visible(forward.attention)
        assert not seen[num_padded:, :num_padded].any()
        for row in range(num_padded, len(previous)):
            own = [previous[other] for other in np.flatnonzero(seen[row])]
            block = (previous[row][0] - num_prompt) // block_length
            end = min(num_prompt + (block + 1) * block_length, len(final))
            assert sorted(position for position, _ in cached + own) == list(range(end))
        # What is kept, and what rides along, is final.
        block = (max(forward.positions) - num_prompt) // block_length
        start = num_prompt + block * block_length if forward.reads else max(forward.positions) + 1
        for position, token in cached + previous[num_padded:]:
            assert position >= start or token == final[position]


@given(prompts, sizes, rules)
@examples(80)
def test_commits_cost_one_forward_a_block_unless_they_ride(prompt, size, rule):
    runs = [run(prompt, **size, **rule, **commit) for commit in COMMITS]
    assert runs[0][0] == runs[1][0] == runs[2][0]
    num_blocks = -(-size["gen_length"] // size["block_length"])
    kinds = [[forward.kind for forward in forwards] for _, _, forwards in runs]
    assert kinds[1] == kinds[2]
    assert kinds[1].count("store") == num_blocks
    assert kinds[0] == [kind for kind in kinds[1] if kind == "denoise"]


@given(prompts, sizes, commits)
@examples(60)
def test_a_threshold_of_0_takes_blocks_whole_and_one_above_1_single_tokens(prompt, size, commit):
    def num_steps(**rule):
        return sum(bool(forward.reads) for forward in run(prompt, **size, **commit, **rule)[2])

    assert num_steps(threshold=0.0) == -(-size["gen_length"] // size["block_length"])
    assert num_steps(threshold=1.01) == num_steps() == size["gen_length"]


@given(prompts, st.integers(1, 12), commits, rules)
@examples(40)
def test_blocks_of_one_are_decoded_left_to_right_and_causally(prompt, gen_length, commit, rule):
    _, trace, forwards = run(prompt, gen_length=gen_length, block_length=1, **commit, **rule)
    steps = [index for index, forward in enumerate(forwards) if forward.reads]
    assert trace.fixed_at() == dict(enumerate(steps))
    if not commit:
        for forward in forwards:
            assert (visible(forward.attention) == np.tri(len(forward.tokens), dtype=bool)).all()
        assert [len(forward.tokens) for forward in forwards] == [len(prompt) + 1] + [2] * (gen_length - 1)


@given(sizes, commits, rules)
@examples(80)
def test_decoding_ends_after_the_block_with_a_stop_token(size, commit, rule):
    whole, _, _ = run(**size, **commit, **rule)
    stops = (EOS, EOT, *range(4))
    at = next((index for index, token in enumerate(whole.tokens) if token in stops), None)
    cut, trace, _ = run(eos_ids=stops, **size, **commit, **rule)
    early, early_trace, _ = run(eos_ids=stops, early_stop=True, **size, **commit, **rule)
    assert early == cut
    assert early_trace.num_forwards <= trace.num_forwards
    if at is None:
        assert cut == whole
    else:
        block_end = (at // size["block_length"] + 1) * size["block_length"]
        assert (cut.stop, cut.tokens) == ("eos", whole.tokens[: at + 1])
        assert sorted(trace.fixed_at()) == list(range(min(block_end, size["gen_length"])))


@given(st.integers(1, 64), st.integers(1, 70))
def test_rounded_quotas_fill_a_block_without_empty_steps(num_masked, steps):
    quotas = rounded_quotas(num_masked, steps)
    assert sum(quotas) == num_masked
    assert 0 < min(quotas) <= max(quotas) <= -(-num_masked // steps) + 1
    assert len(quotas) <= steps
    if num_masked % steps == 0 or steps >= num_masked:
        assert quotas == [quota for quota in even_quotas(num_masked, steps) if quota]


def test_halves_are_rounded_to_even_at_single_precision():
    assert rounded_quotas(6, 4) == [2, 1, 2, 1]
    assert rounded_quotas(16, 5) == [3, 3, 3, 4, 3]
    assert rounded_quotas(4, 3) == [1, 1, 2]  # exactly 1.5, were it not for the schedule's float32


def test_random_order_is_drawn_from_the_seed():
    orders = [
        tuple(run(gen_length=8, block_length=8, remasking="random", seed=seed)[1].fixed_at()) for seed in range(4)
    ]
    assert len(set(orders)) > 1
    assert orders[0] == tuple(run(gen_length=8, block_length=8, remasking="random", seed=0)[1].fixed_at())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_length": 0}, "block_length=0"),
        ({"steps": 0}, "steps=0"),
        ({"steps_per_block": 2.5}, "steps_per_block=2.5"),
        ({"steps": 8, "steps_per_block": 2}, "steps 8 and steps_per_block 2 each say how much a forward commits"),
        ({"steps": 8, "threshold": 0.9}, "steps 8 and threshold 0.9 each say"),
        ({"threshold": -1}, "threshold=-1"),
        ({"threshold": 0.9, "remasking": "random"}, "a threshold of 0.9 compares confidences"),
        ({"remasking": "entropy"}, "remasking='entropy'; choose one of low_confidence, random"),
        ({"separate_commit": 2}, "separate_commit=2"),
        ({"mask_id": -1}, "mask_id=-1"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=f"bd3lm: .*{message}"):
        Bd3lmSettings(**{"mask_id": MASK, **wrong})
