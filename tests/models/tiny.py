"""Random tiny checkpoints, the transformers model as oracle, and one plain forward of ours to hold against it."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from refusion_eval.engine.masks import attend_over
from refusion_eval.models.cache import KVCache
from refusion_eval.models.config import model_config
from refusion_eval.models.transformer import Transformer
from refusion_eval.models.weights import load_weights
from refusion_eval.types import Attention

VOCAB_SIZE = 61
MASK_ID, EOS_ID = 60, 59
CPU = torch.device("cpu")


def save_checkpoint(
    directory: Path, *, rope: str = "parameters", shard_size: str = "1GB", seed: int = 0, **changes: object
) -> Qwen3ForCausalLM:
    """Saves a random Qwen3 in Hugging Face layout and returns it, with eager attention, for comparison.

    Norm scales are random too, so that leaving one out shows. `rope` says where config.json keeps the rotary base.
    """
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "eos_token_id": EOS_ID,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM._from_config(Qwen3Config(**(sizes | changes)), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    model.save_pretrained(directory, max_shard_size=shard_size)
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {"mask_token_id": MASK_ID}
    if rope == "top level":
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    path.write_text(json.dumps(config))
    return model


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    config = model_config(directory)
    return Transformer(config, load_weights(directory, config, dtype, CPU))


def new_cache(model: Transformer, num_sequences: int = 1, capacity: int = 4) -> KVCache:
    return KVCache(model.config, num_sequences, capacity, model.dtype, CPU)


def forward(
    model: Transformer, cache: KVCache, tokens: Sequence[int], positions: Sequence[int], attention: Attention
) -> torch.Tensor:
    """Logits of every row of one forward over what the cache holds; its rows are staged."""
    cache.reserve(cache.lengths[0] + len(tokens))
    cache.stage(0, len(tokens))
    attend = attend_over(cache, [attention], "sdpa")
    return model.logits(model.hidden(torch.tensor(tokens), torch.tensor(positions), max(positions), attend))


@torch.no_grad()
def oracle(
    reference: Qwen3ForCausalLM, tokens: Sequence[int], positions: Sequence[int], visible: torch.Tensor
) -> torch.Tensor:
    """Logits of transformers' model, without a cache, under an arbitrary dense mask [rows, rows]."""
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    output = reference(
        input_ids=torch.tensor([tokens]),
        position_ids=torch.tensor([positions]),
        attention_mask=mask[None, None],
        use_cache=False,
    )
    return output.logits[0]
