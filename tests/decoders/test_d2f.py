"""D2F's decoders: the public code's tokens, forwards and block states, and what must hold for any settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.decoders import DECODERS
from refusion_eval.decoders.d2f import D2fDreamSettings, D2fLladaSettings, decode
from refusion_eval.engine.engine import Engine, Request
from refusion_eval.errors import ConfigError
from refusion_eval.types import Forward, ForwardDone, Read, Readout, Select, draw_key
from tests.decoders.baselines import RECORDS_EACH, assert_equals_golden, golden_case, golden_model
from tests.decoders.d2f_oracle import Snapshot, fixed_after, recomputed, watched
from tests.decoders.oracle import visible_rows
from tests.decoders.scripted import readout, run_scripted
from tests.engine.random_model import VOCAB_SIZE, random_engine
from tests.examples import examples

MASK, EOS, EOT = VOCAB_SIZE - 1, VOCAB_SIZE - 2, VOCAB_SIZE - 3
PROMPT = [1, 2, 3]
NAMES = ("block_size", "block_add_threshold", "decoded_token_threshold", "skip_threshold", "sampling_strategy")
GOLDENS = [(decoder, number) for decoder in ("d2f_llada", "d2f_dream") for number in range(RECORDS_EACH)]
CLASSES = (D2fLladaSettings, D2fDreamSettings)


def golden_request(decoder: str, case: dict[str, Any]) -> Request:
    released, entry = case["settings"], DECODERS[decoder]
    named = {name: released[name] for name in NAMES}
    chosen = entry.Settings(gen_length=released["max_new_tokens"], mask_id=191, eos_ids=(190, 189), **named)
    return Request(entry.decode, case["prompt_ids"], chosen)


@pytest.mark.parametrize(("decoder", "number"), GOLDENS)
def test_tokens_forwards_and_block_states_are_those_of_the_public_code(shared: Path, decoder: str, number: int):
    case = golden_case(shared, decoder, number)
    prompt, chosen = case["prompt_ids"], golden_request(decoder, case).settings
    seen: list[Snapshot] = []
    assert_equals_golden(golden_model(shared, case).engine.run(watched(seen), prompt, chosen), case)
    wanted = [(forward["start"], forward["blocks"]) for forward in case["forwards"]]
    assert [(forward.positions[0] - len(prompt), blocks) for forward, blocks in seen] == wanted


@pytest.mark.parametrize(("decoder", "number"), GOLDENS)
def test_the_same_in_a_batch_with_all_other_cases(shared: Path, decoder: str, number: int):
    case = golden_case(shared, decoder, number)
    requests = [golden_request(name, golden_case(shared, name, index)) for name, index in GOLDENS]
    outs = dict(golden_model(shared, case).engine.run_many(requests, batch_size=6))
    assert len(outs) == len(GOLDENS)
    assert_equals_golden(outs[GOLDENS.index((decoder, number))], case)


def answer(forward: Forward, read: Read) -> Readout:
    """Tokens and confidences that depend on place and content, spread over all ids but the mask."""
    keys = [draw_key(5, sum(forward.tokens), forward.positions[row]) for row in read.rows]
    return readout([key % MASK for key in keys], [(key >> 20) % 997 / 997 for key in keys])


shares = st.sampled_from([0.0, 0.1, 0.34, 0.5, 0.9, 1.0])


@st.composite
def any_settings(draw: Any, **fixed: Any) -> D2fLladaSettings:
    block_size = draw(st.integers(1, 6))
    names = ("block_add_threshold", "decoded_token_threshold", "skip_threshold")
    return draw(st.sampled_from(CLASSES))(
        block_size=block_size,
        gen_length=draw(st.integers(block_size, 24)),
        mask_id=MASK,
        eos_ids=(EOS, EOT),
        **{name: draw(shares) for name in names if name not in fixed},
        **fixed,
    )


@given(any_settings(), st.integers(1, 5))
@examples(150)
def test_the_input_starts_where_the_cache_ends_and_sees_block_causally(chosen, prompt_length):
    seen: list[Snapshot] = []
    _, trace, _ = run_scripted(watched(seen), list(range(1, 1 + prompt_length)), chosen, answer)
    for (forward, blocks), done in zip(seen, trace.of(ForwardDone), strict=True):
        assert list(forward.positions) == list(range(done.cached, prompt_length + chosen.block_size * len(blocks)))
        block_of = [max(-1, (position - prompt_length) // chosen.block_size) for position in forward.positions]
        for row, visible in enumerate(visible_rows(forward.attention)):
            assert sorted(visible) == [other for other, block in enumerate(block_of) if block <= block_of[row]]


@given(any_settings())
@examples(150)
def test_full_blocks_advance_and_nothing_grows_behind_an_eos(chosen):
    seen: list[Snapshot] = []
    response, trace, forwards = run_scripted(watched(seen), PROMPT, chosen, answer)
    num_blocks, halted = 0, False
    for (_, blocks), fixed in zip(seen, fixed_after(trace), strict=True):
        assert num_blocks <= len(blocks) <= num_blocks + (not halted)
        assert [state for state, _, _ in blocks] == sorted((state for state, _, _ in blocks), key="cta".index)
        for index, (_, num_masked, full) in enumerate(blocks):
            advanced = any(position // chosen.block_size == index for position in fixed)
            assert advanced or not (full and num_masked)
        num_blocks, halted = len(blocks), halted or EOS in fixed.values()
    assert halted or num_blocks == chosen.num_positions // chosen.block_size
    text = [token for _, token in sorted(trace.fixed_tokens().items())]
    assert len(text) == num_blocks * chosen.block_size
    assert len(forwards) <= len(text)
    stops = [index for index, token in enumerate(text) if token in (EOS, EOT)]
    assert list(response.tokens) == text[: stops[0] + 1 if stops else None]


@given(any_settings(block_add_threshold=1.0, decoded_token_threshold=1.0, skip_threshold=1.0))
@examples(50)
def test_with_all_thresholds_at_one_a_forward_fixes_one_token(chosen):
    _, trace, forwards = run_scripted(decode, PROMPT, chosen, answer)
    assert [len(fixed) for fixed in fixed_after(trace)] == [1] * len(forwards)


@given(any_settings(block_add_threshold=1.0))
@examples(50)
def test_blocks_that_are_added_when_the_last_is_done_are_never_two(chosen):
    seen: list[Snapshot] = []
    run_scripted(watched(seen), PROMPT, chosen, answer)
    assert all(sum(num_masked > 0 for _, num_masked, _ in blocks) == 1 for _, blocks in seen)


@given(any_settings())
@examples(80)
def test_stopping_early_gives_the_same_text(chosen):
    many_stops = replace(chosen, eos_ids=(EOS, EOT, *range(8)))
    late, late_trace, _ = run_scripted(decode, PROMPT, many_stops, answer)
    early, early_trace, _ = run_scripted(decode, PROMPT, replace(many_stops, early_stop=True), answer)
    assert early == late
    assert early_trace.num_forwards <= late_trace.num_forwards


@pytest.fixture(scope="module")
def engine() -> Engine:
    return random_engine(3)


VARIANTS = [
    {"block_add_threshold": 0.1},
    {"block_add_threshold": 0.5, "decoded_token_threshold": 0.5, "skip_threshold": 0.3},
    {"block_add_threshold": 0.0, "skip_threshold": 0.5, "sampling_strategy": "margin_confidence"},
    {"block_add_threshold": 0.7, "skip_threshold": 0.4, "sampling_strategy": "neg_entropy", "block_size": 3},
    {"block_add_threshold": 1.0, "skip_threshold": 0.2, "block_size": 1},
    {"block_add_threshold": 0.3, "skip_threshold": 0.4, "block_size": 4, "halt_ids": (*range(6), EOS)},
]


@pytest.mark.parametrize("settings_class", CLASSES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_and_recomputed_decodings_are_equal(engine, settings_class, variant):
    chosen = settings_class(**{"gen_length": 24, "block_size": 6, "mask_id": MASK, "eos_ids": (EOS,)} | variant)
    prompts = [[5, 9, 2], [1], [7, 7, 3, 11, 4, 16, 2], [12, 3]]
    for prompt in prompts:
        cached, whole = (engine.run(algorithm, prompt, chosen).trace for algorithm in (decode, recomputed))
        assert fixed_after(cached) == fixed_after(whole)


@pytest.mark.parametrize("settings_class", CLASSES)
def test_what_confidences_are_computed_in_only_rounds_them(engine, settings_class):
    chosen = settings_class(gen_length=24, block_size=6, skip_threshold=0.4, mask_id=MASK)
    runs = [
        engine.run(decode, [5, 9], replace(chosen, confidence_dtype=name)) for name in ("float32", "float64", "model")
    ]
    assert fixed_after(runs[0].trace) == fixed_after(runs[1].trace) == fixed_after(runs[2].trace)


@pytest.mark.parametrize("settings_class", CLASSES)
def test_samples_do_not_depend_on_the_batch(engine, settings_class):
    chosen = settings_class(gen_length=24, block_size=6, temperature=1.3, mask_id=MASK, eos_ids=(EOS,))
    requests = [Request(decode, [1 + index] * (1 + index), replace(chosen, seed=index)) for index in range(5)]
    outs = dict(engine.run_many(requests, batch_size=3))
    alone = [engine.run(request.decode, request.prompt, request.settings) for request in requests]
    assert [fixed_after(outs[index].trace) for index in range(5)] == [fixed_after(out.trace) for out in alone]
    again = engine.run(decode, [1], replace(chosen, seed=1))
    assert again.trace.fixed_tokens() != alone[0].trace.fixed_tokens()


def least_sure_first(forward: Forward, read: Read) -> Readout:
    """The further right, the surer; tokens tell the number of rows of the forward that they come from."""
    predicted = [forward.positions[row] + 1 for row in read.rows]
    return readout([len(forward.tokens)] * len(predicted), [position / 100 for position in predicted])


def test_on_dream_the_first_position_keeps_the_guess_of_the_forward_that_had_its_row():
    chosen = D2fDreamSettings(gen_length=8, block_size=4, block_add_threshold=1.0, mask_id=MASK)
    response, trace, forwards = run_scripted(decode, PROMPT, chosen, least_sure_first)
    # Prompt and first block; that block alone, where its first position has no row; then both blocks, and the second.
    assert [len(forward.tokens) for forward in forwards] == [7, 4, 4, 4, 8, 4, 4, 4]
    assert response.tokens == (7, 4, 4, 7, 8, 4, 4, 8)
    assert [list(fixed) for fixed in fixed_after(trace)] == [[3], [2], [1], [0], [7], [6], [5], [4]]
    assert [[list(read.rows) for read in forward.reads] for forward in forwards] == [
        [[2, 3, 4, 5]],
        [[0, 1]],
        [[0]],
        [],
        [[3, 4, 5, 6]],
        [[0, 1]],
        [[0]],
        [],
    ]


def test_only_the_first_stop_token_halts_growth_unless_told_otherwise():
    def stops(token: int, **halt: Any) -> tuple[int, int]:
        chosen = D2fLladaSettings(gen_length=6, block_size=2, mask_id=MASK, eos_ids=(EOS, EOT), **halt)
        response, trace, _ = run_scripted(
            decode, PROMPT, chosen, lambda _, read: readout([token] * len(read.rows), 0.5)
        )
        return len(response.tokens), len(trace.fixed_at())

    assert stops(EOS) == (1, 2)
    assert stops(EOT) == (1, 6)
    assert stops(EOT, halt_ids=(EOT,)) == (1, 2)
    assert stops(EOS, halt_ids=()) == (1, 6)


@pytest.mark.parametrize(("strategy", "best"), [("default", 0), ("margin_confidence", 1), ("neg_entropy", 2)])
def test_the_strategy_picks_the_best_of_a_full_block_and_the_threshold_stays_on_probability(strategy, best):
    def statistics(_: Forward, read: Read) -> Readout:
        given_all = readout([4] * len(read.rows), np.array([0.6, 0.5, 0.4])[: len(read.rows)])
        assert (read.margin, read.entropy) == (strategy == "margin_confidence", strategy == "neg_entropy")
        return replace(
            given_all,
            margin=np.array([0.1, 0.3, 0.2])[: len(read.rows)] if read.margin else None,
            entropy=np.array([2.0, 3.0, 1.0])[: len(read.rows)] if read.entropy else None,
        )

    def first_choice(tau: float) -> Select:
        named = {"sampling_strategy": strategy, "skip_threshold": tau}
        chosen = D2fLladaSettings(gen_length=3, block_size=3, mask_id=MASK, **named)
        return next(run_scripted(decode, PROMPT, chosen, statistics)[1].of(Select))

    assert first_choice(0.9).chosen == (best,)
    assert first_choice(0.45).chosen == (0, 1)
    assert first_choice(float(np.float32(0.6))).chosen == (best,)  # strictly above


def test_confidences_are_tempered_and_in_the_models_dtype_they_choose():
    named = {"gen_length": 4, "block_size": 4, "mask_id": MASK}
    assert D2fLladaSettings(**named, temperature=0.2).confidence.temperature == 0.2
    confidence = D2fLladaSettings(**named, confidence_dtype="model").confidence
    assert (confidence.temperature, confidence.dtype, confidence.choose) == (1.0, "model", True)


def test_only_whole_blocks_are_decoded_and_iterations_are_bounded():
    chosen = D2fLladaSettings(gen_length=10, block_size=4, mask_id=MASK)
    assert chosen.num_positions == len(run_scripted(decode, PROMPT, chosen, answer)[0].tokens) == 8
    cut, _, forwards = run_scripted(decode, PROMPT, replace(chosen, max_iterations=2), least_sure_first)
    assert (cut.tokens, cut.stop, len(forwards)) == ((), "length", 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gen_length": 16, "block_size": 32}, "d2f_llada: block_size is 32 and gen_length 16"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_add_threshold": 1.1}, "block_add_threshold=1.1"),
        ({"decoded_token_threshold": -1}, "decoded_token_threshold=-1"),
        ({"skip_threshold": "high"}, "skip_threshold='high'"),
        ({"sampling_strategy": "margin"}, "choose one of default, margin_confidence, neg_entropy"),
        ({"halt_ids": (-1,)}, "halt_ids=-1"),
        ({"max_iterations": 0}, "max_iterations=0"),
        ({"eos_ids": (MASK,)}, "also an end-of-sequence id"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        D2fLladaSettings(mask_id=MASK, **wrong)
