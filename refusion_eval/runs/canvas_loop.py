"""DiffusionGemma's own `generate` in transformers, under this project's clock, with the draws that it makes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from refusion_eval.decoders.diffusion_gemma import Place
from refusion_eval.errors import DecodeError
from refusion_eval.models.diffusion_gemma import check_version
from refusion_eval.models.stock import load_stock
from refusion_eval.runs.release import CANVAS_ARGUMENTS, ReleaseSettings
from refusion_eval.types import Decoded, Readout, TokenArray, Trace

_PAD_ID = 0  # stands behind a stop token, where the response is cut


class Drawn(NamedTuple):
    """The draws of one decoding, in their order: the random canvases of each canvas, and what its steps sampled."""

    # Still on the device: a copy in every step would be in the release's time.
    uniform_tokens: list[list[Tensor]]
    sampled_tokens: list[list[Tensor]]

    def uniform(self, place: Place) -> Sequence[int]:
        return _at(self.uniform_tokens, place.canvas, place.step)

    def sampled(self, place: Place, readout: Readout) -> TokenArray:
        return np.array(_at(self.sampled_tokens, place.canvas, place.step - 1))


def _at(draws: list[list[Tensor]], canvas: int, number: int) -> list[int]:
    try:
        tokens: list[int] = draws[canvas][number].tolist()
        return tokens
    except IndexError:
        raise DecodeError(f"the release made no draw {number} for canvas {canvas}, because it ended before") from None


class CanvasLoop:
    """The release's loop over a whole model of transformers; its draws are torch's, from the seed of the settings."""

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device, timed: Callable[..., Decoded]
    ) -> None:
        self._timed = timed
        check_version(directory)
        from transformers.models import diffusion_gemma

        self._parts: Any = diffusion_gemma
        kind = self._parts.DiffusionGemmaForBlockDiffusion
        self._model = load_stock(kind, directory, dtype, device, "for its own loop")
        own = self._model.generation_config
        own.eos_token_id = own.pad_token_id = None  # those of the settings count, also where they name none
        self.drawn = Drawn([], [])  # of the last decoding

    def run(self, prompt: Sequence[int], settings: ReleaseSettings) -> Decoded:
        """Decodes one prompt; the response is of whole canvases, and what the settings leave open is the release's."""
        given = {name: value for name in CANVAS_ARGUMENTS if (value := getattr(settings, name, None)) is not None}
        try:
            if "entropy_bound" in given:
                bound = self._parts.EntropyBoundSamplerConfig(entropy_bound=given.pop("entropy_bound"))
                given["sampler_config"] = bound
            config = self._parts.DiffusionGemmaGenerationConfig(
                max_new_tokens=settings.gen_length,
                eos_token_id=list(settings.eos_ids) or None,
                pad_token_id=_PAD_ID,
                **given,
            )
        except (ValueError, AttributeError) as error:
            raise DecodeError(f"the release's loop refuses its settings: {error}") from error
        torch.manual_seed(settings.seed)
        self.drawn = Drawn([], [])
        self._model._prepare_sampler = self._recording_sampler

        def loop(tokens: Tensor) -> Any:
            return self._model.generate(tokens, generation_config=config)

        return self._timed(loop, self._model, prompt, settings.eos_ids, Trace())

    def _recording_sampler(self, config: Any) -> Any:
        """The release's sampler, whose draws are noted; the sampler itself is called with them and changes nothing."""
        sampler = type(self._model)._prepare_sampler(self._model, config)
        initialize, accept, drawn = sampler.initialize_canvas, sampler.accept_canvas, self.drawn

        def initialized(*arguments: Any, **named: Any) -> Tensor:
            canvas: Tensor = initialize(*arguments, **named)
            # What replaces tokens is drawn right after tokens were sampled, so that another draw begins a canvas.
            if not drawn.uniform_tokens or len(drawn.uniform_tokens[-1]) > len(drawn.sampled_tokens[-1]):
                drawn.uniform_tokens.append([])
                drawn.sampled_tokens.append([])
            drawn.uniform_tokens[-1].append(canvas[0])
            return canvas

        def accepted(current: Tensor, sampled: Tensor, *arguments: Any) -> Tensor:
            drawn.sampled_tokens[-1].append(sampled[0])
            result: Tensor = accept(current, sampled, *arguments)
            return result

        sampler.initialize_canvas, sampler.accept_canvas = initialized, accepted
        return sampler
