"""Samples as token ids (`refusion_eval.training.data.token_cache.encode`)."""

from miniature.tokenizer import train_tokenizer
from refusion_eval.training.data.token_cache import encode


def test_samples_are_chat_turns_with_one_eos() -> None:
    tokenizer = train_tokenizer(["user\nhow many 12 pens?", "assistant\nThe answer is 12."] * 5, 300)
    (sample,) = encode(tokenizer, [("how many pens?", "The answer is 12.")])
    assert tokenizer.decode(sample.prompt) == "<|im_start|>user\nhow many pens?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(sample.answer) == "The answer is 12.<|im_end|>"
