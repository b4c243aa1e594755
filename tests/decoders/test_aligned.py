"""What holds for all decoders whose blocks are counted from the prompt's first token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.decoders import DECODERS
from refusion_eval.models.attention import visible
from tests.decoders import aligned_oracle
from tests.decoders.aligned_oracle import order_of_fixes
from tests.decoders.scripted import answer_by_place, run_scripted
from tests.engine.random_model import VOCAB_SIZE, random_engine
from tests.examples import examples

MASK, EOS, EOT = VOCAB_SIZE - 1, VOCAB_SIZE - 2, VOCAB_SIZE - 3
SETTINGS = {
    "fast_dllm_v2": [
        {"block_length": 8, "small_block_size": 4, "threshold": 0.3},
        {"block_length": 6, "small_block_size": 2, "threshold": 0.5},
        {"block_length": 4, "small_block_size": 4, "threshold": 1.0},
        {"block_length": 4, "small_block_size": 4, "threshold": 0.3, "use_block_cache": True},
    ],
    "llada2": [
        {"block_length": 8, "threshold": 0.3},
        {"block_length": 5, "threshold": 0.9},
        {"block_length": 6, "threshold": 0.3, "edit_threshold": 0.2, "max_post_edit_steps": 3},
        {"block_length": 4, "threshold": 0.4, "edit_threshold": 0.0, "max_post_edit_steps": 5},
        {"block_length": 4, "threshold": 0.4, "edit_threshold": 0.0, "max_post_edit_steps": 0},
    ],
    "sdar": [
        {"block_length": 4},
        {"block_length": 8, "denoising_steps": 3},
        {"block_length": 6, "denoising_steps": 2, "remasking_strategy": "sequential"},
        {"block_length": 8, "remasking_strategy": "low_confidence_dynamic", "confidence_threshold": 0.3},
        {"block_length": 8, "denoising_steps": 4, "remasking_strategy": "low_confidence_dynamic"},
        {"block_length": 8, "remasking_strategy": "entropy_bounded", "eb_threshold": 2.5},
    ],
}
CASES = [(name, number) for name, variants in SETTINGS.items() for number in range(len(variants))]
# Shorter than a block, a block, whole blocks, and a rest, for each of the block lengths.
PROMPTS = [[3 + place * place % 17 for place in range(length)] for length in (1, 3, 4, 5, 6, 8, 10, 12, 16, 21, 24)]


def made(name, chosen, **more):
    return DECODERS[name].Settings(**{"gen_length": 18, "mask_id": MASK, "eos_ids": (EOS, EOT)} | chosen | more)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("name", "number"), CASES)
def test_decoding_with_a_cache_is_decoding_without_one(name, number, seed):
    engine, chosen, ends = random_engine(seed), made(name, SETTINGS[name][number]), set()
    for prompt in PROMPTS:
        out = engine.run(DECODERS[name].decode, prompt, chosen)
        whole = engine.run(getattr(aligned_oracle, name), prompt, chosen)
        assert (out.tokens, out.stop) == (whole.tokens, whole.stop)
        assert order_of_fixes(out.trace) == order_of_fixes(whole.trace)
        ends.add(out.stop)
    assert "length" in ends


answer = answer_by_place(MASK, most=1)
prompts = st.lists(st.integers(0, MASK - 4), min_size=1, max_size=20)
lengths = st.integers(1, 24)
in_blocks = st.sampled_from([case for case in CASES if not SETTINGS[case[0]][case[1]].get("use_block_cache")])
COMMITS = ({}, {"separate_commit": True}, {"release_compatible": True})
commits = st.sampled_from(COMMITS)


def run(case, prompt, **more):
    name, number = case
    if name == "fast_dllm_v2":
        more.pop("separate_commit", None)
        if more.get("release_compatible"):  # a shorter response is refused
            more["gen_length"] += SETTINGS[name][number]["block_length"]
    chosen = made(name, SETTINGS[name][number], **more)
    return chosen, *run_scripted(DECODERS[name].decode, prompt, chosen, answer)


@given(in_blocks, prompts, lengths, commits)
@examples(150)
def test_every_row_sees_all_blocks_up_to_its_own_and_nothing_else(case, prompt, gen_length, commit):
    chosen, _, trace, forwards = run(case, prompt, gen_length=gen_length, eos_ids=(), **commit)
    size, fixed = chosen.block_length, trace.fixed_tokens()
    final = dict(enumerate(prompt)) | {len(prompt) + position: token for position, token in fixed.items()}
    cached: list[tuple[int, int]] = []  # (position, token)
    previous: list[tuple[int, int]] = []
    for forward in forwards:
        if forward.commit.keep is not None:
            del cached[forward.commit.keep :]
        cached += [previous[row] for row in forward.commit.rows]
        assert all(final[position] == token for position, token in cached)  # only what is final stays
        previous = list(zip(forward.positions, forward.tokens, strict=True))
        seen = visible(forward.attention)
        for row, (position, _) in enumerate(previous):
            places = [place for place, _ in cached] + [previous[other][0] for other in np.flatnonzero(seen[row])]
            assert sorted(places) == list(range((position // size + 1) * size))


@given(in_blocks, prompts, lengths)
@examples(60)
def test_the_release_decodes_whole_blocks_and_we_cut_them(case, prompt, gen_length):
    _, ours, _, _ = run(case, prompt, gen_length=gen_length, eos_ids=())
    chosen, whole, trace, _ = run(case, prompt, gen_length=gen_length, eos_ids=(), release_compatible=True)
    assert (len(ours.tokens), ours.stop) == (gen_length, "length")
    assert sorted(trace.fixed_at()) == list(range(len(whole.tokens)))
    gen_length, common = chosen.gen_length, min(gen_length, len(whole.tokens))
    assert ours.tokens[:common] == whole.tokens[:common]
    end = len(prompt) + len(whole.tokens)
    if case[0] == "fast_dllm_v2":  # rounds down to whole blocks, and adds the token of the last forward
        rest = len(prompt) % chosen.block_length
        num_tokens = gen_length // chosen.block_length * chosen.block_length - rest + 1
        assert len(whole.tokens) == num_tokens
    else:
        assert (end - len(prompt) - gen_length, end % chosen.block_length) == (
            -(len(prompt) + gen_length) % chosen.block_length,
            0,
        )


@given(st.sampled_from(CASES), prompts, lengths, commits)
@examples(80)
def test_the_positions_that_decoding_touches_are_told_exactly(case, prompt, gen_length, commit):
    chosen, _, _, forwards = run(case, prompt, gen_length=gen_length, eos_ids=(), **commit)
    touched = 1 + max(position for forward in forwards for position in forward.positions)
    assert touched == len(prompt) + chosen.positions_after(len(prompt)) <= len(prompt) + chosen.num_positions


@given(in_blocks, prompts, lengths)
@examples(60)
def test_stores_cost_a_forward_a_block_unless_they_ride(case, prompt, gen_length):
    if case[0] == "fast_dllm_v2":  # its stores are read
        return
    runs = [run(case, prompt, gen_length=gen_length, eos_ids=(), **commit) for commit in COMMITS]
    fixes = [order_of_fixes(trace) for _, _, trace, _ in runs]
    assert fixes[0] == fixes[1] == fixes[2]
    kinds = [[forward.kind for forward in forwards] for *_, forwards in runs]
    size, num_prompt = runs[0][0].block_length, len(prompt)
    num_blocks = -(-(num_prompt + gen_length) // size) - num_prompt // size
    assert kinds[2].count("store") == kinds[1].count("store") + 1 == num_blocks
    num_prefills = num_prompt // size if case[0] == "llada2" else int(num_prompt >= size)
    assert [kinds[1].count("prefill"), kinds[2].count("prefill")] == [num_prefills] * 2
    assert kinds[0] == [kind for kind in kinds[1] if kind == "denoise"]


@given(in_blocks, prompts, lengths, commits)
@examples(80)
def test_decoding_ends_after_the_block_with_a_stop_token(case, prompt, gen_length, commit):
    _, whole, _, _ = run(case, prompt, gen_length=gen_length, eos_ids=(), **commit)
    stops = tuple(range(5))
    chosen, cut, trace, _ = run(case, prompt, gen_length=gen_length, eos_ids=stops, **commit)
    _, early, early_trace, _ = run(case, prompt, gen_length=gen_length, eos_ids=stops, early_stop=True, **commit)
    assert early == cut
    assert early_trace.num_forwards <= trace.num_forwards
    at = next((index for index, token in enumerate(whole.tokens) if token in stops), None)
    if at is None:
        assert cut == whole
    elif case[0] != "fast_dllm_v2" or not commit.get("release_compatible"):
        block_end = ((len(prompt) + at) // chosen.block_length + 1) * chosen.block_length - len(prompt)
        assert (cut.stop, cut.tokens) == ("eos", whole.tokens[: at + 1])
        assert max(trace.fixed_at()) < block_end
