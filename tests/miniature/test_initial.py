"""Initial weights (`miniature.initial`): content, not distance, decides where the copied heads look."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from miniature.initial import prepare_for_lookup

NUM_TOKENS, EARLIER = 120, 7


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=96,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    return Qwen3ForCausalLM(config).float()


def _last_token_attention(model: Qwen3ForCausalLM) -> list[torch.Tensor]:
    """For each layer [heads, tokens]: where the last token looks; it occurs once before, at `EARLIER`."""
    tokens = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:NUM_TOKENS]
    tokens[-1] = tokens[EARLIER]
    with torch.no_grad():
        attentions = model(input_ids=tokens[None], output_attentions=True).attentions
    return [layer[0, :, -1] for layer in attentions]


def test_copied_heads_look_at_the_token_itself_and_at_its_earlier_occurrence(model: Qwen3ForCausalLM) -> None:
    prepare_for_lookup(model)
    first, *others = _last_token_attention(model)
    for layer in others:
        for head in layer[:2]:
            assert set(head.topk(2).indices.tolist()) == {EARLIER, NUM_TOKENS - 1}
            assert head[EARLIER] > 10 * head.median()
        assert all(head.argmax() != EARLIER for head in layer[2:])
    assert all(head.argmax() != EARLIER for head in first)


def test_random_weights_do_not(model: Qwen3ForCausalLM) -> None:
    assert all(head[EARLIER] < 0.1 for layer in _last_token_attention(model) for head in layer)


def test_layers_begin_by_adding_nothing(model: Qwen3ForCausalLM) -> None:
    prepare_for_lookup(model)
    tokens = torch.arange(5)[None]
    hidden = model.model(input_ids=tokens).last_hidden_state
    assert torch.allclose(hidden, model.model.norm(model.model.embed_tokens(tokens)))
