"""What prompts are made of where the user says so: another chat template, none, a BOS token in front."""

import json

import pytest

from refusion_eval.errors import ConfigError
from refusion_eval.evaluation.loop import evaluate
from refusion_eval.lm_eval_plugin.adapter import RefusionLM
from refusion_eval.runs.model_args import parse_model_args

CHAT = [{"role": "user", "content": "Hello"}]


def build(checkpoint, **arguments):
    return RefusionLM.create_from_arg_obj({"pretrained": checkpoint, **arguments})


def test_a_template_of_ones_own_replaces_the_checkpoints(checkpoint, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    assert build(checkpoint, chat_template=str(own)).apply_chat_template(CHAT) == "[Hello]"
    assert "Hello" in build(checkpoint).apply_chat_template(CHAT) != "[Hello]"


def test_without_a_template_there_is_none_to_apply(checkpoint):
    lm = build(checkpoint, chat_template="none")
    assert not lm.tokenizer.chat_template
    with pytest.raises(ConfigError, match="has no chat template"):
        lm.apply_chat_template(CHAT)


def test_a_template_that_is_not_there_is_one_clear_error(checkpoint):
    with pytest.raises(ConfigError, match=r"chat_template=missing.jinja: .*give a Jinja file, or none"):
        build(checkpoint, chat_template="missing.jinja").apply_chat_template(CHAT)


def test_a_bos_token_is_put_in_front_once_and_only_of_prompts(checkpoint):
    lm = build(checkpoint, add_bos_token=True)
    bos = lm.tokenizer.bos_token_id
    plain = build(checkpoint).tok_encode("two words", add_special_tokens=False)
    assert lm.tok_encode("two words") == [bos, *plain]
    assert lm.tok_encode(lm.tokenizer.bos_token + "two words") == [bos, *plain]
    assert lm.tok_encode("two words", add_special_tokens=False) == plain


def test_a_tokenizer_without_bos_token_cannot_add_one(checkpoint):
    lm = build(checkpoint, add_bos_token=True)
    lm.tokenizer.bos_token = None
    with pytest.raises(ConfigError, match="names no BOS token; leave out add_bos_token"):
        lm.tok_encode("two words")


def test_records_say_what_prompts_were_made_of(checkpoint, tmp_path):
    arguments = {"pretrained": checkpoint, "run_dir": str(tmp_path), "gen_length": 8, "slot_size": 4, "block_size": 8}
    evaluate(parse_model_args({**arguments, "chat_template": "none", "add_bos_token": True}), ["mini_gsm8k"], limit=1)
    settings = json.loads((tmp_path / "run.json").read_text())["manifest"]["settings"]
    assert (settings["chat_template"], settings["add_bos_token"]) == ("none", True)
