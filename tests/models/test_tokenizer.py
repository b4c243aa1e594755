"""The tokenizer adds nothing to a rendered prompt, and says so when there is no chat template."""

import contextlib

import pytest

from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A word-level tokenizer in Hugging Face layout, with the chat template as a file of its own."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<|im_end|>", "<|mask|>", "user:", "assistant:", "one", "two"]
    backend = Backend(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", mask_token="<|mask|>", unk_token="<unk>"
    )
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(directory)
    return directory


def test_encode_and_decode_are_inverse_and_add_nothing(saved):
    tokenizer = Tokenizer(saved)
    assert tokenizer.encode("one two") == [5, 6]
    assert tokenizer.decode([5, 6, 1]) == "one two"
    assert tokenizer.decode([5, 1], skip_special_tokens=False).split() == ["one", "<|im_end|>"]


def test_chat_template_is_rendered_with_its_arguments(saved, tmp_path):
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}{% if enable_thinking %} think{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(tmp_path)
    messages = [{"role": "user", "content": "one"}]
    assert tokenizer.render_chat(messages) == "user: one assistant:"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "user: one "
    assert tokenizer.render_chat(messages, enable_thinking=True) == "user: one assistant: think"


def test_missing_chat_template(saved):
    with pytest.raises(ConfigError, match="has no chat template"):
        Tokenizer(saved).render_chat([{"role": "user", "content": "one"}])


def test_missing_tokenizer_files(tmp_path):
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded"):
        Tokenizer(tmp_path)


def test_code_in_the_checkpoint_is_never_run(saved, tmp_path):
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    witness = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(witness)!r}, 'w')\nclass Evil: pass\n")
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": [null, "evil.Evil"]}}')
    with contextlib.suppress(CheckpointError):
        Tokenizer(tmp_path)
    assert not witness.exists()
