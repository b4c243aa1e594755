"""Differences between families of models as data: entries of config.json, tensor names, and switches of a layer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from refusion_eval.types import CheckpointKind


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """Names of the modules in a checkpoint; a tensor's name is that of its module and ".weight" or ".bias".

    Attributes:
        embedding, final_norm, head: full names.
        layer: prefix of the names inside a layer, with {} for its number.
        input_norm, q, k, v, out, mlp_norm, gate, up, down, q_norm, k_norm: names inside a layer.
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}."
    input_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    out: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"


@dataclass(frozen=True, kw_only=True)
class ConfigKeys:
    """Names of the sizes in config.json; the attributes are those of `refusion_eval.models.config.ModelConfig`."""

    vocab_size: str = "vocab_size"
    hidden_size: str = "hidden_size"
    intermediate_size: str = "intermediate_size"
    num_layers: str = "num_hidden_layers"
    num_heads: str = "num_attention_heads"
    num_kv_heads: str = "num_key_value_heads"
    max_positions: str = "max_position_embeddings"
    tied_head: str = "tie_word_embeddings"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family.

    Attributes:
        qkv_bias: whether queries, keys and values have biases.
        qk_norm: whether each head of queries and keys is normalised.
        tensors: names of the tensors.
        keys: names in config.json.
        must_be: entries of config.json that must be present with this value, because the default is another one.
        may_be: entries of config.json that must have one of these values if they are present.
        kind: what its checkpoints are trained to do; None if that differs between them.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    tensors: TensorNames = field(default_factory=TensorNames)
    keys: ConfigKeys = field(default_factory=ConfigKeys)
    must_be: Mapping[str, object] = field(default_factory=dict)
    may_be: Mapping[str, tuple[object, ...]]
    kind: CheckpointKind | None = None


_OFF = (False, None)
_SILU: dict[str, tuple[object, ...]] = {"hidden_act": ("silu",)}
_QWEN2 = Family(qkv_bias=True, may_be=_SILU | {"use_sliding_window": _OFF, "use_mrope": _OFF})

# By model_type of config.json.
FAMILIES: Mapping[str, Family] = {
    "qwen3": Family(qk_norm=True, may_be=_SILU | {"attention_bias": _OFF, "use_sliding_window": _OFF}),
    "qwen2": _QWEN2,
    "llama": Family(may_be=_SILU | {"attention_bias": _OFF, "mlp_bias": _OFF}),
    # Qwen2, but trained for bidirectional attention with logits one position ahead.
    "Dream": replace(_QWEN2, kind="dream"),
    "llada": Family(
        tensors=TensorNames(
            embedding="model.transformer.wte",
            final_norm="model.transformer.ln_f",
            head="model.transformer.ff_out",
            layer="model.transformer.blocks.{}.",
            input_norm="attn_norm",
            q="q_proj",
            k="k_proj",
            v="v_proj",
            out="attn_out",
            mlp_norm="ff_norm",
            gate="ff_proj",
            up="up_proj",
            down="ff_out",
        ),
        keys=ConfigKeys(
            vocab_size="embedding_size",
            hidden_size="d_model",
            intermediate_size="mlp_hidden_size",
            num_layers="n_layers",
            num_heads="n_heads",
            num_kv_heads="n_kv_heads",
            max_positions="max_sequence_length",
            tied_head="weight_tying",
        ),
        # The config class serves several research models: its defaults are not those of LLaDA.
        must_be={
            "activation_type": "silu",
            "block_type": "llama",
            "layer_norm_type": "rms",
            "rope": True,
            "weight_tying": False,
        },
        may_be={
            "alibi": _OFF,
            "attention_layer_norm": _OFF,
            "bias_for_layer_norm": _OFF,
            "block_group_size": (1,),
            "clip_qkv": (None,),
            "include_bias": _OFF,
            "include_qkv_bias": _OFF,
            "input_emb_norm": _OFF,
            "layer_norm_with_affine": (True,),
            "multi_query_attention": _OFF,
            "rope_full_precision": (True,),
            "scale_logits": _OFF,
        },
        kind="llada",
    ),
}
