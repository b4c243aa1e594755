"""Training samples as token ids, and batches of similar length."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from refusion_eval.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation as ids.

    Attributes:
        prompt: the chat-templated user turn with its generation prompt.
        answer: the response and one EOS; never empty.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of tokens, prompt and answer."""
        return len(self.prompt) + len(self.answer)


def check_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    """Refuses a tokenizer that samples cannot be made with.

    Raises:
        ConfigError: it has no EOS token or no chat template.
    """
    for name in ("eos_token", "chat_template"):
        if not getattr(tokenizer, name):
            raise ConfigError(
                f"{tokenizer.name_or_path or 'the tokenizer'} has no {name}; use a chat model's, or set it"
            )


def encode(tokenizer: PreTrainedTokenizerFast, pairs: Iterable[tuple[str, str]]) -> list[Sample]:
    """Tokenises (query, response) pairs the way they meet at inference: the prompt and the response each on its own.

    Raises:
        ConfigError: see `check_tokenizer`.
        DataError: a response is empty (it would leave nothing to learn), naming its row.
    """
    check_tokenizer(tokenizer)
    queries, responses = [], []
    for number, (query, response) in enumerate(pairs):
        if not response:
            raise DataError(f"row {number}: the response is empty; give it a text or remove the row")
        turn = [{"role": "user", "content": query}]
        queries.append(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        responses.append(response)
    # Not verbose: whether a sample is too long is for the caller to say, not for the tokenizer's own limit.
    prompt_ids = tokenizer(queries, add_special_tokens=False, verbose=False)["input_ids"]
    answer_ids = tokenizer(responses, add_special_tokens=False, verbose=False)["input_ids"]
    eos = tokenizer.eos_token_id
    return [Sample(tuple(prompt), (*answer, eos)) for prompt, answer in zip(prompt_ids, answer_ids, strict=True)]


def plan_batches(
    lengths: Sequence[int], *, tokens_per_batch: int, seed: int, epoch: int, pool: int = 256
) -> list[list[int]]:
    """Cuts one epoch into batches of samples of similar length, in a random order that the seed decides.

    Args:
        lengths: number of tokens of each sample.
        tokens_per_batch: upper limit of (samples x longest sample) of a batch; a longer sample stands alone.
        seed: of the run.
        epoch: each epoch has its own order.
        pool: number of shuffled samples that are sorted by length together; smaller is more random, larger pads less.

    Returns:
        Lists of sample numbers; each sample occurs once.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    batches: list[list[int]] = []
    for start in range(0, len(order), pool):
        batch: list[int] = []
        for number in sorted(order[start : start + pool].tolist(), key=lambda n: lengths[n]):
            if batch and (len(batch) + 1) * lengths[number] > tokens_per_batch:
                batches.append(batch)
                batch = []
            batch.append(number)
        batches.append(batch)
    return [batches[number] for number in rng.permutation(len(batches))]
