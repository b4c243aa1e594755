"""Training samples as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from refusion_eval.models.tokenizer import render_chat


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """Token ids of one conversation."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


def encode(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]]) -> list[TrainingSample]:
    """Tokenises (query, response) pairs as at inference: prompt and response separately, then one EOS."""
    prompts = [
        render_chat(tokenizer, [{"role": "user", "content": query}], add_generation_prompt=True) for query, _ in pairs
    ]
    # Not verbose, as the caller limits the length of samples, not the tokenizer.
    prompt_ids, answer_ids = (
        tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for texts in (prompts, [response for _, response in pairs])
    )
    eos = tokenizer.eos_token_id
    return [
        TrainingSample(tuple(prompt), (*answer, eos)) for prompt, answer in zip(prompt_ids, answer_ids, strict=True)
    ]
