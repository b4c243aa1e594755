"""Random tiny checkpoints, the transformers model as oracle, and one plain forward of ours to hold against it."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from refusion_eval.models.attention import attend_over
from refusion_eval.models.cache import KVCache
from refusion_eval.models.checkpoint import model_config
from refusion_eval.models.transformer import Transformer
from refusion_eval.models.weights import load_weights
from refusion_eval.types import Attention

VOCAB_SIZE = 61
MASK_ID, EOS_ID = 60, 59
CPU = torch.device("cpu")
CLASSES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
# Families that transformers has no class for, and the one whose class computes them.
COMPUTED_BY = {
    **dict.fromkeys(("Dream", "Fast_dLLM_Qwen", "a2d-qwen2"), "qwen2"),
    **dict.fromkeys(("sdar", "llada2", "a2d-qwen3", "wedlm", "DreamReasoner"), "qwen3"),
    **dict.fromkeys(("llada", "illada"), "llama"),
    "sdar_moe": "qwen3_moe",
}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
# Parts of LLaDA's tensor names, in the order in which they replace those of Llama.
LLADA_NAMES = {
    "model.embed_tokens": "model.transformer.wte",
    "model.layers.": "model.transformer.blocks.",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
LLADA_KEYS = {
    "vocab_size": "embedding_size",
    "hidden_size": "d_model",
    "intermediate_size": "mlp_hidden_size",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "max_position_embeddings": "max_sequence_length",
    "tie_word_embeddings": "weight_tying",
    "hidden_act": "activation_type",
    "rms_norm_eps": "rms_norm_eps",
    "eos_token_id": "eos_token_id",
}
LLADA_SWITCHES = {
    "model_type": "llada",
    "rope": True,
    "block_type": "llama",
    "layer_norm_type": "rms",
    "alibi": False,
    "multi_query_attention": None,
    "vocab_size": VOCAB_SIZE,
}


def save_checkpoint(
    directory: Path,
    *,
    family: str = "qwen3",
    rope: str = "parameters",
    shard_size: str = "1GB",
    seed: int = 0,
    **changes: object,
) -> PreTrainedModel:
    """Saves a random model in Hugging Face layout and returns it, with eager attention, for comparison.

    Norm scales and biases are random too, so that leaving one out shows. `rope` says where config.json keeps the rotary
    base.
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
    computed_by = COMPUTED_BY.get(family, family)
    if not computed_by.startswith("qwen3"):
        sizes.pop("head_dim")
    if computed_by == "qwen3_moe":
        sizes |= MIXTURE
    torch.manual_seed(seed)
    make_config, make_model = CLASSES[computed_by]
    model = make_model._from_config(make_config(**(sizes | changes)), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.uniform_(-0.5, 0.5)
    model.save_pretrained(directory, max_shard_size=shard_size)
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {"mask_token_id": MASK_ID}
    if rope == "top level":
        config["rope_scaling"] = config.pop("rope_parameters")
        config["rope_theta"] = config["rope_scaling"].pop("rope_theta")
    config |= {"model_type": family} | ({"qk_norm": computed_by == "qwen3"} if family == "wedlm" else {})
    config |= {"model_type": "Dream", "block_size": 32} if family == "DreamReasoner" else {}
    if family == "llada":
        config = _as_llada(config)
        for file in directory.glob("*.safetensors"):
            save_file({llada_name(name): tensor for name, tensor in load_file(file).items()}, file)
        for index in directory.glob("*.index.json"):
            weight_map = json.loads(index.read_text())["weight_map"]
            index.write_text(json.dumps({"weight_map": {llada_name(name): weight_map[name] for name in weight_map}}))
    path.write_text(json.dumps(config))
    return model


def save_word_tokenizer(directory: Path, num_words: int) -> None:
    """Saves a tokenizer beside a checkpoint: id n is the word "wn", but for 0 (unknown words) and 1 (the end)."""
    words = {"<unk>": 0, "<end>": 1} | {f"w{number}": number for number in range(2, num_words)}
    model = Tokenizer(WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>", unk_token="<unk>").save_pretrained(directory)


CANVAS = 6  # of a DiffusionGemma with random weights, whose tokens VOCAB_SIZE - 3 and above are of images


def save_diffusion_gemma(directory: Path) -> None:
    """Saves a DiffusionGemma with random weights, with the tokenizer of `save_word_tokenizer`; its end token is 1."""
    from transformers.models.diffusion_gemma import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion  # 5.24

    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    rope["full_attention"] = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "rope_parameters": rope,
        "layer_types": ["sliding_attention", "full_attention"],
        "use_bidirectional_attention": "vision",
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 8,
        "max_position_embeddings": 4096,
    }
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision |= {"num_key_value_heads": 1, "head_dim": 8, "patch_size": 2, "position_embedding_size": 4}
    images = {"image_token_id": VOCAB_SIZE - 1, "boi_token_id": VOCAB_SIZE - 2, "eoi_token_id": VOCAB_SIZE - 3}
    config = DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=CANVAS, **images)
    torch.manual_seed(0)
    model = DiffusionGemmaForBlockDiffusion(config)
    with torch.no_grad():
        for layer, other in zip(model.model.encoder.language_model.layers, model.model.decoder.layers, strict=True):
            layer.layer_scalar.fill_(0.9)
            other.layer_scalar.fill_(1.1)
        model.model.decoder.embed_tokens.weight.mul_(12)  # so that distributions are not flat
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1], "pad_token_id": 0}))
    save_word_tokenizer(directory, VOCAB_SIZE - 3)


def llada_name(name: str) -> str:
    """LLaDA's name of a tensor or module of Llama."""
    for old, new in LLADA_NAMES.items():
        name = name.replace(old, new)
    return name


def _as_llada(config: dict) -> dict:
    named = {new: config[old] for old, new in LLADA_KEYS.items()}
    return named | LLADA_SWITCHES | {"rope_theta": config["rope_parameters"]["rope_theta"], "mask_token_id": MASK_ID}


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
    reference: PreTrainedModel, tokens: Sequence[int], positions: Sequence[int], visible: torch.Tensor
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


def exact(model: Transformer, tokens: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
    """Logits in float64 from the definitions, without a cache, under a dense mask [rows, rows]; positions from 0.

    Only the angles of the rotary embedding are rounded to float32, as in training.
    """
    config, weights = model.config, model.weights
    heads, groups, width = config.num_heads, config.num_kv_heads, config.head_dim

    def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * scale.double()

    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    angles = (torch.arange(len(tokens))[:, None] * (1.0 / config.rope_theta**exponents)).double().repeat(1, 2)[:, None]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    x = weights.embedding[torch.tensor(tokens)].double()
    for layer in weights.layers:
        qkv = norm(x, layer.input_norm) @ layer.qkv.double().t()
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias.double()
        q, k, v = qkv.unflatten(-1, (-1, width)).split((heads, groups, groups), dim=1)
        if layer.qk_norm is not None:
            q, k = norm(q, layer.qk_norm[:heads]), norm(k, layer.qk_norm[heads:])
        q, k, v = rotated(q), *(part.repeat_interleave(heads // groups, dim=1) for part in (rotated(k), v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / width**0.5
        shares = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", shares, v).flatten(1) @ layer.out.double().t()
        gate, up = (norm(x, layer.mlp_norm) @ layer.gate_up.double().t()).chunk(2, dim=-1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer.down.double().t()
    return norm(x, weights.final_norm) @ weights.head.double().t()
