"""All records of the systems of 2026 that one checkpoint decodes, in one batch, whatever their decoders."""

from pathlib import Path

import pytest

from refusion_eval.api import decoder_settings, generate_stream
from tests.decoders import (
    test_d3llm,
    test_dparallel,
    test_drafts,
    test_fast_dllm_v2,
    test_idlm,
    test_llada2,
    test_sdar,
    test_wedlm,
)
from tests.decoders.baselines import NUM_RECORDS, assert_equals_golden, golden_case, golden_model

# Decoder, settings and expectation of a record.
AS_RELEASED = {
    "d3llm_dream": lambda case: ("d3llm_dream", test_d3llm.released(case), case),
    "d3llm_llada": lambda case: ("d3llm_llada", test_d3llm.released(case), case),
    "dparallel_dream": lambda case: (
        "dream",
        test_dparallel.released_dream(case),
        test_dparallel.without_padding(case),
    ),
    "dparallel_llada": lambda case: (*test_dparallel.released_llada(case), case),
    "fast_dllm_v2": lambda case: ("fast_dllm_v2", test_fast_dllm_v2.released(case), test_fast_dllm_v2.as_decoded(case)),
    "freedave_sdar": lambda case: ("sdar", test_drafts.released(case), {**case, "first_eos": None}),
    "idlm": lambda case: ("idlm", test_idlm.released(case), case),
    "llada2": lambda case: ("llada2", test_llada2.released(case) | {"release_compatible": True}, case),
    "sdar": lambda case: ("sdar", test_sdar.released(case) | {"release_compatible": True}, case),
    "wedlm": lambda case: ("wedlm", test_wedlm.released(case), case),
}


def test_every_record_is_here():
    assert AS_RELEASED.keys() == NUM_RECORDS.keys() - {"idlm_accept", "idlm_sampled"}  # those are no decodings alone


@pytest.mark.parametrize("layout", ["dream", "fast", "idlm", "llada", "qwen3", "sdar", "wedlm"])
def test_a_batch_of_all_records_of_a_checkpoint_decodes_each_as_released(shared: Path, layout: str):
    by_checkpoint: dict[str, list] = {}
    for name, as_released in AS_RELEASED.items():
        for number in range(NUM_RECORDS[name]):
            case = golden_case(shared, name, number)
            if case["checkpoint"].startswith(layout):
                by_checkpoint.setdefault(case["checkpoint"], []).append((case, as_released(case)))
    assert by_checkpoint
    for records in by_checkpoint.values():
        model = golden_model(shared, records[0][0])
        requests = [
            (decoder, case["prompt_ids"], decoder_settings(model, decoder, **settings))
            for case, (decoder, settings, _) in records
        ]
        together = dict(generate_stream(model, requests, batch_size=len(requests)))
        for number, (_, (*_, wanted)) in enumerate(records):
            assert_equals_golden(together[number], wanted)
