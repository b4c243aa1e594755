"""Finds a checkpoint, here or on the hub, and says what it was trained for: a table of known ones, or its files."""

import contextlib
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from refusion_eval.errors import CheckpointError
from refusion_eval.models.config import read_family, read_json
from refusion_eval.types import CheckpointKind
from refusion_eval.untrusted import kind_of

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True)
class Location:
    """A located checkpoint."""

    name: str
    directory: Path
    revision: str | None


def locate(name: str, revision: str | None) -> Location:
    """Finds a checkpoint, downloading its small files if it is a hub id; raises CheckpointError."""
    directory = Path(name).expanduser()
    if name and directory.is_dir():
        if revision is not None:
            raise CheckpointError(f"{name} is a local directory; revision={revision!r} is for hub ids, leave it out")
        _refuse_pipes(directory)
        return Location(name, directory, None)
    if directory.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or not name:
        raise CheckpointError(f"no directory {name!r}; give a directory or a hub id such as GSAI-ML/ReFusion")
    directory = _download(name, revision, SMALL_FILES)
    return Location(name, directory, directory.name)


def _refuse_pipes(directory: Path) -> None:
    # A library that opens a pipe, a socket or a device waits for ever.
    for path in directory.iterdir():
        with contextlib.suppress(OSError):  # of a link that leads nowhere
            mode = path.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise CheckpointError(f"{path} is a {kind_of(mode)}, not a plain file; download the checkpoint again")


def fetch_weights(location: Location) -> None:
    """Downloads the weights of a hub checkpoint into its directory; does nothing for a local one."""
    if location.revision is not None:
        _download(location.name, location.revision, WEIGHT_FILES)


def _download(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        advice = f"it is gated: accept its terms on https://huggingface.co/{name}, then log in or set HF_TOKEN"
        raise CheckpointError(f"{name}: {advice}") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{name} has no revision {revision!r}; give a branch, tag or commit of it") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        advice = "neither a directory here nor a public hub id; check the spelling, or log in if it is private"
        raise CheckpointError(f"{name} is {advice}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        advice = "neither a directory here nor in the local cache, and the hub cannot be reached"
        raise CheckpointError(
            f"{name} is {advice} ({type(error).__name__}); go online or give the directory of a downloaded copy"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Card:
    """Facts about a checkpoint beyond its shapes."""

    name: str
    backbone: str
    mask_id: int | None
    eos_ids: tuple[int, ...]
    kind: CheckpointKind
    decoders: tuple[str, ...] = ()
    shape: Mapping[str, int | str] = field(default_factory=dict)  # entries of config.json that tell a local copy


LLADA_EOS = (126081, 126348)  # <|endoftext|>, <|eot_id|>
LLADA_SHAPE: Mapping[str, int | str] = {
    "model_type": "llada",
    "embedding_size": 126464,
    "d_model": 4096,
    "n_layers": 32,
}
QWEN_EOS = (151645, 151643)  # <|im_end|>, <|endoftext|>
DREAM_SHAPE: Mapping[str, int | str] = {
    "model_type": "Dream",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "num_hidden_layers": 28,
}


def _llada(name: str) -> Card:
    return Card(name=name, backbone="LLaDA-8B", mask_id=126336, eos_ids=LLADA_EOS, kind="llada", shape=LLADA_SHAPE)


def _dream(name: str) -> Card:
    eos_ids = QWEN_EOS[::-1]
    return Card(name=name, backbone="Qwen2.5-7B", mask_id=151666, eos_ids=eos_ids, kind="dream", shape=DREAM_SHAPE)


def _causal(name: str, backbone: str, eos_ids: tuple[int, ...], **shape: int | str) -> Card:
    return Card(name=name, backbone=backbone, mask_id=None, eos_ids=eos_ids, kind="causal", shape=shape)


CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        # The release stops at <|im_end|> alone; its vocabulary ends with <|beginoftext|> and <|mask|>.
        Card(
            name="GSAI-ML/ReFusion",
            backbone="Qwen3-8B",
            mask_id=151670,
            eos_ids=(151645,),
            kind="refusion",
            shape={"model_type": "qwen3", "vocab_size": 151671, "hidden_size": 4096, "num_hidden_layers": 36},
        ),
        _causal(
            "Qwen/Qwen3-8B",
            "Qwen3-8B",
            QWEN_EOS,
            model_type="qwen3",
            vocab_size=151936,
            hidden_size=4096,
            num_hidden_layers=36,
        ),
        _causal(
            "Qwen/Qwen3-0.6B",
            "Qwen3-0.6B",
            QWEN_EOS,
            model_type="qwen3",
            vocab_size=151936,
            hidden_size=1024,
            num_hidden_layers=28,
        ),
        # Llama 3.1 has the same sizes and another end token; the context length distinguishes it.
        _causal(
            "meta-llama/Meta-Llama-3-8B-Instruct",
            "Llama-3-8B",
            (128001, 128009),
            model_type="llama",
            vocab_size=128256,
            hidden_size=4096,
            num_hidden_layers=32,
            max_position_embeddings=8192,
        ),
        # No shape: nothing in config.json distinguishes it from Qwen2-7B-Instruct.
        _causal("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B", QWEN_EOS),
        # These differ in training data, but not in the facts of a card.
        *map(_llada, ("GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-1.5")),
        *map(_dream, ("Dream-org/Dream-v0-Instruct-7B", "Dream-org/Dream-v0-Base-7B")),
    )
}


def checkpoint_card(name: str, directory: Path) -> Card:
    """The card of a known checkpoint or of a local copy of it, else one read from the files of the directory.

    A copy or a fine-tune is recognised by its shape, unless its config.json names a backbone, decoders or a mask token
    of its own. For all others:

    | fact | first of these that exists |
    |---|---|
    | mask id | mask_token_id in config.json; the tokenizer's mask token; its token "<|mask|>" |
    | EOS ids | eos_token_id in generation_config.json; eos_token_id in config.json (one id or a list) |
    | decoders | decoders in config.json; those that fit the family, or models with or without a mask token |

    Raises:
        CheckpointError: a file is malformed.
    """
    if name in CARDS:
        return CARDS[name]
    path = directory / "config.json"
    config = read_json(path)
    for card in CARDS.values():
        if _is_copy(config, card):
            return replace(card, name=name)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    mask_id = config.get("mask_token_id")
    if mask_id is None:
        mask_id = _tokenizer_mask_id(directory)
    else:
        _ids(path, "mask_token_id", [mask_id])  # one, never a list
    # The row of a mask predicts it, from the whole text, where transformers computes a masked language model.
    stock_kind: CheckpointKind | None = "llada" if is_masked_model(config) else None
    family = read_family(directory, str(config.get("model_type")))
    kind = stock_kind if family is None else family.kind
    return Card(
        name=name,
        backbone=str(config.get("backbone", config.get("model_type", "unknown"))),
        mask_id=mask_id,
        eos_ids=_ids(generation_path, "eos_token_id", generation.get("eos_token_id"))
        or _ids(path, "eos_token_id", config.get("eos_token_id")),
        kind=kind or ("causal" if mask_id is None else "masked"),
        decoders=_own_decoders(path, config),
    )


def is_masked_model(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a masked language model, which fills masks from the whole text around them."""
    return any(str(name).endswith("ForMaskedLM") for name in config.get("architectures") or [])


def _is_copy(config: Mapping[str, Any], card: Card) -> bool:
    """Whether a config.json is that of a known checkpoint, or of a fine-tune with the same card."""
    if not card.shape or "backbone" in config or "decoders" in config:
        return False
    same_mask = config.get("mask_token_id", card.mask_id) == card.mask_id
    return same_mask and all(config.get(key) == value for key, value in card.shape.items())


def _own_decoders(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    decoders = config.get("decoders", [])
    if not isinstance(decoders, list) or not all(isinstance(decoder, str) and decoder for decoder in decoders):
        raise CheckpointError(f"{path}: decoders is {decoders!r}; it must be a list of decoder names")
    return tuple(decoders)


def _ids(path: Path, key: str, value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise CheckpointError(f"{path}: {key} is {value!r}; it must be a token id or a list of token ids")
    return tuple(ids)


def _tokenizer_mask_id(directory: Path) -> int | None:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return None
    raw = read_json(path)
    try:
        return _mask_id_of(raw, directory / "tokenizer.json")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} or tokenizer.json beside it lists its added tokens in an unknown form ({error!r}); download both "
            "files again"
        ) from error


def _mask_id_of(raw: Mapping[str, Any], tokenizer_path: Path) -> int | None:
    mask_token = raw.get("mask_token") or "<|mask|>"
    if isinstance(mask_token, Mapping):
        mask_token = mask_token.get("content")
    for token_id, token in raw.get("added_tokens_decoder", {}).items():
        if token.get("content") == mask_token:
            return int(token_id)
    added = read_json(tokenizer_path).get("added_tokens", []) if tokenizer_path.is_file() else []
    return next((token["id"] for token in added if token.get("content") == mask_token), None)
