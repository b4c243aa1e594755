"""Where a training's initial weights come from, as settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from refusion_eval.errors import ConfigError

Dtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters instead of training every weight.

    Attributes:
        rank: r.
        alpha: the adapters' product is multiplied by alpha / rank.
        dropout: of what an adapter reads, in [0, 1).
        target_modules: names of the adapted matrices inside a layer, such as "q_proj".
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora: rank is {self.rank}; it must be at least 1")
        if self.alpha <= 0:
            raise ConfigError(f"lora: alpha is {self.alpha}; it must be positive, often twice the rank")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora: dropout is {self.dropout}; it must be at least 0 and below 1")
        if isinstance(self.target_modules, str) or not self.target_modules:
            raise ConfigError(
                f"lora: target_modules is {self.target_modules!r}; give a list of matrices such as [q_proj, v_proj]"
            )


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Where initial weights come from, and which of them are trained how.

    Attributes:
        model: directory or hub id of the initial weights; None where `shape` is given.
        revision: branch, tag or commit of a hub id.
        shape: of random weights: model_type (qwen3, qwen2, llama) and sizes as config.json names them (see
            `backbone_check.random_config`).
        tokenizer: directory or hub id; None is the model's own. A shape needs one.
        dtype: of the weights.
        gradient_checkpointing: compute activations again in backward rather than keeping them.
        lora: None trains every weight.
        seed: of random weights.
    """

    model: str | None = None
    revision: str | None = None
    shape: Mapping[str, Any] | None = None
    tokenizer: str | None = None
    dtype: Dtype = "bfloat16"
    gradient_checkpointing: bool = True
    lora: LoraSettings | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.model is None) == (self.shape is None):
            given = "neither" if self.model is None else "both"
            raise ConfigError(
                f"backbone: {given} of model and shape given; name a checkpoint (model), or the shape of random weights"
            )
        if self.shape is not None and self.tokenizer is None:
            raise ConfigError(
                "backbone: random weights of a shape have no tokenizer of their own; name one (tokenizer)"
            )
        if self.revision is not None and self.model is None:
            raise ConfigError(f"backbone: revision={self.revision!r} belongs to a model of the hub; leave it out")
        if self.dtype not in get_args(Dtype):
            raise ConfigError(f"backbone: dtype={self.dtype!r} is unknown; choose {' or '.join(get_args(Dtype))}")
