"""A checkpoint in the layout of ReFusion's release, or in that of its backbone with both spellings of config.json.

The layouts hold the same model and differ in three things:

- rows of the vocabulary: the release has one for each id of the tokenizer (151,671), the backbone spare ones beyond
  (Qwen3: 151,936), which no token uses. They are cut off, or filled with the mean of the others;
- config.json: the release was written by transformers 4.52 and spells rotary settings and dtype as that does; the
  other layout has both spellings;
- tokenizer_config.json and special_tokens_map.json, which the release has as transformers 4 writes them.

Either names the stock class as its architecture and brings no code. Whether the published config.json names code of
its own (auto_map) is not known here; it would not be carried over, as the tensors are those of a plain Qwen3.
"""

import shutil
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models.checkpoint import Location, fetch_weights, locate
from refusion_eval.models.config import ModelConfig, model_config, read_json
from refusion_eval.models.families import FAMILIES
from refusion_eval.models.files import CheckpointFiles
from refusion_eval.models.tokenizer import Tokenizer
from refusion_eval.training.checkpoints.backbone_check import CLASSES, CONFIGS
from refusion_eval.training.checkpoints.config_layout import as_released, tokenizer_as_released, with_both_spellings
from refusion_eval.training.checkpoints.save import replacing, write_json
from refusion_eval.training.checkpoints.shards import write_shards
from refusion_eval.training.checkpoints.special_tokens import num_ids, special_ids, take_mask

Layout = Literal["release", "stock"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Rows of Qwen's own checkpoints, whose tokenizers have this many ids at least: those of Qwen2 from 7B on are wider.
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
    """Writes a checkpoint anew in a layout, one shard in memory at a time; whole or not at all.

    Args:
        source: directory or hub id, in either layout.
        target: directory to be made.
        to: "release" or "stock".
        dtype: of the weights, a key of `DTYPES`; None leaves each as it is.
        rows: of the vocabulary, under "stock"; None is what the backbone has where it is Qwen's, else as in `source`.
        revision: branch, tag or commit of a hub id.

    Raises:
        ConfigError: a setting that cannot be met, or a target that is there already.
        CheckpointError: the source is not there, or is no model of a known class with just its tensors.
    """
    target = Path(target)
    if to not in get_args(Layout):
        raise ConfigError(f"to={to!r} is unknown; choose {' or '.join(get_args(Layout))}")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is unknown; choose {', '.join(DTYPES)}")
    if rows is not None and to == "release":
        raise ConfigError(f"rows={rows} is for the layout stock; the release's has as many as the tokenizer has ids")
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} is there already; name a directory that is not")
    location = locate(source, revision)
    config = _Source(location)
    fetch_weights(location)
    num_rows = config.num_ids if to == "release" else config.stock_rows(rows)
    with replacing(target) as part:
        config.write_weights(part, num_rows, None if dtype is None else DTYPES[dtype])
        config.write_files(part, to, {"vocab_size": num_rows} | ({} if dtype is None else {"dtype": dtype}))


class _Source:
    """The checkpoint that is converted: its config.json and tokenizer, read and checked."""

    def __init__(self, location: Location) -> None:
        self._directory = location.directory
        path = location.directory / "config.json"
        self._raw = read_json(path)
        self._shapes: ModelConfig = model_config(location.directory)
        if self._shapes.family not in CLASSES:
            raise CheckpointError(
                f"{path}: model_type is {self._shapes.family!r}; those that are converted are {', '.join(CLASSES)}"
            )
        if not (location.directory / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{location.name} has no tokenizer.json; put the backbone's tokenizer files beside it"
            )
        self._tokenizer = Tokenizer(location.directory).inner
        take_mask(self._tokenizer, self._raw.get("mask_token_id"))
        if self._tokenizer.mask_token is None:
            raise CheckpointError(
                f"{location.name} has no mask token, so that it is no masked diffusion model; train it first, "
                "which adds one"
            )
        self.num_ids = num_ids(self._tokenizer)
        if self.num_ids > self._shapes.vocab_size:
            raise CheckpointError(
                f"{location.name}: the tokenizer has {self.num_ids} ids, but the vocabulary "
                f"{self._shapes.vocab_size} rows; take weights and tokenizer from the same checkpoint"
            )

    def stock_rows(self, stated: int | None) -> int:
        """Rows that the backbone has."""
        if stated is not None and stated < self.num_ids:
            raise ConfigError(
                f"rows={stated} is less than the tokenizer's {self.num_ids} ids; give more or leave it out"
            )
        if stated is not None:
            return stated
        shapes = self._shapes
        is_wide = shapes.family == "qwen2" and shapes.hidden_size >= _WIDE_HIDDEN_SIZE
        known = _WIDE_QWEN2_ROWS if is_wide else _QWEN_ROWS
        is_qwen = shapes.family in ("qwen2", "qwen3") and _QWEN_IDS <= self.num_ids <= known
        return max(shapes.vocab_size, known) if is_qwen else shapes.vocab_size

    def write_weights(self, part: Path, num_rows: int, dtype: torch.dtype | None) -> None:
        """Streams the tensors, those of the vocabulary with `num_rows` rows."""
        files = CheckpointFiles(self._directory)
        shapes = self._tensor_shapes()
        names = FAMILIES[self._shapes.family].tensors
        vocabulary = (f"{names.embedding}.weight", f"{names.head}.weight")
        ignored = {vocabulary[1]} if self._shapes.tied_head else set()
        strays = [name for name in files.unread if name not in shapes.keys() | ignored]
        if strays:
            raise CheckpointError(
                f"{self._directory} has {len(strays)} tensors that a {CLASSES[self._shapes.family].__name__} has not "
                f"({', '.join(strays[:3])}); it computes something else and is not converted"
            )

        def read(name: str) -> Tensor:
            tensor = files.read(name, shapes[name])
            if name in vocabulary:
                tensor = _with_rows(tensor, num_rows, self.num_ids)
            return tensor if dtype is None else tensor.to(dtype)

        item_size = (dtype or DTYPES.get(self._shapes.dtype, torch.float32)).itemsize
        sizes = {name: torch.Size(shape).numel() * item_size for name, shape in shapes.items()}
        write_shards(part, sizes, read)

    def _tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the class of transformers, from a model without memory."""
        family = self._shapes.family
        with torch.device("meta"):
            model = CLASSES[family](CONFIGS[family].from_dict(dict(self._raw)))
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        if self._shapes.tied_head:
            shapes.pop(f"{FAMILIES[family].tensors.head}.weight", None)
        return shapes

    def write_files(self, part: Path, to: Layout, changes: dict[str, Any]) -> None:
        """Config and tokenizer."""
        for name in _COPIED:
            if (self._directory / name).is_file():
                shutil.copy(self._directory / name, part / name)
        architecture = {"architectures": [CLASSES[self._shapes.family].__name__]}
        raw = self._raw | architecture | special_ids(self._tokenizer)
        # The two spellings of the dtype must not contradict each other.
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
    """A matrix of the vocabulary cut to `num_rows`, or filled up with the mean of the rows that tokens have."""
    missing = num_rows - len(weight_VD)
    if missing <= 0:
        return weight_VD[:num_rows]
    mean_D = weight_VD[:num_ids].float().mean(dim=0).to(weight_VD.dtype)
    return torch.cat((weight_VD, mean_D.expand(missing, -1)))
