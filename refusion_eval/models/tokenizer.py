"""The tokenizer of a checkpoint: text to token ids and back, chat template. Runs no code from the checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from refusion_eval.errors import CheckpointError, ConfigError


class Tokenizer:
    """A thin wrapper: exactly the calls that evaluation needs.

    Attributes:
        inner: the Hugging Face tokenizer.

    Args:
        directory: holds the tokenizer files.

    Raises:
        CheckpointError: the files are missing or malformed.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self.inner: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise CheckpointError(
                f"{directory}: the tokenizer cannot be loaded ({error}); it needs tokenizer.json and "
                "tokenizer_config.json"
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
