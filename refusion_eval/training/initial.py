"""Initial weights with which a tiny model soon learns to look things up in its context."""

import torch
from transformers import Qwen3ForCausalLM

# Share of the rotary pairs that turn fastest, and their gain: what they say depends on distance, not on content.
FAST_SHARE, FAST_GAIN = 0.5, 0.3


@torch.no_grad()
def prepare_for_lookup(model: Qwen3ForCausalLM) -> None:
    """Changes random weights in place so that attention by content is there from the first step.

    - The first key head of every layer but the first is copied into the query heads that read it, so that they begin
      by attending to earlier occurrences of the same token (a query-key product near the identity, after Trockman and
      Kolter, "Mimetic initialization of self-attention layers", arXiv 2305.09828). The query gains damp the rotary
      pairs that turn fast, or else the token itself would outweigh its earlier occurrences. The first layer stays
      random: it is where attention by distance forms.
    - What the layers add to the residual stream begins at zero, and embeddings have unit norm in expectation, so that
      the layers above see which token they read.
    """
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    num_pairs = config.head_dim // 2
    num_fast = int(FAST_SHARE * num_pairs)
    model.model.embed_tokens.weight.normal_(std=config.hidden_size**-0.5)
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        attention.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        if number == 0:
            continue
        key_head = attention.k_proj.weight[: config.head_dim]
        attention.q_proj.weight[: group * config.head_dim] = key_head.repeat(group, 1)
        gains = attention.q_norm.weight.view(2, num_pairs)  # a pair's halves are num_pairs apart
        gains[:, :num_fast] = FAST_GAIN
