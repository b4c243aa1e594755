"""The tokenizer of a training: the backbone's own, with the special tokens that the objectives need."""

from typing import Any

from transformers import AddedToken, PreTrainedTokenizerFast

from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models.checkpoint import Location, locate
from refusion_eval.models.config import read_json
from refusion_eval.models.tokenizer import Tokenizer
from refusion_eval.training.config import BackboneConfig
from refusion_eval.training.data.samples import check_tokenizer
from refusion_eval.training.tokenizer import MASK, START


def load_tokenizer(config: BackboneConfig) -> PreTrainedTokenizerFast:
    """The tokenizer, with a chat template, an end token, and a beginning and a mask token, added where it has none.

    The mask token is the one that the model's config.json or the tokenizer names, else a token "<|mask|>", else a new
    "<|mask|>"; a tokenizer without a beginning token gets "<|beginoftext|>" before it. New tokens take the first free
    ids, which gives ReFusion's (151669 and 151670) for Qwen3, Dream's mask (151666) for Qwen2.5, and 128256 for the
    mask of Llama 3. Padding is the end token where there is none.

    Raises:
        ConfigError: no chat template or end token, or a mask id that the tokenizer has no token for.
        CheckpointError: there is no such tokenizer.
    """
    tokenizer = own_tokenizer(config)
    check_tokenizer(tokenizer)
    take_mask(tokenizer, _stated_mask_id(config))
    missing = [
        token for name, token in (("bos_token", START), ("mask_token", MASK)) if getattr(tokenizer, name) is None
    ]
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in missing], special_tokens=True)
    tokenizer.bos_token = tokenizer.bos_token or START
    tokenizer.mask_token = tokenizer.mask_token or MASK
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def own_tokenizer(config: BackboneConfig) -> PreTrainedTokenizerFast:
    """The tokenizer as its files have it, without the tokens that `load_tokenizer` adds."""
    location = tokenizer_location(config)
    if not (location.directory / "tokenizer.json").is_file() and not (location.directory / "vocab.json").is_file():
        raise CheckpointError(
            f"{location.name} has no tokenizer (tokenizer.json, or vocab.json and merges.txt); name one (tokenizer)"
        )
    tokenizer = Tokenizer(location.directory).inner
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise CheckpointError(f"{location.name}: {type(tokenizer).__name__} has no fast form; give a tokenizer.json")
    return tokenizer


def tokenizer_location(config: BackboneConfig) -> Location:
    """Where the tokenizer's files lie, downloaded if need be."""
    if config.tokenizer is not None:
        return locate(config.tokenizer, None)
    return locate(str(config.model), config.revision)


def num_ids(tokenizer: PreTrainedTokenizerFast) -> int:
    """How many rows of embeddings the tokenizer's ids need: the highest and one."""
    return max(tokenizer.get_vocab().values()) + 1


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """What config.json says of special tokens, as the release does: one end token, the tokenizer's."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id")
    ids: dict[str, Any] = {name: getattr(tokenizer, name) for name in names}
    return {name: number for name, number in ids.items() if number is not None}


def _stated_mask_id(config: BackboneConfig) -> int | None:
    if config.model is None:
        return None
    stated = read_json(locate(config.model, config.revision).directory / "config.json").get("mask_token_id")
    return None if stated is None else int(stated)


def take_mask(tokenizer: PreTrainedTokenizerFast, stated_id: int | None) -> None:
    """Makes a token that is there already the mask token.

    Args:
        tokenizer: changes.
        stated_id: what config.json says; None for nothing, which leaves the tokenizer's own, or else "<|mask|>".

    Raises:
        ConfigError: there is no token of that id.
    """
    if stated_id is not None:
        token = tokenizer.convert_ids_to_tokens(stated_id)
        if token is None:
            raise ConfigError(
                f"config.json has mask_token_id={stated_id}, for which {tokenizer.name_or_path or 'the tokenizer'} has "
                "no token; take model and tokenizer from the same checkpoint"
            )
        tokenizer.mask_token = token
    elif tokenizer.mask_token is None and MASK in tokenizer.get_vocab():
        tokenizer.mask_token = MASK
