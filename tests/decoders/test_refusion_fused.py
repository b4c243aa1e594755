"""Fusing forwards changes their number and nothing else: on a random model, and chances and costs by hand."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.decoders.refusion import RefusionSettings, decode
from refusion_eval.decoders.refusion_fused import (
    ForwardCost,
    SlotForecast,
    acceptance,
    length_chances,
    profitable_branches,
    profitable_lengths,
)
from refusion_eval.types import DROP_ALL, Decoding, Forward, Read, Response, Select, Trace, causal, draw_key
from tests.decoders.oracle import OracleEngine
from tests.engine.random_model import VOCAB_SIZE, dense_logits, random_engine, random_transformer
from tests.examples import examples

MODEL, ENGINE = random_transformer(5), random_engine(5)


@st.composite
def any_settings(draw: st.DrawFn) -> dict[str, object]:
    slot_size = draw(st.sampled_from([1, 2, 4, 8]))
    return {
        "gen_length": draw(st.integers(1, 24)),
        "slot_size": slot_size,
        "block_size": slot_size * draw(st.integers(1, 4)),
        "tau_slot": draw(st.sampled_from([0.0, 0.2, 0.5, 0.9])),
        "tau_token": draw(st.sampled_from([0.0, 0.05, 0.2, 0.6])),
        "temperature": draw(st.sampled_from([0.0, 0.0, 1.0])),
        "seed": draw(st.integers(0, 3)),
        "mask_id": VOCAB_SIZE - 1,
        "eos_ids": (VOCAB_SIZE - 2,),
        "order": draw(st.sampled_from(["confidence", "left_to_right", "random"])),
        "recompute_kv": draw(st.booleans()),
        "verify_independently": draw(st.booleans()),
        "completion": draw(st.sampled_from(["paper", "verifier"])),
    }


@given(any_settings(), st.sampled_from([0.0, 0.02, 0.3]), st.sampled_from([0, 40]))
@examples(80)
def test_fused_or_not_the_tokens_are_the_same(common: dict[str, object], row_cost: float, free_rows: int):
    prompt = [3, 1, 4, 1, 5]
    plain = ENGINE.run(decode, prompt, RefusionSettings(**common, fuse=False))
    costs = {"row_cost": row_cost, "free_rows": free_rows}
    fused = ENGINE.run(decode, prompt, RefusionSettings(**common, fuse=True, **costs))
    assert fused.tokens == plain.tokens
    assert fused.stop == plain.stop
    assert fused.num_forwards <= plain.num_forwards


@given(any_settings())
@examples(40)
def test_recomputing_where_it_changes_nothing_changes_no_token(common: dict[str, object]):
    chosen = common | {"recompute_kv": False, "block_size": common["slot_size"]}  # one slot at a time
    plain = ENGINE.run(decode, [3, 1, 4, 1, 5], RefusionSettings(**chosen, fuse=False))
    again = ENGINE.run(decode, [3, 1, 4, 1, 5], RefusionSettings(**chosen | {"recompute_kv": True}, fuse=False))
    assert again.tokens == plain.tokens
    assert again.num_forwards == plain.num_forwards + sum(1 for _ in plain.trace.of(Select))


@given(st.integers(1, 20), st.integers(1, 6))
@examples(40)
def test_serial_decoding_reads_each_token_as_one_uncached_forward_does(gen_length: int, slot_size: int):
    common = {"gen_length": gen_length, "slot_size": slot_size, "block_size": slot_size, "mask_id": VOCAB_SIZE - 1}
    serial = ENGINE.run(decode, [3, 1, 4], RefusionSettings(**common, serial=True))
    assert serial.num_forwards == len(serial.tokens) == gen_length
    for position, token in enumerate(serial.tokens):
        mask = [VOCAB_SIZE - 1] if position % slot_size == 0 else []
        text = [3, 1, 4, *serial.tokens[:position], *mask]
        assert ENGINE.run(last_row, text, None).tokens == (token,)


def last_row(text: list[int], _settings: None, trace: Trace) -> Decoding:
    read = Read(rows=(len(text) - 1,), suppress=(VOCAB_SIZE - 1,))
    (readout,) = yield Forward(text, range(len(text)), causal(len(text)), (read,))
    tokens = (int(readout.tokens[0]),)
    trace.fix((0,), tokens)
    trace.stop("length", 1)
    return Response(tokens, "length")


class _Uncached:
    """The random model as `OracleEngine` calls a model of transformers."""

    dtype = torch.float32

    def __call__(
        self, *, input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool
    ) -> SimpleNamespace:
        assert not use_cache
        logits = dense_logits(MODEL, input_ids[0].tolist(), position_ids[0].tolist(), attention_mask[0, 0] == 0)
        return SimpleNamespace(logits=logits[None])


@given(any_settings(), st.booleans())
@examples(40)
def test_tokens_and_forwards_are_those_of_an_engine_that_caches_nothing(common: dict[str, object], fuse: bool):
    chosen = RefusionSettings(**common | {"temperature": 0.0}, fuse=fuse)
    expected, trace = OracleEngine(_Uncached()).run(decode, [3, 1, 4, 1, 5], chosen)
    found = ENGINE.run(decode, [3, 1, 4, 1, 5], chosen)
    assert (found.tokens, found.stop, found.num_forwards) == (expected.tokens, expected.stop, trace.num_forwards)


def _token_by_token(prompt: Sequence[int], settings: RefusionSettings, trace: Trace) -> Decoding:
    """Serial decoding in which the noise of a token depends on its position alone."""
    tokens: list[int] = []
    for position in range(settings.gen_length):
        fed = [*prompt, *tokens, *[settings.mask_id] * (position % settings.slot_size == 0)]
        place = len(prompt) + position
        read = Read(
            rows=(len(fed) - 1,),
            suppress=(settings.mask_id,),
            temperature=settings.temperature,
            draws=(draw_key(settings.seed, place),) if settings.temperature else (),
        )
        (readout,) = yield Forward(fed, range(len(fed)), causal(len(fed)), (read,), DROP_ALL)
        tokens.append(int(readout.tokens[0]))
        if tokens[-1] in settings.eos_ids:
            return Response(tuple(tokens), "eos")
    return Response(tuple(tokens), "length")


@given(any_settings(), st.booleans())
@examples(60)
def test_the_verifiers_tokens_are_those_of_token_by_token_decoding(common: dict[str, object], fuse: bool):
    one_slot = common | {"completion": "verifier", "tau_token": 1.0, "block_size": common["slot_size"]}
    chosen = RefusionSettings(**one_slot | {"verify_independently": False, "recompute_kv": False}, fuse=fuse)
    prompt = [3, 1, 4, 1, 5]
    expected = ENGINE.run(_token_by_token, prompt, chosen)
    found = ENGINE.run(decode, prompt, chosen)
    assert (found.tokens, found.stop) == (expected.tokens, expected.stop)


def test_chances_of_lengths_add_up_to_one():
    chances = length_chances(np.array([0.9, 0.5, 0.8]))
    assert chances == pytest.approx([0.1, 0.45, 0.09, 0.36])


def test_free_rows_cost_nothing_and_further_ones_their_share():
    cost = ForwardCost(free_rows=100, row_cost=0.01)
    assert [cost.gain(1, saved_rows=rows, num_rows=1, extra_rows=0) for rows in (1, 100, 150)] == [1.0, 1.0, 1.5]
    assert cost.gain(0.5, saved_rows=50, num_rows=80, extra_rows=40) == pytest.approx(0.5 - 0.2)


def test_the_token_behind_the_valid_prefix_is_certain_and_an_eos_finishes_a_slot():
    probs = np.array([0.3, 0.3, 0.9, 0.5], dtype=np.float32)
    forecast = SlotForecast.estimate([1, 2, 3, 4], probs, valid=1, eos_ids=())
    assert forecast.finished == pytest.approx(0.45)
    assert forecast.lengths == [(pytest.approx(0.45), 3), (pytest.approx(0.1), 2)]
    ended = SlotForecast.estimate([1, 2, 9, 4], probs, valid=1, eos_ids=(9,))
    assert ended.finished == pytest.approx(0.9)
    assert ended.lengths == [(pytest.approx(0.1), 2)]


def test_predictions_are_attached_only_if_all_slots_are_likely_covered():
    sure, open_ = SlotForecast(1.0, []), SlotForecast(0.2, [(0.7, 2), (0.1, 1)])
    cheap, dear = ForwardCost(0, 0.001), ForwardCost(0, 2.0)
    assert profitable_lengths([sure, open_], 4, cheap, num_rows=8) == [[], [2, 1]]
    assert profitable_lengths([open_], 4, dear, num_rows=8) == [[2]]
    assert profitable_lengths([sure], 4, cheap, num_rows=8) == [[]]


def test_no_plan_is_no_branch():
    assert profitable_branches([], ForwardCost(0, 0.0), 8) == []


def test_without_a_threshold_every_draft_is_certain_to_be_accepted():
    probs_K = np.array([0.01, 0.4])
    assert acceptance(probs_K, 0.0).tolist() == [1, 1]
    assert acceptance(probs_K, 0.3).tolist() == [0.01, 0.4]


@pytest.mark.parametrize("fuse", [False, True])
def test_a_response_that_fills_no_block_is_empty_if_release_compatible(fuse: bool):
    sizes = {"gen_length": 4, "slot_size": 4, "block_size": 8, "mask_id": VOCAB_SIZE - 1}
    decoded = ENGINE.run(decode, [3, 1, 4], RefusionSettings(**sizes, release_compatible=True, fuse=fuse))
    assert (decoded.tokens, decoded.num_forwards) == ((), 0)
