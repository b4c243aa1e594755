"""Whether a backbone can be trained, said before any weights are read, and the shapes of random ones."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models.checkpoint import locate
from refusion_eval.models.config import model_config, parse_model_config, read_json
from refusion_eval.models.families import FAMILIES
from refusion_eval.models.files import CheckpointFiles
from refusion_eval.training.checkpoints.special_tokens import load_tokenizer, num_ids, special_ids
from refusion_eval.training.config import BackboneConfig, LoraSettings, Objective

# By model_type of config.json.
CONFIGS: Mapping[str, type[PretrainedConfig]] = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}
CLASSES: Mapping[str, type[PreTrainedModel]] = {
    "qwen3": Qwen3ForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "llama": LlamaForCausalLM,
}
# Entries of a shape, by config.json's names: those that it has to state, and what the others are if it does not.
_STATED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
# These follow from the others.
_DERIVED = ("vocab_size", "num_key_value_heads", "head_dim")


def check_backbone(config: BackboneConfig, objective: Objective, *, max_length: int | None = None) -> None:
    """Refuses what cannot be trained, from config.json, tokenizer files and headers of local weights.

    Whether a model of the hub has weights that can be read shows when they are fetched.

    Args:
        config: what is asked for.
        objective: what it is to be trained on.
        max_length: tokens of the longest sample, where known.

    Raises:
        ConfigError: settings that cannot be met.
        CheckpointError: a model or tokenizer that is not there, or not of a kind that is trained.
    """
    if objective not in get_args(Objective):
        raise ConfigError(f"objective={objective!r} is unknown; known: {', '.join(get_args(Objective))}")
    if config.shape is not None:
        tokenizer = load_tokenizer(config)
        positions = random_config(config.shape, num_ids(tokenizer), special_ids(tokenizer)).max_position_embeddings
        family = str(config.shape["model_type"])
    else:
        family, positions = _check_model(config)
        load_tokenizer(config)
    if max_length is not None and max_length > positions:
        raise ConfigError(
            f"samples of {max_length} tokens do not fit into the model's {positions} positions; lower the length"
        )
    if config.lora is not None:
        _check_lora(config.lora, family)


def _check_model(config: BackboneConfig) -> tuple[str, int]:
    """The family and the positions of a checkpoint that can be trained."""
    location = locate(str(config.model), config.revision)
    path = location.directory / "config.json"
    raw = read_json(path)
    check_class(raw, path)
    shapes = model_config(location.directory)
    if location.revision is None:
        CheckpointFiles(location.directory)
    return shapes.family, shapes.max_positions


def check_class(raw: Mapping[str, Any], path: Path) -> None:
    """Refuses a model that no class of transformers computes.

    Raises:
        CheckpointError: it is of another type, or needs code that comes with the checkpoint.
    """
    name, known = str(raw.get("model_type")), ", ".join(CLASSES)
    if name not in CLASSES:
        code = " and brings code of its own, which is never run" if "auto_map" in raw else ""
        raise CheckpointError(f"{path}: model_type is {name!r}{code}; backbones that can be trained are {known}")
    expected = CLASSES[name].__name__
    architectures = raw.get("architectures") or [expected]
    if expected not in architectures:
        raise CheckpointError(
            f"{path}: architectures is {architectures}, not {expected}; code that comes with a checkpoint is never "
            "run. If its tensors are those of a plain model, `refusion-eval convert` makes it one"
        )


def _check_lora(lora: LoraSettings, family: str) -> None:
    names = FAMILIES[family].tensors
    matrices = (names.q, names.k, names.v, names.out, names.gate, names.up, names.down)
    known = [name.rpartition(".")[2] for name in matrices]
    for target in lora.target_modules:
        if target not in known:
            raise ConfigError(
                f"lora: target_modules names {target!r}, which is no matrix of a {family} layer; it has "
                f"{', '.join(known)} (the embedding of new tokens is trained anyway, the output layer never is)"
            )


def random_config(shape: Mapping[str, Any], num_rows: int, ids: Mapping[str, int]) -> PretrainedConfig:
    """The config of random weights.

    Args:
        shape: model_type, hidden_size, intermediate_size, num_hidden_layers and num_attention_heads; optionally
            vocab_size (`num_rows`), num_key_value_heads (num_attention_heads), head_dim (hidden_size /
            num_attention_heads), max_position_embeddings (4096), rope_theta (1e6), rms_norm_eps (1e-6),
            initializer_range (0.02) and tie_word_embeddings (false).
        num_rows: what the tokenizer needs.
        ids: its special tokens.

    Raises:
        ConfigError: an entry is unknown, missing or impossible.
    """
    name = shape.get("model_type")
    if name not in CONFIGS:
        raise ConfigError(f"shape: model_type is {name!r}; choose {', '.join(CONFIGS)}")
    known = ("model_type", *_STATED, *_DERIVED, *_DEFAULTS)
    for key in shape:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"shape: unknown entry {key!r}; {advice}")
    missing = [key for key in _STATED if key not in shape]
    if missing:
        raise ConfigError(f"shape: {', '.join(missing)} not given; state {', '.join(_STATED)}")
    stated = {key: value for key, value in shape.items() if key != "model_type"}
    # Before anything is divided: positive whole numbers, and switches that are off.
    raw = {"model_type": name, "vocab_size": num_rows, **_DEFAULTS, **stated, "hidden_act": "silu"}
    try:
        sizes = parse_model_config(raw, Path("shape"))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    if sizes.vocab_size < num_rows:
        raise ConfigError(
            f"shape: vocab_size is {sizes.vocab_size}, but the tokenizer has {num_rows} ids; leave it out"
        )
    entries = {**_DEFAULTS, **stated}
    entries |= {"vocab_size": sizes.vocab_size, "num_key_value_heads": sizes.num_kv_heads, "head_dim": sizes.head_dim}
    return CONFIGS[str(name)](**entries, **ids)
