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
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models.checkpoint import Location, fetch_weights, locate
from refusion_eval.models.config import FAMILIES, ModelConfig, model_config, read_json
from refusion_eval.models.tokenizer import Tokenizer
from refusion_eval.models.weights import CheckpointFiles, with_saved_head
from refusion_eval.training.checkpoints.backbone import CLASSES
from refusion_eval.training.checkpoints.layouts import as_released, tokenizer_as_released, with_both_spellings
from refusion_eval.training.checkpoints.save import replacing, write_json, write_shards
from refusion_eval.training.checkpoints.special_tokens import num_ids, set_mask_token, special_ids

Layout = Literal["release", "stock"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Qwen's tokenizers have at least `_QWEN_IDS` ids. Its checkpoints have more rows; those of Qwen2 from 7B on the most.
_QWEN_IDS, _QWEN_ROWS, _WIDE_QWEN2_ROWS, _WIDE_HIDDEN_SIZE = 151_643, 151_936, 152_064, 3584
_COPIED = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
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
    """Writes a checkpoint in another layout, completely or not at all, with one shard in memory at a time.

    Raises:
        ConfigError: a setting is impossible, or `target` exists.
        CheckpointError: the source is missing, or is not a model of a known class with exactly its tensors.
    """
    for name, value, choices in (("to", to, get_args(Layout)), ("dtype", dtype, (None, *DTYPES))):
        if value not in choices:
            raise ConfigError(f"{name}={value!r} is unknown; choose {', '.join(filter(None, choices))}")
    if rows is not None and to == "release":
        raise ConfigError(f"rows={rows} is for the layout stock; the release has one row for each id of the tokenizer")
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists already; name a new directory")
    location = locate(source, revision)
    checkpoint = _Source(location)
    fetch_weights(location)
    num_rows = checkpoint.num_ids if to == "release" else checkpoint.stock_rows(rows)
    with replacing(target) as part:
        checkpoint.write_weights(part, num_rows, None if dtype is None else DTYPES[dtype])
        checkpoint.write_files(part, to, {"vocab_size": num_rows} | ({} if dtype is None else {"dtype": dtype}))


class _Source:
    """Config and tokenizer of the checkpoint that is converted, after their checks."""

    def __init__(self, location: Location) -> None:
        self._directory = location.directory
        path = location.directory / "config.json"
        self._raw = read_json(path)
        self._shapes: ModelConfig = model_config(location.directory)
        if self._shapes.family not in CLASSES:
            raise CheckpointError(
                f"{path}: model_type is {self._shapes.family!r}; convert supports {', '.join(CLASSES)}"
            )
        if not (location.directory / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{location.name} has no tokenizer.json; put the tokenizer files of the backbone beside the weights"
            )
        self._tokenizer = Tokenizer(location.directory).inner
        set_mask_token(self._tokenizer, self._raw.get("mask_token_id"))
        if self._tokenizer.mask_token is None:
            raise CheckpointError(
                f"{location.name} has no mask token, so it is not a masked diffusion model; train it first, which adds "
                "a mask token"
            )
        self.num_ids = num_ids(self._tokenizer)
        if self.num_ids > self._shapes.vocab_size:
            raise CheckpointError(
                f"{location.name}: the tokenizer has {self.num_ids} ids, but the vocabulary "
                f"{self._shapes.vocab_size} rows; take weights and tokenizer from the same checkpoint"
            )

    def stock_rows(self, requested: int | None) -> int:
        """Rows of the vocabulary in the layout "stock": for Qwen as in its own checkpoints, for others as they are."""
        if requested is not None:
            if requested < self.num_ids:
                raise ConfigError(
                    f"rows={requested} is less than the tokenizer's {self.num_ids} ids; give more or leave it out"
                )
            return requested
        shapes = self._shapes
        is_wide = shapes.family == "qwen2" and shapes.hidden_size >= _WIDE_HIDDEN_SIZE
        qwen_rows = _WIDE_QWEN2_ROWS if is_wide else _QWEN_ROWS
        is_qwen = shapes.family in ("qwen2", "qwen3") and _QWEN_IDS <= self.num_ids <= qwen_rows
        return max(shapes.vocab_size, qwen_rows) if is_qwen else shapes.vocab_size

    def write_weights(self, part: Path, num_rows: int, dtype: torch.dtype | None) -> None:
        """Copies the tensors, one shard at a time; embedding and output layer get `num_rows` rows."""
        family = self._shapes.family
        files = CheckpointFiles(self._directory)
        with torch.device("meta"):
            model = CLASSES[family](CLASSES[family].config_class.from_dict(dict(self._raw)))
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        names = FAMILIES[family].tensors
        vocabulary = (f"{names.embedding}.weight", f"{names.head}.weight")
        ignored = set()
        if with_saved_head(self._shapes, files.find, str(self._directory)).tied_head:
            shapes.pop(vocabulary[1], None)
            ignored.add(vocabulary[1])
        unknown = [name for name in files.unread if name not in shapes.keys() | ignored]
        if unknown:
            raise CheckpointError(
                f"{self._directory} has {len(unknown)} tensors that {CLASSES[family].__name__} does not have "
                f"({', '.join(unknown[:3])}); it is another kind of model and cannot be converted"
            )

        def read(name: str) -> Tensor:
            tensor = files.read(name, shapes[name])
            if name in vocabulary:
                tensor = _with_rows(tensor, num_rows, self.num_ids)
            return tensor if dtype is None else tensor.to(dtype)

        write_shards(part, shapes, dtype or DTYPES.get(self._shapes.dtype, torch.float32), read)

    def write_files(self, part: Path, to: Layout, changes: dict[str, Any]) -> None:
        """Writes config.json, with `changes`, and the files of the tokenizer."""
        for name in _COPIED:
            if (self._directory / name).is_file():
                shutil.copy(self._directory / name, part / name)
        architecture = {"architectures": [CLASSES[self._shapes.family].__name__]}
        raw = self._raw | architecture | special_ids(self._tokenizer)
        # The two spellings of the data type must not contradict each other.
        raw |= {"dtype": self._shapes.dtype} | changes
        write_json(part / "config.json", as_released(raw) if to == "release" else with_both_spellings(raw))
        config_path = part / "tokenizer_config.json"
        tokens = {name: getattr(self._tokenizer, name) for name in _TOKENS if getattr(self._tokenizer, name)}
        tokenizer = (read_json(config_path) if config_path.is_file() else {}) | tokens
        if to == "release":
            tokenizer = tokenizer_as_released(tokenizer, read_json(part / "tokenizer.json"))
            extra = tokenizer.get("additional_special_tokens")
            special = tokens | ({"additional_special_tokens": extra} if extra else {})
            write_json(part / "special_tokens_map.json", special)
        write_json(config_path, tokenizer)


def _with_rows(weight_VD: Tensor, num_rows: int, num_ids: int) -> Tensor:
    """Cuts a matrix to `num_rows` rows, or extends it with the mean of the rows of known ids."""
    missing = num_rows - len(weight_VD)
    if missing <= 0:
        return weight_VD[:num_rows]
    mean_D = weight_VD[:num_ids].float().mean(dim=0).to(weight_VD.dtype)
    return torch.cat((weight_VD, mean_D.expand(missing, -1)))
