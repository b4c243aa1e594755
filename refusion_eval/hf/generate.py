"""Decoders as `custom_generate` of transformers, version 4.57 or newer.

`model.generate` prepares prompt and generation config and passes both to the callable, which decodes each row with this
project's engine and returns the rows as one tensor.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationMode,
    MaxLengthCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from refusion_eval.api import (
    LoadedModel,
    check_decoder,
    check_prompt,
    decoder_settings,
    generate_stream,
    with_width_cost,
)
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.hf.hosted import hosted
from refusion_eval.hf.streamer import FinishedPrefix, SlotListener, WatchedTrace
from refusion_eval.types import Decoded, Trace

# Settings with another name in transformers; their values come from the generation config.
TRANSFORMERS_NAMES = {"gen_length": "max_new_tokens", "eos_ids": "eos_token_id", "mask_id": "mask_token_id"}
# Arguments that `generate` prepares for its own forwards and that have no use here.
UNUSED = ("use_cache", "logits_to_keep", "cache_position")
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# top_k=50 is the default of transformers; with it, tokens are sampled from the whole softmax.
DEFAULT_TOP_K = 50


@dataclass
class DecodedOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`.

    Attributes:
        sequences: prompts and responses, [rows, tokens]; rows padded on the right.
        decoded: for each row the tokens, why decoding ended, forwards, seconds (including the streamer's) and trace.
    """

    decoded: tuple[Decoded, ...] | None = None


def generate_with(decoder: str) -> Callable[..., Any]:
    """A decoder of this project as a callable for `model.generate(..., custom_generate=...)`.

    The callable is used through `generate`, or directly as `f(model, input_ids, attention_mask=..., ...)`. Called
    directly, it suggests a name for a misspelt setting; `generate` only says that the setting is not used.

    The following come from the arguments of transformers:
      - the length: `max_new_tokens` or `max_length`;
      - `eos_token_id`, `pad_token_id`, `return_dict_in_generate`, `num_return_sequences`;
      - `do_sample` and `temperature`; samples come from the whole softmax. Without a `seed`, one is drawn from torch's
        generator, so `torch.manual_seed` repeats it; row r of a batch uses seed + r;
      - `attention_mask`: each row is decoded with the tokens that the mask keeps;
      - `streamer`, for a single row: a `SlotListener` receives all drafts and tokens, any other one the prefix without
        gaps.

    The mask token is `mask_token_id`, else `model.config.mask_token_id`, else that of a known checkpoint. All other
    settings have the decoder's own names and defaults (`refusion_eval.decoders.DECODERS[decoder].Settings`).

    The first call for a model copies some of its weights; see `refusion_eval.hf.hosted.hosted`. `release` frees the
    copies.

    Returns:
        The callable. It returns prompts and responses, [rows, tokens], or a `DecodedOutput`. It raises ConfigError for
        wrong settings and for what a decoder cannot do (beams, logits processors, stopping criteria, scores), and

    Raises:
        ConfigError: unknown decoder.
    """
    check_decoder(decoder)
    names = [field.name for field in dataclasses.fields(DECODERS[decoder].Settings)]
    own = [name for name in names if name != "temperature"] + (["mask_token_id"] if "mask_id" in names else [])

    def custom_generate(
        model: Any,
        input_ids: Tensor | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: GenerationConfig | None = None,
        streamer: Any = None,
        **arguments: Any,
    ) -> Tensor | DecodedOutput:
        if logits_processor is None or generation_config is None or input_ids is None:  # not prepared by `generate`
            _check_names(hosted(model), decoder, own, arguments)
            if generation_config is not None:
                arguments["generation_config"] = generation_config
            return GenerationMixin.generate(
                model, input_ids, custom_generate=custom_generate, streamer=streamer, **arguments
            )
        if streamer is None:
            streamer = _streamer_of(sys._getframe(1))
        settings = {name: arguments.pop(name) for name in own if name in arguments}
        prompts = _prompts(input_ids, arguments)
        _refuse(generation_config, logits_processor, stopping_criteria, arguments)
        num_new = generation_config.max_length - input_ids.shape[1]
        # As in `hosted`: tensors made in the caller's inference mode could not be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            loaded = hosted(model)
            rows = list(_settings(loaded, decoder, settings, generation_config, num_new, len(prompts)))
            for prompt in prompts:
                check_prompt(loaded, prompt, rows[0].num_positions)
            if streamer is None:
                decoded = _decode_batch(loaded, decoder, prompts, rows)
            else:
                decoded = [_decode_streamed(loaded, decoder, prompts, rows, streamer)]
        sequences = _sequences(input_ids, decoded, generation_config)
        if generation_config.return_dict_in_generate:
            return DecodedOutput(sequences=sequences, decoded=tuple(decoded))
        return sequences

    # `generate` passes on the arguments in this signature and treats all others, such as `temperature`, as its own.
    parameters = [
        parameter
        for parameter in inspect.signature(custom_generate).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in own]
    parameters.append(inspect.Parameter("model_kwargs", inspect.Parameter.VAR_KEYWORD))
    vars(custom_generate)["__signature__"] = inspect.Signature(parameters)
    custom_generate.__name__ = custom_generate.__qualname__ = f"{decoder}_generate"
    custom_generate.__doc__ = f"Decoder {decoder} for `model.generate(..., custom_generate=...)`; see `generate_with`."
    return custom_generate


def _streamer_of(caller: FrameType | None) -> Any:
    """The streamer that was passed to `generate`, read from its frame.

    transformers 4.57 to 5.23 puts the prompt into the streamer but does not pass it to the callable, because it
    replaces the collected arguments by those in the callable's signature.
    """
    if caller is None or caller.f_code is not inspect.unwrap(GenerationMixin.generate).__code__:
        return None
    return caller.f_locals.get("streamer")


def _check_names(loaded: LoadedModel, decoder: str, own: Sequence[str], arguments: dict[str, Any]) -> None:
    """Refuses names that neither the decoder nor `generate` knows, and suggests similar ones."""
    known = {*vars(GenerationConfig()), *inspect.signature(GenerationMixin.generate).parameters, "attention_mask"}
    for name in arguments:
        if name not in known and name not in own:
            decoder_settings(loaded, decoder, **{name: arguments[name]})


def _prompts(input_ids: Tensor, arguments: dict[str, Any]) -> list[list[int]]:
    """The tokens of each row that its attention mask keeps."""
    mask, positions = arguments.pop("attention_mask", None), arguments.pop("position_ids", None)
    kept = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    if positions is not None and not positions.expand_as(kept)[kept].equal((kept.cumsum(1) - 1)[kept]):
        raise ConfigError("position_ids other than 0, 1, ... of every prompt are not supported; leave them out")
    return [row[keep].tolist() for row, keep in zip(input_ids, kept, strict=True)]


def _refuse(config: GenerationConfig, processors: Any, criteria: Any, arguments: dict[str, Any]) -> None:
    """Refuses options of `generate` that are not supported, so that none is ignored silently."""
    if (mode := config.get_generation_mode()) not in MODES:
        raise ConfigError(
            f"{mode.value} is not supported with a decoder of this project; leave out num_beams and the like"
        )
    if wanted := [name for name in OUTPUTS if getattr(config, name)]:
        raise ConfigError(f"{', '.join(wanted)} is not supported with a decoder of this project; leave it out")
    for processor in processors:
        default = isinstance(processor, TopKLogitsWarper) and processor.top_k == DEFAULT_TOP_K
        if not default and not isinstance(processor, TemperatureLogitsWarper):
            raise ConfigError(
                f"{type(processor).__name__} is not applied by a decoder of this project; switch it off "
                "(top_k=0, top_p=1.0, repetition_penalty=1.0, do_sample=False, ...; the model's generation_config.json "
                "may have set it)"
            )
    for criterion in criteria or ():
        if not isinstance(criterion, MaxLengthCriteria | EosTokenCriteria):
            raise ConfigError(f"{type(criterion).__name__} is not applied here; give stop_rule, a decoder setting")
    cache = arguments.pop("past_key_values", None)
    if cache is not None and cache.get_seq_length() > 0:
        raise ConfigError("past_key_values is not supported with a decoder of this project; give the whole prompt")
    if extra := [name for name, value in arguments.items() if name not in UNUSED and value is not None]:
        raise ConfigError(f"{', '.join(extra)} is not used by a decoder of this project; leave it out")


def _settings(
    loaded: LoadedModel, decoder: str, settings: dict[str, Any], config: GenerationConfig, num_new: int, num_rows: int
) -> Iterator[Any]:
    """The decoder's settings for each row."""
    for own, name in TRANSFORMERS_NAMES.items():
        if own in settings:
            raise ConfigError(f"{own} is called {name} in transformers; give it by that name")
    names = {field.name for field in dataclasses.fields(DECODERS[decoder].Settings)}
    mask_id = settings.pop("mask_token_id", None)
    if "mask_id" in names:
        settings["mask_id"] = loaded.card.mask_id if mask_id is None else mask_id
        if settings["mask_id"] is None:
            raise ConfigError(
                f"{decoder} needs a mask token and the config of {loaded.name} names none; give mask_token_id"
            )
    eos = config.eos_token_id
    settings |= {
        "gen_length": num_new,
        "eos_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    }
    if config.do_sample:
        settings["temperature"] = float(config.temperature)
        settings.setdefault("seed", int(torch.randint(2**31, ())))
    resolved = with_width_cost(decoder_settings(loaded, decoder, **settings), lambda: loaded.width_cost)
    for row in range(num_rows):
        yield dataclasses.replace(resolved, seed=resolved.seed + row) if config.do_sample else resolved


def _decode_batch(
    loaded: LoadedModel, decoder: str, prompts: Sequence[list[int]], rows: Sequence[Any]
) -> list[Decoded]:
    if len(prompts) == 1:
        return [loaded.engine.run(DECODERS[decoder].decode, prompts[0], rows[0])]
    requests = [(decoder, prompt, settings) for prompt, settings in zip(prompts, rows, strict=True)]
    results: dict[int, Decoded] = {}
    for index, result in generate_stream(loaded, requests, batch_size=len(requests)):
        if isinstance(result, DecodeError):
            raise result
        results[index] = result
    return [results[index] for index in range(len(prompts))]


def _decode_streamed(
    loaded: LoadedModel, decoder: str, prompts: Sequence[list[int]], rows: Sequence[Any], streamer: Any
) -> Decoded:
    """Decodes one row with a streamer, which is ended in any case because it may hold a terminal or a thread."""
    try:
        if len(prompts) > 1:
            raise ConfigError(f"a streamer shows one response, not {len(prompts)}; generate them one by one")
        (prompt,), (settings,) = prompts, rows
        listener = (
            streamer
            if isinstance(streamer, SlotListener)
            else FinishedPrefix(streamer, settings.eos_ids, settings.gen_length)
        )
        listener.begin(settings.num_positions)
        watched = WatchedTrace(listener)
        decoded = loaded.engine.run(DECODERS[decoder].decode, prompt, settings, watched)
        listener.finish(decoded.tokens)
    finally:
        streamer.end()
    return dataclasses.replace(decoded, trace=Trace(watched.events, watched.num_forwards))


def _sequences(input_ids: Tensor, decoded: Sequence[Decoded], config: GenerationConfig) -> Tensor:
    """Prompts and responses in one tensor, padded on the right to the longest response."""
    longest = max(len(out.tokens) for out in decoded)
    pad = config._pad_token_tensor
    if pad is None:
        if any(len(out.tokens) < longest for out in decoded):
            raise ConfigError("the responses differ in length and there is no padding token; give pad_token_id")
        pad = 0
    responses = input_ids.new_full((len(decoded), longest), int(pad))
    for row, out in zip(responses, decoded, strict=True):
        row[: len(out.tokens)] = torch.tensor(out.tokens)
    return torch.cat((input_ids, responses), dim=1)


refusion_generate = generate_with("refusion")
