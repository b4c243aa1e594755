"""The tokenizer of a training run: the tokenizer of the backbone and the special tokens that the objectives need."""

from typing import Any

from transformers import AddedToken, PreTrainedTokenizerFast

from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models.checkpoint import locate, read_json
from refusion_eval.models.tokenizer import Tokenizer
from refusion_eval.training.config import BackboneConfig

# The names in Qwen3 and in the published checkpoint of ReFusion.
START, MASK = "<|beginoftext|>", "<|mask|>"


def load_tokenizer(config: BackboneConfig) -> PreTrainedTokenizerFast:
    """Loads the tokenizer and adds a mask token and a beginning token if it has none."""
    tokenizer = original_tokenizer(config)
    for name in ("eos_token", "chat_template"):
        if not getattr(tokenizer, name):
            raise ConfigError(
                f"{tokenizer.name_or_path or 'the tokenizer'} has no {name}; use a chat model's, or set it"
            )
    mask_id = None
    if config.model is not None:
        mask_id = read_json(locate(config.model, config.revision).directory / "config.json").get("mask_token_id")
    set_mask_token(tokenizer, mask_id)
    # New tokens take the first free ids, the beginning token before the mask: 151669 and 151670 for Qwen3 as in the
    # release of ReFusion, mask 151666 for Qwen2.5 as in Dream, mask 128256 for Llama 3.
    for name, token in (("bos_token", START), ("mask_token", MASK)):
        if getattr(tokenizer, name) is None:
            tokenizer.add_tokens([AddedToken(token, special=True, normalized=False)], special_tokens=True)
            setattr(tokenizer, name, token)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def original_tokenizer(config: BackboneConfig) -> PreTrainedTokenizerFast:
    """The tokenizer of the files, without the tokens that `load_tokenizer` adds."""
    is_own = config.tokenizer is not None
    location = locate(str(config.tokenizer if is_own else config.model), None if is_own else config.revision)
    if not (location.directory / "tokenizer.json").is_file() and not (location.directory / "vocab.json").is_file():
        raise CheckpointError(
            f"{location.name} has no tokenizer (tokenizer.json, or vocab.json and merges.txt); name one (tokenizer)"
        )
    tokenizer = Tokenizer(location.directory).inner
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise CheckpointError(f"{location.name}: {type(tokenizer).__name__} has no fast form; give a tokenizer.json")
    return tokenizer


def num_ids(tokenizer: PreTrainedTokenizerFast) -> int:
    return max(tokenizer.get_vocab().values()) + 1


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Entries of config.json about special tokens; as in the release there is one end token."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id")
    ids: dict[str, Any] = {name: getattr(tokenizer, name) for name in names}
    return {name: number for name, number in ids.items() if number is not None}


def set_mask_token(tokenizer: PreTrainedTokenizerFast, mask_id: int | None) -> None:
    """Makes the token that config.json names the mask token; None keeps the tokenizer's own, or takes "<|mask|>"."""
    if mask_id is not None:
        token = tokenizer.convert_ids_to_tokens(int(mask_id))
        if token is None:
            raise ConfigError(
                f"config.json has mask_token_id={mask_id}, for which {tokenizer.name_or_path or 'the tokenizer'} has "
                "no token; take model and tokenizer from the same checkpoint"
            )
        tokenizer.mask_token = token
    elif tokenizer.mask_token is None and MASK in tokenizer.get_vocab():
        tokenizer.mask_token = MASK
