"""What every decoder gives on small checkpoints, compared with stored tokens, texts, forwards and traces."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from refusion_eval.api import decoder_settings, generate, generate_stream, load_model
from refusion_eval.decoders import DECODERS
from refusion_eval.paths import embedded_path
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.system import System
from refusion_eval.types import Decoded, draw_key
from tests.guard.stored import check, differences

CHECKPOINTS = Path(__file__).resolve().parents[1] / "data" / "parity"
PLACES = {
    "tiny": CHECKPOINTS / "tiny",
    "llada": CHECKPOINTS / "baselines" / "checkpoints" / "llada_2",
    "dream": CHECKPOINTS / "baselines" / "checkpoints" / "dream_3",
    "qwen3": CHECKPOINTS / "baselines" / "checkpoints" / "qwen3_5",
}
DLLM_CACHE = {"prompt_interval_steps": 9, "gen_interval_steps": 4, "transfer_ratio": 0.25}
SAMPLED = {"temperature": 0.8, "seed": 5}
REFUSION = {"gen_length": 32, "slot_size": 4, "block_size": 16}
FUSED = {**REFUSION, "fuse": True, "free_rows": 8, "row_cost": 0.02}
D2F = {"block_size": 8, "skip_threshold": 0.5, "decoded_token_threshold": 0.6}
# checkpoint -> name of the case -> decoder and settings.
CASES: Mapping[str, Mapping[str, tuple[str, dict[str, Any]]]] = {
    "tiny": {
        "autoregressive": ("autoregressive", {}),
        "autoregressive sampled": ("autoregressive", SAMPLED),
        "refusion": ("refusion", REFUSION),
        "refusion low thresholds": ("refusion", {**REFUSION, "tau_slot": 0.5, "tau_token": 0.2}),
        "refusion fused": ("refusion", FUSED),
        "refusion fused left to right": ("refusion", {**FUSED, "left_to_right": True}),
        "refusion left to right": ("refusion", {**REFUSION, "left_to_right": True}),
        "refusion recompute": ("refusion", {**REFUSION, "recompute_kv": True}),
        "refusion verify independently": ("refusion", {**REFUSION, "verify_independently": True}),
        "refusion release": ("refusion", {**REFUSION, "release_compatible": True}),
        "refusion fused release": ("refusion", {**FUSED, "release_compatible": True}),
        "refusion serial": ("refusion", {**REFUSION, "serial": True}),
        "refusion sampled": ("refusion", {**REFUSION, **SAMPLED}),
        "refusion fused sampled": ("refusion", {**FUSED, **SAMPLED}),
        "bd3lm": ("bd3lm", {"block_length": 6, "steps_per_block": 4}),
        "bd3lm threshold": ("bd3lm", {"block_length": 8, "threshold": 0.6}),
        "bd3lm separate commit": ("bd3lm", {"block_length": 4, "separate_commit": True, "early_stop": True}),
        "esolm": ("esolm", {"steps": 6}),
        "esolm sequential": ("esolm", {"alpha_0": 0.25, "subcontext_len": 4}),
        "llada": ("llada", {"block_length": 8, "steps": 12}),
    },
    "qwen3": {
        "autoregressive": ("autoregressive", {}),
        "bd3lm sampled": ("bd3lm", {"block_length": 8, **SAMPLED}),
        "bd3lm release": ("bd3lm", {"block_length": 8, "release_compatible": True}),
        "esolm shuffled": ("esolm", {"alpha_0": 0.5, "subcontext_len": 8, "subcontext_shuffle": True}),
        "refusion": ("refusion", REFUSION),
        "refusion fused": ("refusion", FUSED),
    },
    "llada": {
        "llada": ("llada", {"block_length": 8, "steps": 12}),
        "llada guided": ("llada", {"block_length": 24, "cfg_scale": 0.5}),
        "llada sampled": ("llada", {"block_length": 8, **SAMPLED}),
        "llada random remasking": ("llada", {"block_length": 8, "steps": 12, "remasking": "random"}),
        "llada late end": ("llada", {"block_length": 24, "confidence_eos_eot_inf": True, "logits_eos_inf": True}),
        "llada release": ("llada", {"block_length": 8, "release_compatible": True}),
        "llada dllm cache": ("llada", {"block_length": 8, **DLLM_CACHE}),
        "fast_dllm_llada dual": ("fast_dllm_llada", {"block_length": 8, "threshold": 0.6}),
        "fast_dllm_llada prefix": ("fast_dllm_llada", {"block_length": 8, "threshold": 0.6, "cache": "prefix"}),
        "fast_dllm_llada no cache": ("fast_dllm_llada", {"block_length": 8, "factor": 1.0, "cache": "none"}),
        "fast_dllm_llada sparse": ("fast_dllm_llada", {"block_length": 8, "threshold": 0.6, "cache": "sparse"}),
        "fast_dllm_llada steps": ("fast_dllm_llada", {"block_length": 8, "steps": 12, "release_compatible": True}),
        "d2f_llada": ("d2f_llada", D2F),
        "d2f_llada sampled": ("d2f_llada", {**D2F, **SAMPLED}),
    },
    "dream": {
        "dream": ("dream", {"steps": 9}),
        "dream origin": ("dream", {"alg": "origin", "temperature": 0.2}),
        "dream margin": ("dream", {"alg": "topk_margin", "steps": 12}),
        "dream maskgit": ("dream", {"alg": "maskgit_plus", "steps": 12, "alg_temp": 0.3}),
        "dream sampled": ("dream", {**SAMPLED, "top_p": 0.9, "top_k": 20}),
        "dream dllm cache": ("dream", DLLM_CACHE),
        "fast_dllm_dream dual": ("fast_dllm_dream", {"block_length": 8, "threshold": 0.6}),
        "fast_dllm_dream prefix": ("fast_dllm_dream", {"block_length": 8, "threshold": 0.6, "cache": "prefix"}),
        "fast_dllm_dream sparse": ("fast_dllm_dream", {"block_length": 8, "threshold": 0.6, "cache": "sparse"}),
        "d2f_dream": ("d2f_dream", D2F),
    },
}
# Compared with the release's own loop in transformers on random weights (`tests/runs/test_diffusion_gemma.py`).
BESIDE_THE_RELEASE = {"diffusion_gemma"}
GUARDED = {decoder for cases in CASES.values() for decoder, _ in cases.values()}
ALL_CASES = [(checkpoint, case) for checkpoint, cases in CASES.items() for case in cases]


@cache
def model(checkpoint: str, weights: str) -> Any:
    """A checkpoint with the weights that the fixture `weights` lets tests load."""
    return load_model(str(PLACES[checkpoint]), dtype="float32", device="cpu", attention="sdpa")


@cache
def prompts(checkpoint: str) -> tuple[tuple[int, ...], ...]:
    """Three prompts; those of the trained checkpoint are texts that it knows, of about equal lengths."""
    if checkpoint == "tiny":
        lines = (CHECKPOINTS / "golden.jsonl").read_text().splitlines()
        return tuple(tuple(json.loads(lines[number])["prompt_ids"]) for number in (0, 20, 40))
    return tuple(
        tuple(draw_key(11, number, position) % 180 for position in range(length))
        for number, length in enumerate((3, 17, 9))
    )


def settings_of(loaded: Any, checkpoint: str, case: str) -> Any:
    decoder, settings = CASES[checkpoint][case]
    eos = {} if checkpoint == "tiny" else {"eos_ids": (190, 189)}
    return decoder_settings(loaded, decoder, **{"gen_length": 24, **eos, **settings})


def record(loaded: Any, checkpoint: str, out: Any) -> dict[str, Any]:
    assert isinstance(out, Decoded)
    text = loaded.tokenizer.decode(out.tokens) if checkpoint == "tiny" else None
    return {
        "tokens": list(out.tokens),
        "text": text,
        "stop": out.stop,
        "num_forwards": out.num_forwards,
        "trace": out.trace.to_json(),
    }


def decoded(checkpoint: str, weights: str, batch_size: int) -> dict[str, Any]:
    loaded, cases = model(checkpoint, weights), list(CASES[checkpoint])
    requests = [
        (CASES[checkpoint][case][0], prompt, settings_of(loaded, checkpoint, case))
        for case in cases
        for prompt in prompts(checkpoint)
    ]
    results = dict(generate_stream(loaded, requests, batch_size))
    records = [record(loaded, checkpoint, results[number]) for number in range(len(requests))]
    return {case: records[3 * number : 3 * number + 3] for number, case in enumerate(cases)}


@pytest.mark.parametrize("checkpoint", CASES)
def test_every_case_decodes_alone_as_stored(checkpoint: str, weights: str) -> None:
    check(f"decoded_{checkpoint}", decoded(checkpoint, weights, 1))


@pytest.mark.parametrize("checkpoint", CASES)
def test_every_case_decodes_in_a_batch_of_all_decoders_as_stored(checkpoint: str, weights: str) -> None:
    check(f"decoded_{checkpoint}", decoded(checkpoint, weights, 7), writes=False)


def test_every_decoder_has_a_case_or_records_of_public_code() -> None:
    names = (path.stem.removeprefix("golden_") for path in (CHECKPOINTS / "systems2026").glob("golden_*.jsonl"))
    assert GUARDED <= set(DECODERS) <= GUARDED.union(names, BESIDE_THE_RELEASE)


@pytest.mark.usefixtures("weights")
def test_texts_get_the_stored_texts() -> None:
    records = {}
    for decoder in ("autoregressive", "bd3lm", "fast_dllm_llada", "idlm", "llada", "refusion", "wedlm"):
        place = str(embedded_path({"fast_dllm_llada": "llada"}.get(decoder, decoder)))
        embedded = load_model(place, dtype="float32", device="cpu", attention="sdpa")
        out = generate(embedded, "Ann has 3 apples and buys 4 more. How many has she?", decoder, gen_length=32)
        records[decoder] = {"text": out.text, "tokens": list(out.tokens), "num_forwards": out.num_forwards}
    check("texts", records)


def settings_by_task(checkpoint: str, decoder: str, preset: str | None = None) -> Iterator[tuple[str, Any]]:
    """The settings of every task for a decoder, as a run resolves them, with their sources and digest."""
    arguments: dict[str, Any] = {"pretrained": str(PLACES[checkpoint]), "decoder": decoder, "device": "cpu"}
    if preset is not None:
        arguments["preset"] = preset
    system = System(parse_model_args(arguments))
    for benchmark in ("arc_challenge", "gpqa", "gsm8k", "humaneval", "math", "mbpp", "mmlu_pro", "parts"):
        for task in (f"refusion_{benchmark}", f"mini_{benchmark}"):
            if task != "refusion_parts":
                resolved = system.resolve(task, {}, announce=False)
                yield task, [dict(resolved.values), dict(resolved.sources), list(resolved.until), resolved.digest]


PRESETS = {"llada": ("official_blocks", "paper_implied"), "bd3lm": (), "dream": ()}


def test_settings_of_every_decoder_and_task_come_from_the_stored_sources() -> None:
    fitting = {"d2f_llada": "llada", "fast_dllm_llada": "llada", "llada": "llada"}
    fitting |= dict.fromkeys(("dream", "d2f_dream", "fast_dllm_dream"), "dream")
    records = {
        " ".join(filter(None, (decoder, preset))): dict(settings_by_task(fitting.get(decoder, "tiny"), decoder, preset))
        for decoder in sorted(GUARDED)
        for preset in (None, *PRESETS.get(decoder, ()))
    }
    check("settings", records)


def test_a_changed_token_or_score_is_a_difference() -> None:
    stored = {"case": {"tokens": [1, 2, 3], "trace": [["select", 0, [0.5, 0.25]], ["stop", 0, "eos", 3]]}}

    def found(**changes: Any) -> list[str]:
        return list(differences(stored, {"case": {**stored["case"], **changes}}))

    stop = ["stop", 0, "eos", 3]
    assert found(new=1, trace=[["select", 0, [0.50001, 0.25]], stop]) == []
    assert found(tokens=[1, 2, 4]) == ["/case/tokens/2: 3, 4"]
    assert found(tokens=[1, 2]) == ["/case/tokens: [1, 2, 3], [1, 2]"]
    assert found(trace=[["select", 0, [0.501, 0.25]], stop]) == ["/case/trace/0/2/0: 0.5, 0.501"]
    assert list(differences(stored, {"case": {"tokens": [1, 2, 3]}, "more": {}})) == [
        "/case/trace: only stored",
        "/more: only now",
    ]
