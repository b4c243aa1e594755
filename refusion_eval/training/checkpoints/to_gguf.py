"""Writes an autoregressive checkpoint as one GGUF file, which llama.cpp's server reads."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models import checkpoint, gguf
from refusion_eval.models.card import checkpoint_card
from refusion_eval.models.checkpoint import ModelConfig, read_json
from refusion_eval.models.location import fetch_weights, locate
from refusion_eval.models.tokenizer import Tokenizer
from refusion_eval.models.weights import UNQUANTISED, CheckpointFiles, with_saved_head

log = logging.getLogger(__name__)

# What stands in the pattern by which a byte-level tokenizer splits texts -> llama.cpp's name of that rule.
_SPLITS = {r"\p{N}{1,3}": "llama-bpe", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|": "qwen2"}
_SPLITS["'individual_digits': True"] = "smollm"
_OTHER_SPLIT = "gpt-2"


def convert(source: str, target: Path, *, dtype: str | None = None, revision: str | None = None) -> None:
    """Writes a checkpoint in Qwen2, Qwen3 or Llama layout as a GGUF file, completely or not at all.

    Args:
        source: folder or hub id.
        target: the file, which must not exist yet.
        dtype: float32 (the default), bfloat16 or float16, of the matrices; vectors are float32.
        revision: branch, tag or commit of a hub id.

    Raises:
        ConfigError: the file exists.
        CheckpointError: the checkpoint is of another family, or its tokenizer is no byte-level BPE.
    """
    library = gguf.library()
    if target.exists():
        raise ConfigError(f"{target} exists already; name a new file")
    location = locate(source, revision)
    config = checkpoint.model_config(location.directory)
    if config.family not in gguf.FAMILIES or config.layout is not None:
        raise CheckpointError(
            f"{location.name}: model_type is {config.family!r}, or its layout is its own; --to gguf writes the stock "
            f"layouts {', '.join(gguf.FAMILIES)}"
        )
    fetch_weights(location)
    part = target.with_name(f"{target.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    writer = library.GGUFWriter(part, config.family)
    try:
        _add_shapes(writer, config)
        kind = gguf.TYPE_OF_DTYPE[dtype or "float32"]
        writer.add_file_type(library.LlamaFileType[f"{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}"])
        _add_tokenizer(writer, location.directory, config)
        _add_tensors(writer, location.directory, config, library.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _add_shapes(writer: Any, config: ModelConfig) -> None:
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: Any, directory: Path, config: ModelConfig) -> None:
    from gguf import TokenType

    inner, path = Tokenizer(directory).inner, directory / "tokenizer.json"
    stored = read_json(path)
    model, split = stored.get("model") or {}, str(stored.get("pre_tokenizer"))
    if model.get("type") != "BPE" or "ByteLevel" not in split:
        raise CheckpointError(f"{path} is no byte-level BPE, which is the only kind that --to gguf writes")
    # str() of the parsed JSON doubles backslashes.
    known = next((name for pattern, name in _SPLITS.items() if pattern in split.replace("\\\\", "\\")), None)
    if known is None:
        log.warning("%s: llama.cpp has no rule that splits texts as this tokenizer does: send it token ids", path)
    spelling = {number: token for token, number in inner.get_vocab().items()}
    added = inner.added_tokens_decoder
    tokens = [spelling.get(number, f"[PAD{number}]") for number in range(config.vocab_size)]
    types = [
        (TokenType.CONTROL if added[number].special else TokenType.USER_DEFINED)
        if number in added
        else TokenType.NORMAL
        if number in spelling
        else TokenType.UNUSED
        for number in range(config.vocab_size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(known or _OTHER_SPLIT)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_add_bos_token(False)  # prompts are rendered before they are sent
    eos_ids = checkpoint_card(str(directory), directory).eos_ids
    if eos_ids:
        writer.add_eos_token_id(eos_ids[0])
    if len(eos_ids) > 1:
        writer.add_eot_token_id(eos_ids[1])
    if inner.bos_token_id is not None:
        writer.add_bos_token_id(inner.bos_token_id)
    if inner.pad_token_id is not None:
        writer.add_pad_token_id(inner.pad_token_id)
    if inner.chat_template:
        writer.add_chat_template(inner.chat_template)


def _add_tensors(writer: Any, directory: Path, config: ModelConfig, kind: Any) -> None:
    from gguf import quantize

    files, names = CheckpointFiles(directory), gguf.tensor_names(config)
    config = with_saved_head(config, files.find, str(directory))
    head = f"{config.family_layout.tensors.head}.weight"
    # Opened anew, because the check above counts the head as read.
    for name in CheckpointFiles(directory).unread:
        if name == head and config.tied_head:
            continue
        tensor = files.find(name)
        assert tensor is not None
        if tensor.dtype not in UNQUANTISED:
            raise CheckpointError(f"{files.place_of(name)} is {tensor.dtype}; only unquantised checkpoints are written")
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if written is None:
            raise CheckpointError(f"{files.place_of(name)} is no tensor of a {config.family} model")
        values = tensor.float().numpy()
        if heads := gguf.rotated_heads(name, config):
            values = _as_pairs(values, heads)
        if values.ndim > 1:
            writer.add_tensor(written, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(written, values)
    if config.rope_scaling is not None:
        writer.add_tensor("rope_freqs.weight", gguf.frequency_divisors(config, config.rope_scaling))


def _as_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in llama.cpp's order for Llama: what is rotated together stands side by side."""
    # The checkpoint has the first half of each head before its second half.
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
