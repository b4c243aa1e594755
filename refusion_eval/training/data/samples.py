"""Training samples as token ids."""

from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from refusion_eval.errors import ConfigError, DataError
from refusion_eval.models.tokenizer import render_chat


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """Token ids of one conversation."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of tokens, prompt and answer."""
        return len(self.prompt) + len(self.answer)


def check_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    """Checks that a tokenizer has an EOS token and a chat template.

    Raises:
        ConfigError: one of them is missing.
    """
    for name in ("eos_token", "chat_template"):
        if not getattr(tokenizer, name):
            raise ConfigError(
                f"{tokenizer.name_or_path or 'the tokenizer'} has no {name}; use a chat model's, or set it"
            )


def encode(tokenizer: PreTrainedTokenizerFast, pairs: Iterable[tuple[str, str]]) -> list[TrainingSample]:
    """Tokenises (query, response) pairs as at inference: prompt and response separately.

    Raises:
        ConfigError: the tokenizer has no EOS token or no chat template.
        DataError: a response is empty; the message names its row.
    """
    check_tokenizer(tokenizer)
    queries, responses = [], []
    for number, (query, response) in enumerate(pairs):
        if not response:
            raise DataError(f"row {number}: the response is empty; give it a text or remove the row")
        turn = [{"role": "user", "content": query}]
        queries.append(render_chat(tokenizer, turn, add_generation_prompt=True))
        responses.append(response)
    # Not verbose, as the caller limits the length of samples, not the tokenizer.
    prompt_ids = tokenizer(queries, add_special_tokens=False, verbose=False)["input_ids"]
    answer_ids = tokenizer(responses, add_special_tokens=False, verbose=False)["input_ids"]
    eos = tokenizer.eos_token_id
    return [
        TrainingSample(tuple(prompt), (*answer, eos)) for prompt, answer in zip(prompt_ids, answer_ids, strict=True)
    ]
