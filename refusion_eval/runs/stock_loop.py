"""The loops of others: a model under the `generate` of its release or of transformers, timed as an engine is."""

import contextlib
import functools
import math
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, get_args

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from refusion_eval.decoders import first_eos
from refusion_eval.decoders.autoregressive import AutoregressiveSettings
from refusion_eval.errors import CheckpointError, ConfigError, DecodeError
from refusion_eval.models.card import checkpoint_card
from refusion_eval.models.checkpoint import is_diffusion_gemma, read_json
from refusion_eval.models.device import choose_device, cpu_threads, synchronize
from refusion_eval.models.location import fetch_weights, locate
from refusion_eval.models.stock import check_stock, load_stock
from refusion_eval.models.tokenizer import Tokenizer
from refusion_eval.runs.backend import Backend, Description, Opener
from refusion_eval.runs.canvas_loop import CanvasLoop
from refusion_eval.runs.job import Job
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.own_engine import OwnEngine
from refusion_eval.runs.release import Entry, ReleaseSettings, find_entry, hash_of_code
from refusion_eval.store.records import RELEASE_LOOP, STOCK_GENERATE
from refusion_eval.types import ENCODE, MOST_TOKENS, Decoded, StopReason, StopRule, Trace
from refusion_eval.untrusted import Child, environment_without_keys

# `generate` pads responses in a batch only, so a single request never uses this id.
PAD_ID = 0
_WORKER = Path(__file__).with_name("release_worker.py")
_LONGEST_SECONDS = 3600.0  # of the own time of the process of a checkpoint's code, for one request
IN_ITS_PROCESS = "in a process of its own, without the keys of the environment"


class StockLoop:
    """A model that a loop calls. Its forwards are counted by hooks on the model, whoever wrote the loop."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        model.generation_config = GenerationConfig()  # without the checkpoint's own defaults, such as sampling

    def run(self, prompt: Sequence[int], settings: AutoregressiveSettings | ReleaseSettings) -> Decoded:
        """Decodes one prompt; the trace holds the forwards that `generate` makes, one a token."""
        temperature, options = settings.temperature, {}
        if temperature:
            if isinstance(settings, AutoregressiveSettings):  # only greedy decoding gives the text of this engine
                raise DecodeError("the stock loop is greedy; set temperature=0, or take this project's engine")
            options = {"temperature": temperature, "top_p": settings.top_p, "top_k": settings.top_k}
            torch.manual_seed(settings.seed)
        ends = {"eos_token_id": list(settings.eos_ids) or None, "pad_token_id": PAD_ID}
        config = GenerationConfig(max_new_tokens=settings.gen_length, do_sample=bool(temperature), **ends, **options)
        trace = Trace()
        asked = _AfterEachToken(len(prompt), settings.stop_rule, self.model.device, trace)

        def loop(tokens: Tensor) -> Any:
            return self.model.generate(  # type: ignore[operator]
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([asked]),
            )

        return timed(loop, self.model, prompt, settings.eos_ids, trace, asked)


class _AfterEachToken(StoppingCriteria):
    """Records each token, and ends the response when the stop rule returns True."""

    def __init__(self, prompt_length: int, stop_rule: StopRule | None, device: torch.device, trace: Trace) -> None:
        self.stopped = False
        self._prompt_length = prompt_length
        self._stop_rule = stop_rule
        self._trace = trace
        self._answers = {answer: torch.tensor([answer], device=device) for answer in (False, True)}

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        position = input_ids.shape[1] - self._prompt_length - 1
        self._trace.fix((position,), (int(input_ids[0, -1]),))
        if self._stop_rule is not None:
            self.stopped = self._stop_rule(input_ids[0, self._prompt_length :].tolist())
        return self._answers[self.stopped]


def timed(
    loop: Callable[[Tensor], Any],
    model: torch.nn.Module,
    prompt: Sequence[int],
    eos_ids: Sequence[int],
    trace: Trace,
    asked: _AfterEachToken | None = None,
) -> Decoded:
    """Calls a loop for one prompt.

    Args:
        loop: gets the ids of the prompt, [1, tokens], and returns those of the response, with the prompt in front or
            without it, in a tensor, or in the field `sequences`, or beside other values in a tuple.
        model: which the loop calls, and whose forwards are counted.
        eos_ids: tokens after the first of which the response is cut.
        trace: which gets the forwards.
        asked: what a loop from left to right asks after each token.

    Raises:
        DecodeError: the loop returned no tokens, or called no forward of the model.
    """
    device: torch.device = next(model.parameters()).device
    kinds = ("prefill", "decode") if asked else ("forward", "forward")
    if _encoder(model) is not None:
        kinds = ("denoise", "denoise")
    synchronize(device)
    started = time.perf_counter()
    with torch.no_grad(), _counted(model, trace, kinds, device) as first:
        tokens = _tokens(loop(torch.tensor([list(prompt)], device=device)))
    seconds = time.perf_counter() - started
    if not trace.num_forwards:
        raise DecodeError("the loop called neither the model nor the model in it, so its forwards cannot be counted")
    response = tokens[len(prompt) :] if tokens[: len(prompt)] == list(prompt) else tokens
    if not response:
        raise DecodeError(f"the loop returned {len(tokens)} tokens and no response")
    end = first_eos(response, eos_ids)
    kept = tuple(response if end is None else response[: end + 1])
    early: StopReason = "stop_string" if asked is not None and asked.stopped else "length"
    stop: StopReason = early if end is None else "eos"
    trace.stop(stop, len(kept))
    return Decoded(kept, stop, trace.num_forwards, seconds, trace, first[0] - started)


@contextlib.contextmanager
def _counted(
    model: torch.nn.Module, trace: Trace, kinds: tuple[str, str], device: torch.device
) -> Iterator[list[float]]:
    """Records each call of the model, or of a part that a loop may call alone; yields when the first ended."""
    # Such parts are the model without its output head, and an encoder with a cache that a decoder reads.
    # A call inside a call is part of it. Where a loop computes the head itself, it calls the inner model alone.
    depth, first_ended, encoder = 0, list[float](), _encoder(model)

    def before(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            fed = next((one for one in (*arguments[:1], *map(named.get, _FED)) if isinstance(one, Tensor)), None)
            rows = 0 if fed is None else fed.shape[0] * fed.shape[1]
            kind = ENCODE if module is encoder else kinds[trace.num_forwards > 0]
            trace.forward(kind, rows, _cached_rows(named.get("past_key_values", named.get("cache"))))

    def after(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if not (depth or first_ended):
            synchronize(device)
            first_ended.append(time.perf_counter())

    with contextlib.ExitStack() as hooks:
        parts = (model, getattr(model, "base_model", model), encoder)
        for watched in {id(one): one for one in parts if one is not None}.values():
            handles = watched.register_forward_pre_hook(before, with_kwargs=True)
            hooks.callback(handles.remove)
            hooks.callback(watched.register_forward_hook(after, always_call=True).remove)
        yield first_ended


def _encoder(model: torch.nn.Module) -> torch.nn.Module | None:
    """The encoder of a model whose decoder has forwards of its own, as DiffusionGemma's; None for others."""
    inner = getattr(model, "base_model", model)
    return getattr(inner, "encoder", None) if hasattr(inner, "decoder") else None


_FED = ("input_ids", "inputs_embeds", "decoder_input_ids")  # what a forward computes, [batch, rows, ...]


def _cached_rows(cache: Any) -> int:
    """Rows in a cache of transformers, or in one of tuples; 0 for others."""
    if hasattr(cache, "get_seq_length"):
        return int(cache.get_seq_length())
    if isinstance(cache, list | tuple) and cache and isinstance(cache[0], list | tuple):
        return int(cache[0][0].shape[-2])
    return 0


def _tokens(output: Any) -> list[int]:
    output = getattr(output, "sequences", output)
    for one in output if isinstance(output, list | tuple) else (output,):
        if isinstance(one, Tensor) and one.ndim and not one.is_floating_point():
            return [int(token) for token in (one[0] if one.ndim > 1 else one).tolist()]
    raise DecodeError(f"the loop returned {type(output).__name__}, in which there are no token ids")


class StockBackend(OwnEngine):
    """The stock loop over a checkpoint that this project's engine could decode too, one job at a time."""

    ends_no_thoughts = "loop=generate"
    decoder = STOCK_GENERATE
    own_forwards = False
    together = Backend.together

    @functools.cached_property
    def _loop(self) -> Any:
        place = (self.model.directory, self.model.dtype, self.model.device)
        return StockLoop(load_stock(AutoModelForCausalLM, *place, "for the stock loop"))

    def _check_files(self) -> bool:
        has_weights = super()._check_files()
        if has_weights and self.model.revision is None:
            check_stock(AutoModelForCausalLM, self.model.directory)
        return has_weights

    def _run(self, job: Job) -> Decoded:
        with cpu_threads(self.model.num_threads):
            return self._loop.run(job.prompt_ids, self._settings(job))


class LoopFiles:
    """A checkpoint of any architecture, as far as the loop of its release needs it; see `LoadedModel`."""

    is_stock = True
    attention, cuda_graphs = "transformers", False

    def __init__(self, args: ModelArgs) -> None:
        self._location = locate(args.checkpoint, args.revision, with_code=args.allow_code)
        self.name, folder, self.revision = self._location
        config = read_json(folder / "config.json")
        if "auto_map" in config and not args.allow_code:
            raise ConfigError(f"{self.name}: its loop is code of the checkpoint; read it, then add --allow-code")
        self.card = checkpoint_card(self.name, folder)
        sizes = {**config, **(config.get("text_config") or {})}
        self.max_positions = sizes.get("max_position_embeddings") or sizes.get("max_sequence_length")
        self.is_diffusion_gemma = is_diffusion_gemma(config)
        self.device = choose_device(args.device)
        stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        name = (stored if self.device.type == "cuda" else "float32") if args.dtype == "auto" else args.dtype
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{folder / 'config.json'}: dtype {name} is none of torch; correct it")
        self.dtype: torch.dtype = dtype
        self.entry = find_entry(folder, args.settings.get("entry"), allow_code=args.allow_code)
        self.has_code = args.allow_code and any(folder.glob("*.py"))
        if args.allow_code and (folder / "custom_generate").exists():
            raise ConfigError(
                f"{self.name}: transformers would put custom_generate/generate.py in the place of `generate`, and no "
                "record would say so; copy the checkpoint without that folder"
            )

    @property
    def num_threads(self) -> int:
        return torch.get_num_threads()

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self._location.directory)

    @property
    def directory(self) -> Path:
        fetch_weights(self._location)
        return self._location.directory


class _Elsewhere:
    """The loop of a checkpoint's code, which runs in a process of its own; what it answers is data of a stranger."""

    def __init__(self, files: LoopFiles) -> None:
        self._entry = files.entry
        self._folder = tempfile.TemporaryDirectory()  # where transformers copies the code to
        dtype = str(files.dtype).removeprefix("torch.")
        first: dict[str, Any] = {"directory": str(files.directory), "entry": self._entry._asdict(), "dtype": dtype}
        first |= {"device": str(files.device), "threads": files.num_threads}
        environment = environment_without_keys() | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": self._folder.name}
        self._child = Child(_WORKER, first, environment, start_s=_LONGEST_SECONDS)
        weakref.finalize(self, self._child.close)

    def run(self, prompt: Sequence[int], settings: ReleaseSettings) -> Decoded:
        arguments = self._entry.arguments(settings)
        question = {"prompt": list(prompt), "arguments": arguments, "eos_ids": settings.eos_ids, "seed": settings.seed}
        try:
            answer = self._child.ask(question, _LONGEST_SECONDS)
        except (ChildProcessError, TimeoutError, ValueError, RecursionError) as error:
            raise DecodeError(f"the code of the checkpoint: {error}") from error
        if answer is None:
            raise DecodeError(f"the code of the checkpoint ended, or took more than {_LONGEST_SECONDS:g} s")
        if isinstance(answer, dict) and "error" in answer:
            raise DecodeError(str(answer["error"]))
        try:
            return _decoded(**answer)
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise DecodeError(f"the code of the checkpoint gave an answer that is none: {error}") from error


def _decoded(
    tokens: list[int], stop: StopReason, seconds: float, prefill_seconds: float | None, trace: list[Any]
) -> Decoded:
    """What the process of a stranger's code answered; an error for what no loop gives."""
    steps, whole = Trace.from_json(trace), float(seconds)
    first = None if prefill_seconds is None else float(prefill_seconds)
    if stop not in get_args(StopReason) or not steps.num_forwards or not 0 <= (first or 0.0) <= whole < math.inf:
        raise ValueError(f"it stopped by {stop} after {steps.num_forwards} forwards and {seconds} s")
    if not all(type(token) is int and 0 <= token < MOST_TOKENS for token in tokens):
        raise TypeError("a token is no whole number, or no id")
    return Decoded(tuple(tokens), stop, steps.num_forwards, whole, steps, first)


class ReleaseBackend(StockBackend):
    """The release's own loop over its own model, one job at a time; code of a checkpoint in a process of its own."""

    ends_no_thoughts = "loop=release"
    decoder = RELEASE_LOOP
    scores = False
    refusal = Backend.refusal  # the loop itself tells what it cannot decode

    @classmethod
    def of(cls, opener: Opener) -> Self:
        files: Any = opener.prepared(LoopFiles(opener.args))
        return cls(opener, files)

    @property
    def _files(self) -> LoopFiles:
        files: Any = self.model
        assert isinstance(files, LoopFiles)
        return files

    @property
    def entry(self) -> Entry:
        return self._files.entry

    def describe(self, system: Opener) -> Description:
        """The loop, its arguments and where it runs, and what no run by it tells."""
        entry, settings, positions = self.entry, system.checkpoint_settings, self._files.max_positions
        facts: dict[str, Any] = {"model": self.args.pretrained, "loop": str(entry), "arguments": list(entry.takes)}
        facts |= {"runs": self._place, "context": positions, "has_template": system.has_template}
        facts |= {"prompts_begin": system.beginning, "prompts": {}, "settings": settings}
        has_template = f"{'a' if system.has_template else 'no'} chat template"
        lines = [
            f"decoded by {entry}, {self._place}",
            f"arguments of the loop: {', '.join(entry.takes)}",
            f"context of {positions or 'unknown'} tokens, {has_template}",
            "not known: whether the weights fit; how many forwards it makes; when it decides a token",
        ]
        return Description(facts, [f"{self.args.pretrained}: {line}" for line in lines])

    @property
    def _place(self) -> str:
        return IN_ITS_PROCESS if self._files.has_code else "in this process"

    def identity(self) -> dict[str, Any]:
        """Which loop decodes, where it runs, and which code it is."""
        code = {"code": hash_of_code(self.model.directory)} if self._files.has_code else {}
        return {"release_loop": {"entry": str(self.entry), "runs": self._place, **code}}

    def check(self, settings: Any = None) -> None:
        given = self.args.settings if settings is None else settings.given
        if unknown := self.entry.unknown(given):
            taken = ", ".join(self.entry.takes)
            raise ConfigError(f"{self.entry} has no argument for {unknown[0]}; it has {taken}")
        if self.args.samples > 1 and not self.entry.file and settings is not None and not settings.temperature:
            samples = f"samples={self.args.samples}, but {self.entry} is greedy without a temperature"
            raise ConfigError(f"{samples}; set one, such as temperature=0.7, or leave samples out")

    @functools.cached_property
    def _loop(self) -> Any:
        files = self._files
        if files.is_diffusion_gemma and not files.has_code:
            return CanvasLoop(files.directory, files.dtype, files.device, timed)
        return _Elsewhere(files) if files.has_code else super()._loop

    @property
    def drawn(self) -> Any:
        """The draws of the last decoding of DiffusionGemma."""
        return self._loop.drawn
