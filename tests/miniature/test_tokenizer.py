"""The tokenizer of tiny models (`miniature.tokenizer`)."""

from miniature.tokenizer import train_tokenizer


def test_digits_are_split_and_special_tokens_are_single_ids() -> None:
    tokenizer = train_tokenizer(["1212 1212 1212 pens"] * 20, 300)
    assert tokenizer.tokenize("1212") == ["1", "2", "1", "2"]
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>"):
        assert len(tokenizer(token)["input_ids"]) == 1
