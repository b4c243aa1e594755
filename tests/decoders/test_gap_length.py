"""Gaps of open length: the search for their length, and DreamOn, under which they grow and shrink."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from refusion_eval.api import generate, generate_many, load_model, settings_for
from refusion_eval.decoders import DECODERS
from refusion_eval.decoders.gap_length import Search, holes, searched_length, usual_confidence
from refusion_eval.decoders.infilling import fitted, over_gap, span
from refusion_eval.errors import ConfigError
from refusion_eval.types import Fix, ForwardDone, Readout, Trace
from tests.decoders.baselines import forwards_of, golden_model
from tests.decoders.test_infilling import ENGINE, MASK_ID, MODEL, PREFIX, SUFFIX, around, decode, forwards_made
from tests.engine.random_model import dense_logits
from tests.models import tiny


def longest_by_hand(prompt: list[int], places: range, causal: bool) -> int:
    """The length with the highest mean probability of the best tokens of its masks, by dense logits."""
    means = []
    for length in range(1, len(places) + 1):
        text = [*prompt[: places.start], *[MASK_ID] * length, *prompt[places.stop :]]
        order = list(range(len(text)))
        masks = order[places.start : places.start + length]
        order = [place for place in order if place not in masks] + masks if causal else order
        sees = torch.ones(len(text), len(text), dtype=torch.bool)
        logits = dense_logits(MODEL, [text[place] for place in order], order, sees.tril() if causal else sees)
        probs = logits[[order.index(mask) for mask in masks]].softmax(-1)
        probs[:, MASK_ID] = 0
        means.append(float(probs.max(-1).values.mean()))
    return 1 + means.index(max(means))


@pytest.mark.parametrize("first", [1, 4, 8])
@pytest.mark.parametrize("decoder", ["llada", "fast_dllm_llada", "refusion", "esolm"])
def test_a_search_without_end_finds_the_most_confident_length(decoder: str, first: int):
    entry, prompt = DECODERS[decoder], [*PREFIX, *holes(first, 9), *SUFFIX]
    search = Search(patience=99, calibrated=False)
    small = {"slot_size": 4, "block_size": 8} if decoder == "refusion" else {}
    settings = entry.Settings(mask_id=MASK_ID, **small)
    out = ENGINE.run(over_gap(entry, list, search=search), prompt, settings)
    length = longest_by_hand(prompt, span(prompt), entry.reads.attention == "causal")
    assert (len(out.tokens), out.stop) == (length, "gap")
    known = decode(decoder, around(length), settings)
    assert out.tokens == known.tokens
    assert forwards_of(out)[9:] == forwards_of(known)
    kinds = [event.kind for event in out.trace.of(ForwardDone)]
    assert (kinds[:9], "search" in kinds[9:]) == (["search"] * 9, False)


@pytest.mark.parametrize(
    ("given", "tried"),
    [
        ({}, [8, 9, 10, 11, 12, 7, 6, 5, 4]),  # nothing is better, and four misses end a direction
        ({9: 0.9, 13: 0.95}, [8, 9, 10, 11, 12, 13, 14, 15, 16, 7, 6, 5, 4]),
        ({7: 0.9, 3: 0.95}, [8, 9, 10, 11, 12, 7, 6, 5, 4, 3, 2, 1]),
        ({14: 0.9}, [8, 9, 10, 11, 12, 7, 6, 5, 4]),  # not reached
    ],
)
def test_a_search_climbs_upwards_and_then_downwards(given: dict[int, float], tried: list[int]):
    prompt, found = [*PREFIX, *holes(8, 16), *SUFFIX], []
    searching = searched_length(DECODERS["dream"].reads, prompt, span(prompt), MASK_ID, Search(calibrated=False))
    forward, best = next(searching), None
    while best is None:
        found.append(len(forward.tokens) - len(PREFIX) - len(SUFFIX))
        (read,) = forward.reads
        assert list(read.rows) == list(range(4, 4 + found[-1]))  # Dream's are one row before
        assert read.suppress == (MASK_ID,)  # no gap is filled with masks
        probs = np.full(found[-1], given.get(found[-1], 0.5))
        try:
            forward = searching.send((Readout(np.zeros(found[-1], np.int64), probs),))
        except StopIteration as end:
            best = end.value
    assert found == tried
    assert best == max((length for length in given if length in tried), key=given.__getitem__, default=8)


@pytest.mark.parametrize(("length", "usual"), [(1, 0.937721), (8, 0.586520), (64, 0.252036)])
def test_short_gaps_are_usually_more_confident(length: int, usual: float):
    assert usual_confidence(length) == pytest.approx(usual, abs=1e-6)


@pytest.mark.parametrize("decoder", ["refusion", "llada", "dream", "fast_dllm_llada", "esolm"])
def test_gaps_of_open_length_are_filled_in_a_batch_as_alone(tmp_path: Path, decoder: str):
    family = {"dream": "Dream", "refusion": "qwen3", "esolm": "qwen3"}.get(decoder, "llada")
    tiny.save_checkpoint(tmp_path, family=family)
    model = load_model(str(tmp_path), device="cpu", dtype="float32")
    chosen = {"mask_id": tiny.MASK_ID, "eos_ids": (), "slot_size": 4, "block_size": 8}
    chosen = chosen if decoder == "refusion" else {name: chosen[name] for name in ("mask_id", "eos_ids")}
    pairs = [([3, 1], [9, 2]), ([8, 4, 4], [7]), ([2], [5, 5, 5]), ([7, 7, 7], [1])]
    prefixes, suffixes = ([pair[side] for pair in pairs] for side in (0, 1))
    together = generate_many(model, prefixes, decoder, suffixes=suffixes, gap_tokens=(3, 12), **chosen)
    assert len({len(out.tokens) for out in together}) > 1
    for (prefix, suffix), out in zip(pairs, together, strict=True):
        alone = generate(model, prefix, decoder, suffix=suffix, gap_tokens=(3, 12), **chosen)
        assert (alone.tokens, forwards_of(alone)) == (out.tokens, forwards_of(out))
        known = generate(model, prefix, decoder, suffix=suffix, gap_tokens=len(out.tokens), **chosen)
        assert known.tokens == out.tokens


def test_a_model_that_reads_from_left_to_right_ends_a_gap_of_open_length_by_itself(monkeypatch: pytest.MonkeyPatch):
    model = load_model("embedded:autoregressive", device="cpu")
    monkeypatch.setitem(vars(model.tokenizer), "fim_ids", [11, 12, 13])
    given = {"suffix": SUFFIX, "eos_ids": ()}
    opened = generate(model, PREFIX, "autoregressive", gap_tokens=(2, 6), **given)
    bounded = generate(model, PREFIX, "autoregressive", gap_tokens=6, **given)
    assert (opened.tokens, forwards_of(opened)) == (bounded.tokens, forwards_of(bounded))


@pytest.mark.golden
@pytest.mark.parametrize("number", range(6))
def test_a_gap_grows_and_shrinks_as_in_dreamon(reference_data: Path, number: int):
    path = reference_data / "parity" / "infill" / "golden_dreamon_expand.jsonl"
    if not path.is_file():
        pytest.skip(f"needs {path}, beside the checkout")
    case = json.loads(path.read_text().splitlines()[number])
    model, released, gap = golden_model(reference_data, case), case["settings"], case["gap"]
    before, behind = case["canvas_ids"][: gap[0]], case["canvas_ids"][gap[-1] + 1 :]
    prompt = [*before, *holes(released["min_gen_len"], released["max_gen_len"]), *behind]
    chosen = {"alg": released["alg"], "expand_id": released["expand_id"], "schedule": "dreamon"}
    chosen["eos_ids"] = behind[-1:] if released["delete_eos_token"] else ()
    made, out = forwards_made(prompt, settings_for(model, "dream", prompt, chosen), "dream", model.engine)
    assert [list(forward.tokens) for forward in made] == [forward["state"] for forward in case["forwards"]]
    assert out.num_forwards == case["num_forwards"]
    assert list(out.tokens) == case["infill_ids"]
    assert (out.stop, out.trace.fixed_tokens()) == ("gap", dict(enumerate(out.tokens)))
    states = [*(forward["state"] for forward in case["forwards"]), case["output_ids"]]
    for event in out.trace.of(Fix):  # the next forward sees the token that this one has fixed
        (token,) = event.tokens
        assert states[event.forward + 1].count(token) == states[event.forward].count(token) + 1


def test_gaps_that_grow_are_filled_in_a_batch_as_alone(tmp_path: Path):
    tiny.save_checkpoint(tmp_path, family="Dream")
    model = load_model(str(tmp_path), device="cpu", dtype="float32")
    pairs = [([3, 1], [9, 2]), ([8, 4, 4], [7]), ([2], [5, 5, 5]), ([7, 7, 7], [1])]
    grown = set()
    for expand_id in range(tiny.MASK_ID):  # any token may be that of a random model
        chosen = {"mask_id": tiny.MASK_ID, "eos_ids": (), "schedule": "dreamon", "expand_id": expand_id}
        prefixes, suffixes = ([pair[side] for pair in pairs] for side in (0, 1))
        together = generate_many(model, prefixes, "dream", suffixes=suffixes, gap_tokens=(3, 6), **chosen)
        for (prefix, suffix), out in zip(pairs, together, strict=True):
            grown.add(len(out.tokens))
            assert expand_id not in out.tokens
            if expand_id % 9 == 0 or len(out.tokens) > 3:
                alone = generate(model, prefix, "dream", suffix=suffix, gap_tokens=(3, 6), **chosen)
                assert (alone.tokens, forwards_of(alone)) == (out.tokens, forwards_of(out))
    assert grown == {3, 4, 5, 6}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 4}, "steps is 4 and schedule dreamon, which fills one mask a forward; leave out steps"),
        ({"gen_interval_steps": 2}, "schedule is dreamon, which changes the length of a text"),
        ({"alg": "p2"}, "schedule is dreamon, and alg=p2"),
    ],
)
def test_what_does_not_fit_the_schedule_of_dreamon_is_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        DECODERS["dream"].Settings(mask_id=MASK_ID, gen_length=8, schedule="dreamon", **settings)
    short = fitted(DECODERS["dream"].Settings(mask_id=MASK_ID, gen_length=8, schedule="dreamon", steps=8), 5)
    assert short.steps == 5


def test_a_gap_grows_as_often_as_it_may_have_tokens_and_never_beyond_them():
    prompt, expand, eos = [*PREFIX, *holes(1, 3), *SUFFIX], 4, 7
    settings = DECODERS["dream"].Settings(
        mask_id=MASK_ID, gen_length=3, schedule="dreamon", expand_id=expand, eos_ids=(eos,)
    )
    decoding, seen = DECODERS["dream"].decode(prompt, settings, Trace()), []
    forward = next(decoding)
    # The last mask is the surest. It grows, grows, is deleted, grows and is deleted; then the budget is spent.
    for token in (expand, expand, eos, expand, eos):
        masks = len(forward.tokens) - len(PREFIX) - len(SUFFIX)
        seen.append((masks, forward.reads[0].exclude))
        readout = Readout(np.full(masks, token), np.full(masks, 0.5), entropy=np.arange(masks, 0, -1.0))
        forward = decoding.send((readout,))
    assert seen == [(1, ()), (2, ()), (3, (expand,)), (2, ()), (3, (expand,))]
    assert (len(forward.tokens), forward.reads[0].exclude) == (len(PREFIX) + 2 + len(SUFFIX), (expand,))


def test_an_expand_token_beyond_the_vocabulary_is_refused(tmp_path: Path):
    tiny.save_checkpoint(tmp_path, family="Dream", expand_token_id=tiny.VOCAB_SIZE)
    model = load_model(str(tmp_path), device="cpu", dtype="float32")
    with pytest.raises(ConfigError, match=rf"{tiny.VOCAB_SIZE}\] must lie in the vocabulary"):
        generate(model, around(3), "dream", mask_id=tiny.MASK_ID)


def test_a_gap_of_open_length_is_searched_where_it_does_not_grow():
    settings = DECODERS["dream"].Settings(mask_id=MASK_ID, expand_id=4)
    out = decode("dream", [*PREFIX, *holes(3, 6), *SUFFIX], settings)
    assert next(iter(out.trace.of(ForwardDone))).kind == "search"
    assert 4 not in out.tokens
