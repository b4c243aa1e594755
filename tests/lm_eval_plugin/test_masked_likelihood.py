"""Log-likelihood requests of lm-eval to models that fill masks both ways."""

import json
import math

import pytest
from lm_eval.api.instance import Instance

from refusion_eval.api import generate, load_model, score_tokens
from refusion_eval.errors import ConfigError
from refusion_eval.lm_eval_plugin.adapter import RefusionLM
from tests.models.tiny import MASK_ID, save_checkpoint, save_word_tokenizer


@pytest.fixture(scope="module", params=["llada", "Dream"])
def checkpoint(request, tmp_path_factory):
    """A random checkpoint and its main decoder."""
    folder = tmp_path_factory.mktemp(request.param)
    save_checkpoint(folder, family=request.param, max_position_embeddings=24, initializer_range=0.4)
    save_word_tokenizer(folder, num_words=MASK_ID)
    return str(folder), {"llada": "llada", "Dream": "dream"}[request.param]


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint[0], device="cpu")


def build(checkpoint, **arguments):
    pretrained, decoder = checkpoint
    return RefusionLM.create_from_arg_obj({"pretrained": pretrained, "decoder": decoder, **arguments})


def asked(pairs):
    return [Instance("loglikelihood", {}, pair, 0, ("x", number, 1)) for number, pair in enumerate(pairs)]


def test_log_likelihoods_are_the_estimates_with_the_samples_and_seed_asked_for(checkpoint, model):
    pairs = [("w5 w9 w44", " w7"), ("w2", " w3 w4 w5 w6 w7 w8 w9 w10"), ("", "w10 w11"), ("w4 w4", " w12 w13 w14 w15")]
    lm = build(checkpoint, mc_samples=12, seed=3, batch_size=2)
    found = lm.loglikelihood(asked(pairs))
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        given = lm.tok_encode(context) or [lm.prefix_token_id]
        expected = score_tokens(model, given, lm.tok_encode(continuation), mc_samples=12, seed=3)
        assert math.isclose(value, expected.log_prob, rel_tol=1e-4, abs_tol=1e-4)
        assert (type(value), type(greedy)) == (float, bool)
        assert greedy == expected.is_greedy
    (other,) = build(checkpoint, mc_samples=12, seed=4).loglikelihood(asked(pairs[1:2]))
    assert other[0] != pytest.approx(found[1][0], abs=1e-3)


def test_the_greedy_choice_is_what_the_decoder_gives(checkpoint, model):
    lm = build(checkpoint)
    choices = range(2, MASK_ID)
    scores = lm.loglikelihood(asked([("w5 w9", f" w{token}") for token in choices]))
    settings = {"block_length": 1} if lm.args.decoder == "llada" else {}
    decoded = generate(model, lm.tok_encode("w5 w9"), lm.args.decoder, gen_length=1, eos_ids=(), **settings)
    greedy = [token for token, (_, is_greedy) in zip(choices, scores, strict=True) if is_greedy]
    assert greedy == list(decoded.tokens)


def test_a_text_too_long_for_the_model_loses_its_beginning(checkpoint):
    lm = build(checkpoint)
    words = [f"w{number}" for number in range(2, 40)]
    long, fitting = lm.loglikelihood(asked([(" ".join(given), " w50 w51") for given in (words, words[-22:])]))
    assert long[0] == pytest.approx(fitting[0], abs=1e-4)
    with pytest.raises(ConfigError, match="a continuation of 24 tokens is too long to be scored: it may have 23"):
        lm.loglikelihood(asked([("w2", " " + " ".join(words[:24]))]))


def test_rolling_log_likelihood_is_the_sum_over_windows_that_fit(checkpoint, model):
    lm = build(checkpoint, mc_samples=8)
    tokens = list(range(2, 32))
    text = " ".join(f"w{token}" for token in tokens)
    (found,) = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0, ("x", 0, 1))])
    windows = [([lm.prefix_token_id], tokens[:23]), (tokens[6:23], tokens[23:])]
    assert found == pytest.approx(sum(score_tokens(model, *window, mc_samples=8).log_prob for window in windows))


def test_a_block_diffusion_model_has_no_log_likelihood(tmp_path):
    save_checkpoint(tmp_path)
    save_word_tokenizer(tmp_path, num_words=MASK_ID)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoders": ["bd3lm"]}))
    with pytest.raises(ConfigError, match="was trained for bd3lm, for which no log-likelihood is computed"):
        build((str(tmp_path), "bd3lm")).loglikelihood(asked([("w5", " w7")]))
