"""The tokenizer adds nothing to a rendered prompt, and says so when there is no chat template."""

import contextlib
import json
from datetime import datetime

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


TEXT = "Hello world, don't stop 2024\n\n"


@pytest.fixture
def dream(tmp_path):
    """Files as Dream ships them: a byte-level vocabulary, its merges, and a tokenizer class as Python code."""
    from tokenizers import ByteLevelBPETokenizer

    bytes_only = ByteLevelBPETokenizer()
    bytes_only.train_from_iterator([TEXT] * 9, vocab_size=290)
    bytes_only.save_model(str(tmp_path))
    first = bytes_only.get_vocab_size()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>"]
    added = {str(first + index): {"content": token, "special": True} for index, token in enumerate(special)}
    config = {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "bos_token": "<|beginoftext|>",
        "chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "tokenizer_class": "DreamTokenizer",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenization_dream.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    model = {"model_type": "Dream", "auto_map": {"AutoConfig": "configuration_dream.DreamConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "configuration_dream.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    return tmp_path


def test_dream_is_read_without_its_code(dream):
    tokenizer = Tokenizer(dream)
    special = {token["content"]: int(token_id) for token_id, token in added_tokens(dream).items()}
    ids = tokenizer.encode(TEXT + "<|mask|><|im_end|>")
    assert ids[-2:] == [special["<|mask|>"], special["<|im_end|>"]]
    assert tokenizer.decode(ids) == TEXT
    # Qwen2's rule: every digit is a token of its own, contractions are cut off.
    pieces = tokenizer.inner.tokenize(TEXT)
    assert pieces[-5:-1] == ["2", "0", "2", "4"]
    assert "'t" in pieces
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>hi<|im_end|>"
    assert not (dream / "ran").exists()


def added_tokens(directory):
    return json.loads((directory / "tokenizer_config.json").read_text())["added_tokens_decoder"]


def test_dream_without_its_files_is_one_clear_error(dream):
    (dream / "merges.txt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks merges\.txt, which DreamTokenizer is made from"):
        Tokenizer(dream)


def test_llada_is_read_without_its_code(saved, tmp_path):
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    model = {"model_type": "llada", "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "configuration_llada.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert Tokenizer(tmp_path).encode("one two <|mask|>") == [5, 6, 2]
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def written(saved, tmp_path):
    """Makes a tokenizer with a chat template."""

    def write(template):
        for path in saved.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / "chat_template.jinja").write_text(template)
        return Tokenizer(tmp_path)

    return write


NOON = datetime(2024, 7, 26, 12)
TURN = [{"role": "user", "content": "one"}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ strftime_now('%d %b %Y') }}",
        '{% set day = strftime_now( "%d %b %Y" ) %}{{ day }}',
        "{%- if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}{{ day }}",
        "{#- strftime_now #}{{ strftime_now('%d') + strftime_now(' %b %Y') }}",
    ],
)
def test_a_template_finds_the_moment_that_it_is_given(written, template):
    tokenizer = written(template)
    assert tokenizer.asks_for_the_time
    assert tokenizer.render_chat(TURN, now=NOON) == "26 Jul 2024"
    assert tokenizer.render_chat(TURN) == datetime.now().strftime("%d %b %Y")


@pytest.mark.parametrize(
    "ask", ["{% set form = '%d' %}{{ strftime_now(form) }}", "{% set f = strftime_now %}{{ f('%d') }}"]
)
def test_a_template_whose_clock_cannot_be_stopped_is_refused_where_it_must_be(written, ask):
    tokenizer = written(ask)
    with pytest.raises(ConfigError, match=r"asks for the time by more than strftime_now\('FORMAT'\)"):
        tokenizer.render_chat(TURN, now=NOON)
    assert tokenizer.render_chat(TURN) == datetime.now().strftime("%d")


@pytest.mark.parametrize("draw", ["{{ [1, 2] | random }}", "{{ lipsum(n=1) }}", "{% filter random %}ab{% endfilter %}"])
def test_a_template_that_draws_at_random_is_refused(written, draw):
    with pytest.raises(ConfigError, match="draws at random"):
        written(draw).render_chat(TURN)


def test_a_template_may_speak_of_what_it_does_not_do(written):
    text = "a random lipsum {# random #}{{ ' of strftime_now' }}"
    assert written(text).render_chat(TURN, now=NOON) == "a random lipsum  of strftime_now"


TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
DEFAULT = "{% if messages[0].role != 'system' %}<|system|>You help.<|end|>{% endif %}"


@pytest.mark.parametrize(
    ("template", "beginning"),
    [
        (TURNS, ""),
        (DEFAULT + TURNS, "<|system|>You help."),  # whose end also ends the answer before a second question
        ("Today is {{ strftime_now('%d') }}.\n" + TURNS, "Today is 26.\n"),
        ("{{ messages[-1].content | upper }}", ""),
    ],
)
def test_what_a_template_adds_before_the_first_turn_is_told(written, template, beginning):
    assert written(template).beginning(now=NOON) == beginning
