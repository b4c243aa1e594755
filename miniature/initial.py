"""Initial weights of a tiny backbone, arranged so that the model attends by content from the first step."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from refusion_eval.training.checkpoints.backbone import load_backbone, load_tokenizer
from refusion_eval.training.checkpoints.save import save_backbone
from refusion_eval.training.config import BackboneConfig

# Share and gain of the fastest rotary pairs, which encode distance rather than content.
FAST_SHARE, FAST_GAIN = 0.5, 0.3


def write_initial(config: BackboneConfig, target: Path) -> None:
    """Writes the checkpoint that a training run starts from, with random weights of `config.shape`."""
    tokenizer = load_tokenizer(config)
    model = load_backbone(config, tokenizer)
    prepare_for_lookup(model)
    save_backbone(model, tokenizer, target)


@torch.no_grad()
def prepare_for_lookup(model: PreTrainedModel) -> None:
    """Changes the random weights of a Qwen3 in place.

    - In every layer but the first, the first key head is copied into the query heads that read it, which then attend to
      earlier occurrences of the same token (query-key product near the identity, after Trockman and Kolter, "Mimetic
      initialization of self-attention layers", arXiv 2305.09828). The query gains damp the fastest rotary pairs;
      otherwise the token itself would outweigh its earlier occurrences. The first layer stays random, because attention
      by distance forms there.
    - The outputs of the layers are zero, and the expected norm of an embedding is 1, so that later layers can read the
      token.
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
