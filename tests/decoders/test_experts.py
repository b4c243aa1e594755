"""Decoders on mixtures of experts: tokens, forwards and commits of the public code, alone and in a batch of all."""

import json
from pathlib import Path
from typing import Any

import pytest

from refusion_eval.api import decoder_settings, generate, generate_stream
from tests.decoders import test_sdar
from tests.decoders.baselines import assert_equals_golden, forwards_of, golden_model

MASK, EOS = 207, 206
NUM_RECORDS = {"llada2_moe": 16, "qwen3moe": 6, "sdar_moe": 8}
ALL = [(name, number) for name, count in NUM_RECORDS.items() for number in range(count)]


def record(folder: Path, name: str, number: int) -> dict[str, Any]:
    lines = (folder / "parity" / "systems2027" / f"golden_{name}.jsonl").read_text().splitlines()
    assert len(lines) == NUM_RECORDS[name]
    case: dict[str, Any] = json.loads(lines[number])
    return case


def released(case: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The decoder and the settings of a record."""
    wanted = case["settings"]
    if case["decoder"] == "ar":
        return "autoregressive", {"gen_length": wanted["max_new_tokens"], "eos_ids": tuple(wanted["stop_ids"])}
    if case["decoder"] == "sdar":
        return "sdar", test_sdar.released(case) | {"mask_id": MASK}
    names = {"steps": "steps_per_block", "editing_threshold": "edit_threshold", "max_post_steps": "max_post_edit_steps"}
    others = {names.get(name, name): value for name, value in wanted.items() if name not in ("eos_id", "mask_id")}
    return "llada2", {**others, "rule": case["variant"], "mask_id": MASK, "eos_ids": (EOS,)}


@pytest.mark.parametrize(("name", "number"), ALL)
def test_tokens_forwards_and_commits_are_those_of_the_public_code(systems_2027: Path, name: str, number: int):
    case = record(systems_2027, name, number)
    decoder, settings = released(case)
    as_released = {} if decoder == "autoregressive" else {"release_compatible": True}
    out = generate(golden_model(systems_2027, case), case["prompt_ids"], decoder, **settings, **as_released)
    assert_equals_golden(out, case)


@pytest.mark.parametrize(("name", "number"), [pair for pair in ALL if pair[0] != "qwen3moe"])
def test_a_cache_changes_no_token_and_no_commit(systems_2027: Path, name: str, number: int):
    case = record(systems_2027, name, number)
    decoder, settings = released(case)
    out = generate(golden_model(systems_2027, case), case["prompt_ids"], decoder, **settings)
    if decoder == "llada2":
        assert list(out.tokens) == case["released_ids"]
    commits = [sorted(forward["commit"]) for forward in case["forwards"] if not forward.get("store")]
    assert [sorted(forward["commit"]) for forward in forwards_of(out)] == commits


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", ["llada2", "sdarmoe", "qwen3moe"])
def test_a_batch_of_all_records_of_a_checkpoint_decodes_each_as_released(systems_2027: Path, name: str, number: int):
    cases = [record(systems_2027, *pair) for pair in ALL]
    cases = [case for case in cases if case["checkpoint"] == f"{name}_{number}"]
    model = golden_model(systems_2027, cases[0])
    requests = []
    for case in cases:
        decoder, settings = released(case)
        as_released = {} if decoder == "autoregressive" else {"release_compatible": True}
        requests.append((decoder, case["prompt_ids"], decoder_settings(model, decoder, **settings, **as_released)))
    together = dict(generate_stream(model, requests, batch_size=len(requests)))
    for number, case in enumerate(cases):
        assert_equals_golden(together[number], case)


@pytest.mark.parametrize("fuse", [False, True])
def test_refusion_decodes_the_same_alone_and_in_a_batch(systems_2027: Path, tmp_path: Path, fuse: bool):
    model = golden_model(with_mask(systems_2027, tmp_path), {"checkpoint": "qwen3moe_1"})
    settings = decoder_settings(model, "refusion", gen_length=32, slot_size=4, block_size=16, fuse=fuse)
    prompts = [[5, 6, 7], [9] * 40, [11, 12]]
    together = dict(generate_stream(model, [("refusion", prompt, settings) for prompt in prompts], batch_size=3))
    for number, prompt in enumerate(prompts):
        alone = generate(model, prompt, "refusion", gen_length=32, slot_size=4, block_size=16, fuse=fuse)
        assert together[number].tokens == alone.tokens
        assert forwards_of(together[number]) == forwards_of(alone)


def test_fused_forwards_of_refusion_change_no_token(systems_2027: Path, tmp_path: Path):
    model = golden_model(with_mask(systems_2027, tmp_path), {"checkpoint": "qwen3moe_1"})
    plain, fused = (
        generate(model, [5, 6, 7], "refusion", gen_length=32, slot_size=4, block_size=16, fuse=fuse)
        for fuse in (False, True)
    )
    assert fused.tokens == plain.tokens
    assert fused.num_forwards <= plain.num_forwards
    assert None not in (plain.num_experts_read, fused.num_experts_read)


@pytest.mark.parametrize("decoder", ["bd3lm", "llada", "llada2", "sdar"])
def test_other_decoders_of_masks_decode_the_same_alone_and_in_a_batch(systems_2027: Path, tmp_path: Path, decoder: str):
    model = golden_model(with_mask(systems_2027, tmp_path), {"checkpoint": "qwen3moe_1"})
    settings = decoder_settings(model, decoder, gen_length=16, block_length=8)
    prompts = [[5, 6, 7], [9] * 20]
    together = dict(generate_stream(model, [(decoder, prompt, settings) for prompt in prompts], batch_size=2))
    for number, prompt in enumerate(prompts):
        alone = generate(model, prompt, decoder, gen_length=16, block_length=8)
        assert (together[number].tokens, forwards_of(together[number])) == (alone.tokens, forwards_of(alone))


def with_mask(folder: Path, target: Path) -> Path:
    """A folder that holds the checkpoint qwen3moe_1 as a masked model."""
    source, place = (root / "parity" / "systems2027" / "checkpoints" / "qwen3moe_1" for root in (folder, target))
    place.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"mask_token_id": MASK}))
    (place / "model.safetensors").symlink_to(source / "model.safetensors")
    return target
