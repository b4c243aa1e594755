"""Golden decodings of public code (`parity/baselines`, `parity/systems2026`), decoded anew and compared by forwards."""

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from refusion_eval.api import LoadedModel, decoder_settings, generate, generate_stream, load_model
from refusion_eval.types import Decoded

RECORDS_EACH = 5  # of a baseline
NUM_RECORDS = {  # of a system of 2026
    "d3llm_dream": 6,
    "d3llm_llada": 6,
    "dparallel_dream": 6,
    "dparallel_llada": 6,
    "fast_dllm_v2": 7,
    "freedave_sdar": 3,
    "idlm": 7,
    "idlm_accept": 8,
    "idlm_sampled": 1,
    "llada2": 6,
    "sdar": 8,
    "wedlm": 8,
}
GOLDEN_DEVICE = os.environ.get("REFUSION_EVAL_GOLDEN_DEVICE", "cpu")  # set by hand on a machine with a GPU


@cache
def _load(directory: str) -> LoadedModel:
    return load_model(directory, dtype="float32", device=GOLDEN_DEVICE)


def golden_model(shared: Path, case: Mapping[str, Any]) -> LoadedModel:
    """The tiny checkpoint of a case."""
    (found,) = (shared / "parity").glob(f"*/checkpoints/{case['checkpoint']}")
    return _load(str(found))


def golden_case(shared: Path, name: str, number: int) -> dict[str, Any]:
    """One record of golden_<name>.jsonl."""
    (found,) = (shared / "parity").glob(f"*/golden_{name}.jsonl")
    lines = found.read_text().splitlines()
    assert len(lines) == NUM_RECORDS.get(name, RECORDS_EACH)
    case: dict[str, Any] = json.loads(lines[number])
    return case


def decode_golden(shared: Path, case: Mapping[str, Any], decoder: str, **settings: Any) -> Decoded:
    """Decodes the prompt of a case on its checkpoint."""
    return generate(golden_model(shared, case), case["prompt_ids"], decoder, **settings)


def decode_in_batch(
    shared: Path, case: Mapping[str, Any], decoder: str, requests: Sequence[tuple[Sequence[int], Mapping[str, Any]]]
) -> list[Decoded]:
    """Decodes (prompt, settings) requests together on the checkpoint of a case; each must go as it goes alone."""
    model = golden_model(shared, case)
    resolved = [(decoder, prompt, decoder_settings(model, decoder, **settings)) for prompt, settings in requests]
    together = dict(generate_stream(model, resolved, batch_size=len(requests)))
    outs = []
    for index, (prompt, settings) in enumerate(requests):
        out = together[index]
        assert isinstance(out, Decoded)
        alone = generate(model, prompt, decoder, **settings)
        assert (out.tokens, forwards_of(out)) == (alone.tokens, forwards_of(alone))
        outs.append(out)
    return outs


def forwards_of(out: Decoded) -> list[dict[str, Any]]:
    """Rows, cached rows and commits of every forward, as the records have them."""
    forwards: list[dict[str, Any]] = []
    for row in out.trace.to_json():
        tag, _, *values = row
        if tag == "forward":
            _, rows, cached = values
            forwards.append({"q": rows, "ctx": cached, "commit": []})
        elif tag == "fix":
            forwards[-1]["commit"] += [list(pair) for pair in zip(*values, strict=True)]
    return forwards


def assert_equals_golden(out: Decoded, case: Mapping[str, Any]) -> None:
    """Same tokens, number of forwards, rows of each forward and tokens committed after each."""
    wanted = [
        {"q": forward["q"] * forward["rows"], "ctx": forward["ctx"], "commit": forward["commit"]}
        for forward in case["forwards"]
    ]
    got = forwards_of(out)
    for forward in got:
        forward["commit"].sort()
    assert got == wanted
    assert out.num_forwards == case["num_forwards"]
    assert list(out.tokens) == case["output_ids"][: len(out.tokens)]
    first_stop = case.get("first_eos_or_eot", case.get("first_stop", case["first_eos"]))
    assert len(out.tokens) == (len(case["output_ids"]) if first_stop is None else first_stop + 1)
