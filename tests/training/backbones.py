"""Tiny checkpoints as a hub has them, without a mask token, and batches for them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from miniature.tokenizer import CHAT_TEMPLATE
from refusion_eval.training.config import Objective, ObjectiveConfig
from refusion_eval.training.data.collate import PackedBatch, collate
from refusion_eval.training.objectives.example import TrainingSample
from refusion_eval.training.objectives.table import OBJECTIVES, SpecialIds
from tests.models import tiny

NUM_ROWS, END_ID = tiny.VOCAB_SIZE, 1
FAMILIES = [(family, tied) for family in ("qwen3", "qwen2", "llama") for tied in (True, False)]


def save_tokenizer(directory: Path, num_words: int, **settings: object) -> None:
    """A tokenizer with a chat template, an end token and no mask: id n is "wn", but for 0 and 1.

    Id 0 is what transformers adds to the tokenizer of every Qwen2.
    """
    words = {"<|endoftext|>": 0, "<end>": END_ID} | {f"w{number}": number for number in range(2, num_words)}
    model = Tokenizer(WordLevel(words, unk_token="<|endoftext|>"))
    model.pre_tokenizer = WhitespaceSplit()
    settings = {"eos_token": "<end>", "unk_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE} | settings
    PreTrainedTokenizerFast(tokenizer_object=model, **settings).save_pretrained(directory)


def save_backbone_of(
    directory: Path, family: str = "qwen3", tied: bool = False, *, num_words: int = NUM_ROWS, **changes: Any
) -> PreTrainedModel:
    """A random checkpoint of NUM_ROWS rows, of which the tokenizer knows `num_words`."""
    model = tiny.save_checkpoint(directory, family=family, tie_word_embeddings=tied, **changes)
    change_json(directory / "config.json", mask_token_id=None)
    save_tokenizer(directory, num_words)
    return model


def change_json(path: Path, **changes: object) -> None:
    """Sets entries of a JSON file, and removes those that are None."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def batch_for(objective: Objective, mask: int) -> PackedBatch:
    """Three samples under an objective."""
    settings: dict[str, Any] = {
        "slot_sizes": (2, 4),
        "eos_multiple": 4,
        "block_size": 4 * (objective in ("bd3lm", "idlm", "wedlm")),
    }
    config = ObjectiveConfig(objective=objective, **settings)
    samples = [
        TrainingSample((2, 3, 4), (5, 6, 7, 8, 9, 10, END_ID)),
        TrainingSample((6,), (END_ID,)),
        TrainingSample((9, 8, 7), (*range(11, 24), END_ID)),
    ]
    rng = np.random.default_rng(3)
    return collate([[OBJECTIVES[objective](sample, rng, config, SpecialIds(END_ID, mask)) for sample in samples]])


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """[1, T, V], in evaluation mode."""
    was_training = model.training
    logits = model.eval()(input_ids=tokens).logits
    model.train(was_training)
    return logits
