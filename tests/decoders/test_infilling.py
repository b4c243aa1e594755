"""Infilling: public code's tokens and forwards, and that the text behind a gap is seen, kept and never decoded."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.api import (
    around_gap,
    decode_of,
    decoder_settings,
    generate,
    generate_many,
    generate_stream,
    load_model,
    settings_for,
)
from refusion_eval.decoders import DECODERS
from refusion_eval.decoders.esolm import EsolmSettings
from refusion_eval.decoders.gap_length import Search, holes
from refusion_eval.decoders.infilling import check_infilling, fitted, over_gap, span
from refusion_eval.decoders.refusion import RefusionSettings
from refusion_eval.errors import ConfigError
from refusion_eval.models.tokenizer import FIM_TOKENS
from refusion_eval.types import HOLE, OPEN, Decoded, Fix, ForwardDone, Readout, Stop, Trace
from tests.decoders.baselines import forwards_of, golden_model
from tests.decoders.oracle import OracleEngine
from tests.decoders.test_refusion_fused import any_settings
from tests.engine.random_model import VOCAB_SIZE, dense_logits, random_engine, random_transformer
from tests.examples import examples
from tests.models import tiny

MODEL, ENGINE = random_transformer(5), random_engine(5)
PREFIX, SUFFIX = [3, 1, 4, 1, 5], [9, 2, 6]
MASK_ID = VOCAB_SIZE - 1
PUBLIC_MASK = 191
GOLDENS = {
    "llada_infill": 6,
    "llada_infill_cal": 6,
    "dream_infill": 7,
    "dream_infill_dllm": 6,
    "dream_infill_p2": 6,
    "dreamon_fixed": 6,
}
NUMBERS = [(name, number) for name, most in GOLDENS.items() for number in range(most)]


def around(num_holes: int, prefix: list[int] = PREFIX, suffix: list[int] = SUFFIX) -> list[int]:
    return [*prefix, *[HOLE] * num_holes, *suffix]


def settings_of(name: str, case: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The decoder of a record, and its settings under our names."""
    released = case["settings"]
    if name == "llada_infill":
        block_length = released["block_size"] or len(case["canvas_ids"])
        return "llada", {"schedule": "dllm", "steps": released["steps"], "block_length": block_length}
    if name == "llada_infill_cal":
        block_length = released["block_length"] or released["gen_length"]
        return "llada", {"steps": released["steps"], "block_length": block_length, "confidence_dtype": "float64"}
    if name == "dreamon_fixed":
        kept = {setting: released[setting] for setting in ("steps", "alg", "expand_id")}
        return "dream", {**kept, "schedule": "dreamon"}
    named = {"steps": released["steps"], "alg": released["alg"], "top_k": released["top_k"] or 0}
    return "dream", {**named, **({"schedule": "dllm"} if name.endswith("dllm") else {"eps": released["eps"]})}


@pytest.mark.golden
@pytest.mark.parametrize(("name", "number"), NUMBERS)
def test_tokens_and_forwards_are_those_of_the_public_code(reference_data: Path, name: str, number: int):
    path = reference_data / "parity" / "infill" / f"golden_{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"needs {path}, beside the checkout")
    lines = path.read_text().splitlines()
    assert len(lines) == GOLDENS[name]
    case = json.loads(lines[number])
    decoder, settings = settings_of(name, case)
    model, start = golden_model(reference_data, case), case["gap"][0]
    prompt = [HOLE if token == PUBLIC_MASK else token for token in case["canvas_ids"]]
    wanted = [
        {"q": one["q"] * one["rows"], "ctx": one["ctx"], "commit": sorted(one["commit"])} for one in case["forwards"]
    ]
    if (released := case["settings"]).get("dstep", -1) < 0:
        out = generate(model, prompt, decoder, eos_ids=(), **settings)
    else:  # the length was searched
        around = prompt[:start], prompt[case["gap"][-1] + 1 :]
        prompt = [*around[0], *holes(released["gen_length"], released["max_gen_length"]), *around[1]]
        search = Search(released["span"], released["dstep"], released["use_bias"])
        filling = over_gap(DECODERS[decoder], list, search=search)
        del settings["block_length"]
        out = model.engine.run(filling, prompt, settings_for(model, decoder, prompt, settings | {"eos_ids": ()}))
        tried = [{"q": sum(map(len, around)) + length, "ctx": 0, "commit": []} for length, _ in case["search"]]
        wanted = [*tried, *wanted]
        prompt = [*around[0], *holes(case["infill_length"]), *around[1]]
    found = forwards_of(out)
    for forward in found:
        forward["commit"] = sorted([start + position, token] for position, token in forward["commit"])
    assert found == wanted
    assert out.num_forwards == case["num_forwards"]
    assert [*prompt[:start], *out.tokens, *prompt[start + len(out.tokens) :]] == case["output_ids"]


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 99))
@examples(40)
def test_the_least_sure_positions_are_masked_again_and_the_others_keep_their_tokens(length: int, steps: int, seed: int):
    drawn, trace = np.random.default_rng(seed), Trace()
    settings = DECODERS["dream"].Settings(mask_id=MASK_ID, alg="p2", gen_length=length, steps=steps)
    decoding = DECODERS["dream"].decode(around(length), settings, trace)
    forward, state, response = next(decoding), [MASK_ID] * length, None
    for step in range(1, steps + 1):
        assert list(forward.tokens[5 : 5 + length]) == state
        probs, tokens = drawn.random(length), drawn.integers(0, MASK_ID, length)
        worst = sorted(range(length), key=probs.__getitem__)[: length * (steps - step) // steps]
        kept = [token if old == MASK_ID else old for old, token in zip(state, tokens.tolist(), strict=True)]
        state = [MASK_ID if place in worst else token for place, token in enumerate(kept)]
        try:
            forward = decoding.send((Readout(tokens, probs),))
        except StopIteration as end:
            response = end.value
            break
    assert MASK_ID not in state
    assert list(response.tokens) == state
    assert trace.fixed_tokens() == dict(enumerate(state))


def test_nothing_that_may_be_masked_again_ends_a_text_early():
    with pytest.raises(ConfigError, match="alg is p2, which masks tokens again: none is final"):
        DECODERS["dream"].Settings(mask_id=MASK_ID, alg="p2", early_stop=True)


class Uncached:
    """The random model as `OracleEngine` calls a model of transformers."""

    dtype = torch.float32

    def __call__(self, *, input_ids: Any, position_ids: Any, attention_mask: Any, use_cache: bool) -> SimpleNamespace:
        logits = dense_logits(MODEL, input_ids[0].tolist(), position_ids[0].tolist(), attention_mask[0, 0] == 0)
        return SimpleNamespace(logits=logits[None])


def decode(entry: str, prompt: list[int], settings: Any) -> Decoded:
    return ENGINE.run(over_gap(DECODERS[entry], lambda: ()), prompt, settings)


@given(any_settings(), st.integers(1, 14), st.booleans(), st.booleans())
@examples(80)
def test_refusion_fills_a_gap_as_an_engine_that_caches_nothing(
    common: dict[str, Any], length: int, fuse: bool, serial: bool
):
    chosen = common | {"temperature": 0.0, "gen_length": 99}
    if serial:
        names = ("gen_length", "slot_size", "block_size", "mask_id", "eos_ids")
        settings = RefusionSettings(**{name: chosen[name] for name in names}, serial=True)
    else:
        settings = RefusionSettings(**chosen, fuse=fuse)
    filling = over_gap(DECODERS["refusion"], lambda: ())
    expected, trace = OracleEngine(Uncached()).run(filling, around(length), settings)
    found = ENGINE.run(filling, around(length), settings)
    assert (found.tokens, found.stop, found.num_forwards) == (expected.tokens, expected.stop, trace.num_forwards)
    assert len(found.tokens) == length or found.stop == "eos"
    assert all(event.positions[-1] < length for event in found.trace.of(Fix))


@given(st.integers(1, 14), st.integers(0, 3))
@examples(10)
def test_eso_lm_fills_a_gap_as_an_engine_that_caches_nothing(length: int, seed: int):
    filling, settings = over_gap(DECODERS["esolm"], lambda: ()), EsolmSettings(mask_id=MASK_ID, seed=seed, steps=64)
    expected, trace = OracleEngine(Uncached()).run(filling, around(length), settings)
    found = ENGINE.run(filling, around(length), settings)
    assert (found.tokens, found.num_forwards) == (expected.tokens, trace.num_forwards)
    (first, *_), _ = forwards_made(around(length), settings, "esolm")
    assert list(first.tokens[:8]) == [*PREFIX, *SUFFIX]
    assert set(first.positions[8:]) <= set(range(5, 5 + length))


@given(any_settings(), st.integers(1, 14), st.sampled_from([0.0, 0.02, 0.3]))
@examples(80)
def test_fused_or_not_the_tokens_of_a_gap_are_the_same(common: dict[str, Any], length: int, row_cost: float):
    plain = decode("refusion", around(length), RefusionSettings(**common, fuse=False))
    fused = decode("refusion", around(length), RefusionSettings(**common, fuse=True, row_cost=row_cost))
    assert (fused.tokens, fused.stop) == (plain.tokens, plain.stop)
    assert fused.num_forwards <= plain.num_forwards


def forwards_made(
    prompt: list[int], settings: Any, decoder: str = "refusion", engine: Any = ENGINE
) -> tuple[list[Any], Decoded]:
    """The forwards of a decoding, by default on the random model, and its result."""
    made = []

    def watched(prompt, settings, trace):
        decoding = over_gap(DECODERS[decoder], lambda: ())(prompt, settings, trace)
        forward = next(decoding)
        while True:
            made.append(forward)
            try:
                forward = decoding.send((yield forward))
            except StopIteration as stop:
                return stop.value

    return made, engine.run(watched, prompt, settings)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("completion", ["paper", "verifier"])
def test_known_text_comes_first_at_its_positions_and_the_last_slot_is_short(fuse: bool, completion: str):
    settings = RefusionSettings(
        slot_size=4, block_size=8, mask_id=MASK_ID, fuse=fuse, completion=completion, tau_slot=0.0, tau_token=0.3
    )
    (first, second, *others), _ = forwards_made(around(6), settings)
    assert list(first.tokens) == [*PREFIX, *SUFFIX, *[MASK_ID] * 6]
    assert list(first.positions) == [0, 1, 2, 3, 4, 11, 12, 13, 5, 6, 7, 8, 9, 10]
    assert list(second.commit.rows) == list(range(8))
    for forward in (second, *others):
        assert set(forward.positions) <= set(range(5, 11))


def test_a_gap_at_the_end_is_a_response_whose_last_slot_is_short():
    settings = {"slot_size": 4, "block_size": 8, "mask_id": MASK_ID, "tau_slot": 0.1, "tau_token": 0.1}
    gap = decode("refusion", around(6, suffix=[]), RefusionSettings(**settings))
    short = ENGINE.run(
        DECODERS["refusion"].decode, PREFIX, RefusionSettings(**settings, gen_length=6, whole_slots=False)
    )
    assert (gap.tokens, gap.num_forwards) == (short.tokens, short.num_forwards)
    assert max(gap.trace.fixed_at()) == 5


@pytest.mark.parametrize(
    "decoder", [name for name, entry in DECODERS.items() if entry.infills and entry.reads.attention == "bidirectional"]
)
@pytest.mark.parametrize("prefix", [PREFIX, []])
def test_a_bidirectional_decoder_keeps_the_suffix_and_fills_the_gap_alone(decoder: str, prefix: list[int]):
    start, prompt = len(prefix), around(8, prefix)
    settings = fitted(DECODERS[decoder].Settings(mask_id=MASK_ID), 8)
    made, _ = forwards_made(prompt, settings, decoder)
    assert list(made[0].tokens) == [*prefix, *[MASK_ID] * 8, *SUFFIX]
    for forward in made:
        pairs = zip(forward.positions, forward.tokens, strict=True)
        assert {pair for pair in pairs if pair[0] >= start + 8} <= set(enumerate(SUFFIX, start + 8))
    out = decode(decoder, prompt, settings)
    assert sorted(out.trace.fixed_at()) == list(range(8))
    assert list(out.tokens) == [out.trace.fixed_tokens()[place] for place in range(8)]


@pytest.mark.parametrize("decoder", ["llada", "dream"])
def test_given_tokens_between_holes_stay_where_they_are(decoder: str):
    prompt = [3, HOLE, HOLE, 7, HOLE, 8, 8, HOLE, 2]
    settings = fitted(DECODERS[decoder].Settings(mask_id=MASK_ID), len(span(prompt)))
    out = decode(decoder, prompt, settings)
    assert (out.tokens[2], out.tokens[4:6], len(out.tokens)) == (7, (8, 8), 7)
    assert sorted(out.trace.fixed_at()) == [0, 1, 3, 6]


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("decoder", ["llada", "dream"])
def test_a_known_stop_token_between_gaps_ends_nothing(decoder: str, early_stop: bool):
    prompt = [3, HOLE, HOLE, 7, HOLE, 8, HOLE, 2]
    settings = fitted(
        DECODERS[decoder].Settings(mask_id=MASK_ID, eos_ids=(7,), early_stop=early_stop), len(span(prompt))
    )
    out = decode(decoder, prompt, settings)
    end = next((place for place, token in enumerate(out.tokens) if token == 7 and place != 2), None)
    assert (len(out.tokens), out.stop) == ((6, "gap") if end is None else (end + 1, "eos"))
    assert len(out.tokens) > 3
    assert out.tokens[2] == 7


@pytest.mark.parametrize("decoder", ["refusion", "llada", "autoregressive"])
def test_a_full_gap_is_its_own_reason_to_stop(monkeypatch: pytest.MonkeyPatch, decoder: str):
    model = load_model("embedded" if decoder == "refusion" else f"embedded:{decoder}", device="cpu")
    if decoder == "autoregressive":
        monkeypatch.setitem(vars(model.tokenizer), "fim_ids", [11, 12, 13])
    small = {"slot_size": 4, "block_size": 8} if decoder == "refusion" else {}
    out = generate(model, around(5), decoder, eos_ids=(), **small)
    # An autoregressive model would say by its end token that the gap is full, so it was cut.
    reason = "length" if decoder == "autoregressive" else "gap"
    assert out.stop == reason
    assert [(event.reason, event.position) for event in out.trace.of(Stop)] == [(reason, 5)]
    ended = generate(model, around(5), decoder, eos_ids=(out.tokens[2],), **small)
    assert (ended.stop, ended.trace.events[-1].reason) == ("eos", "eos")


def test_steps_of_dream_at_random_are_those_of_the_masks_between_given_tokens():
    prompt = [3, HOLE, 5, 6, 7, 8, HOLE, HOLE, 2]
    settings = fitted(DECODERS["dream"].Settings(mask_id=MASK_ID, alg="origin", gen_length=9), len(span(prompt)))
    assert decode("dream", prompt, settings).num_forwards == 3


@pytest.mark.parametrize(
    ("decoder", "length", "settings", "steps"),
    [
        ("llada", 24, {"block_length": 8, "steps": 10}, 12),  # a multiple of 3 blocks
        ("llada", 20, {"block_length": 8, "steps": 10}, 10),  # one block, as 8 does not divide 20
        ("llada", 7, {"block_length": 7, "steps": 3}, 3),
        ("dream", 7, {"steps": 3}, 3),
        ("fast_dllm_dream", 12, {"cache": "none", "alg": "confidence_threshold", "threshold": 0.5, "steps": 5}, 6),
    ],
)
def test_steps_are_the_next_larger_number_that_a_gap_allows(
    tmp_path: Path, decoder: str, length: int, settings: dict[str, Any], steps: int
):
    tiny.save_checkpoint(tmp_path, family="llada" if decoder == "llada" else "Dream")
    model = load_model(str(tmp_path), device="cpu", dtype="float32")
    assert settings_for(model, decoder, around(length), settings).steps == steps
    made = decoder_settings(model, decoder, gen_length=2 * length, **{**settings, "steps": 2 * length})
    assert fitted(made, length).steps == length
    with pytest.raises(ConfigError, match="steps=0"):
        settings_for(model, decoder, around(length), settings | {"steps": 0})


def test_steps_that_mask_tokens_again_keep_their_number():
    made = DECODERS["dream"].Settings(mask_id=MASK_ID, alg="p2", steps=64, gen_length=768)
    assert fitted(made, 24).steps == 64
    assert fitted(replace(made, alg="entropy"), 24).steps == 2


def test_many_prompts_and_a_stream_take_gaps_as_one_prompt_does(tmp_path: Path):
    tiny.save_checkpoint(tmp_path, family="llada")
    model = load_model(str(tmp_path), device="cpu", dtype="float32")
    chosen = {"steps": 3, "eos_ids": ()}
    suffixes, prompts = ([9, 2], [7], [5, 5, 5]), ([3, 1], [8], [2, 4, 6])
    alone = [
        generate(model, prompt, "llada", suffix=suffix, gap_tokens=5, **chosen)
        for prompt, suffix in zip(prompts, suffixes, strict=True)
    ]
    many = generate_many(model, prompts, "llada", suffixes=suffixes, gap_tokens=5, **chosen)
    holes = [around_gap(model, *pair, 5) for pair in zip(prompts, suffixes, strict=True)]
    streamed = dict(
        generate_stream(model, [("llada", ids, settings_for(model, "llada", ids, chosen)) for ids in holes], 2)
    )
    for index, one in enumerate(alone):
        for other in (many[index], generate_many(model, holes, "llada", **chosen)[index], streamed[index]):
            assert (other.tokens, other.num_forwards, other.stop) == (one.tokens, 3, "gap")
    with pytest.raises(ConfigError, match=r"prompt 0 .* gen_length=8 with a gap of 5 tokens"):
        generate_many(model, holes, "llada", gen_length=8)
    with pytest.raises(ConfigError, match="suffixes are 1 for 3 prompts"):
        generate_many(model, prompts, "llada", suffixes=[[9]], gap_tokens=5)


@pytest.mark.parametrize(
    ("decoder", "settings"),
    [
        ("refusion", {"slot_size": 4, "block_size": 8, "tau_slot": 0.02}),
        ("llada", {"block_length": 8}),
        ("fast_dllm_llada", {"threshold": 0.1, "block_length": 8}),
        ("d3llm_llada", {"threshold": 2.0}),
        ("dream", {"alg": "p2", "steps": 4}),
        ("dream", {"alg": "p2", "temperature": 0.6, "top_p": 0.95}),
    ],
)
def test_in_a_batch_a_gap_is_filled_as_alone(tmp_path: Path, decoder: str, settings: dict[str, Any]):
    tiny.save_checkpoint(tmp_path, family={"refusion": "qwen3", "dream": "Dream"}.get(decoder, "llada"))
    model = load_model(str(tmp_path), device="cpu", dtype="float32")
    tokens = {"mask_id": tiny.MASK_ID, "eos_ids": ()}
    prompts = [around(6), around(6, suffix=[8]), around(11), PREFIX]
    resolved = decoder_settings(model, decoder, gen_length=8, **tokens, **settings)
    together = dict(generate_stream(model, [(decoder, prompt, resolved) for prompt in prompts], batch_size=4))
    for index, prompt in enumerate(prompts):
        ((_, alone),) = generate_stream(model, [(decoder, prompt, resolved)], batch_size=1)
        assert together[index].tokens == alone.tokens
        assert together[index].num_forwards == alone.num_forwards


@pytest.mark.parametrize("settings", [{"fuse": False}, {"fuse": True, "free_rows": 64}, {"serial": True}])
def test_a_model_of_transformers_sees_a_suffix_in_front_of_the_gap(tmp_path: Path, settings: dict[str, Any]):
    # Without an attention mask transformers takes positions that jump for texts packed behind each other, and a row
    # sees nothing before the last jump.
    tiny.save_checkpoint(tmp_path, family="qwen3")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mask_token_id": tiny.MASK_ID}))
    own = load_model(str(tmp_path), device="cpu", dtype="float32")
    stock = load_model(str(tmp_path), device="cpu", backend="transformers")
    options = {"slot_size": 4, "block_size": 8, "eos_ids": (), **settings}
    texts = {}
    for suffix in ([9, 2, 6, 5], [30, 22, 7, 1]):
        ours, theirs = (
            generate(model, PREFIX, "refusion", suffix=suffix, gap_tokens=10, **options) for model in (own, stock)
        )
        assert theirs.tokens == ours.tokens
        assert list(theirs.trace.of(ForwardDone)) == list(ours.trace.of(ForwardDone))
        texts[tuple(suffix)] = theirs.tokens
    assert len(set(texts.values())) == 2  # the suffix decides


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model("embedded", device="cpu")


def test_a_text_has_its_gap_between_prefix_and_suffix(model: Any):
    out = generate(model, "The answer", suffix=" 12.", gap_tokens=5, slot_size=4, block_size=8, eos_ids=())
    ids = [*model.tokenizer.encode("The answer", plain=True), *[HOLE] * 5, *model.tokenizer.encode(" 12.")]
    same = generate(model, ids, slot_size=4, block_size=8, eos_ids=())
    assert len(out.tokens) == 5
    assert (out.tokens, out.num_forwards) == (same.tokens, same.num_forwards)
    assert out.text == model.tokenizer.decode(out.tokens)


@pytest.mark.parametrize(
    ("prompt", "decoder", "more", "message"),
    [
        (around(3), "autoregressive", {}, "by FIM tokens, and the tokenizer has none"),
        ([1, HOLE, 2, HOLE, 3], "refusion", {}, "decoder=refusion fills one gap, and the prompt has several"),
        (around(3), "refusion", {"gen_length": 8}, "gen_length=8 with a gap of 3 tokens"),
        (around(3), "refusion", {"release_compatible": True}, "the release decodes whole slots and fills no gap"),
        ([HOLE] * 3, "refusion", {}, "the prompt is all gap"),
        (around(2100), "refusion", {}, "exceeds the context of 2048"),
        ([1, *holes(3, 2100), 2], "refusion", {}, "exceeds the context of 2048"),
        ([1, HOLE, OPEN, 2, HOLE, 3], "llada", {}, "a gap of open length .* is the only one"),
        ([1, OPEN, HOLE, 2], "llada", {}, "a gap of open length .* begins with -1"),
        ("prefix", "refusion", {"suffix": "end", "gap_tokens": (8, 8)}, r"gap_tokens=\(8, 8\); .* a pair of the first"),
        ("prefix", "refusion", {"suffix": "end"}, "gap_tokens=None; give the number of tokens"),
        ("prefix", "refusion", {"suffix": "end", "gap_tokens": 0}, "gap_tokens=0; give the number"),
        ("prefix", "refusion", {"suffix": "end", "gap_tokens": (2, 3, 4)}, r"gap_tokens=\(2, 3, 4\); .* a pair of"),
        ("prefix", "refusion", {"suffix": "end", "gap_tokens": "search"}, "gap_tokens=search; give the number"),
        ("prefix", "refusion", {"gap_tokens": 4}, "gap_tokens=4 without a suffix"),
    ],
)
def test_what_cannot_be_filled_is_refused(prompt: Any, decoder: str, more: dict[str, Any], message: str):
    model = load_model("embedded" if decoder == "refusion" else f"embedded:{decoder}", device="cpu")
    small = {"slot_size": 4, "block_size": 8} if decoder == "refusion" else {}
    with pytest.raises(ConfigError, match=message) as raised:
        generate(model, prompt, decoder, **small, **more)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("decoder", ["bd3lm", "sdar", "idlm", "wedlm", "d2f_dream", "llada2", "fast_dllm_v2"])
def test_a_decoder_that_sees_no_later_text_says_so(decoder: str):
    message = f"decoder={decoder} does not infill: it writes blocks from left to right, and they see no later text"
    with pytest.raises(ConfigError, match=message):
        check_infilling(decoder, DECODERS[decoder], around(3), lambda: ())
    check_infilling(decoder, DECODERS[decoder], PREFIX, lambda: ())


def test_an_autoregressive_model_is_asked_for_the_middle_by_its_tokens(monkeypatch: pytest.MonkeyPatch):
    model = load_model("embedded:autoregressive", device="cpu")
    before, after, middle = 11, 12, 13
    monkeypatch.setitem(vars(model.tokenizer), "fim_ids", [before, after, middle])
    out = generate(model, around(4), "autoregressive", eos_ids=())
    asked = generate(model, [before, *PREFIX, after, *SUFFIX, middle], "autoregressive", gen_length=4, eos_ids=())
    assert (out.tokens, forwards_of(out)) == (asked.tokens, forwards_of(asked))


@pytest.mark.parametrize("bos", [3, 4])
def test_a_beginning_of_the_text_stays_in_front_of_the_tokens_around_a_gap(bos: int):
    model = load_model("embedded:autoregressive", device="cpu")
    vars(model.tokenizer)["fim_ids"] = [11, 12, 13]
    model.tokenizer.inner.bos_token = model.tokenizer.inner.convert_ids_to_tokens(bos)
    settings = decoder_settings(model, "autoregressive")
    first = next(decode_of(model, "autoregressive", settings, around(4))(around(4), settings, Trace()))
    begin = [3, 11] if bos == 3 else [11, 3]  # the first token of the prefix
    assert list(first.tokens) == [*begin, *PREFIX[1:], 12, *SUFFIX, 13]


def test_without_a_suffix_and_tokens_to_say_so_the_prefix_alone_is_continued():
    model = load_model("embedded:autoregressive", device="cpu")
    out = generate(model, around(4, suffix=[]), "autoregressive", eos_ids=())
    assert out.tokens == generate(model, PREFIX, "autoregressive", gen_length=4, eos_ids=()).tokens


@pytest.mark.parametrize("names", FIM_TOKENS)
def test_the_tokens_around_a_gap_are_found_by_their_names(names: tuple[str, str, str]):
    tokenizer = load_model("embedded:autoregressive", device="cpu").tokenizer
    assert tokenizer.fim_ids == []
    tokenizer = type(tokenizer)(Path(tokenizer.inner.name_or_path))
    tokenizer.inner.add_tokens(list(names), special_tokens=True)
    assert tokenizer.fim_ids == tokenizer.inner.convert_tokens_to_ids(list(names))


def test_a_gap_holds_no_thought():
    with pytest.raises(ConfigError, match="thought_budget=1: a gap holds no thought"):
        fitted(RefusionSettings(mask_id=MASK_ID, gen_length=8, slot_size=4, block_size=8, thought_budget=1), 3)


def test_steps_keep_their_share_and_blocks_that_do_not_divide_a_gap_become_one():
    llada = DECODERS["llada"].Settings(mask_id=MASK_ID, gen_length=64, block_length=16, steps=32)
    assert [(one.gen_length, one.block_length, one.steps) for one in (fitted(llada, 7), fitted(llada, 32))] == [
        (7, 7, 4),
        (32, 16, 16),
    ]
