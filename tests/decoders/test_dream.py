"""Dream's decoder: the public code's tokens and forwards, its schedule, and what must hold for any settings."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.api import generate_many
from refusion_eval.decoders.dream import RANKING_ALGS, DreamSettings, decode, quota, shares
from refusion_eval.errors import ConfigError
from refusion_eval.types import Forward, Read, Readout, Select, draw_key
from tests.decoders.baselines import RECORDS_EACH, assert_equals_golden, decode_golden, golden_case, golden_model
from tests.decoders.scripted import run_scripted
from tests.examples import examples

MASK, EOS = 31, 30
SCHEDULED = ("origin", *RANKING_ALGS)
OFFICIAL_GREEDY = {"temperature": 0.0, "confidence_temperature": 0.1, "confidence_top_p": 0.9}
LENGTHS = st.integers(1, 40)
STEPS = st.integers(1, 60)


def settings_of(case):
    """A record's settings under our names; the release writes None where nothing is cut or drawn."""
    released = case["settings"]
    return {
        "gen_length": released["max_new_tokens"],
        "top_p": released["top_p"] or 1.0,
        "top_k": released["top_k"] or 0,
        "alg_temp": released["alg_temp"] or 0.0,
        **{name: released[name] for name in ("steps", "temperature", "alg", "eps")},
    }


@pytest.mark.parametrize("dtype", ["float32", "float64", "model"])
@pytest.mark.parametrize("number", range(RECORDS_EACH))
def test_tokens_and_forwards_are_those_of_the_public_code(shared: Path, number: int, dtype: str):
    case = golden_case(shared, "dream", number)
    assert_equals_golden(decode_golden(shared, case, "dream", confidence_dtype=dtype, **settings_of(case)), case)


@pytest.mark.parametrize("number", range(RECORDS_EACH))
def test_a_batch_of_unequal_prompts_changes_no_token(shared: Path, number: int):
    case = golden_case(shared, "dream", number)
    prompt = case["prompt_ids"]
    # The last two wait for a place, so that forwards of different steps share a batch.
    prompts = [prompt[:2], prompt, prompt * 3, prompt, prompt[1:]]
    batched = generate_many(golden_model(shared, case), prompts, "dream", batch_size=3, **settings_of(case))
    for out in (batched[1], batched[3]):
        assert_equals_golden(out, case)
    for prompt_ids, out in zip(prompts, batched, strict=True):
        alone = decode_golden(shared, {**case, "prompt_ids": prompt_ids}, "dream", **settings_of(case))
        assert (out.tokens, out.num_forwards) == (alone.tokens, alone.num_forwards)


def test_any_ranking_takes_the_same_tokens_in_one_step(shared: Path):
    case = golden_case(shared, "dream", 0)
    algs = ({"alg": alg} for alg in SCHEDULED)
    outs = [decode_golden(shared, case, "dream", gen_length=20, steps=1, **alg) for alg in (*algs, OFFICIAL_GREEDY)]
    assert len({out.tokens for out in outs}) == 1
    assert {out.num_forwards for out in outs} == {1}


def answer(forward: Forward, read: Read) -> Readout:
    """Tokens, confidences, entropies and margins that depend on place and content; the mask is never chosen."""
    keys = [draw_key(7, sum(forward.tokens), row) for row in read.rows]
    probs, entropy, margin = (np.array([(key >> shift) % 97 / 97 for key in keys]) for shift in (8, 24, 40))
    tokens = np.array([key % MASK for key in keys])
    return Readout(tokens, probs, None, entropy if read.entropy else None, margin if read.margin else None)


def equally_sure(forward: Forward, read: Read) -> Readout:
    """Every distribution has one token left."""
    ones = np.ones(len(read.rows), dtype=np.float32)
    return Readout(np.arange(len(read.rows)), ones, None, 0 * ones, ones)


@given(LENGTHS, STEPS, st.sampled_from(SCHEDULED), st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 1.0]))
@examples(100)
def test_every_step_is_a_forward_of_the_whole_canvas(gen_length, steps, alg, alg_temp, temperature):
    alg_temp = 0.0 if alg == "origin" else alg_temp
    chosen = DreamSettings(
        mask_id=MASK, gen_length=gen_length, steps=steps, alg=alg, alg_temp=alg_temp, temperature=temperature
    )
    response, trace, forwards = run_scripted(decode, [1, 2, 3], chosen, answer)
    assert (len(forwards), len(response.tokens)) == (steps, gen_length)
    assert {len(forward.tokens) for forward in forwards} == {3 + gen_length}
    counts = np.bincount(list(trace.fixed_at().values()), minlength=steps)
    for step, (forward, count) in enumerate(zip(forwards, counts, strict=True)):
        masked = [row for row, token in enumerate(forward.tokens) if token == MASK]
        read = [row for each in forward.reads for row in each.rows]
        if alg == "origin":
            assert len(read) == count
            assert {row + 1 for row in read} <= set(masked)
        else:
            assert count == (len(masked) if step == steps - 1 else quota(len(masked), shares(steps, 1e-3)[step]))
            # Nothing is read where nothing can be chosen, else the row before each mask.
            assert read == ([row - 1 for row in masked] if count else [])
    again, _, _ = run_scripted(decode, [1, 2, 3], chosen, answer)
    assert again == response


@pytest.mark.parametrize("alg", RANKING_ALGS)
def test_equally_sure_positions_are_taken_from_left_to_right(alg):
    _, trace, _ = run_scripted(decode, [1], DreamSettings(mask_id=MASK, gen_length=12, alg=alg), equally_sure)
    assert list(trace.fixed_at()) == list(range(12))


@pytest.mark.parametrize(("alg", "field"), [("maskgit_plus", 0), ("topk_margin", 1), ("entropy", 2)])
def test_each_ranking_prefers_what_it_names(alg, field):
    statistics = {0: [0.9, 0.3, 0.5], 1: [0.1, 0.2, 0.05], 2: [1.0, 0.5, 0.25]}
    best = {0: 0, 1: 1, 2: 2}[field]

    def scripted(forward: Forward, read: Read) -> Readout:
        rows = list(read.rows)
        probs, margin, entropy = (np.array(statistics[number])[rows] for number in range(3))
        return Readout(np.array(rows), probs, None, entropy if read.entropy else None, margin if read.margin else None)

    # Two steps: the first takes one of three, the second the others.
    _, trace, _ = run_scripted(decode, [1], DreamSettings(mask_id=MASK, gen_length=3, steps=2, alg=alg), scripted)
    assert next(trace.of(Select)).chosen == (best,)


def test_a_high_alg_temp_draws_and_a_low_one_ranks():
    def first_chosen(alg_temp, seed):
        chosen = DreamSettings(mask_id=MASK, gen_length=8, steps=4, alg="maskgit_plus", alg_temp=alg_temp, seed=seed)
        return next(run_scripted(decode, [1], chosen, answer)[1].of(Select)).chosen

    assert {first_chosen(1e-6, seed) for seed in range(20)} == {first_chosen(0.0, 0)}
    drawn = [position for seed in range(200) for position in first_chosen(1e6, seed)]
    # Uniform over 8 positions, one at a time.
    assert np.bincount(drawn, minlength=8).min() > 10
    assert len(drawn) == 200


def test_origin_fixes_each_position_with_the_share_of_the_step():
    counts = np.zeros(4)
    for seed in range(100):
        chosen = DreamSettings(mask_id=MASK, gen_length=20, steps=4, alg="origin", seed=seed)
        _, trace, _ = run_scripted(decode, [1], chosen, answer)
        counts += np.bincount(list(trace.fixed_at().values()), minlength=4)
    # A schedule that falls evenly: a quarter of the canvas in each of four steps.
    assert np.abs(counts / counts.sum() - 0.25).max() < 0.05


@given(st.integers(1, 1500), st.sampled_from([1e-3, 1e-5, 0.1, 0.0]))
@examples(200)
def test_shares_are_those_of_torch(steps, eps):
    levels = torch.linspace(1, eps, steps + 1)
    wanted = 1 - levels[1:] / levels[:-1]
    wanted[-1] = 1
    # The last digit of torch depends on the instructions of the processor.
    np.testing.assert_allclose(shares(steps, eps), wanted.numpy(), rtol=0, atol=2.5e-7)


@pytest.mark.parametrize("gen_length", [1, 7, 32, 256, 500, 1024])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_quotas_are_those_of_torch_and_fill_the_canvas(gen_length, ratio):
    steps = max(1, gen_length // ratio)
    levels = torch.linspace(1, 1e-3, steps + 1)
    left, ours, theirs = gen_length, [], []
    for step, share in enumerate(shares(steps, 1e-3)):
        ours.append(quota(left, share))
        last = step == steps - 1
        theirs.append(left if last else int(torch.tensor(float(left)) * (1 - levels[step + 1] / levels[step])))
        left -= ours[-1]
    assert ours == theirs
    assert sum(ours) == gen_length


def test_quotas_of_the_usual_lengths():
    def quotas(gen_length, steps):
        left, filled = gen_length, []
        for share in shares(steps, 1e-3):
            filled.append(quota(left, share))
            left -= filled[-1]
        return filled

    assert quotas(256, 256) == [0, *[1] * 254, 2]
    assert quotas(1024, 1024) == [0, 0, *[1] * 1021, 3]
    assert quotas(512, 256) == [1, *[2] * 254, 3]


@given(LENGTHS, STEPS, st.sampled_from(SCHEDULED))
@examples(60)
def test_stopping_early_gives_the_same_text(gen_length, steps, alg):
    late = DreamSettings(mask_id=MASK, eos_ids=(EOS, *range(15)), gen_length=gen_length, steps=steps, alg=alg)
    response, trace, _ = run_scripted(decode, [5], late, answer)
    early, early_trace, _ = run_scripted(decode, [5], replace(late, early_stop=True), answer)
    assert early == response
    assert early_trace.num_forwards <= trace.num_forwards == steps


def test_confidences_come_from_the_sampled_distribution_or_their_own():
    sampled = DreamSettings(mask_id=MASK, temperature=0.1, top_p=0.9, top_k=5, confidence_dtype="model")
    read = sampled.read([4], 0, [5])
    assert (read.temperature, read.top_p, read.top_k, read.confidence.temperature) == (0.1, 0.9, 5, 0.1)
    assert read.entropy
    assert not read.margin
    assert not read.confidence.choose
    greedy = DreamSettings(mask_id=MASK, confidence_dtype="model").read([4], 0, [5])
    assert (greedy.temperature, greedy.top_p, greedy.confidence.temperature) == (0.0, 1.0, 1.0)
    assert greedy.confidence.choose
    assert not DreamSettings(mask_id=MASK).confidence.choose
    own = DreamSettings(mask_id=MASK, confidence_dtype="model", **OFFICIAL_GREEDY).read([4], 0, [5])
    assert (own.temperature, own.top_p, own.confidence.temperature) == (0.0, 0.9, 0.1)
    assert not own.confidence.choose


def test_confidences_of_their_own_tie_and_go_almost_from_left_to_right(shared: Path):
    case = golden_case(shared, "dream", 2)

    def order(**own):
        out = decode_golden(shared, case, "dream", gen_length=24, **own)
        return list(out.trace.fixed_at())

    def displacement(positions):
        return sum(abs(place - position) for place, position in enumerate(positions))

    assert displacement(order(**OFFICIAL_GREEDY)) < displacement(order()) / 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps=0"),
        (
            {"alg": "confidence_threshold"},
            "choose one of origin, maskgit_plus, topk_margin, entropy, entropy_threshold",
        ),
        ({"top_p": 0}, "top_p=0; it must be above 0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -1}, "top_k=-1"),
        ({"eps": 2}, "eps=2"),
        ({"alg_temp": -1}, "alg_temp=-1"),
        ({"alg": "origin", "alg_temp": 0.5}, "alg=origin draws nothing by confidence"),
        ({"confidence_temperature": 0.0}, "confidence_temperature=0.0; it must be above 0"),
        ({"gen_length": 0}, "gen_length=0"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        DreamSettings(mask_id=MASK, **wrong)


def test_where_tokens_are_sampled_confidences_are_the_samplers():
    own = {"confidence_temperature": 0.5, "confidence_top_p": 0.9}
    sampled = DreamSettings(mask_id=MASK, temperature=0.2, top_p=0.95, **own)
    assert (sampled.confidence.temperature, sampled.read([0], 0, [0]).top_p) == (0.2, 0.95)
    greedy = DreamSettings(mask_id=MASK, top_p=0.95, **own)
    assert (greedy.confidence.temperature, greedy.read([0], 0, [0]).top_p) == (0.5, 0.9)
