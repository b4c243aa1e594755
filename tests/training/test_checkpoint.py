"""Checkpoints on disk (`refusion_eval.training.checkpoints.save`)."""

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from miniature.tokenizer import train_tokenizer
from refusion_eval.training.checkpoints.save import save_backbone


def _saved(target: Path) -> tuple[Qwen3ForCausalLM, int]:
    tokenizer = train_tokenizer(["user\nfour pens", "assistant\nfive pens"] * 5, 280)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=16,
        rope_theta=1e6,
        mask_token_id=tokenizer.mask_token_id,
    )
    model = Qwen3ForCausalLM(config)
    save_backbone(model, tokenizer, target)
    return model, tokenizer.mask_token_id


def test_weights_come_back(tmp_path: Path) -> None:
    model, _ = _saved(tmp_path / "checkpoint")
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path / "checkpoint")
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_config_names_the_mask_and_both_spellings_of_the_rotary_base(tmp_path: Path) -> None:
    _, mask_id = _saved(tmp_path / "checkpoint")
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert config["mask_token_id"] == mask_id
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6


def test_the_chat_template_opens_the_answer_and_ignores_thinking(tmp_path: Path) -> None:
    _saved(tmp_path / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    turn = [{"role": "system", "content": "s"}, {"role": "user", "content": "four"}]
    rendered = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    expected = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nfour<|im_end|>\n<|im_start|>assistant\n"
    assert rendered == expected


def test_config_names_the_decoders_of_the_last_training_only(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["user\nfour pens", "assistant\nfive pens"] * 5, 280)
    model, _ = _saved(tmp_path / "first")
    for name, decoders, expected in (("second", ("autoregressive",), ["autoregressive"]), ("third", (), None)):
        save_backbone(model, tokenizer, tmp_path / name, decoders=decoders)
        assert json.loads((tmp_path / name / "config.json").read_text()).get("decoders") == expected
        model = Qwen3ForCausalLM.from_pretrained(tmp_path / name)


def test_saving_again_replaces_the_checkpoint_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    _saved(tmp_path / "checkpoint")
    _saved(tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
