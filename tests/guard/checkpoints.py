"""Tiny random checkpoints that follow from a seed alone: LLaDA's and Dream's layouts, and an adapter for each."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
VOCAB, HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD = 1925, 48, 80, 2, 4, 2, 12
RANK = 2
COMMON = {"eos_token_id": 1922, "bos_token_id": 1923, "pad_token_id": 1920, "mask_token_id": 1924, "rms_norm_eps": 1e-6}
LLADA = {
    "model_type": "llada",
    "vocab_size": VOCAB,
    "embedding_size": VOCAB,
    "d_model": HIDDEN,
    "mlp_hidden_size": MLP,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "n_kv_heads": KV_HEADS,
    "max_sequence_length": 2048,
    "weight_tying": False,
    "activation_type": "silu",
    "block_type": "llama",
    "layer_norm_type": "rms",
    "rope": True,
    "rope_theta": 5000.0,
    "alibi": False,
    "multi_query_attention": None,
}
DREAM = {
    "model_type": "Dream",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_theta": 5000.0,
}
ROLES = ("q", "k", "v", "out", "gate", "up", "down", "norm", "mlp_norm")
LLADA_ROLES = ("q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out", "attn_norm", "ff_norm")
DREAM_ROLES = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"),
)
SHAPES = {
    "q": (HEADS * HEAD, HIDDEN),
    "k": (KV_HEADS * HEAD, HIDDEN),
    "v": (KV_HEADS * HEAD, HIDDEN),
    "out": (HIDDEN, HEADS * HEAD),
    "gate": (MLP, HIDDEN),
    "up": (MLP, HIDDEN),
    "down": (HIDDEN, MLP),
}


def make_all(folder: Path) -> dict[str, str]:
    """Makes them below a folder; name -> path."""
    llada = [f"model.transformer.{name}" for name in ("wte", "ln_f", "ff_out")]
    dream = ["model.embed_tokens", "model.norm", "lm_head"]
    _save(folder / "llada", LLADA, llada, "model.transformer.blocks", LLADA_ROLES, seed=1)
    _save(folder / "dream", DREAM, dream, "model.layers", DREAM_ROLES, seed=2)
    _save_adapter(folder / "llada_lora", "model.transformer.blocks", ("q_proj", "attn_out"), seed=3)
    _save_adapter(folder / "dream_lora", "model.layers", ("self_attn.q_proj", "self_attn.o_proj"), seed=4)
    return {path.name: str(path) for path in folder.iterdir()}


def _random(random: np.random.Generator, shape: tuple[int, ...], scale: float) -> np.ndarray:
    return (scale * random.standard_normal(shape)).astype(np.float32)


def _save(path: Path, config: dict, outer: list[str], layers: str, roles: tuple[str, ...], seed: int) -> None:
    path.mkdir(parents=True)
    random = np.random.default_rng(seed)
    embedding, norm, head = outer
    tensors = {f"{name}.weight": _random(random, (VOCAB, HIDDEN), 0.3) for name in (embedding, head)}
    tensors[f"{norm}.weight"] = 1 + _random(random, (HIDDEN,), 0.2)
    for layer in range(LAYERS):
        for role, name in zip(ROLES, roles, strict=True):
            full = f"{layers}.{layer}.{name}"
            shape = SHAPES.get(role)
            tensors[f"{full}.weight"] = _random(random, shape, 0.25) if shape else 1 + _random(random, (HIDDEN,), 0.2)
            if config is DREAM and role in "qkv":
                tensors[f"{full}.bias"] = _random(random, shape[:1], 0.2)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | COMMON))
    tokenizer = next(ROOT.glob("refusion_eval/**/refusion/tokenizer.json")).parent
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tokenizer / name, path / name)


def _save_adapter(path: Path, layers: str, modules: tuple[str, ...], seed: int) -> None:
    path.mkdir(parents=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module in modules:
            full = f"base_model.model.{layers}.{layer}.{module}"
            tensors[f"{full}.lora_A.weight"] = _random(random, (RANK, HIDDEN), 0.3)
            tensors[f"{full}.lora_B.weight"] = _random(random, (HIDDEN, RANK), 0.3)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "bias": "none"}
    config["target_modules"] = [module.rpartition(".")[2] for module in modules]
    (path / "adapter_config.json").write_text(json.dumps(config))
