"""A model of transformers under its own forward, for architectures that this project's transformer does not compute.

Every call computes a whole text: nothing is kept between calls. Shapes: N rows of a text, V vocabulary.
"""

from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models.checkpoint import is_masked_model
from refusion_eval.models.config import ModelConfig, read_json

# Where config.json states no length, as for architectures without positions.
NO_LIMIT = 1 << 20

# Largest difference of logits, relative to the largest logit, that rounding explains.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def stock_config(directory: Path) -> ModelConfig:
    """Sizes of a checkpoint of any architecture of transformers, as far as decoding needs them."""
    try:
        config: Any = AutoConfig.from_pretrained(directory, trust_remote_code=False).get_text_config()
        heads = getattr(config, "num_attention_heads", None) or 1
        return ModelConfig(
            family=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rms_norm_eps=1e-6,
            rope_theta=1.0,
            max_positions=getattr(config, "max_position_embeddings", None) or NO_LIMIT,
            tied_head=bool(config.tie_word_embeddings),
            dtype=str(config.dtype or "float32").removeprefix("torch."),
        )
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{directory}: transformers cannot read its config.json without code of the checkpoint ({error}); give a "
            "checkpoint of an architecture that transformers has"
        ) from error


class StockModel:
    """A causal or masked language model of transformers."""

    def __init__(self, module: PreTrainedModel, config: ModelConfig, attention: Literal["causal", "all"]) -> None:
        self._module = module
        self._attention = attention
        self.config = config
        self.device = module.device
        self.dtype = module.dtype

    @classmethod
    def open(cls, directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Self:
        """Loads a checkpoint with its class in transformers, from safetensors and without code of the checkpoint."""
        is_masked = is_masked_model(read_json(directory / "config.json"))
        auto: Any = AutoModelForMaskedLM if is_masked else AutoModelForCausalLM
        try:
            module = auto.from_pretrained(directory, dtype=dtype, trust_remote_code=False, use_safetensors=True)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{directory}: transformers cannot load it ({error})") from error
        return cls(module.to(device).eval(), config, "all" if is_masked else "causal")

    @torch.inference_mode()
    def logits(self, tokens: list[int], positions: list[int], visible_NN: npt.NDArray[np.bool_]) -> Tensor:
        """Logits of every row of one text, float32, [N, V]; refuses patterns that the architecture does not take."""
        # Plain text in any order of rows needs no pattern, which only some architectures take.
        order = np.argsort(positions, kind="stable")
        if self._is_plain(np.asarray(positions)[order], visible_NN[np.ix_(order, order)]):
            logits_NV = self._call([tokens[row] for row in order])
            return logits_NV[torch.from_numpy(np.argsort(order)).to(logits_NV.device)]
        if not self._takes_patterns:
            raise ConfigError(
                f"{self.config.family} of transformers takes no position ids or no attention pattern beside its "
                f"tokens, so with backend=transformers it runs {self._suited} only"
            )
        return self._call(tokens, positions, visible_NN)

    @property
    def _suited(self) -> str:
        return "decoder=autoregressive" if self._attention == "causal" else "decoders that read the whole text"

    def _is_plain(self, positions: npt.NDArray[np.int64], visible_NN: npt.NDArray[np.bool_]) -> bool:
        """Whether rows in the order of their positions are what transformers computes from tokens alone."""
        full_NN = np.ones_like(visible_NN)
        plain_NN = full_NN if self._attention == "all" else np.tril(full_NN)
        return np.array_equal(positions, np.arange(len(positions))) and np.array_equal(visible_NN, plain_NN)

    def _call(
        self, tokens: list[int], positions: list[int] | None = None, visible_NN: npt.NDArray[np.bool_] | None = None
    ) -> Tensor:
        def row(numbers: list[int]) -> Tensor:
            return torch.tensor([numbers], device=self.device)

        options: dict[str, Tensor] = {}
        if positions is not None and visible_NN is not None:
            hidden_NN = torch.from_numpy(~visible_NN).to(self.device)
            lowest = torch.finfo(self.dtype).min
            mask_NN = torch.zeros(hidden_NN.shape, dtype=self.dtype, device=self.device).masked_fill(hidden_NN, lowest)
            # The smallest number instead of -inf, as transformers builds masks: its softmax has no row of -inf alone.
            options = {"position_ids": row(positions), "attention_mask": mask_NN[None, None]}
        return self._module(input_ids=row(tokens), **options).logits[0].float()

    @cached_property
    def _takes_patterns(self) -> bool:
        """Whether the architecture obeys position ids and an attention pattern."""
        # Tried on three rows, as some classes accept both and ignore them: as plain text in another order of rows, and
        # with rows that see themselves alone.
        text, order = [0, 1, 2], [2, 0, 1]
        full_NN = np.ones((3, 3), dtype=np.bool_)
        plain_NN = full_NN if self._attention == "all" else np.tril(full_NN)
        try:
            moved_NV = self._call(order, order, plain_NN[np.ix_(order, order)])
            alone_NV = self._call(text, [0, 0, 0], np.eye(3, dtype=np.bool_))
            wanted = [(moved_NV, self._call(text)[order]), (alone_NV[2], self._call([2])[0])]
        except (TypeError, ValueError, RuntimeError, IndexError):
            return False
        return all(self._same(found, right) for found, right in wanted)

    def _same(self, found: Tensor, right: Tensor) -> bool:
        scale = float(right.abs().max()) or 1.0
        return float((found - right).abs().max()) <= _TOLERANCE[self.dtype] * scale
