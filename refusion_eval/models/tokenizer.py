"""The tokenizer of a checkpoint: text to token ids and back, chat template. Runs no code from the checkpoint."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, Qwen2TokenizerFast
from transformers.utils import logging

from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models.config import read_json

# Classes that a checkpoint brings as Python code, and the class of transformers that does the same with its files.
# AutoTokenizer refuses such a checkpoint, as it does not run the code.
SAME_AS: Mapping[str, Any] = {"DreamTokenizer": Qwen2TokenizerFast}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


class Tokenizer:
    """A thin wrapper: exactly the calls that evaluation needs.

    Attributes:
        inner: the Hugging Face tokenizer.

    Args:
        directory: holds the tokenizer files.

    Raises:
        CheckpointError: files are missing or malformed, or need code from the checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        try:
            with _quiet():  # transformers warns of model types that it does not know, which the tokenizer does not need
                self.inner: Any = _tokenizer_class(directory).from_pretrained(
                    directory, trust_remote_code=False, local_files_only=True
                )
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise CheckpointError(
                f"{directory}: the tokenizer cannot be loaded ({error}); it needs tokenizer_config.json "
                "and tokenizer.json, or vocab.json and merges.txt"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added: a rendered chat template already holds its special tokens."""
        return list(self.inner.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        text: str = self.inner.decode(
            list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def replace_chat_template(self, template: str | None) -> None:
        """Takes another chat template, in Jinja, than the checkpoint's; None for none."""
        self.inner.chat_template = template

    def render_chat(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True, **template_arguments: Any
    ) -> str:
        """The text of a conversation under the checkpoint's chat template.

        Args:
            messages: {"role": ..., "content": ...} each.
            add_generation_prompt: whether the text ends where the assistant is to begin.
            **template_arguments: variables of the template, such as enable_thinking.

        Raises:
            ConfigError: the checkpoint has no chat template.
        """
        if not self.inner.chat_template:
            raise ConfigError(
                f"{self.inner.name_or_path} has no chat template (chat_template.jinja or tokenizer_config.json); "
                "evaluate it without one"
            )
        text: str = self.inner.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **template_arguments
        )
        return text


def _tokenizer_class(directory: Path) -> Any:
    path = directory / "tokenizer_config.json"
    declared = str(read_json(path).get("tokenizer_class")) if path.is_file() else ""
    if declared not in SAME_AS:
        return AutoTokenizer
    # Without its files transformers would make an empty vocabulary, not an error.
    missing = [name for name in ("vocab.json", "merges.txt") if not (directory / name).is_file()]
    if missing and not (directory / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{directory} lacks {' and '.join(missing)}, which {declared} is made from; download the files"
        )
    return SAME_AS[declared]
