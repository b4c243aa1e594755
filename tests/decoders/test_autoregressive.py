"""Autoregressive decoding on scripted readouts."""

import pytest

from refusion_eval.decoders.autoregressive import AutoregressiveSettings, decode
from refusion_eval.errors import ConfigError
from refusion_eval.types import Forward, Read, Readout
from tests.decoders.baselines import RECORDS_EACH, assert_equals_golden, decode_golden, golden_case
from tests.decoders.scripted import readout, run_scripted

EOS = 9
PROMPT = [1, 2, 3]


def count_up(forward: Forward, read: Read) -> Readout:
    return readout([forward.positions[read.rows[0]] + 1], 0.5)


def test_every_token_takes_one_forward_and_the_last_token_is_not_fed_back():
    response, _trace, forwards = run_scripted(decode, PROMPT, AutoregressiveSettings(gen_length=4), count_up)
    assert response.tokens == (3, 4, 5, 6)
    assert response.stop == "length"
    assert [list(forward.tokens) for forward in forwards] == [PROMPT, [3], [4], [5]]
    assert [list(forward.positions) for forward in forwards] == [[0, 1, 2], [3], [4], [5]]
    assert [list(forward.commit.rows) for forward in forwards] == [[], [0, 1, 2], [0], [0]]


def test_decoding_ends_with_eos_which_is_kept():
    response, _, forwards = run_scripted(
        decode, PROMPT, AutoregressiveSettings(gen_length=50, eos_ids=(EOS,)), count_up
    )
    assert response.tokens[-1] == EOS
    assert response.stop == "eos"
    assert len(forwards) == len(response.tokens) == 7


def test_a_stop_rule_ends_decoding():
    rule = AutoregressiveSettings(gen_length=50, stop_rule=lambda tokens: len(tokens) >= 2)
    response, _, _ = run_scripted(decode, PROMPT, rule, count_up)
    assert len(response.tokens) == 2
    assert response.stop == "stop_string"


def test_sampling_draws_a_new_key_for_every_position_and_seed():
    def keys(seed: int) -> list[int]:
        chosen = AutoregressiveSettings(gen_length=5, temperature=1.0, seed=seed)
        return [key for forward in run_scripted(decode, PROMPT, chosen, count_up)[2] for key in forward.reads[0].draws]

    assert len(set(keys(0))) == 5
    assert keys(0) == keys(0)
    assert not set(keys(0)) & set(keys(1))


@pytest.mark.parametrize("changes", [{"gen_length": 0}, {"temperature": -0.1}, {"seed": -1}, {"eos_ids": (-2,)}])
def test_bad_settings_are_refused(changes: dict[str, object]):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        AutoregressiveSettings(**changes)


@pytest.mark.parametrize("number", range(RECORDS_EACH))
def test_tokens_and_forwards_are_those_of_the_public_code(shared, number):
    case = golden_case(shared, "ar", number)
    named = case["settings"]
    assert named["stop_ids"] == "eos"
    out = decode_golden(shared, case, "autoregressive", gen_length=named["max_new_tokens"], eos_ids=(190,))
    assert_equals_golden(out, case)
