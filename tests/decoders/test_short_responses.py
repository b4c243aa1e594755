"""A response shorter than a block has the length that was asked for, or is refused before anything is computed."""

import pytest

from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError
from tests.decoders.test_all_in_one_batch import SETTINGS
from tests.engine.random_model import VOCAB_SIZE, random_engine

MASK, EOS = VOCAB_SIZE - 1, VOCAB_SIZE - 2
# Their releases fill whole blocks, each in the same number of steps.
WHOLE_BLOCKS = ("d2f_dream", "d2f_llada", "fast_dllm_dream", "fast_dllm_llada", "llada")
OTHERS = [name for name, decoder in DECODERS.items() if decoder.reads.masked and name not in WHOLE_BLOCKS]


def settings(name, **chosen):
    return DECODERS[name].Settings(**{"mask_id": MASK, "eos_ids": (EOS,), **chosen})


@pytest.mark.parametrize("name", OTHERS)
def test_it_has_its_length_and_no_mask(name):
    engine, decode = random_engine(1), DECODERS[name].decode
    for chosen in ({}, *SETTINGS[name]):
        for gen_length in (1, 3):
            for num_prompt in (1, 5, 8, 32):  # whole blocks, and a rest
                prompt = [place % 17 for place in range(num_prompt)]
                out = engine.run(decode, prompt, settings(name, **chosen, gen_length=gen_length))
                assert len(out.tokens) == gen_length or out.tokens[-1] == EOS
                assert len(out.tokens) <= gen_length
                assert MASK not in out.tokens


@pytest.mark.parametrize("name", WHOLE_BLOCKS)
def test_where_blocks_are_whole_the_error_says_what_to_set(name):
    with pytest.raises(ConfigError, match=r"gen_length .*3.*; set gen_length to (a multiple of|one whole) block"):
        settings(name, gen_length=3)
    length = "block_size" if name.startswith("d2f") else "block_length"
    assert settings(name, gen_length=3, **{length: 3}).num_positions == 3
