"""Writes a model as a Hugging Face checkpoint directory, whole or not at all."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

# What transformers writes about its own session, of no use to a reader of the checkpoint.
_SESSION_KEYS = ("is_local", "local_files_only")


def save_checkpoint(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, target: Path, *, decoders: Sequence[str] = ()
) -> None:
    """Writes weights rounded to bfloat16, config and tokenizer; `model` itself stays as it is.

    The directory is built beside `target` and then takes its place, so that a crash leaves the previous one.

    Args:
        model: what to write.
        tokenizer: with its chat template.
        target: the directory.
        decoders: those that the model was trained for, the main one first; config.json gets them
            (`refusion_eval.models.cards`). Empty leaves it to the reader.
    """
    part, old = target.with_name(target.name + ".part"), target.with_name(target.name + ".old")
    for path in (part, old):
        shutil.rmtree(path, ignore_errors=True)
    rounded = Qwen3ForCausalLM(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded.to(torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    _make_portable(part, decoders)
    if target.exists():
        os.replace(target, old)
    os.replace(part, target)
    shutil.rmtree(old, ignore_errors=True)


def _make_portable(directory: Path, decoders: Sequence[str]) -> None:
    """Adds the decoders and the names that transformers 4 reads beside those of 5, and opens the files to all."""
    config_path, tokenizer_path = directory / "config.json", directory / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "torch_dtype": config["dtype"]}
    config |= {"decoders": list(decoders)} if decoders else {}
    tokenizer = json.loads(tokenizer_path.read_text(encoding="utf-8"))
    tokenizer = {key: value for key, value in tokenizer.items() if key not in _SESSION_KEYS}
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    for path, content in ((config_path, config), (tokenizer_path, tokenizer)):
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in directory.iterdir():
        path.chmod(0o644)
