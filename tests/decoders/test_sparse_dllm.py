"""Sparse-dLLM's cache: what is fed and kept when, that keeping all is the dual cache one step later, and batches."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.decoders import fast_dllm
from refusion_eval.decoders.canvas import even_quotas
from refusion_eval.decoders.dream import quota, shares
from refusion_eval.decoders.fast_dllm import FastDllmDreamSettings, FastDllmLladaSettings
from refusion_eval.engine.engine import Engine, Request
from refusion_eval.engine.recorded import recorder
from refusion_eval.errors import ConfigError
from refusion_eval.models import attention
from refusion_eval.types import (
    DROP_ALL,
    NOTHING,
    Commit,
    Confidence,
    Forward,
    ForwardDone,
    Read,
    Response,
    bidirectional,
    draw_key,
)
from tests.decoders.baselines import forwards_of
from tests.decoders.scripted import answer_by_place, blocks, run_scripted
from tests.engine.random_model import VOCAB_SIZE, random_engine, random_transformer
from tests.examples import examples

MASK = VOCAB_SIZE - 1
LLADA = FastDllmLladaSettings(mask_id=MASK, gen_length=12, block_length=6, cache="sparse", keep_ratio=1.0)
DREAM = FastDllmDreamSettings(
    mask_id=MASK, gen_length=12, block_length=6, cache="sparse", keep_ratio=1.0, alg="entropy", steps=12
)
PROMPTS = [[draw_key(5, number, place) % MASK for place in range(2 + 3 * number)] for number in range(4)]


def dual_one_step_later(prompt, chosen, trace):
    """Plain LLaDA or Dream in blocks; from a block's third forward on the second one's rows around the block stay."""
    is_dream = isinstance(chosen, FastDllmDreamSettings)
    tokens, length = [*prompt, *[MASK] * chosen.gen_length], len(prompt) + chosen.gen_length
    for start in range(len(prompt), length, chosen.block_length):
        end = start + chosen.block_length
        for number in count():
            masked = [place for place in range(start, end) if tokens[place] == MASK]
            if not masked:
                break
            fed, commit = range(length), DROP_ALL
            if number >= 2:
                fed = range(start, end)
                commit = Commit([*range(start), *range(end, length)]) if number == 2 else NOTHING
            if is_dream and number == 0:
                masked = masked[:1]
            rows = [place - fed.start - is_dream for place in masked]
            dtype = "model" if is_dream else "float64"
            confidence = Confidence(dtype=dtype, choose=is_dream)
            read = Read(rows, suppress=(MASK,), entropy=is_dream, confidence=confidence)
            (got,) = yield Forward(tokens[fed.start : fed.stop], fed, bidirectional(len(fed)), (read,), commit)
            scores = -got.entropy if is_dream else got.probs
            if not is_dream:
                num_chosen = even_quotas(chosen.block_length, chosen.steps_per_block)[number]
            elif number == 0:
                num_chosen = 1
            else:
                num_chosen = quota(len(masked), shares(chosen.steps_per_block, chosen.eps)[number])
            for index in np.argsort(-scores, kind="stable")[:num_chosen]:
                tokens[masked[index]] = int(got.tokens[index])
    return Response(tuple(tokens[len(prompt) :]), "length")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("chosen", [LLADA, replace(LLADA, steps=6), DREAM, replace(DREAM, steps=8)])
def test_keeping_all_is_the_dual_cache_one_step_later(seed, chosen):
    engine = random_engine(seed)
    decode = fast_dllm.decode_dream if isinstance(chosen, FastDllmDreamSettings) else fast_dllm.decode
    for prompt in PROMPTS:
        wanted = engine.run(dual_one_step_later, prompt, chosen)
        got = engine.run(decode, prompt, chosen)
        assert got.tokens == wanted.tokens
        rows = [[(done["q"], done["ctx"]) for done in forwards_of(out)] for out in (got, wanted)]
        assert rows[0] == rows[1]


def test_keeping_less_changes_some_tokens_and_a_dual_cache_is_another_thing():
    outs: dict[object, set] = {}
    for name, chosen in {
        "all": LLADA,
        "half": replace(LLADA, keep_ratio=0.5),
        "none": replace(LLADA, keep_ratio=0.0),
        "dual": replace(LLADA, cache="dual"),
    }.items():
        outs[name] = {(seed, random_engine(seed).run(fast_dllm.decode, PROMPTS[3], chosen).tokens) for seed in range(8)}
    assert all(outs[one] != outs[other] for one in outs for other in outs if one != other)


answer = answer_by_place(MASK)


@given(blocks(3, 3), st.floats(0, 1), st.sampled_from([1, 3, 5]), st.booleans())
@examples(60)
def test_the_second_forward_of_a_block_is_scored_and_the_third_keeps_the_best_share(size, ratio, kernel_size, is_dream):
    same = {"mask_id": MASK, "cache": "sparse", "keep_ratio": ratio, "kernel_size": kernel_size, **size}
    if is_dream:
        _, trace, forwards = run_scripted(
            fast_dllm.decode_dream, [1, 2, 3], FastDllmDreamSettings(threshold=1.3, **same), answer
        )
    else:
        _, trace, forwards = run_scripted(fast_dllm.decode, [1, 2, 3], FastDllmLladaSettings(**same), answer)
    length, each = 3 + size["gen_length"], size["block_length"]
    assert len(forwards) == size["gen_length"]
    cached = [event.cached for event in trace.events if isinstance(event, ForwardDone)]
    for index, forward in enumerate(forwards):
        block, number = divmod(index, each)
        own = range(3 + block * each, 3 + (block + 1) * each)
        rest = [row for row in range(length) if row not in own]
        assert list(forward.positions) == list(range(length) if number < 2 else own)
        assert forward.kind == ("refresh" if number == 1 else "denoise" if number < 2 or not is_dream else "decode")
        if number == 1:
            scores = forward.approximation
            assert (list(scores.queries), list(scores.keys)) == (list(own), rest)
            assert (scores.best, scores.pooling) == (int(len(rest) * ratio), kernel_size)
        else:
            assert forward.approximation is None
        if number == 2:
            assert list(forward.commit.rows) == rest
        else:
            assert forward.commit == (DROP_ALL if number < 2 else NOTHING)
        assert cached[index] == (0 if number < 2 else int(len(rest) * ratio))


@pytest.mark.parametrize("max_padding", [0.0, float("inf")])
@pytest.mark.parametrize("batch_size", [2, 5, 16])
def test_a_batch_changes_nothing(batch_size, max_padding, monkeypatch):
    monkeypatch.setattr(attention, "MAX_CPU_PADDING", max_padding)
    engine = random_engine(2)
    requests = []
    for prompt in PROMPTS:
        for ratio in (0.0, 0.3, 0.5, 1.0):
            requests.append(Request(fast_dllm.decode, prompt, replace(LLADA, keep_ratio=ratio, steps=8)))
            requests.append(Request(fast_dllm.decode_dream, prompt, replace(DREAM, keep_ratio=ratio)))
        requests.append(Request(fast_dllm.decode, prompt, replace(LLADA, cache="dual")))
    together = dict(engine.run_many(requests, batch_size))
    for number, request in enumerate(requests):
        alone = engine.run(request.decode, request.prompt, request.settings)
        assert together[number].tokens == alone.tokens
        assert forwards_of(together[number]) == forwards_of(alone)


def test_fixed_shapes_give_the_same_tokens():
    model = random_transformer(4)
    free, static = Engine(model, "sdpa"), Engine(model, "sdpa", record=recorder(model.device))
    for prompt in PROMPTS:
        chosen = replace(LLADA, keep_ratio=0.5)
        wanted = free.run(fast_dllm.decode, prompt, chosen)
        got = static.run(fast_dllm.decode, prompt, chosen)
        assert got.tokens == wanted.tokens
        assert forwards_of(got) == forwards_of(wanted)


@pytest.mark.parametrize("kind", [FastDllmLladaSettings, FastDllmDreamSettings])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"keep_ratio": 1.5}, "keep_ratio=1.5"),
        ({"keep_ratio": "half"}, "keep_ratio='half'"),
        ({"kernel_size": 4}, "kernel_size is 4; scores are pooled around each row"),
        ({"kernel_size": 0}, "kernel_size=0"),
        ({"cache": "sparser"}, "choose one of none, prefix, dual, sparse"),
    ],
)
def test_settings_that_cannot_be_are_refused(kind, wrong, message):
    with pytest.raises(ConfigError, match=message):
        kind(mask_id=MASK, **wrong)


def test_positions_that_are_not_ranked_are_refused():
    with pytest.raises(ConfigError, match="fast_dllm_dream: alg is origin, and with cache sparse positions are ranked"):
        FastDllmDreamSettings(mask_id=MASK, cache="sparse", alg="origin")
    FastDllmDreamSettings(mask_id=MASK, cache="sparse", alg="maskgit_plus")
