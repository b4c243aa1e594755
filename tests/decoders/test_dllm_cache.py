"""dLLM-Cache under LLaDA's and Dream's decoders: what each step computes, and where theory says nothing may change."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.decoders import dream, llada
from refusion_eval.decoders.dream import DreamSettings
from refusion_eval.decoders.fast_dllm import FastDllmDreamSettings
from refusion_eval.decoders.llada import LladaSettings
from refusion_eval.engine.engine import Engine, Request
from refusion_eval.errors import ConfigError
from refusion_eval.types import FeatureReuse, draw_key
from tests.decoders.baselines import forwards_of
from tests.decoders.scripted import answer_by_place, run_scripted
from tests.engine.random_model import VOCAB_SIZE, random_engine, random_transformer
from tests.examples import examples

MASK = VOCAB_SIZE - 1
LLADA = LladaSettings(mask_id=MASK, gen_length=12, block_length=6)
DREAM = DreamSettings(mask_id=MASK, gen_length=12)
DECODE = {LladaSettings: llada.decode, DreamSettings: dream.decode}
PROMPTS = [[draw_key(5, number, place) % MASK for place in range(1 + 3 * number)] for number in range(4)]


def cached(chosen, prompt, response, ratio=0.0):
    return replace(chosen, prompt_interval_steps=prompt, gen_interval_steps=response, transfer_ratio=ratio)


def run(engine, prompt, chosen):
    return engine.run(DECODE[type(chosen)], prompt, chosen)


def recomputing(decode):
    """The same decoder, asking for the features of all rows at every step."""

    def decode_so(prompt, chosen, trace):
        decoding = decode(prompt, chosen, trace)
        forward = next(decoding)
        while True:
            assert forward.approximation is None
            try:
                forward = decoding.send((yield replace(forward, approximation=FeatureReuse(len(prompt)))))
            except StopIteration as stop:
                return stop.value

    return decode_so


@pytest.mark.parametrize("chosen", [LLADA, replace(LLADA, temperature=0.8), DREAM, replace(DREAM, steps=7)])
@pytest.mark.parametrize("seed", range(3))
def test_intervals_of_1_give_the_uncached_tokens(chosen, seed):
    engine = random_engine(seed)
    for prompt in PROMPTS:
        plain = run(engine, prompt, chosen)
        same = engine.run(recomputing(DECODE[type(chosen)]), prompt, chosen)
        assert same.tokens == plain.tokens
        assert forwards_of(same) == forwards_of(plain)


@pytest.mark.parametrize("chosen", [LLADA, DREAM])
@pytest.mark.parametrize("seed", range(4))
def test_a_share_of_1_is_a_refresh_of_the_response_at_every_step(chosen, seed):
    engine = random_engine(seed)
    for prompt in PROMPTS:
        wanted = run(engine, prompt, cached(chosen, 50, 1))
        for interval in (2, 5, 50):
            assert run(engine, prompt, cached(chosen, 50, interval, 1.0)).tokens == wanted.tokens


@pytest.mark.parametrize("seed", range(6))
def test_with_one_layer_keys_and_values_of_the_prompt_are_never_stale(seed):
    engine = Engine(random_transformer(seed, num_layers=1), "sdpa")
    for prompt in PROMPTS:
        plain = run(engine, prompt, LLADA)
        for chosen in (cached(LLADA, 50, 1), cached(LLADA, 3, 1, 0.25), cached(LLADA, 50, 4, 1.0)):
            assert run(engine, prompt, chosen).tokens == plain.tokens


@pytest.mark.parametrize("chosen", [LLADA, DREAM])
def test_with_more_layers_reuse_changes_some_tokens(chosen):
    plain, stale, adapting = (
        [run(random_engine(seed), PROMPTS[2], which).tokens for seed in range(6)]
        for which in (chosen, cached(chosen, 50, 50), cached(chosen, 50, 50, 0.25))
    )
    assert plain != stale != adapting != plain


@pytest.mark.parametrize("batch_size", [2, 5, 16])
def test_a_batch_changes_nothing(batch_size):
    engine = random_engine(3)
    schedules = [(1, 1, 0.0), (4, 3, 0.25), (50, 7, 0.25), (2, 5, 0.0), (5, 1, 0.0)]
    requests = [
        Request(DECODE[type(chosen)], prompt, cached(chosen, *schedule))
        for prompt in PROMPTS
        for schedule in schedules
        for chosen in (LLADA, DREAM)
    ]
    together = dict(engine.run_many(requests, batch_size))
    for number, request in enumerate(requests):
        alone = engine.run(request.decode, request.prompt, request.settings)
        assert together[number].tokens == alone.tokens
        assert forwards_of(together[number]) == forwards_of(alone)


answer = answer_by_place(MASK)


@given(st.sampled_from([LLADA, DREAM]), st.integers(1, 6), st.integers(1, 6), st.floats(0, 1))
@examples(40)
def test_each_part_is_computed_by_its_own_interval_from_the_first_step_on(chosen, prompt, response, ratio):
    decode = DECODE[type(chosen)]
    _, trace, forwards = run_scripted(decode, [1, 2, 3], cached(chosen, prompt, response, ratio), answer)
    _, plain_trace, plain_forwards = run_scripted(decode, [1, 2, 3], chosen, answer)
    assert trace == plain_trace
    assert [replace(forward, approximation=None) for forward in forwards] == plain_forwards
    for step, forward in enumerate(forwards):
        if prompt == response == 1:
            assert forward.approximation is None
        else:
            assert forward.approximation == FeatureReuse(3, step % prompt == 0, step % response == 0, ratio)


@pytest.mark.parametrize("kind", [LladaSettings, DreamSettings])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt_interval_steps": 0}, "prompt_interval_steps=0"),
        ({"gen_interval_steps": 2.5}, "gen_interval_steps=2.5"),
        ({"transfer_ratio": -0.1}, "transfer_ratio=-0.1"),
    ],
)
def test_settings_that_cannot_be_are_refused(kind, wrong, message):
    with pytest.raises(ConfigError, match=message):
        kind(mask_id=MASK, **wrong)


def test_where_features_are_not_reused_it_is_said():
    with pytest.raises(ConfigError, match=r"llada: cfg_scale is 1\.0 with prompt_interval_steps 4"):
        LladaSettings(mask_id=MASK, cfg_scale=1.0, prompt_interval_steps=4)
    with pytest.raises(ConfigError, match="fast_dllm_dream: prompt_interval_steps is 1 and gen_interval_steps 7"):
        FastDllmDreamSettings(mask_id=MASK, gen_interval_steps=7)
