"""Model sizes for timing, and checkpoints with random weights of such a size."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3 model, named as in its config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int


# Qwen3's sizes with ReFusion's vocabulary.
SHAPES: Mapping[str, Shape] = {
    "0.6B": Shape(
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=3072,
        vocab_size=151671,
    ),
    "8B": Shape(
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=12288,
        vocab_size=151671,
    ),
}


def random_checkpoint(shape: Shape, directory: Path, dtype: torch.dtype) -> None:
    """Writes a checkpoint with random weights; its special tokens are the last of the vocabulary."""
    torch.manual_seed(0)
    vocabulary = shape.vocab_size
    config = Qwen3Config(
        **asdict(shape),
        head_dim=128,
        max_position_embeddings=8192,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        bos_token_id=vocabulary - 2,
        eos_token_id=vocabulary - 3,
        pad_token_id=vocabulary - 4,
    )
    config.mask_token_id = vocabulary - 1
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(directory)
