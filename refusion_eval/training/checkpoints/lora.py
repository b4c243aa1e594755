"""Low-rank adapters by peft: added to a model, and merged into the tensors that are written.

Beside the adapters, the embeddings of new tokens are trained. The output layer is not, as no label is a new token.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from refusion_eval.errors import ConfigError
from refusion_eval.models.adapter import WEIGHTS_FILE
from refusion_eval.training.config import LoraSettings

_ADAPTER = "default"
_PREFIX = "base_model.model."
_ROWS = ".token_adapter.trainable_tokens_delta." + _ADAPTER


class _TiedHead(torch.nn.Linear):
    """An output layer whose matrix is an embedding, with the rows that are being trained as they are now.

    peft has a wrapper for this; the loss needs a plain linear layer.
    """

    def __init__(self, embedding: torch.nn.Module) -> None:
        torch.nn.Module.__init__(self)
        self.register_parameter("bias", None)
        self._embedding: tuple[Any] = (embedding,)  # in a tuple, so that its parameters are not counted here too
        self.out_features, self.in_features = self.weight.shape

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[out, in], made anew at each call."""
        weight: Tensor = self._embedding[0].weight
        return weight


def add_adapters(model: PreTrainedModel, lora: LoraSettings, new_ids: Sequence[int], seed: int) -> PreTrainedModel:
    """Freezes a model and adds adapters, which change nothing yet.

    Args:
        model: is wrapped, and changes.
        lora: what to adapt.
        new_ids: tokens whose embeddings are trained; in a tied model they are trained as what is read only by way of
            the output layer, too, whose matrix they share.
        seed: of the adapters' random halves.

    Returns:
        The model of peft.

    Raises:
        ConfigError: peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("lora needs peft, which is not installed; pip install 'refusion-eval[train]'") from error
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


class PlainTensors:
    """A model's tensors as one without adapters has them: adapters merged in, plain names.

    Each is made when it is read, in float32, and rounded once, so that no second model comes to be.

    Attributes:
        state: the tensors as the model has them.

    Args:
        model: with or without adapters.
        state: its tensors by name.
    """

    def __init__(self, model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
        self.state = state
        self._scales = {
            name: module.scaling[_ADAPTER] for name, module in model.named_modules() if hasattr(module, "lora_A")
        }
        self._new_ids = _trained_ids(model)
        self._sources = {_plain_name(name): name for name in state if not _is_adapter(name)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, by name."""
        return {name: tuple(self.state[source].shape) for name, source in self._sources.items()}

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        """One tensor, merged."""
        source = self._sources[name]
        weight = self.state[source]
        module = source.removesuffix(".base_layer.weight")
        if module in self._scales:
            low_RI, high_OR = (self.state[f"{module}.lora_{part}.{_ADAPTER}.weight"].float() for part in "AB")
            return torch.addmm(weight.float(), high_OR, low_RI, alpha=self._scales[module]).to(weight.dtype)
        rows = self.state.get(source.removesuffix(".token_adapter.base_layer.weight") + _ROWS)
        if rows is None:
            return weight
        return weight.index_copy(0, torch.tensor(self._new_ids, device=weight.device), rows.to(weight.dtype))


def _is_adapter(name: str) -> bool:
    return ".lora_" in name or ".trainable_tokens_" in name


def _plain_name(name: str) -> str:
    """What the model without adapters calls a tensor."""
    return name.removeprefix(_PREFIX).replace(".token_adapter.base_layer.", ".").replace(".base_layer.", ".")


def _trained_ids(model: PreTrainedModel) -> list[int]:
    indices = model.peft_config[_ADAPTER].trainable_token_indices if is_adapted(model) else None
    return [] if indices is None else list(indices["embed_tokens"])


def save_adapter(model: PreTrainedModel, state: Mapping[str, Tensor], target: Path) -> None:
    """Writes the adapters alone, in peft's layout.

    Args:
        model: of `add_adapters`.
        state: its tensors by name.
        target: directory to be made.
    """
    from peft import get_peft_model_state_dict

    settings: Any = model.peft_config[_ADAPTER]
    target.mkdir()
    dataclasses.replace(settings, inference_mode=True).save_pretrained(target)
    extract: Callable[..., dict[str, Tensor]] = get_peft_model_state_dict
    tensors = extract(model, state_dict=dict(state), save_embedding_layers=False)
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        target / WEIGHTS_FILE,
        metadata={"format": "pt"},
    )
