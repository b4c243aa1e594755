"""Converts a checkpoint between the layout of ReFusion's release and the layout of its backbone.

| part                | release                                  | stock (backbone)                                |
|---------------------|------------------------------------------|-------------------------------------------------|
| rows of vocabulary  | one for each id (151,671)                | spare rows, the mean of the others (151,936)    |
| config.json         | transformers 4.52                        | spellings of transformers 4 and 5               |
| tokenizer files     | transformers 4                           | unchanged                                       |

Both name the stock class of transformers as architecture and contain no code: the tensors are those of a plain model.
"""

import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models import checkpoint
from refusion_eval.models.checkpoint import ModelConfig, read_json, write_json
from refusion_eval.models.location import Location, fetch_weights, locate
from refusion_eval.models.tokenizer import JSON_FILES, TEMPLATE_FILE, Tokenizer
from refusion_eval.models.weights import INDEX_FILE, CheckpointFiles, with_saved_head
from refusion_eval.training.checkpoints import save
from refusion_eval.training.checkpoints.backbone import CLASSES, num_ids, set_mask_token, special_ids
from refusion_eval.training.checkpoints.save import replacing

Layout = Literal["release", "stock"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Qwen's tokenizers have at least `_QWEN_IDS` ids. Its checkpoints have more rows; those of Qwen2 from 7B on the most.
_QWEN_IDS, _QWEN_ROWS, _WIDE_QWEN2_ROWS, _WIDE_HIDDEN_SIZE = 151_643, 151_936, 152_064, 3584
_COPIED = (*JSON_FILES, TEMPLATE_FILE, "generation_config.json", "merges.txt")
_TOKENS = ("bos_token", "eos_token", "pad_token", "mask_token")


def convert(
    source: str,
    target: Path,
    to: Layout,
    *,
    dtype: str | None = None,
    rows: int | None = None,
    revision: str | None = None,
) -> None:
    """Writes a checkpoint in another layout, completely or not at all, with one shard in memory at a time."""
    if rows is not None and to == "release":
        raise ConfigError(f"rows={rows} is for the layout stock; the release has one row for each id of the tokenizer")
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists already; name a new directory")
    location = locate(source, revision)
    raw, shapes, tokenizer = _checked(location)
    fetch_weights(location)
    num_rows = num_ids(tokenizer) if to == "release" else _stock_rows(shapes, num_ids(tokenizer), rows)
    with replacing(target) as part:
        _write_weights(location.directory, part, raw, shapes, num_ids(tokenizer), num_rows, dtype)
        for name in _COPIED:
            if (location.directory / name).is_file():
                shutil.copy(location.directory / name, part / name)
        architecture = {"architectures": [CLASSES[shapes.family].__name__]}
        # The two spellings of the data type must not contradict each other.
        config = raw | architecture | special_ids(tokenizer) | {"vocab_size": num_rows, "dtype": dtype or shapes.dtype}
        spelt = save.as_released if to == "release" else save.with_both_spellings
        write_json(part / "config.json", spelt(config))
        _write_tokenizer(part, to, tokenizer)


def _checked(location: Location) -> tuple[dict[str, Any], ModelConfig, PreTrainedTokenizerFast]:
    """Content of config.json, shapes and tokenizer of a checkpoint that can be converted."""
    path = location.directory / "config.json"
    raw, shapes = read_json(path), checkpoint.model_config(location.directory)
    if shapes.family not in CLASSES:
        raise CheckpointError(f"{path}: model_type is {shapes.family!r}; convert supports {', '.join(CLASSES)}")
    if not (location.directory / "tokenizer.json").is_file():
        raise CheckpointError(f"{location.name} has no tokenizer.json; put that of the backbone beside the weights")
    tokenizer = Tokenizer(location.directory).inner
    set_mask_token(tokenizer, raw.get("mask_token_id"))
    if tokenizer.mask_token is None:
        raise CheckpointError(f"{location.name} has no mask token, as a masked diffusion model has; train it first")
    if num_ids(tokenizer) > shapes.vocab_size:
        sizes = f"the tokenizer has {num_ids(tokenizer)} ids, but the vocabulary {shapes.vocab_size} rows"
        raise CheckpointError(f"{location.name}: {sizes}; take both from the same checkpoint")
    return raw, shapes, tokenizer


def _stock_rows(shapes: ModelConfig, num_ids: int, requested: int | None) -> int:
    """Rows of the vocabulary in the layout "stock": for Qwen as in its own checkpoints, for others as they are."""
    if requested is not None and requested < num_ids:
        raise ConfigError(f"rows={requested} is less than the tokenizer's {num_ids} ids; give more or leave it out")
    is_wide = shapes.family == "qwen2" and shapes.hidden_size >= _WIDE_HIDDEN_SIZE
    qwen_rows = _WIDE_QWEN2_ROWS if is_wide else _QWEN_ROWS
    is_qwen = shapes.family in ("qwen2", "qwen3") and _QWEN_IDS <= num_ids <= qwen_rows
    return requested or (max(shapes.vocab_size, qwen_rows) if is_qwen else shapes.vocab_size)


def _write_weights(
    source: Path, part: Path, raw: dict[str, Any], model: ModelConfig, num_ids: int, num_rows: int, dtype: str | None
) -> None:
    """Copies the tensors, one shard at a time; embedding and output layer get `num_rows` rows."""
    model_class, names = CLASSES[model.family], checkpoint.FAMILIES[model.family].tensors
    files = CheckpointFiles(source)
    with torch.device("meta"):
        empty = model_class(model_class.config_class.from_dict(dict(raw)))
    shapes = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()}
    vocabulary = (f"{names.embedding}.weight", f"{names.head}.weight")
    if with_saved_head(model, files.find, str(source)).tied_head:
        shapes.pop(vocabulary[1], None)
    if unknown := [name for name in files.unread if name not in shapes]:
        counted = f"{len(unknown)} tensors that {model_class.__name__} does not have ({', '.join(unknown[:3])})"
        raise CheckpointError(f"{source} has {counted}; it is another kind of model and cannot be converted")

    def read(name: str) -> Tensor:
        tensor = files.read(name, shapes[name])
        if name in vocabulary:  # cut, or extended with the mean of the rows of known ids
            mean_D = tensor[:num_ids].float().mean(dim=0).to(tensor.dtype)
            tensor = torch.cat((tensor[:num_rows], mean_D.expand(max(num_rows - len(tensor), 0), -1)))
        return tensor if dtype is None else tensor.to(DTYPES[dtype])

    # Only the tensors of one shard are read at a time; `huggingface_hub.save_torch_state_dict` would need all of them.
    size_dtype = DTYPES.get(dtype or model.dtype, torch.float32)
    sizes = {name: torch.empty(shape, dtype=size_dtype, device="meta") for name, shape in shapes.items()}
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=save.SHARD_BYTES)
    for file_name, tensor_names in split.filename_to_tensors.items():
        tensors = {name: read(name).contiguous() for name in tensor_names}
        save_file(tensors, part / file_name, metadata={"format": "pt"})
    if split.is_sharded:
        write_json(part / INDEX_FILE, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def _write_tokenizer(part: Path, to: Layout, tokenizer: PreTrainedTokenizerFast) -> None:
    path = part / "tokenizer_config.json"
    tokens = {name: getattr(tokenizer, name) for name in _TOKENS if getattr(tokenizer, name)}
    config = (read_json(path) if path.is_file() else {}) | tokens
    if to == "release":
        config = save.tokenizer_as_released(config, read_json(part / "tokenizer.json"))
        extra = config.get("additional_special_tokens")
        write_json(part / "special_tokens_map.json", tokens | ({"additional_special_tokens": extra} if extra else {}))
    write_json(path, config)
