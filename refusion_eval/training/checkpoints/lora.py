"""Low-rank adapters by peft. The output layer is not trained, as no label is a new token."""

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from refusion_eval.errors import ConfigError
from refusion_eval.training.config import LoraSettings


class _TiedHead(torch.nn.Linear):
    """Output layer of a tied model, whose matrix is the embedding with its trained rows."""

    # peft has a wrapper for this purpose, but the loss needs a plain linear layer.

    def __init__(self, embedding: torch.nn.Module) -> None:
        torch.nn.Module.__init__(self)
        self.register_parameter("bias", None)
        self._embedding: tuple[Any] = (embedding,)  # in a tuple, so that its parameters are not counted here too
        self.out_features, self.in_features = self.weight.shape

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # [out, in], computed at each access
        weight: Tensor = self._embedding[0].weight
        return weight


def add_adapters(model: PreTrainedModel, lora: LoraSettings, new_ids: Sequence[int], seed: int) -> PreTrainedModel:
    """Freezes a model and adds adapters, which do not change its output before training.

    Args:
        new_ids: tokens whose embeddings are trained. A tied model uses the same rows in its output layer.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("lora needs peft, which is not installed: pip install peft") from error
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        bias="none",
        task_type="CAUSAL_LM",
        trainable_token_indices={"embed_tokens": list(new_ids)} if new_ids else None,
    )
    tied = model.config.tie_word_embeddings
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, settings)
    if tied and new_ids:
        model.set_output_embeddings(_TiedHead(model.get_input_embeddings()))
    return adapted


def is_adapted(model: torch.nn.Module) -> bool:
    """Whether `add_adapters` made the model."""
    return hasattr(model, "peft_config")


def merged_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy without adapters, whose weights contain them; `model` does not change."""
    adapted: Any = copy.deepcopy(model)
    with warnings.catch_warnings():
        # peft declares the model untied. The rows are merged into the embedding, which stays the output layer as well.
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
        merged: PreTrainedModel = adapted.merge_and_unload()
    merged.config.tie_word_embeddings = model.config.tie_word_embeddings
    return merged


def save_adapter(model: PreTrainedModel, target: Path) -> None:
    """Writes the adapters alone, in the layout of peft."""
    model.save_pretrained(target, save_embedding_layers=False)
    (target / "README.md").unlink(missing_ok=True)  # an empty form
