"""Eso-LM: the law of its schedule, what every forward feeds and keeps, and that the cache is exact."""

from itertools import accumulate, chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.decoders import refusion
from refusion_eval.decoders.esolm import EsolmSettings, decode
from refusion_eval.decoders.refusion import RefusionSettings
from refusion_eval.engine.engine import Request
from refusion_eval.errors import ConfigError
from refusion_eval.types import Decoded, Fix, Forward, ForwardDone, Read, Readout, causal, draw_key
from tests.decoders.baselines import forwards_of
from tests.decoders.scripted import readout, run_scripted
from tests.engine.random_model import VOCAB_SIZE, dense_logits, random_engine
from tests.examples import examples

MASK, EOS = 31, 30
TINY_MASK = VOCAB_SIZE - 1


@st.composite
def schedules(draw):
    """Settings of any schedule: drawn numbers of tokens, or subcontexts."""
    seed = draw(st.integers(0, 99))
    if draw(st.booleans()):
        alpha_0 = draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
        steps = draw(st.none() | st.integers(1, 20))
        return {"gen_length": draw(st.integers(1, 24)), "alpha_0": alpha_0, "steps": steps, "seed": seed}
    num_steps = draw(st.integers(1, 6))
    return {
        "gen_length": num_steps * draw(st.integers(1, 4)),
        "alpha_0": draw(st.integers(0, num_steps)) / num_steps,
        "subcontext_len": num_steps,
        "subcontext_shuffle": draw(st.booleans()),
        "seed": seed,
    }


prompts = st.lists(st.integers(0, 20), min_size=1, max_size=12)


def answer(forward: Forward, read: Read) -> Readout:
    """Tokens depend on the place and on everything that the forward feeds."""
    keys = [draw_key(7, sum(forward.tokens), forward.positions[row]) for row in read.rows]
    return readout([key % MASK for key in keys], [(key >> 20) % 997 / 997 for key in keys])


def run(prompt=(1, 2, 3), **chosen):
    return run_scripted(decode, prompt, EsolmSettings(mask_id=MASK, **chosen), answer)


# The schedule.


@given(schedules())
@examples(200)
def test_every_position_is_decoded_once_and_the_sequential_part_left_to_right(chosen):
    made = EsolmSettings(mask_id=MASK, **chosen)
    schedule = made.schedule()
    assert all(schedule)
    assert sorted(chain(*schedule)) == list(range(made.gen_length))
    if (num_subcontexts := chosen.get("subcontext_len")) is not None:
        num_parallel = round(made.alpha_0 * num_subcontexts)
        assert [len(step) for step in schedule[:num_parallel]] == [made.gen_length // num_subcontexts] * num_parallel
        assert all(len({position % num_subcontexts for position in step}) == 1 for step in schedule[:num_parallel])
        assert [len(step) for step in schedule[num_parallel:]] == [1] * (
            made.gen_length - sum(map(len, schedule[:num_parallel]))
        )
        assert schedule[num_parallel:] == sorted(schedule[num_parallel:])
    if made.alpha_0 == 1:
        assert len(schedule) <= (made.steps or made.gen_length)
    if made.alpha_0 == 0:
        assert schedule == [[position] for position in range(made.gen_length)]


def chain_of_binomials(alpha_0, steps):
    """Chance of each step for a token, from the release's own chain: alpha at both ends, one step after another."""
    times = [1 - step / steps for step in range(steps + 1)]
    alphas = [alpha_0 * (1 - (1 - 1e-3) * time) for time in times]
    fills = [(after - before) / (1 - before) for before, after in pairwise(alphas)]
    left = [1.0, *accumulate((1 - fill for fill in fills), lambda product, factor: product * factor)]
    return [fill * masked for fill, masked in zip(fills, left, strict=False)]


@pytest.mark.parametrize("alpha_0", [0.25, 0.5, 1.0])
def test_steps_fill_as_many_masks_as_the_releases_binomials(alpha_0):
    length, steps, num_seeds = 64, 4, 300
    chances = chain_of_binomials(alpha_0, steps)
    assert abs(sum(chances) - alpha_0) < 2e-3
    schedules = [
        EsolmSettings(mask_id=MASK, gen_length=length, alpha_0=alpha_0, steps=steps, seed=seed).schedule()
        for seed in range(num_seeds)
    ]
    counts = np.array([[len(step) for step in schedule[:steps]] for schedule in schedules])
    for step, chance in enumerate(chances):
        variance = length * chance * (1 - chance)
        assert abs(counts[:, step].mean() - length * chance) < 4 * (variance / num_seeds) ** 0.5
        assert 0.7 < counts[:, step].var() / variance < 1.35
    # The order is uniform: the first position decoded, and where position 0 comes, are anywhere alike.
    if alpha_0 == 1:
        orders = [list(chain(*schedule)) for schedule in schedules]
        deviation = (length**2 / 12 / num_seeds) ** 0.5
        for drawn in ([order[0] for order in orders], [order.index(0) for order in orders]):
            assert abs(np.mean(drawn) - (length - 1) / 2) < 4 * deviation


def test_one_step_a_position_takes_two_thirds_of_the_forwards():
    # L tokens fall into L steps: a step stays empty with chance (1 - 1 / L)^L.
    lengths = [len(EsolmSettings(mask_id=MASK, gen_length=128, seed=seed).schedule()) for seed in range(60)]
    assert abs(np.mean(lengths) / 128 - (1 - (1 - 1 / 128) ** 128)) < 0.02


def test_subcontexts_by_hand():
    def schedule(**chosen):
        return EsolmSettings(mask_id=MASK, gen_length=8, subcontext_len=4, **chosen).schedule()

    assert schedule() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert schedule(alpha_0=0.5) == [[0, 4], [1, 5], [2], [3], [6], [7]]
    shuffled = [schedule(subcontext_shuffle=True, seed=seed) for seed in range(20)]
    assert all(sorted(map(sorted, made)) == schedule() for made in shuffled)
    assert len({str(made) for made in shuffled}) > 15
    assert {step[0] > step[1] for made in shuffled for step in made} == {True, False}


# What a forward feeds, reads and keeps.


@given(prompts, schedules())
@examples(150)
def test_the_cache_is_everything_clean_in_generation_order_and_never_a_mask(prompt, chosen):
    response, trace, forwards = run(prompt, **chosen)
    made = EsolmSettings(mask_id=MASK, **chosen)
    final = [*prompt, *response.tokens]
    assert len(final) == len(prompt) + made.gen_length
    schedule = made.schedule()
    assert len(forwards) == trace.num_forwards == len(schedule)
    order = [list(range(len(prompt))), *([len(prompt) + p for p in step] for step in schedule)]
    cached: list[tuple[int, int]] = []  # (position, token)
    previous: list[tuple[int, int]] = []
    for step, forward in enumerate(forwards):
        assert forward.commit.keep is None
        cached += [previous[row] for row in forward.commit.rows]
        previous = list(zip(forward.positions, forward.tokens, strict=True))
        assert cached == [(position, final[position]) for position in chain(*order[:step])]
        clean = [(position, final[position]) for position in order[step]]
        assert previous == clean + [(position, MASK) for position in order[step + 1]]
        assert forward.attention == causal(len(previous))
        (read,) = forward.reads
        assert list(read.rows) == list(range(len(clean), len(previous)))
    assert trace.fixed_at() == {position: step for step, taken in enumerate(schedule) for position in taken}
    assert all(list(event.positions) == sorted(event.positions) for event in trace.of(Fix))
    num_rows = sum(event.rows for event in trace.of(ForwardDone))
    assert num_rows == len(prompt) + 2 * made.gen_length - len(schedule[-1])


@given(prompts, schedules(), st.integers(0, 29))
@examples(100)
def test_stopping_early_gives_the_same_text(prompt, chosen, num_stops):
    stops = (EOS, *range(num_stops))
    late, late_trace, _ = run(prompt, eos_ids=stops, **chosen)
    early, early_trace, _ = run(prompt, eos_ids=stops, early_stop=True, **chosen)
    assert early == late
    settled = max((late_trace.fixed_at()[position] for position in range(len(late.tokens))), default=0)
    assert early_trace.num_forwards == (settled + 1 if late.stop == "eos" else late_trace.num_forwards)


def test_a_stop_string_ends_decoding():
    response, trace, _ = run(gen_length=8, alpha_0=0.0, early_stop=True, stop_rule=lambda tokens: len(tokens) == 3)
    assert (response.stop, len(response.tokens), trace.num_forwards) == ("stop_string", 3, 3)


def test_samples_come_from_the_nucleus_with_a_draw_of_their_own():
    _, _, forwards = run(gen_length=12, steps=3, temperature=1.0, p_nucleus=0.9, seed=5)
    reads = [read for forward in forwards for read in forward.reads]
    assert {(read.top_p, read.temperature, read.suppress) for read in reads} == {(0.9, 1.0, (MASK,))}
    assert len(set(chain(*(read.draws for read in reads)))) == 12


# On models.

CHOICES = (
    {"alpha_0": 1.0},
    {"alpha_0": 1.0, "steps": 3},
    {"alpha_0": 0.4, "steps": 6, "seed": 2},
    {"alpha_0": 0.0},
    {"subcontext_len": 6, "subcontext_shuffle": True},
    {"subcontext_len": 4, "alpha_0": 0.5},
)


@pytest.mark.parametrize("chosen", CHOICES)
def test_the_cache_is_exact(chosen):
    engine, prompt = random_engine(3), [4, 7, 1, 9, 2]
    made = EsolmSettings(mask_id=TINY_MASK, gen_length=24, **chosen)
    out = engine.run(decode, prompt, made)
    text = [*prompt, *out.tokens]
    schedule = made.schedule()
    order = list(chain(range(len(prompt)), *([len(prompt) + p for p in step] for step in schedule)))
    num_clean = len(prompt)
    for step in schedule:
        # Anew and at once: everything in generation order, also the masks of later steps.
        fed = [text[position] for position in order[:num_clean]] + [TINY_MASK] * (len(order) - num_clean)
        visible = torch.ones(len(order), len(order)).tril().bool()
        logits = dense_logits(engine.model, fed, order, visible)[num_clean : num_clean + len(step)]
        likeliest = [max(set(range(VOCAB_SIZE)) - {TINY_MASK}, key=row.__getitem__) for row in logits.tolist()]
        assert likeliest == [text[len(prompt) + position] for position in step]
        num_clean += len(step)


def test_a_batch_changes_neither_order_nor_tokens():
    engine = random_engine(5)
    own = {"mask_id": TINY_MASK, "gen_length": 24}
    requests = [
        Request(decode, [number] * (1 + 5 * number % 17), EsolmSettings(temperature=temperature, **own, **chosen))
        for number, (chosen, temperature) in enumerate((c, t) for c in CHOICES for t in (0.0, 1.0))
    ]
    plain = RefusionSettings(slot_size=4, block_size=8, fuse=True, row_cost=0.0, **own)
    requests.insert(3, Request(refusion.decode, [1, 2, 3], plain))
    for index, together in engine.run_many(requests, batch_size=5):
        assert isinstance(together, Decoded)
        alone = engine.run(requests[index].decode, requests[index].prompt, requests[index].settings)
        assert (together.tokens, together.trace.fixed_at()) == (alone.tokens, alone.trace.fixed_at())
        assert forwards_of(together) == forwards_of(alone)


def test_the_order_is_the_seeds_alone():
    engine = random_engine(5)

    def fixed_at(prompt, seed):
        return engine.run(decode, prompt, EsolmSettings(mask_id=TINY_MASK, gen_length=16, seed=seed)).trace.fixed_at()

    assert fixed_at([1, 2], 0) == fixed_at([9] * 30, 0)
    assert len({tuple(sorted(fixed_at([1, 2], seed).items())) for seed in range(5)}) == 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"alpha_0": 1.5}, "alpha_0=1.5"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 4, "subcontext_len": 4}, "steps 4 and subcontext_len 4 each say"),
        ({"subcontext_len": 0}, "subcontext_len=0"),
        ({"gen_length": 10, "subcontext_len": 4}, "gen_length is 10 and subcontext_len 4"),
        ({"gen_length": 8, "subcontext_len": 4, "alpha_0": 0.3}, "alpha_0 is 0.3 of 4 steps"),
        ({"subcontext_shuffle": True}, "subcontext_shuffle needs subcontext_len"),
        ({"subcontext_shuffle": 2}, "subcontext_shuffle=2"),
        ({"p_nucleus": 0}, "p_nucleus=0"),
        ({"p_nucleus": 1.1}, "p_nucleus=1.1"),
        ({"eos_ids": (MASK,)}, "also an end-of-sequence id"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=f"esolm: .*{message}"):
        EsolmSettings(**{"mask_id": MASK, **wrong})
