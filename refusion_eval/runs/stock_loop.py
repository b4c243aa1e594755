"""The stock autoregressive loop: transformers' own model under its own `generate`, timed as an engine is."""

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from refusion_eval.decoders.autoregressive import AutoregressiveSettings
from refusion_eval.errors import CheckpointError, DecodeError
from refusion_eval.models.device import cpu_threads, synchronize
from refusion_eval.runs.backend import Backend
from refusion_eval.runs.job import Job
from refusion_eval.runs.own_engine import OwnEngine
from refusion_eval.store.records import STOCK_GENERATE
from refusion_eval.types import Decoded, StopReason, StopRule, Trace

# `generate` pads responses in a batch only, so a single request never uses this id.
_PAD_ID = 0


class StockLoop:
    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        model.generation_config = GenerationConfig()  # without the checkpoint's own defaults, such as sampling

    @classmethod
    def open(cls, directory: Path, dtype: torch.dtype, device: torch.device) -> Self:
        """Loads a checkpoint in Hugging Face layout; CheckpointError if transformers has no class for it."""
        try:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{directory}: transformers cannot load it for the stock loop: {error}") from error
        return cls(model.to(device).eval())

    def run(self, prompt: Sequence[int], settings: AutoregressiveSettings) -> Decoded:
        """Decodes one prompt greedily; the trace holds the forwards that `generate` makes, one a token."""
        if settings.temperature > 0:  # only greedy decoding gives the text of this project's engine
            raise DecodeError("the stock loop is greedy; set temperature=0, or take this project's engine")
        device = self.model.device
        synchronize(device)
        started = time.perf_counter()
        clock = _Clock(len(prompt), settings.stop_rule, device)
        tokens = torch.tensor([list(prompt)], device=device)
        ends = {"eos_token_id": list(settings.eos_ids) or None, "pad_token_id": _PAD_ID}
        config = GenerationConfig(max_new_tokens=settings.gen_length, do_sample=False, **ends)
        output: Any = self.model.generate(  # type: ignore[operator]
            tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        response = tuple(int(token) for token in output[0, len(prompt) :].tolist())
        seconds = time.perf_counter() - started
        ended_early: StopReason = "stop_string" if clock.stopped else "length"
        stop: StopReason = "eos" if response[-1] in settings.eos_ids else ended_early
        trace = Trace()
        for number, token in enumerate(response):  # with a KV cache: the prompt once, then each token but the last
            forward = ("decode", 1, len(prompt) + number - 1) if number else ("prefill", len(prompt), 0)
            trace.forward(*forward)
            trace.fix((number,), (token,))
        trace.stop(stop, len(response))
        return Decoded(response, stop, len(response), seconds, trace, clock.first - started)


class _Clock(StoppingCriteria):
    """Measures the time of the first token, and ends the response when the stop rule returns True."""

    def __init__(self, prompt_length: int, stop_rule: StopRule | None, device: torch.device) -> None:
        self.first = 0.0
        self.stopped = False
        self._prompt_length = prompt_length
        self._stop_rule = stop_rule
        self._device = device
        self._answers = {answer: torch.tensor([answer], device=device) for answer in (False, True)}

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        if not self.first:
            synchronize(self._device)
            self.first = time.perf_counter()
        if self._stop_rule is not None:
            self.stopped = self._stop_rule(input_ids[0, self._prompt_length :].tolist())
        return self._answers[self.stopped]


class StockBackend(OwnEngine):
    """The stock loop over a checkpoint that this project's engine could decode too, one job at a time."""

    ends_no_thoughts = "loop=generate"
    decoder = STOCK_GENERATE
    records_graphs = False
    together = Backend.together

    def __init__(self, *of_engine: Any) -> None:
        super().__init__(*of_engine)
        self.attention = "transformers"  # which chooses its own

    @functools.cached_property
    def _loop(self) -> StockLoop:
        return StockLoop.open(self.model.directory, self.model.dtype, self.model.device)

    def _run(self, job: Job) -> Decoded:
        with cpu_threads(self.model.num_threads):
            return self._loop.run(job.prompt_ids, self._settings(job))
