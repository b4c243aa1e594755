"""DiffusionGemma: its encoder and decoder from transformers, without the vision tower.

One set of weights is used twice. The encoder is causal and writes keys and values; the decoder reads them, sees its
whole canvas, and writes nothing. Shapes: N rows of a text or a canvas, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from refusion_eval.errors import CheckpointError
from refusion_eval.models.checkpoint import ModelConfig
from refusion_eval.models.stock import check_stock, load_stock, stock_config

OLDEST = (5, 24)  # of transformers: earlier ones lack the model, or call its arguments by other names


def check_version(directory: Path) -> None:
    """Raises CheckpointError if transformers is too old for DiffusionGemma."""
    version = transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise CheckpointError(
            f"{directory}: DiffusionGemma needs transformers 5.24 or later, and {version} is installed; upgrade it: "
            "pip install 'transformers>=5.24'"
        )


def encoder_decoder_config(directory: Path) -> ModelConfig:
    """Sizes of a checkpoint of DiffusionGemma; CheckpointError if they, or the model, cannot be had."""
    check_version(directory)
    return replace(stock_config(directory), family="diffusion_gemma")


class EncoderDecoder:
    """Both halves over the weights of a checkpoint; those of a vision tower are not loaded."""

    def __init__(self, directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._module = load_stock(_text_model(), directory, dtype, device, refuses_others=True)
        self.config, self.device, self.dtype = config, self._module.device, self._module.dtype

    @staticmethod
    def check_files(directory: Path) -> None:
        """Refuses a checkpoint whose tensors do not fit; only their names and shapes are read."""
        check_stock(_text_model(), directory, refuses_others=True)

    def new_cache(self) -> Any:
        """An empty cache that grows; transformers' static one gives other logits from the sliding window on."""
        return transformers.DynamicCache(config=self._module.config.get_text_config())

    @torch.inference_mode()
    def encode(self, tokens: Sequence[int], positions: Sequence[int], cache: Any) -> Tensor:
        """Appends the keys and values of a text, each row of which sees what is before it; returns its states, [N, C].

        They are those after the last norm. The encoder has no head.
        """
        states = self._module.encoder.language_model(
            input_ids=self._ids(tokens), position_ids=self._ids(positions), cache=cache
        )
        return states.last_hidden_state[0]

    @torch.inference_mode()
    def denoise(self, tokens: Sequence[int], positions: Sequence[int], cache: Any, before_NV: Tensor | None) -> Tensor:
        """Logits of a canvas, float32, [N, V], each row of which sees the encoded text and the whole canvas.

        Args:
            before_NV: logits of the canvas in the step before, divided by the temperature (self-conditioning).
        """
        decoder = self._module.decoder
        # The release keeps them in the dtype of the weights, which rounds them.
        before = None if before_NV is None else before_NV[None].to(self.dtype)
        states = decoder(
            decoder_input_ids=self._ids(tokens),
            cache=cache,
            self_conditioning_logits=before,
            decoder_position_ids=self._ids(positions),
        )
        logits_NV = nn.functional.linear(states.last_hidden_state[0], decoder.embed_tokens.weight).float()
        cap = decoder.text_config.final_logit_softcapping
        return torch.tanh(logits_NV / cap) * cap

    def _ids(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor([list(numbers)], device=self.device)


def _text_model() -> Any:
    """The class of both halves, whose tensors have the names of transformers' own class."""
    # Imported here: an older transformers has no such module, which `check_version` tells.
    from transformers.models.diffusion_gemma import modeling_diffusion_gemma as modeling

    class TextModel(modeling.DiffusionGemmaPreTrainedModel):  # type: ignore[misc]
        _tied_weights_keys = modeling.DiffusionGemmaModel._tied_weights_keys
        # `lm_head` is the embedding.
        _keys_to_ignore_on_load_unexpected = (r"encoder\.vision_tower\.", r"encoder\.embed_vision\.", r"lm_head\.")

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.encoder = nn.Module()
            self.encoder.language_model = modeling.DiffusionGemmaEncoderTextModel(config.text_config)
            self.decoder = modeling.DiffusionGemmaDecoderModel(config)
            self.post_init()

    return TextModel
