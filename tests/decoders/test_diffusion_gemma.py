"""DiffusionGemma's decoder: recorded draws of the release replayed, and its rules on scripted readouts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refusion_eval.api import decoder_settings, generate, generate_stream
from refusion_eval.decoders import Decoder
from refusion_eval.decoders.diffusion_gemma import (
    DECODER,
    DiffusionGemmaSettings,
    Place,
    SeededDraws,
    decode,
    decode_with,
    within_bound,
)
from refusion_eval.errors import ConfigError
from refusion_eval.types import Draft, Readout, Select
from tests.decoders.baselines import assert_equals_golden, forwards_of, golden_model
from tests.decoders.scripted import run_scripted

NUM_RECORDS = 9
EOS = 30


def record(folder: Path, number: int) -> dict[str, Any]:
    lines = (folder / "parity" / "systems2027" / "golden_diffusion_gemma.jsonl").read_text().splitlines()
    assert len(lines) == NUM_RECORDS
    case: dict[str, Any] = json.loads(lines[number])
    return case


def released(case: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a record; a first canvas that a user gave is among the draws."""
    wanted = dict(case["settings"])
    of_release = {name: wanted.pop(name, None) for name in ("pad_token_id", "decoder_input_ids", "eos_token_id")}
    return {
        "gen_length": wanted.pop("max_new_tokens"),
        "eos_ids": tuple(of_release["eos_token_id"] or ()),
        "release_compatible": True,
        **wanted,
    }


class Recorded:
    """The draws of a record, and what the decoder chose between them."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        self.steps: dict[Place, dict[str, Any]] = {}
        canvas, step = -1, 0
        for forward in case["forwards"]:
            canvas, step = (canvas + 1, 0) if forward["kind"] == "encode" else (canvas, step + 1)
            self.steps[Place(canvas, step)] = forward

    def uniform(self, place: Place) -> Sequence[int]:
        return self.steps[place]["random"] if place.step else self.steps[Place(place.canvas, 1)]["canvas"]

    def sampled(self, place: Place, readout: Readout) -> Any:
        step = self.steps[place]
        assert readout.entropy == pytest.approx(step["entropy"], abs=1e-4)
        return np.array(step["sampled"])


def replaying(case: Mapping[str, Any], fed: list[list[int]] | None = None) -> Decoder:
    """The decoder with the draws of a record; notes what each forward is fed."""

    def replay(prompt: Sequence[int], settings: Any, trace: Any) -> Any:
        decoding, readouts = decode_with(prompt, settings, trace, Recorded(case)), None
        while True:
            try:
                forward = next(decoding) if readouts is None else decoding.send(readouts)
            except StopIteration as end:
                return end.value
            if fed is not None:
                fed.append(list(forward.tokens))
            readouts = yield forward

    return replace(DECODER, decode=replay)


@pytest.mark.parametrize("number", range(NUM_RECORDS))
def test_recorded_draws_give_the_forwards_choices_and_tokens_of_the_release(systems_2027: Path, number: int):
    case, fed = record(systems_2027, number), list[list[int]]()
    model = golden_model(systems_2027, case)
    out = generate(model, case["prompt_ids"], replaying(case, fed), **released(case))
    assert_equals_golden(out, case)
    kinds = [event[2] for event in out.trace.to_json() if event[0] == "forward"]
    assert kinds == [forward["kind"] for forward in case["forwards"]]
    assert (kinds.count("encode"), kinds.count("denoise")) == (case["encoder_forwards"], case["decoder_forwards"])
    steps = [forward for forward in case["forwards"] if forward["kind"] == "denoise"]
    assert [tokens for tokens, kind in zip(fed, kinds, strict=True) if kind == "denoise"] == [
        step["canvas"] for step in steps
    ]
    size = case["settings"]["canvas_length"]
    assert [[place % size for place in event.chosen] for event in out.trace.of(Select)] == [
        step["accepted"] for step in steps
    ]
    stored = [tokens for tokens, kind in zip(fed, kinds, strict=True) if kind == "encode"]
    assert stored == [case["prompt_ids"], *case["canvases"][:-1]]


@pytest.mark.parametrize("number", [1, 2])
def test_a_batch_decodes_each_request_as_it_is_decoded_alone(systems_2027: Path, number: int):
    cases = [record(systems_2027, index) for index in range(NUM_RECORDS)]
    cases = [case for case in cases if case["checkpoint"] == f"dgemma_{number}"]
    model = golden_model(systems_2027, cases[0])
    requests = [
        ("diffusion_gemma", case["prompt_ids"], decoder_settings(model, "diffusion_gemma", **released(case)))
        for case in cases
    ]
    together = dict(generate_stream(model, requests, batch_size=2))
    for index, case in enumerate(cases):
        alone = generate(model, case["prompt_ids"], "diffusion_gemma", **released(case))
        assert (together[index].tokens, forwards_of(together[index])) == (alone.tokens, forwards_of(alone))


def test_draws_of_a_seed_are_repeated_and_those_of_another_differ(systems_2027: Path):
    case = record(systems_2027, 0)
    model = golden_model(systems_2027, case)
    outs = [generate(model, [5, 6, 7], "diffusion_gemma", gen_length=24, eos_ids=(), seed=seed) for seed in (1, 1, 2)]
    assert outs[0].tokens == outs[1].tokens != outs[2].tokens


def scripted(tokens, entropies, **chosen):
    """The response, its events and forwards where step n has the n-th row of most probable tokens and of entropies."""
    size, step = len(tokens[0]), -1

    def answer(forward, read):
        nonlocal step
        step += bool(read.temperature)
        drawn = [100 + token for token in tokens[step]] if read.temperature else tokens[step]
        probs = np.full(size, 0.5, dtype=np.float32)
        entropy = np.array(entropies[step], dtype=np.float32)
        return Readout(np.array(drawn), probs, entropy=entropy if read.entropy else None)

    settings = DiffusionGemmaSettings(**{"canvas_length": size, "gen_length": size, "vocab_size": 50, **chosen})
    return run_scripted(decode, [1, 2], settings, answer)


SAME, SURE = [3, 4, 5, 6], [0.0, 0.0, 0.0, 0.0]


def test_a_canvas_ends_when_it_is_stable_and_confident():
    unsure, other = [0.1] * 4, [3, 4, 5, 7]
    settings = {"max_denoising_steps": 6, "confidence_threshold": 0.05}
    response, _, forwards = scripted([other, SAME, SAME, SAME], [SURE, SURE, unsure, SURE], **settings)
    assert (response.tokens, response.stop, len(forwards)) == (tuple(SAME), "length", 1 + 4)
    # Without a step before it no canvas is stable; with a threshold of 0 every canvas is.
    _, _, forwards = scripted([SAME, SAME], [SURE, SURE], **settings)
    assert len(forwards) == 1 + 2
    _, _, forwards = scripted([SAME], [SURE], **settings, stability_threshold=0)
    assert len(forwards) == 1 + 1
    _, _, forwards = scripted([SAME] * 3, [SURE] * 3, **settings, stability_threshold=2)
    assert len(forwards) == 1 + 3
    _, _, forwards = scripted([SAME] * 6, [unsure] * 6, **settings)  # its steps run out
    assert len(forwards) == 1 + 6


def test_the_response_is_the_most_probable_canvas_and_not_the_accepted_one():
    response, trace, forwards = scripted(
        [SAME, [7, 8, 9, 10]], [[0.5, 0.0, 0.3, 0.4]] * 2, max_denoising_steps=2, entropy_bound=0.35
    )
    assert response.tokens == (7, 8, 9, 10)
    (draft,) = trace.of(Draft)
    # By ascending entropy, positions 1, 2 and 3 follow sums of 0, 0 and 0.3; position 0 would follow 0.7.
    assert (draft.positions, draft.tokens) == ((1, 2, 3), (104, 105, 106))
    assert list(forwards[2].tokens[1:]) == [104, 105, 106]
    assert 0 <= forwards[2].tokens[0] < 50


def test_temperatures_fall_and_the_logits_of_a_step_condition_the_next():
    _, _, forwards = scripted([SAME] * 4, [[1.0] * 4] * 4, max_denoising_steps=4, t_min=0.4, t_max=0.8)
    denoised = forwards[1:]
    assert [step.reads[0].temperature for step in denoised] == pytest.approx([0.8, 0.7, 0.6, 0.5])
    assert [step.self_conditioning for step in denoised] == [
        None,
        *(step.reads[0].temperature for step in denoised[:-1]),
    ]
    assert all(step.reads[0].confidence.temperature == step.reads[0].temperature for step in denoised)


def test_a_stop_token_anywhere_in_a_canvas_ends_the_response_there():
    rows = [[3, EOS, 5, EOS]]
    chosen = {"eos_ids": (EOS,), "stability_threshold": 0, "gen_length": 12}
    response, trace, forwards = scripted(rows, [SURE], **chosen)
    assert (response.tokens, response.stop, len(forwards)) == ((3, EOS), "eos", 2)
    assert sorted(trace.fixed_tokens()) == [0, 1, 2, 3]


def test_whole_canvases_are_decoded_and_what_was_asked_for_is_kept():
    rows, chosen = [SAME, [7, 8, 9, EOS]], {"gen_length": 6, "stability_threshold": 0, "eos_ids": (EOS,)}
    cut, _, forwards = scripted(rows, [SURE] * 2, **chosen)
    assert (cut.tokens, cut.stop, len(forwards)) == ((*SAME, 7, 8), "length", 4)
    whole, _, _ = scripted(rows, [SURE] * 2, **chosen, release_compatible=True)
    assert (whole.tokens, whole.stop) == ((*SAME, 7, 8, 9, EOS), "eos")
    assert DiffusionGemmaSettings(canvas_length=4, gen_length=6).num_positions == 8


def test_a_stop_string_ends_decoding_early_only_if_it_may():
    rows = [SAME, SAME]
    chosen = {"gen_length": 8, "stability_threshold": 0, "stop_rule": lambda tokens: 5 in tokens}
    whole, _, forwards = scripted(rows, [SURE] * 2, **chosen)
    assert (whole.stop, len(forwards)) == ("length", 4)
    early, _, forwards = scripted(rows, [SURE] * 2, **chosen, early_stop=True)
    assert (early.stop, len(forwards)) == ("stop_string", 2)


def test_random_canvases_have_every_token_and_depend_on_their_place():
    draws = SeededDraws(DiffusionGemmaSettings(canvas_length=4000, vocab_size=20))
    first, replaced, second = (draws.uniform(Place(*place)) for place in ((0, 0), (0, 1), (1, 0)))
    counts = np.bincount(first, minlength=20)
    assert len(counts) == 20
    assert np.abs(counts - 200).max() < 70  # five standard deviations
    assert first != replaced != second != first
    assert first == draws.uniform(Place(0, 0))


@pytest.mark.parametrize(
    ("entropies", "bound", "accepted"),
    [
        ([0.5, 0.2, 0.9], 1e-9, [1]),
        ([0.5, 0.2, 0.9], 0.2, [0, 1]),
        ([0.5, 0.2, 0.9], 0.75, [0, 1, 2]),
        ([0.0] * 3, 1e-9, [0, 1, 2]),
    ],
)
def test_positions_are_accepted_while_the_entropies_before_stay_within_the_bound(entropies, bound, accepted):
    assert within_bound(np.array(entropies), bound) == accepted


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"t_min": 0.8}, "t_max=0.8 must be above t_min=0.8"),
        ({"confidence_threshold": 0}, "confidence_threshold=0"),
        ({"entropy_bound": 0}, "entropy_bound=0"),
        ({"max_denoising_steps": 0}, "max_denoising_steps=0"),
        ({"stability_threshold": -1}, "stability_threshold=-1"),
    ],
)
def test_impossible_settings_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        DiffusionGemmaSettings(**wrong)
