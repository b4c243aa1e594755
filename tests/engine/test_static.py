"""Forwards of fixed shape give the tokens of free ones (`refusion_eval.engine.static`)."""

import pytest

from refusion_eval.decoders import DECODERS, autoregressive
from refusion_eval.decoders.autoregressive import AutoregressiveSettings
from refusion_eval.decoders.refusion_settings import RefusionSettings
from refusion_eval.engine.engine import Engine
from refusion_eval.engine.static import WIDTHS, _StaticForward
from tests.engine.random_model import VOCAB_SIZE, random_transformer
from tests.engine.test_engine import wander_requests

REFUSION = DECODERS["refusion"].decode
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LONG_PROMPT = [index * index % VOCAB_SIZE for index in range(700)]


@pytest.fixture
def engines() -> tuple[Engine, Engine]:
    model = random_transformer()
    return Engine(model, "sdpa"), Engine(model, "sdpa", static=True)


def test_random_decodings_are_the_same(engines) -> None:
    free, static = engines
    for request in wander_requests(20):
        expected = free.run(request.decode, request.prompt, request.settings)
        decoded = static.run(request.decode, request.prompt, request.settings)
        assert (decoded.tokens, decoded.trace) == (expected.tokens, expected.trace)


@pytest.mark.parametrize("prompt", [PROMPT, LONG_PROMPT])
@pytest.mark.parametrize("fuse", [True, False])
def test_decoders_give_the_same_tokens_before_and_after_the_buffer_grew(engines, prompt, fuse) -> None:
    free, static = engines
    settings = RefusionSettings(
        gen_length=40, slot_size=8, block_size=16, mask_id=VOCAB_SIZE - 1, tau_token=0.0, fuse=fuse
    )
    assert static.run(REFUSION, prompt, settings).tokens == free.run(REFUSION, prompt, settings).tokens
    greedy = AutoregressiveSettings(gen_length=30)
    mine = static.run(autoregressive.decode, LONG_PROMPT, greedy)
    assert mine.tokens == free.run(autoregressive.decode, LONG_PROMPT, greedy).tokens
    again = static.run(REFUSION, prompt, settings)
    assert again.tokens == free.run(REFUSION, prompt, settings).tokens


def test_each_width_is_prepared_once(engines, monkeypatch) -> None:
    _, static = engines
    made = []
    prepare = _StaticForward.__init__
    monkeypatch.setattr(_StaticForward, "__init__", lambda self, *rest: made.append(rest[-1]) or prepare(self, *rest))
    for _ in range(2):
        static.run(autoregressive.decode, PROMPT, AutoregressiveSettings(gen_length=30))
    assert made == [WIDTHS[0]]
