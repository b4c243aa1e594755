"""How close ReFusion with slots of one token comes to Eso-LM: where both are one, and what sets them apart.

On the embedded checkpoint, which was trained to fill slots in any order.
"""

from functools import cache

import pytest

from miniature.data import held_out_items
from refusion_eval import LoadedModel, generate, generate_many, load_model
from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.paths import embedded_path
from refusion_eval.types import Decoded, Draft, Fix, ForwardDone
from tests.decoders.baselines import forwards_of

ONE = {"slot_size": 1, "free_rows": 0, "row_cost": 0.0, "gen_length": 32}


@cache
def embedded() -> LoadedModel:
    return load_model(str(embedded_path("refusion")), dtype="float32", device="cpu")


def mini_prompts() -> list[list[int]]:
    tokenizer = embedded().tokenizer
    asked = [BENCHMARKS[name] for name in ("gsm8k", "arc_challenge", "parts")]
    turns = [one.prompts.user(held_out_items(one.name)[0].prompt_row) for one in asked]
    return [tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": turn}])) for turn in turns]


def drafted(out: Decoded):
    return [(event.forward, event.positions, event.tokens) for event in out.trace.of(Draft)]


def fixed(out: Decoded):
    return [(event.forward, event.positions, event.tokens) for event in out.trace.of(Fix)]


@pytest.mark.parametrize("number", range(3))
def test_left_to_right_refusion_with_slots_of_one_is_eso_lm_with_alpha_0_of_0(number: int):
    model, prompt = embedded(), mini_prompts()[number]
    out = generate(model, prompt, "esolm", gen_length=32, alpha_0=0.0, early_stop=True)
    assert 5 < len(out.tokens) == out.num_forwards
    blocks = generate(model, prompt, "bd3lm", gen_length=32, block_length=1, early_stop=True)
    assert (blocks.tokens, forwards_of(blocks)) == (out.tokens, forwards_of(out))
    # Forward for forward the same rows, drafts where the other commits; then one to verify the last token.
    fused = generate(model, prompt, "refusion", block_size=1, tau_slot=0.7, tau_token=0.9, fuse=True, **ONE)
    assert fused.tokens == out.tokens
    assert drafted(fused) == fixed(out)
    rows, own = ([(at["q"], at["ctx"]) for at in forwards_of(each)] for each in (fused, out))
    assert rows[:-1] == own == [(len(prompt) + 1, 0), *((2, len(prompt) + cached) for cached in range(len(own) - 1))]
    assert rows[-1] == (1, len(prompt) + len(own) - 1)
    # Not fused, a token takes two; in larger blocks plans feed masks that are not decoded yet and that nobody sees.
    plain = generate(model, prompt, "refusion", block_size=1, fuse=False, **ONE)
    wide = generate(model, prompt, "refusion", block_size=32, left_to_right=True, fuse=True, **ONE)
    assert plain.tokens == wide.tokens == out.tokens
    assert (plain.num_forwards, wide.num_forwards) == (2 * out.num_forwards, fused.num_forwards)
    assert max(at["q"] for at in forwards_of(wide)[1:]) > 20


@pytest.mark.parametrize("fuse", [False, True])
def test_refusion_that_takes_a_block_at_once_is_eso_lm_in_one_step(fuse: bool):
    for prompt in mini_prompts():
        out = generate(embedded(), prompt, "esolm", gen_length=32, subcontext_len=1)
        other = generate(embedded(), prompt, "refusion", block_size=32, tau_slot=0.0, fuse=fuse, **ONE)
        assert other.tokens == out.tokens
        assert (out.num_forwards, other.num_forwards) == (1, 2)
        first, only = (next(each.trace.of(ForwardDone)) for each in (other, out))
        assert (first.rows, first.cached) == (only.rows, only.cached) == (len(prompt) + 32, 0)


def test_otherwise_certainty_orders_and_a_plan_feeds_every_mask_of_the_block():
    prompts = mini_prompts()
    random = generate_many(embedded(), prompts, "esolm", gen_length=32, steps=10**6, eos_ids=())
    certain = generate_many(embedded(), prompts, "refusion", block_size=32, tau_slot=1.0, fuse=False, eos_ids=(), **ONE)
    for prompt, out, other in zip(prompts, random, certain, strict=True):
        assert len(fixed(out)) == out.num_forwards == 32  # so many steps that no two tokens share one
        assert [positions for _, positions, _ in fixed(out)] != [positions for _, positions, _ in fixed(other)]
        assert {at["q"] for at in forwards_of(out)[1:]} == {2}
        assert other.num_forwards == 64
        plans = [event.rows for event in other.trace.of(ForwardDone) if event.kind == "plan"]
        assert plans == [len(prompt) + 32, *range(31, 0, -1)]


def test_refusion_drops_the_masks_behind_an_eos_and_eso_lm_decodes_them():
    for prompt in mini_prompts():
        out = generate(embedded(), prompt, "esolm", gen_length=96)
        settings = {**ONE, "gen_length": 96, "block_size": 96, "tau_slot": 1.0, "fuse": False}
        other = generate(embedded(), prompt, "refusion", **settings)
        assert out.stop == other.stop == "eos"
        assert len(out.trace.fixed_at()) == 96
        assert len(other.tokens) <= len(other.trace.fixed_at()) < 96
