"""Reads GGUF files, llama.cpp's format of models: writes what one holds as a checkpoint in Hugging Face layout.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Metadata, tensors and dequantisation are read by the
library gguf, whose reader has no bounds of its own.
"""

import json
import logging
import math
import re
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from refusion_eval.errors import CheckpointError
from refusion_eval.models.checkpoint import ModelConfig, RopeScaling, parse_model_config, write_json
from refusion_eval.models.packaged import cache_folder, sha256_of
from refusion_eval.models.weights import tensor_shapes
from refusion_eval.untrusted import LARGEST, open_plain

log = logging.getLogger(__name__)

FAMILIES = ("qwen3", "qwen2", "llama")
# Those of which a test compares the dequantised tensors with llama.cpp's.
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_DTYPE_OF_TYPE = {"F16": "float16", "BF16": "bfloat16"}  # all others are stored in float32
TYPE_OF_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # in safetensors and in GGUF files
_MAGIC = b"GGUF"
_MOST_VALUES = 1_500_000  # of the metadata; the vocabulary of Llama 3 with its merges takes some 950,000
_PIECE_BYTES = 64 << 20  # of float32, that are dequantised at once
_CACHE_FORMAT = 1  # higher when another version of this file writes other folders
_FREQUENCIES = "rope_freqs.weight"
# The scaling of Llama 3.1 and 3.2 but for its factor, as GGUF has only the divisors that follow from it.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_QUANTISATION_AT_END = re.compile(r"[.\-_](BF16|F16|F32|I?Q\d\w*)$", re.IGNORECASE)

# The pattern by which Qwen2's tokenizers split texts; that of Llama 3 has numbers of up to three digits.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"\p{N}| ", r"\p{N}{1,3}| ")
_SPLITS = ("smollm", "qwen2", "llama-bpe")  # llama.cpp's names of these rules


def library() -> Any:
    """The library gguf, imported by those alone who read or write such a file."""
    import gguf

    return gguf


def unpacked(path: Path) -> Path:
    """The folder of the checkpoint that a GGUF file holds; it is written into a cache when the file is first opened.

    The cache is `refusion_eval/gguf` in XDG_CACHE_HOME, else in ~/.cache; the name of a folder is the file's SHA-256.
    """
    cache = cache_folder("gguf")
    parent = cache / f"{_CACHE_FORMAT}-{_sha256(path)}"
    folder = parent / path.stem  # which the name of the model is made from
    if not (folder / "config.json").is_file():
        log.info("%s: writing its weights without quantisation to %s; this happens once", path, folder)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=parent) as part:
                whole = Path(part) / "whole"
                whole.mkdir()
                unpack(path, whole)
                whole.rename(folder)
        except OSError as error:
            if not (folder / "config.json").is_file():  # else another process has written it meanwhile
                advice = "make room there, or name another folder as XDG_CACHE_HOME"
                raise CheckpointError(f"{path} cannot be unpacked into {cache} ({error}); {advice}") from error
    return folder


def _sha256(path: Path) -> str:
    try:
        with open_plain(path) as file:
            if file.read(4) != _MAGIC:
                raise CheckpointError(f"{path} is no GGUF file; give one, or a directory in Hugging Face layout")
        return sha256_of(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def unpack(path: Path, folder: Path, dtype: str | None = None) -> None:
    """Writes the checkpoint of a GGUF file into an empty folder, with a piece of one tensor in memory at a time.

    Args:
        path: the file.
        folder: gets config.json, generation_config.json, the files of the tokenizer and model.safetensors.
        dtype: float32, bfloat16 or float16. The default is that of each tensor, and float32 for quantised ones.

    Raises:
        CheckpointError: the file is damaged, or has a layout, a tokenizer or a type that is not read.
    """
    digest = _sha256(path)
    reader, facts = _read(path)
    raw = _config(path, reader, facts)
    # Errors name the file, which stands for the config.json that is made of it.
    config = parse_model_config(raw, path / "config.json")
    tensors = _tensors(path, reader, config)
    rotated = facts.get(f"{config.family}.rope.dimension_count")
    if rotated not in (None, config.head_dim):
        raise CheckpointError(f"{path}: {rotated} of {config.head_dim} values of a head are rotated; only all are")
    if (divisors := {tensor.name: tensor for tensor in reader.tensors}.get(_FREQUENCIES)) is not None:
        raw["rope_parameters"] = {"rope_theta": config.rope_theta} | _scaling(path, config, divisors.data)
    name = f"{_QUANTISATION_AT_END.sub('', path.stem)}, {_quantisation(tensors, facts)}"
    dtypes = {key: dtype or _DTYPE_OF_TYPE.get(tensor.tensor_type.name, "float32") for key, tensor in tensors.items()}
    sizes = {kind: sum(tensors[key].n_elements for key in dtypes if dtypes[key] == kind) for kind in TYPE_OF_DTYPE}
    raw |= {"dtype": max(sizes, key=lambda kind: sizes[kind]), "display_name": name, "backbone": name}
    raw |= {"source": {"file": path.name, "sha256": digest}}
    tokenizer, tokenizer_config, ids = _tokenizer(path, facts)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config | {"model_max_length": config.max_positions})
    write_json(folder / "generation_config.json", ids)
    write_json(folder / "config.json", raw | ids)
    _write_weights(folder / "model.safetensors", tensors, dtypes, config)


def _read(path: Path) -> tuple[Any, dict[str, Any]]:
    """The library's reader of a file, and the metadata as plain values."""

    class Reader(library().GGUFReader):  # type: ignore[misc]
        # The library would count on without end where lengths are wrong, as slices beyond the end are empty.
        num_values = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, *more: Any, **options: Any) -> Any:
            self.data: np.ndarray = self.data.view(np.ndarray)  # slices of a memmap are made several times as slowly
            end, size = int(offset) + int(count) * np.dtype(dtype).itemsize, len(self.data)
            if end > size:
                raise ValueError(f"it has {size} bytes, and {end} are named")
            self.num_values += 1
            if self.num_values > _MOST_VALUES or (not hasattr(self, "data_offset") and end > LARGEST):
                raise ValueError(f"its metadata have more than {LARGEST >> 20} MiB or {_MOST_VALUES} values")
            return super()._get(offset, dtype, count, *more, **options)

    try:
        with np.errstate(all="ignore"):
            reader = Reader(path)
            if reader.byte_order != "I":
                raise ValueError("its numbers have the other order of bytes")
            return reader, {key: entry.contents() for key, entry in reader.fields.items()}
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} is truncated or no GGUF that is read ({error}); download it again") from error


def _config(path: Path, reader: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of config.json, as far as `parse_model_config` checks them."""
    family = facts.get("general.architecture")
    if family not in FAMILIES:
        raise CheckpointError(f"{path} is a GGUF file of {family!r}; read are those of {', '.join(FAMILIES)}")
    if facts.get("split.count") not in (None, 0, 1):
        raise CheckpointError(f"{path} is a part of a model; join the parts with llama-gguf-split --merge")
    shapes = {tensor.name: tensor.shape for tensor in reader.tensors}

    def fact(key: str) -> Any:
        value = facts.get(f"{family}.{key}")
        # GGUF stores float32, of which the shortest number is meant: 1e-05 and not 9.999999747378752e-06.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    kind, factor = fact("rope.scaling.type"), fact("rope.scaling.factor")
    if kind in (None, "none", "linear"):
        kind = "default" if kind == "none" or factor in (None, 0, 1) else "linear"
    num_layers, rope_theta = fact("block_count"), fact("rope.freq_base") or 10_000.0
    if isinstance(num_layers, int) and num_layers > len(shapes):
        raise CheckpointError(f"{path} has {len(shapes)} tensors for {num_layers} layers; download it again")
    return {
        "model_type": family,
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family] + "ForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": int(shapes["token_embd.weight"][-1]) if "token_embd.weight" in shapes else None,
        "hidden_size": fact("embedding_length"),
        "intermediate_size": fact("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": fact("attention.head_count"),
        "num_key_value_heads": fact("attention.head_count_kv"),
        "head_dim": fact("attention.key_length"),
        "num_local_experts": fact("expert_count"),
        "max_position_embeddings": fact("context_length"),
        "rms_norm_eps": fact("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": kind, "rope_theta": rope_theta},
        "rope_theta": rope_theta,
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def _tensors(path: Path, reader: Any, config: ModelConfig) -> dict[str, Any]:
    """The tensors by their names in Hugging Face layout; CheckpointError if they are not those of the config."""
    stored = {tensor.name: tensor for tensor in reader.tensors}
    names = tensor_names(config)
    found = {}
    for name, shape in tensor_shapes(config).items():
        tensor = stored.pop(names.get_name(name, try_suffixes=(".weight", ".bias")), None)
        if tensor is None:
            raise CheckpointError(f"{path} has no tensor for {name}; it is incomplete or of another layout")
        if (saved := tuple(int(size) for size in reversed(tensor.shape))) != shape:
            raise CheckpointError(f"{path}: {tensor.name} has shape {saved}, but the metadata mean {shape}")
        if tensor.tensor_type.name not in TYPES:
            kinds = f"of the type {tensor.tensor_type.name}; read are {', '.join(TYPES)}"
            raise CheckpointError(f"{path}: {tensor.name} is {kinds}")
        found[name] = tensor
    stored.pop(_FREQUENCIES, None)
    if stored:
        listed = ", ".join(sorted(stored)[:3])
        raise CheckpointError(f"{path} has {len(stored)} tensors that no {config.family} model has: {listed}")
    return found


def tensor_names(config: ModelConfig) -> Any:
    """The library's map from names in Hugging Face layout to those in GGUF files."""
    from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES

    architecture = next(arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == config.family)
    return library().get_tensor_name_map(architecture, config.num_layers)


def _quantisation(tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """What the publisher calls the type of the file, such as Q4_K_M; else the type of most weights."""
    told = facts.get("general.file_type")
    for kind in library().LlamaFileType:
        if kind == told and not kind.name.startswith("GUESSED"):
            return str(kind.name.removeprefix("MOSTLY_").removeprefix("ALL_"))
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + tensor.n_elements
    return max(sizes, key=lambda name: sizes[name])


def rotated_heads(name: str, config: ModelConfig) -> int:
    """Number of heads whose rows llama.cpp has in another order; 0 for a tensor that is the same in both layouts."""
    if config.family != "llama":
        return 0
    names = config.family_layout.tensors
    module = name.rpartition(".")[0]
    return config.num_heads if module.endswith(names.q) else config.num_kv_heads if module.endswith(names.k) else 0


def frequency_divisors(config: ModelConfig, scaling: RopeScaling) -> np.ndarray:
    """What llama.cpp divides the rotary frequencies by, [head_dim / 2]: the scaling of Llama 3.1."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    turns = scaling.original_max_positions * config.rope_theta**-exponents / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # the share of a frequency that is not scaled
    return (1 / ((1 - kept) / scaling.factor + kept)).numpy().astype(np.float32)


def _scaling(path: Path, config: ModelConfig, divisors: np.ndarray) -> dict[str, Any]:
    """The rotary scaling that the divisors of the frequencies follow from."""
    factor = float(divisors.max(initial=1))
    found = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    scaling = RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    wanted = frequency_divisors(config, scaling)
    if divisors.dtype != np.float32 or divisors.shape != wanted.shape or not np.allclose(divisors, wanted, rtol=1e-4):
        raise CheckpointError(f"{path}: {_FREQUENCIES} is not the rotary scaling of Llama 3.1, the only one computed")
    return found


def _write_weights(target: Path, tensors: Mapping[str, Any], dtypes: Mapping[str, str], config: ModelConfig) -> None:
    """Writes tensors as one safetensors file, which the library writes only from a whole model in memory."""
    # Wide entries first, so that each begins at a multiple of its size.
    order = sorted(tensors, key=lambda name: dtypes[name] != "float32")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.n_elements * getattr(torch, dtypes[name]).itemsize
        shape = [int(size) for size in reversed(tensor.shape)]
        header[name] = {"dtype": TYPE_OF_DTYPE[dtypes[name]], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            for piece in _pieces(tensors[name], rotated_heads(name, config)):
                values = torch.from_numpy(piece).to(getattr(torch, dtypes[name]))
                file.write(values.contiguous().view(torch.uint8).numpy().data)


def _pieces(tensor: Any, heads: int) -> Iterator[np.ndarray]:
    """The rows of a tensor in float32, some at a time; rows of `heads` in the order of Hugging Face, if it is not 0."""
    from gguf.quants import dequantize

    rows = tensor.data if tensor.data.ndim > 1 else tensor.data[None]
    order = np.arange(len(rows))
    if heads:  # llama.cpp has side by side what is rotated together
        order = order.reshape(heads, -1, 2).swapaxes(1, 2).ravel()
    step = max(1, _PIECE_BYTES * len(rows) // (4 * tensor.n_elements))
    for start in range(0, len(rows), step):
        with np.errstate(all="ignore"):  # weights that are no numbers are refused when they are loaded
            yield np.array(dequantize(rows[order[start : start + step]], tensor.tensor_type), np.float32)


def _tokenizer(path: Path, facts: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any], dict[str, Any]]:
    """The tokenizer of a file, the entries of tokenizer_config.json, and the ids of special tokens for config.json."""
    kind, split = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in _SPLITS:
        raise CheckpointError(
            f"{path}: the tokenizer is {kind!r} with the pre-tokenizer {split!r}; read are byte-level tokenizers "
            f"('gpt2') with {', '.join(_SPLITS)}; take the original checkpoint"
        )
    lists = [(f"tokenizer.ggml.{name}", kind) for name, kind in (("tokens", str), ("token_type", int), ("merges", str))]
    for key, kind in lists:
        if not isinstance(facts.get(key), list) or not all(type(entry) is kind for entry in facts[key]):
            raise CheckpointError(f"{path} has no {key}, or it is no list of {kind.__name__}; download it again")
    tokens, kinds, merges = (facts[key] for key, _ in lists)
    if len(tokens) != len(kinds) or len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{path}: tokens have no type, or the same token is there twice; download it again")
    ids = {name: facts.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom", "padding")}
    ids |= {name: facts.get(f"tokenizer.ggml.{name}_token_id") for name in ("unknown", "mask")}
    for name, number in ids.items():
        if number is not None and not (type(number) is int and 0 <= number < len(tokens)):
            raise CheckpointError(f"{path}: {name}_token_id is {number!r}, but there are {len(tokens)} tokens")
    # The library's own numbers of the types: 3 for control, 4 for those of the user, 5 for rows without a token.
    vocabulary = {token: number for number, token in enumerate(tokens) if kinds[number] != 5}
    try:
        model = models.BPE(
            vocabulary, [tuple(merge.split(" ")) for merge in merges], ignore_merges=split == "llama-bpe"
        )
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = _pre_tokenizer(split)
        if split == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens(
            [
                AddedToken(token, special=kind == 3, normalized=False)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind in (3, 4)
            ]
        )
        adds_bos = ids["bos"] is not None and facts.get("tokenizer.ggml.add_bos_token", split == "llama-bpe")
        adds_eos = ids["eos"] is not None and facts.get("tokenizer.ggml.add_eos_token", False)
        first, last = ([tokens[ids[name]]] if adds else [] for name, adds in (("bos", adds_bos), ("eos", adds_eos)))
        if added := [*first, *last]:
            numbers = [(token, vocabulary[token]) for token in added]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*first, "$A", *last], special_tokens=numbers
            )
    # The Rust code of the library raises plain exceptions; damaged files must not end in a traceback.
    except Exception as error:
        raise CheckpointError(f"{path}: no tokenizer can be made of it ({error}); download it again") from error
    spelt = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    written = {key: tokens[ids[name]] for key, name in spelt.items() if ids[name] is not None}
    written |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False}
    written |= {"clean_up_tokenization_spaces": False}
    if isinstance(template := facts.get("tokenizer.chat_template"), str):
        written["chat_template"] = template
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None))
    special = {"bos_token_id": ids["bos"], "pad_token_id": ids["padding"], "mask_token_id": ids["mask"]}
    special = {key: number for key, number in special.items() if number is not None}
    return tokenizer, written, special | ({"eos_token_id": ends} if ends else {})


def _pre_tokenizer(split: str) -> Any:
    if split == "smollm":
        first, splits_words = cast(Any, pre_tokenizers.Digits(individual_digits=True)), True
    else:
        pattern = Regex(_QWEN2_SPLIT if split == "qwen2" else _LLAMA3_SPLIT)
        first, splits_words = pre_tokenizers.Split(pattern, "isolated"), False
    return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits_words)])
